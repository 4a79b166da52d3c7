#include "kernels.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

// One binary for every x86 CPU: the loader picks the widest version of a loop that the CPU runs.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define ZERO_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ZERO_MULTIVERSION
#endif

namespace zero_native {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename To, typename From>
inline To Convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<float>(value));
  }
}

template <typename From, typename To>
ZERO_MULTIVERSION void Cast(const void* from, void* to, int64_t count) {
  const From* __restrict source = static_cast<const From*>(from);
  To* __restrict out = static_cast<To*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = Convert<To>(source[i]);
}

template <typename T>
void Copy(const void* from, void* to, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
}

// Works through blocks small enough for the first-level cache, so that every row is read once and
// the result written once, whatever the number of rows.
template <typename From, typename To>
ZERO_MULTIVERSION void Sum(const void* rows, void* to, int64_t count, int64_t stride, int64_t world,
                           double scale) {
  using Acc = std::conditional_t<std::is_same_v<From, double>, double, float>;
  constexpr int64_t kBlock = 1024;
  const From* __restrict source = static_cast<const From*>(rows);
  To* __restrict out = static_cast<To*>(to);
  const Acc factor = static_cast<Acc>(scale);
  Acc sum[kBlock];
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t size = std::min(kBlock, count - start);
    const From* row = source + start;
    for (int64_t i = 0; i < size; ++i) sum[i] = Convert<Acc>(row[i]);
    for (int64_t rank = 1; rank < world; ++rank) {
      row += stride;
      for (int64_t i = 0; i < size; ++i) sum[i] += Convert<Acc>(row[i]);
    }
    for (int64_t i = 0; i < size; ++i) out[start + i] = Convert<To>(factor * sum[i]);
  }
}

template <typename T>
struct Type {
  using type = T;
};

// Calls `visit` with the C++ type of a dtype.
template <typename Visit>
auto WithType(ScalarType dtype, const Visit& visit) {
  switch (dtype) {
    case ScalarType::Float:
      return visit(Type<float>{});
    case ScalarType::BFloat16:
      return visit(Type<BFloat16>{});
    case ScalarType::Half:
      return visit(Type<Half>{});
    case ScalarType::Double:
      return visit(Type<double>{});
    default:
      STD_TORCH_CHECK(false, "dtype ", torch::headeronly::toString(dtype),
                      " is not one of float32, bfloat16, float16, float64");
  }
}

}  // namespace

bool IsSupported(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         dtype == ScalarType::Double;
}

CastFn FindCast(ScalarType from, ScalarType to) {
  return WithType(from, [to](auto from_type) {
    using From = typename decltype(from_type)::type;
    return WithType(to, [](auto to_type) -> CastFn {
      using To = typename decltype(to_type)::type;
      if constexpr (std::is_same_v<From, To>) {
        return &Copy<From>;
      } else {
        return &Cast<From, To>;
      }
    });
  });
}

SumFn FindSum(ScalarType from, ScalarType to) {
  return WithType(from, [to](auto from_type) {
    using From = typename decltype(from_type)::type;
    return WithType(to, [](auto to_type) -> SumFn {
      using To = typename decltype(to_type)::type;
      return &Sum<From, To>;
    });
  });
}

}  // namespace zero_native
