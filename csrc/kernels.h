#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace zero_native {

using torch::headeronly::ScalarType;

// Reads `count` elements at `from`, writes as many at `to`. The two must not overlap.
using CastFn = void (*)(const void* from, void* to, int64_t count);

// Sums `world` rows of `count` elements, `stride` elements apart, row by row.
using SumFn = void (*)(const void* rows, void* to, int64_t count, int64_t stride, int64_t world,
                       double scale);

// float32, bfloat16, float16 and float64.
bool IsSupported(ScalarType dtype);

// Casts round to nearest even, by way of float32 wherever one side has 16 bits, as ATen does. A NaN
// stays a NaN, its payload may change. Throws for an unsupported dtype.
CastFn FindCast(ScalarType from, ScalarType to);

// The sum and its product with the scale are taken in float32, for float64 rows in float64, and
// rounded once to the dtype of the result. Throws for an unsupported dtype.
SumFn FindSum(ScalarType from, ScalarType to);

}  // namespace zero_native
