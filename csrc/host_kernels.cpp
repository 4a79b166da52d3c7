#include "host_kernels.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>

// A body is written once, inlined into a function for each instruction set and vectorised there.
#define ZERO_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define ZERO_X86 1
#define ZERO_AVX2 __attribute__((flatten, target("avx2")))
#define ZERO_AVX512 __attribute__((flatten, target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define ZERO_X86 0
#endif

namespace zero_native {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// A block's gradient, converted and scaled, stays in the first-level cache with the rest of the
// block, so steps of an update can be loops of their own: memory is still passed over once. Small
// blocks let the memory work while the divider does.
constexpr int64_t kBlock = 128;

// How many elements ahead memory is asked for what an update reads.
constexpr int64_t kAhead = 1024;

ZERO_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// 0 for a finite number, all ones otherwise.
ZERO_INLINE uint32_t NonFiniteMask(float value) {
  constexpr uint32_t kExponent = 0x7f800000;
  return (BitsOf(value) & kExponent) == kExponent ? ~uint32_t{0} : 0;
}

ZERO_INLINE void PrefetchBytes(const void* data, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  const char* const bytes = static_cast<const char*>(data);
  for (int64_t i = begin; i < end; i += kLine) __builtin_prefetch(bytes + i);
}

ZERO_INLINE void Prefetch(const Update& u, int64_t begin, int64_t end) {
  constexpr int64_t kFloat = sizeof(float);
  const int64_t item = u.grad_dtype == ScalarType::Float ? kFloat : kFloat / 2;
  PrefetchBytes(u.grad, begin * item, end * item);
  PrefetchBytes(u.param, begin * kFloat, end * kFloat);
  for (const float* state : u.state) {
    if (state != nullptr) PrefetchBytes(state, begin * kFloat, end * kFloat);
  }
}

template <typename T>
ZERO_INLINE uint32_t CheckGrad(const Update& u, int64_t begin, int64_t end) {
  const T* const grad = static_cast<const T*>(u.grad);
  uint32_t mask = 0;
  for (int64_t i = begin; i < end; ++i) mask |= NonFiniteMask(static_cast<float>(grad[i]));
  return mask;
}

// Two products, not one with a product of the factors, round like a gradient scaled beforehand.
template <typename T>
ZERO_INLINE uint32_t LoadGrad(const Update& u, int64_t start, int64_t size, float* __restrict g) {
  const T* __restrict grad = static_cast<const T*>(u.grad) + start;
  const float unscale = u.unscale;
  const float clip = u.clip;
  uint32_t mask = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float value = static_cast<float>(grad[i]);
    mask |= NonFiniteMask(value);
    g[i] = value * unscale * clip;
  }
  return mask;
}

template <typename T>
ZERO_INLINE void StoreCopy(const Update& u, int64_t start, int64_t size) {
  const float* __restrict param = u.param + start;
  T* __restrict copy = static_cast<T*>(u.copy) + start;
  for (int64_t i = 0; i < size; ++i) copy[i] = static_cast<T>(param[i]);
}

// torch.lerp takes the end that is nearer as its base.
struct Lerp {
  explicit Lerp(float weight)
      : from_start(std::abs(weight) < 0.5f), factor(from_start ? weight : -(1.0f - weight)) {}
  ZERO_INLINE float operator()(float start, float end) const {
    return (from_start ? start : end) + factor * (end - start);
  }
  bool from_start;
  float factor;
};

template <bool kAmsgrad>
ZERO_INLINE void Adam(const Update& u, int64_t start, int64_t size, const float* __restrict g) {
  const auto [decay, weight1, beta2, weight2, root_correction, eps, step_size] = u.coefficients;
  const Lerp lerp(weight1);
  float* __restrict param = u.param + start;
  float* __restrict exp_avg = u.state[0] + start;
  float* __restrict exp_avg_sq = u.state[1] + start;
  float* __restrict largest = kAmsgrad ? u.state[2] + start : nullptr;
  for (int64_t i = 0; i < size; ++i) {
    const float average = lerp(exp_avg[i], g[i]);
    float square = exp_avg_sq[i] * beta2 + weight2 * g[i] * g[i];
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    if constexpr (kAmsgrad) {
      // A NaN on either side stays.
      square = largest[i] > square || largest[i] != largest[i] ? largest[i] : square;
      largest[i] = square;
    }
    const float denominator = std::sqrt(square) / root_correction + eps;
    param[i] = param[i] * decay + step_size * average / denominator;
  }
}

ZERO_INLINE void Sgd(const Update& u, int64_t start, int64_t size, float* __restrict g) {
  const auto [step_size, momentum, weight, is_first, nesterov, unused5, unused6] = u.coefficients;
  float* __restrict param = u.param + start;
  if (u.state[0] != nullptr) {
    float* __restrict buffer = u.state[0] + start;
    if (is_first != 0) {
      for (int64_t i = 0; i < size; ++i) buffer[i] = g[i];
    } else {
      for (int64_t i = 0; i < size; ++i) buffer[i] = buffer[i] * momentum + weight * g[i];
    }
    if (nesterov != 0) {
      for (int64_t i = 0; i < size; ++i) g[i] += momentum * buffer[i];
    } else {
      for (int64_t i = 0; i < size; ++i) g[i] = buffer[i];
    }
  }
  for (int64_t i = 0; i < size; ++i) param[i] += step_size * g[i];
}

ZERO_INLINE void Adagrad(const Update& u, int64_t start, int64_t size, const float* __restrict g) {
  const float step_size = u.coefficients[0];
  const float eps = u.coefficients[1];
  float* __restrict param = u.param + start;
  float* __restrict sum = u.state[0] + start;
  for (int64_t i = 0; i < size; ++i) {
    const float total = sum[i] + g[i] * g[i];
    sum[i] = total;
    param[i] += step_size * g[i] / (std::sqrt(total) + eps);
  }
}

