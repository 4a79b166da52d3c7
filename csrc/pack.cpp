#include "pack.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace zero_native {
namespace {

// Elements per task: enough to hide the cost of starting one, few enough to share the work.
constexpr int64_t kGrain = 65536;

// A tensor's place in the flat buffer. Byte is const where the tensor is read.
template <typename Byte>
struct Segment {
  int64_t begin;
  int64_t end;
  Byte* data;
  int64_t item_size;
  CastFn copy;
};

void CheckTensor(const Tensor& tensor, const std::string& name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " is not on the CPU");
  STD_TORCH_CHECK(IsSupported(tensor.scalar_type()), name, " has dtype ",
                  torch::headeronly::toString(tensor.scalar_type()),
                  ", expected float32, bfloat16, float16 or float64");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
}

void CheckFlat(const Tensor& tensor, const std::string& name) {
  CheckTensor(tensor, name);
  STD_TORCH_CHECK(tensor.dim() == 1, name, " has ", tensor.dim(), " dimensions, expected 1");
}

// `begin` is where the first free element lies, `size` how many elements the flat buffer has.
void CheckPlace(const std::string& name, int64_t offset, int64_t count, int64_t begin,
                int64_t size) {
  STD_TORCH_CHECK(offset >= begin, name, " at offset ", offset, " overlaps what ends at offset ",
                  begin, ", offsets must ascend");
  STD_TORCH_CHECK(offset <= size && count <= size - offset, name, " at offset ", offset, " with ",
                  count, " elements does not fit into ", size, " elements");
}

void CheckParts(const std::string& part, const std::vector<Tensor>& tensors,
                const std::vector<int64_t>& offsets, int64_t size) {
  STD_TORCH_CHECK(offsets.size() == tensors.size(), part, "s: ", tensors.size(), " tensors but ",
                  offsets.size(), " offsets");
  int64_t begin = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = part + " " + std::to_string(i);
    CheckTensor(tensors[i], name);
    CheckPlace(name, offsets[i], tensors[i].numel(), begin, size);
    begin = offsets[i] + tensors[i].numel();
  }
}

// A const pointer must be asked for: a mutable one makes a copy-on-write tensor copy.
template <typename Byte>
Byte* DataOf(const Tensor& tensor) {
  if constexpr (std::is_const_v<Byte>) {
    return static_cast<Byte*>(tensor.const_data_ptr());
  } else {
    return static_cast<Byte*>(tensor.mutable_data_ptr());
  }
}

template <typename Byte>
std::vector<Segment<Byte>> SegmentsOf(const std::vector<Tensor>& tensors,
                                      const std::vector<int64_t>& offsets, ScalarType flat) {
  std::vector<Segment<Byte>> segments;
  segments.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.numel() == 0) continue;
    const ScalarType own = tensor.scalar_type();
    const CastFn copy = std::is_const_v<Byte> ? FindCast(own, flat) : FindCast(flat, own);
    segments.push_back({offsets[i], offsets[i] + tensor.numel(), DataOf<Byte>(tensor),
                        static_cast<int64_t>(tensor.element_size()), copy});
  }
  return segments;
}

// Calls visit(segment, data, lo, hi) for the part [lo, hi) of every segment that lies within
// [begin, end), in ascending order; `data` is where the tensor's element for lo is.
template <typename Byte, typename Visit>
void ForEachWithin(const std::vector<Segment<Byte>>& segments, int64_t begin, int64_t end,
                   const Visit& visit) {
  auto segment = std::partition_point(segments.begin(), segments.end(),
                                      [begin](const auto& s) { return s.end <= begin; });
  for (; segment != segments.end() && segment->begin < end; ++segment) {
    const int64_t lo = std::max(begin, segment->begin);
    const int64_t hi = std::min(end, segment->end);
    visit(*segment, segment->data + (lo - segment->begin) * segment->item_size, lo, hi);
  }
}

}  // namespace

void Pack(const std::vector<Tensor>& sources, const std::vector<int64_t>& offsets, Tensor out) {
  CheckFlat(out, "pack: out");
  CheckParts("pack: source", sources, offsets, out.numel());
  const auto segments = SegmentsOf<const char>(sources, offsets, out.scalar_type());
  const int64_t item_size = static_cast<int64_t>(out.element_size());
  char* const flat = DataOf<char>(out);
  const auto fill = [&](int64_t begin, int64_t end) {
    int64_t done = begin;
    const auto zero_until = [&](int64_t until) {
      std::memset(flat + done * item_size, 0, static_cast<size_t>((until - done) * item_size));
    };
    ForEachWithin(segments, begin, end, [&](auto& segment, auto* data, int64_t lo, int64_t hi) {
      zero_until(lo);
      segment.copy(data, flat + lo * item_size, hi - lo);
      done = hi;
    });
    zero_until(end);
  };
  torch::stable::parallel_for(0, out.numel(), kGrain, fill);
}

void Unpack(Tensor source, const std::vector<int64_t>& offsets, const std::vector<Tensor>& outs) {
  CheckFlat(source, "unpack: source");
  CheckParts("unpack: out", outs, offsets, source.numel());
  const auto segments = SegmentsOf<char>(outs, offsets, source.scalar_type());
  const int64_t item_size = static_cast<int64_t>(source.element_size());
  const char* const flat = DataOf<const char>(source);
  const auto spill = [&](int64_t begin, int64_t end) {
    ForEachWithin(segments, begin, end, [&](auto& segment, auto* data, int64_t lo, int64_t hi) {
      segment.copy(flat + lo * item_size, data, hi - lo);
    });
  };
  torch::stable::parallel_for(0, source.numel(), kGrain, spill);
}

void SumChunks(Tensor chunks, double scale, Tensor out) {
  CheckFlat(chunks, "sum_chunks: chunks");
  CheckFlat(out, "sum_chunks: out");
  const int64_t chunk = out.numel();
  const bool whole = chunk == 0 ? chunks.numel() == 0 : chunks.numel() % chunk == 0;
  STD_TORCH_CHECK(whole && (chunk == 0 || chunks.numel() > 0), "sum_chunks: ", chunks.numel(),
                  " elements are not one or more chunks of ", chunk);
  if (chunk == 0) return;
  const SumFn sum = FindSum(chunks.scalar_type(), out.scalar_type());
  const char* const from = DataOf<const char>(chunks);
  char* const to = DataOf<char>(out);
  const auto from_size = static_cast<int64_t>(chunks.element_size());
  const auto to_size = static_cast<int64_t>(out.element_size());
  const int64_t world = chunks.numel() / chunk;
  torch::stable::parallel_for(0, chunk, kGrain / world + 1, [&](int64_t begin, int64_t end) {
    sum(from + begin * from_size, to + begin * to_size, end - begin, chunk, world, scale);
  });
}

}  // namespace zero_native
