#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>

namespace zero_native {

using torch::headeronly::ScalarType;

enum class Algorithm { kAdam, kSgd, kAdagrad, kLion };

// Instruction sets a kernel is compiled for. kScalar is what the compiler targets by default.
enum class Isa { kScalar, kAvx2, kAvx512 };

// One update of a flat bucket. Every array has the same length; none overlaps another.
struct Update {
  float* param;
  std::array<float*, 3> state;  // Null where the algorithm has no such state.
  const void* grad;
  ScalarType grad_dtype;  // float32, bfloat16 or float16.
  void* copy;             // Null, or receives the new parameter in 16 bits.
  ScalarType copy_dtype;  // bfloat16 or float16.
  float unscale;
  float clip;
  float l2;                           // Times the parameter is added to the gradient.
  std::array<float, 7> coefficients;  // What they mean is the algorithm's matter.
};

// Updates the elements [begin, end), reading and writing each once. Returns whether a gradient
// element among them, as given, was infinite or NaN. Intermediate results are rounded to float32
// one by one, without fused multiply-adds: results are the same bits for every instruction set.
using UpdateFn = bool (*)(const Update& update, int64_t begin, int64_t end);

// Returns whether one of the gradient's elements [begin, end) is infinite or NaN. Writes nothing.
using NonFiniteFn = bool (*)(const Update& update, int64_t begin, int64_t end);

// Whether this binary has kernels for an instruction set and this CPU runs them.
bool IsAvailable(Isa isa);

// The instruction set must be available.
UpdateFn FindUpdate(Algorithm algorithm, Isa isa);
NonFiniteFn FindNonFinite(Isa isa);

}  // namespace zero_native
