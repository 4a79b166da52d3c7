#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace zero_native {

using torch::stable::Tensor;

// Element types are float32, bfloat16, float16 and float64, in any mix. All tensors are contiguous
// and on the CPU, offsets count elements, and inputs must not overlap outputs. Every function
// throws std::runtime_error, before it writes anything, where a tensor or an offset breaks this.

// Copies each source, flattened, to its offset in the 1-D `out`, and zeroes all the rest of `out`.
// Offsets ascend and leave room for the sources before them.
void Pack(const std::vector<Tensor>& sources, const std::vector<int64_t>& offsets, Tensor out);

// The inverse: fills each of `outs` from its offset in the 1-D `source`.
void Unpack(Tensor source, const std::vector<int64_t>& offsets, const std::vector<Tensor>& outs);

// out[i] = scale * sum over r of chunks[r * chunk + i], r in ascending order, with out of shape
// [chunk] and chunks of shape [world * chunk]. Sums in float32, float64 chunks in float64.
void SumChunks(Tensor chunks, double scale, Tensor out);

}  // namespace zero_native
