#include "host_optimizer.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <system_error>
#include <thread>

#include "host_kernels.h"

namespace zero_native {
namespace {

// Elements that make another thread worth starting.
constexpr int64_t kGrain = 65536;
// Threads begin at whole cache lines of every array.
constexpr int64_t kLine = 64;

// What differs between the algorithms' operators.
struct Shape {
  Algorithm algorithm;
  std::string name;
  size_t least_state;
  size_t most_state;
  size_t coefficients;
};

bool IsHalf(ScalarType dtype) { return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half; }

void CheckBucket(const Tensor& tensor, const std::string& name, int64_t size) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " is not on the CPU");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " is not contiguous");
  STD_TORCH_CHECK(tensor.dim() == 1, name, " has ", tensor.dim(), " dimensions, expected 1");
  STD_TORCH_CHECK(tensor.numel() == size, name, " has ", tensor.numel(), " elements, expected ",
                  size);
}

void CheckDtype(const Tensor& tensor, const std::string& name, bool fits,
                const std::string& wanted) {
  STD_TORCH_CHECK(fits, name, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
                  ", expected ", wanted);
}

float* FloatsOf(const Tensor& tensor, const std::string& name, int64_t size) {
  CheckBucket(tensor, name, size);
  CheckDtype(tensor, name, tensor.scalar_type() == ScalarType::Float, "float32");
  return static_cast<float*>(tensor.mutable_data_ptr());
}

void SetGrad(Update* update, const Tensor& grad, const std::string& name, int64_t size) {
  CheckBucket(grad, name, size);
  const ScalarType dtype = grad.scalar_type();
  CheckDtype(grad, name, dtype == ScalarType::Float || IsHalf(dtype),
             "float32, bfloat16 or float16");
  update->grad = grad.const_data_ptr();
  update->grad_dtype = dtype;
}

Isa ChooseIsa(int64_t isa) {
  const std::vector<int64_t> isas = HostIsas();
  if (isa == -1) return static_cast<Isa>(isas.front());
  STD_TORCH_CHECK(std::find(isas.begin(), isas.end(), isa) != isas.end(), "instruction set ", isa,
                  " is not available on this machine");
  return static_cast<Isa>(isa);
}