ZERO_INLINE void Lion(const Update& u, int64_t start, int64_t size, const float* __restrict g) {
  const auto [decay, step_size, beta1, weight1, beta2, weight2, unused6] = u.coefficients;
  float* __restrict param = u.param + start;
  float* __restrict exp_avg = u.state[0] + start;
  for (int64_t i = 0; i < size; ++i) {
    const float mixed = exp_avg[i] * beta1 + g[i] * weight1;
    const float sign = (mixed > 0 ? 1.0f : 0.0f) - (mixed < 0 ? 1.0f : 0.0f);
    exp_avg[i] = exp_avg[i] * beta2 + weight2 * g[i];
    param[i] = param[i] * decay + step_size * sign;
  }
}

template <Algorithm kAlgorithm>
ZERO_INLINE void Apply(const Update& u, int64_t start, int64_t size, float* __restrict g) {
  if (u.l2 != 0) {
    const float* __restrict param = u.param + start;
    for (int64_t i = 0; i < size; ++i) g[i] += u.l2 * param[i];
  }
  if constexpr (kAlgorithm == Algorithm::kAdam) {
    u.state[2] == nullptr ? Adam<false>(u, start, size, g) : Adam<true>(u, start, size, g);
  } else if constexpr (kAlgorithm == Algorithm::kSgd) {
    Sgd(u, start, size, g);
  } else if constexpr (kAlgorithm == Algorithm::kAdagrad) {
    Adagrad(u, start, size, g);
  } else {
    Lion(u, start, size, g);
  }
}

template <Algorithm kAlgorithm>
ZERO_INLINE bool UpdateBody(const Update& u, int64_t begin, int64_t end) {
  alignas(64) float g[kBlock];
  uint32_t mask = 0;
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t size = std::min(kBlock, end - start);
    Prefetch(u, start + kAhead, std::min(start + kAhead + kBlock, end));
    if (u.grad_dtype == ScalarType::Float) {
      mask |= LoadGrad<float>(u, start, size, g);
    } else if (u.grad_dtype == ScalarType::BFloat16) {
      mask |= LoadGrad<BFloat16>(u, start, size, g);
    } else {
      mask |= LoadGrad<Half>(u, start, size, g);
    }
    Apply<kAlgorithm>(u, start, size, g);
    if (u.copy == nullptr) continue;
    if (u.copy_dtype == ScalarType::BFloat16) {
      StoreCopy<BFloat16>(u, start, size);
    } else {
      StoreCopy<Half>(u, start, size);
    }
  }
  return mask != 0;
}

ZERO_INLINE bool NonFiniteBody(const Update& u, int64_t begin, int64_t end) {
  if (u.grad_dtype == ScalarType::Float) return CheckGrad<float>(u, begin, end) != 0;
  if (u.grad_dtype == ScalarType::BFloat16) return CheckGrad<BFloat16>(u, begin, end) != 0;
  return CheckGrad<Half>(u, begin, end) != 0;
}

template <Algorithm kAlgorithm>
bool UpdateScalar(const Update& u, int64_t begin, int64_t end) {
  return UpdateBody<kAlgorithm>(u, begin, end);
}

bool NonFiniteScalar(const Update& u, int64_t begin, int64_t end) {
  return NonFiniteBody(u, begin, end);
}

#if ZERO_X86
template <Algorithm kAlgorithm>
ZERO_AVX2 bool UpdateAvx2(const Update& u, int64_t begin, int64_t end) {
  return UpdateBody<kAlgorithm>(u, begin, end);
}

template <Algorithm kAlgorithm>
ZERO_AVX512 bool UpdateAvx512(const Update& u, int64_t begin, int64_t end) {
  return UpdateBody<kAlgorithm>(u, begin, end);
}

ZERO_AVX2 bool NonFiniteAvx2(const Update& u, int64_t begin, int64_t end) {
  return NonFiniteBody(u, begin, end);
}

ZERO_AVX512 bool NonFiniteAvx512(const Update& u, int64_t begin, int64_t end) {
  return NonFiniteBody(u, begin, end);
}
#endif

template <Algorithm kAlgorithm>
UpdateFn FindFor(Isa isa) {
#if ZERO_X86
  if (isa == Isa::kAvx512) return &UpdateAvx512<kAlgorithm>;
  if (isa == Isa::kAvx2) return &UpdateAvx2<kAlgorithm>;
#endif
  static_cast<void>(isa);
  return &UpdateScalar<kAlgorithm>;
}

}  // namespace

bool IsAvailable(Isa isa) {
#if ZERO_X86
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return isa == Isa::kScalar;
}

UpdateFn FindUpdate(Algorithm algorithm, Isa isa) {
  switch (algorithm) {
    case Algorithm::kAdam:
      return FindFor<Algorithm::kAdam>(isa);
    case Algorithm::kSgd:
      return FindFor<Algorithm::kSgd>(isa);
    case Algorithm::kAdagrad:
      return FindFor<Algorithm::kAdagrad>(isa);
    default:
      return FindFor<Algorithm::kLion>(isa);
  }
}

NonFiniteFn FindNonFinite(Isa isa) {
#if ZERO_X86
  if (isa == Isa::kAvx512) return &NonFiniteAvx512;
  if (isa == Isa::kAvx2) return &NonFiniteAvx2;
#endif
  static_cast<void>(isa);
  return &NonFiniteScalar;
}

}  // namespace zero_native
