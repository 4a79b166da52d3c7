#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace zero_native {

using torch::stable::Tensor;

// Optimizer steps on flat buckets in host memory. Of every bucket, `param` and each of `state` is
// float32, `grad` float32, bfloat16 or float16, and `copy`, where given, bfloat16 or float16; all
// are contiguous, of shape [n] and on the CPU, and none overlaps another. Where a tensor, a count
// of tensors or a number breaks this, std::runtime_error is thrown before anything is written.
//
// The gradient enters as grad * unscale * clip + l2 * param, computed in float32, with `factors` =
// {unscale, clip, l2}. The new parameter is rounded to nearest even into `copy`.
//
// `check` 0: returns false. 1: updates, and returns whether an element of `grad` is infinite or
// NaN. 2: looks through `grad` first, and where it returns true has written nothing.
//
// `isa` is one of HostIsas(), or -1 for the best of them. The work is shared by as many threads as
// torch.get_num_threads() says.

// state: exp_avg, exp_avg_sq, and max_exp_avg_sq for AMSGrad. coefficients: parameter decay, 1 -
// beta1, beta2, 1 - beta2, sqrt(1 - beta2^t), eps, -lr / (1 - beta1^t).
bool HostAdam(Tensor param, Tensor grad, const std::vector<Tensor>& state,
              std::optional<Tensor> copy, const std::vector<double>& coefficients,
              const std::vector<double>& factors, int64_t check, int64_t isa);

// state: nothing, or the momentum buffer. coefficients: -lr, momentum, 1 - dampening, whether the
// step is the first, whether momentum is Nesterov's; flags are 0 or 1.
bool HostSgd(Tensor param, Tensor grad, const std::vector<Tensor>& state,
             std::optional<Tensor> copy, const std::vector<double>& coefficients,
             const std::vector<double>& factors, int64_t check, int64_t isa);

// state: the sum of squares. coefficients: the negative learning rate of the step, eps.
bool HostAdagrad(Tensor param, Tensor grad, const std::vector<Tensor>& state,
                 std::optional<Tensor> copy, const std::vector<double>& coefficients,
                 const std::vector<double>& factors, int64_t check, int64_t isa);

// state: exp_avg. coefficients: parameter decay, -lr, beta1, 1 - beta1, beta2, 1 - beta2.
bool HostLion(Tensor param, Tensor grad, const std::vector<Tensor>& state,
              std::optional<Tensor> copy, const std::vector<double>& coefficients,
              const std::vector<double>& factors, int64_t check, int64_t isa);

// Whether an element of `grad` is infinite or NaN.
bool HostNonFinite(Tensor grad, int64_t isa);

// What this CPU runs, best first: 2 for AVX-512, 1 for AVX2, 0 for neither.
std::vector<int64_t> HostIsas();

}  // namespace zero_native