// Shares [0, size) among torch's number of threads, the calling one included. Returns whether one
// of the parts returned true.
bool Share(int64_t size, const Update& update, UpdateFn work) {
  const int64_t wanted = std::min<int64_t>(torch::stable::get_num_threads(), size / kGrain);
  const int64_t count = std::max<int64_t>(wanted, 1);
  const int64_t part = (size / count / kLine + 1) * kLine;
  std::atomic<bool> found{false};
  const auto run = [&](int64_t begin, int64_t end) {
    if (begin < end && work(update, begin, end)) found.store(true, std::memory_order_relaxed);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  int64_t begin = 0;
  try {
    for (int64_t i = 1; i < count; ++i) {
      const int64_t end = std::min(begin + part, size);
      threads.emplace_back(run, begin, end);
      begin = end;
    }
  } catch (const std::system_error&) {
    // No more threads: this one does what is left.
  }
  run(begin, size);
  for (std::thread& thread : threads) thread.join();
  return found.load();
}

// The operators' arguments, checked, as what the kernels take.
Update MakeUpdate(const Shape& shape, const Tensor& param, const Tensor& grad,
                  const std::vector<Tensor>& state, const std::optional<Tensor>& copy) {
  const int64_t size = param.numel();
  STD_TORCH_CHECK(state.size() >= shape.least_state && state.size() <= shape.most_state, shape.name,
                  ": ", state.size(), " state tensors, expected ", shape.least_state, " to ",
                  shape.most_state);
  Update update{};
  update.param = FloatsOf(param, shape.name + ": param", size);
  SetGrad(&update, grad, shape.name + ": grad", size);
  for (size_t i = 0; i < state.size(); ++i) {
    update.state[i] = FloatsOf(state[i], shape.name + ": state " + std::to_string(i), size);
  }
  if (copy.has_value()) {
    const std::string name = shape.name + ": copy";
    CheckBucket(*copy, name, size);
    CheckDtype(*copy, name, IsHalf(copy->scalar_type()), "bfloat16 or float16");
    update.copy = copy->mutable_data_ptr();
    update.copy_dtype = copy->scalar_type();
  }
  return update;
}

bool Step(const Shape& shape, const Tensor& param, const Tensor& grad,
          const std::vector<Tensor>& state, const std::optional<Tensor>& copy,
          const std::vector<double>& coefficients, const std::vector<double>& factors,
          int64_t check, int64_t isa) {
  Update update = MakeUpdate(shape, param, grad, state, copy);
  STD_TORCH_CHECK(coefficients.size() == shape.coefficients, shape.name, ": ", coefficients.size(),
                  " coefficients, expected ", shape.coefficients);
  STD_TORCH_CHECK(factors.size() == 3, shape.name, ": ", factors.size(), " factors, expected 3");
  STD_TORCH_CHECK(check >= 0 && check <= 2, shape.name, ": check is ", check,
                  ", expected 0, 1 or 2");
  std::transform(coefficients.begin(), coefficients.end(), update.coefficients.begin(),
                 [](double value) { return static_cast<float>(value); });
  update.unscale = static_cast<float>(factors[0]);
  update.clip = static_cast<float>(factors[1]);
  update.l2 = static_cast<float>(factors[2]);
  const Isa chosen = ChooseIsa(isa);
  const int64_t size = param.numel();
  if (check == 2 && Share(size, update, FindNonFinite(chosen))) return true;
  const bool found = Share(size, update, FindUpdate(shape.algorithm, chosen));
  return check != 0 && found;
}

}  // namespace

bool HostAdam(Tensor param, Tensor grad, const std::vector<Tensor>& state,
              std::optional<Tensor> copy, const std::vector<double>& coefficients,
              const std::vector<double>& factors, int64_t check, int64_t isa) {
  static const Shape shape{Algorithm::kAdam, "host_adam", 2, 3, 7};
  return Step(shape, param, grad, state, copy, coefficients, factors, check, isa);
}

bool HostSgd(Tensor param, Tensor grad, const std::vector<Tensor>& state,
             std::optional<Tensor> copy, const std::vector<double>& coefficients,
             const std::vector<double>& factors, int64_t check, int64_t isa) {
  static const Shape shape{Algorithm::kSgd, "host_sgd", 0, 1, 5};
  return Step(shape, param, grad, state, copy, coefficients, factors, check, isa);
}

bool HostAdagrad(Tensor param, Tensor grad, const std::vector<Tensor>& state,
                 std::optional<Tensor> copy, const std::vector<double>& coefficients,
                 const std::vector<double>& factors, int64_t check, int64_t isa) {
  static const Shape shape{Algorithm::kAdagrad, "host_adagrad", 1, 1, 2};
  return Step(shape, param, grad, state, copy, coefficients, factors, check, isa);
}

bool HostLion(Tensor param, Tensor grad, const std::vector<Tensor>& state,
              std::optional<Tensor> copy, const std::vector<double>& coefficients,
              const std::vector<double>& factors, int64_t check, int64_t isa) {
  static const Shape shape{Algorithm::kLion, "host_lion", 1, 1, 6};
  return Step(shape, param, grad, state, copy, coefficients, factors, check, isa);
}

bool HostNonFinite(Tensor grad, int64_t isa) {
  Update update{};
  SetGrad(&update, grad, "host_non_finite: grad", grad.numel());
  return Share(grad.numel(), update, FindNonFinite(ChooseIsa(isa)));
}

std::vector<int64_t> HostIsas() {
  std::vector<int64_t> isas;
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kScalar}) {
    if (IsAvailable(isa)) isas.push_back(static_cast<int64_t>(isa));
  }
  return isas;
}

}  // namespace zero_native
