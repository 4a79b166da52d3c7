#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <vector>

#include "copies.h"
#include "events.h"
#include "pinned.h"

namespace {

using torch::stable::Tensor;
using zero_cuda::Copies;
using zero_cuda::Direction;
using zero_cuda::PinnedArena;

Tensor PinnedTake(int64_t nbytes, int64_t device) {
  void* const data = PinnedArena::Global().Take(nbytes, static_cast<int32_t>(device));
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(data, {nbytes}, {1}, cpu, torch::headeronly::ScalarType::Byte,
                                  [](void* block) { PinnedArena::Global().Give(block); });
}

void PinnedTrim() { PinnedArena::Global().Trim(); }

int64_t CopyToDevice(Tensor host, Tensor device, int64_t queue) {
  return Copies::Global().Start(host, device, Direction::kToDevice, queue);
}

int64_t CopyToHost(Tensor device, Tensor host, int64_t queue) {
  return Copies::Global().Start(host, device, Direction::kToHost, queue);
}

void WaitOnStream(int64_t ticket) { Copies::Global().WaitOnStream(ticket); }

void WaitOnHost(int64_t ticket) { Copies::Global().WaitOnHost(ticket); }

bool Done(int64_t ticket) { return Copies::Global().Done(ticket); }

void Release(int64_t ticket) { Copies::Global().Release(ticket); }

std::vector<int64_t> Stats() {
  const zero_cuda::PinnedStats pinned = PinnedArena::Global().Stats();
  return {pinned.live, pinned.held, Copies::Global().InFlight(),
          zero_cuda::EventPool::Global().Made()};
}

}  // namespace

STABLE_TORCH_LIBRARY(zero_cuda, m) {
  m.def("pinned_take(int nbytes, int device) -> Tensor");
  m.def("pinned_trim() -> ()");
  m.def("copy_to_device(Tensor host, Tensor(a!) device, int queue) -> int");
  m.def("copy_to_host(Tensor device, Tensor(a!) host, int queue) -> int");
  m.def("wait_on_stream(int ticket) -> ()");
  m.def("wait_on_host(int ticket) -> ()");
  m.def("done(int ticket) -> bool");
  m.def("release(int ticket) -> ()");
  m.def("stats() -> int[]");
}

// Either no tensor argument says where to dispatch, or two of them disagree.
STABLE_TORCH_LIBRARY_IMPL(zero_cuda, CompositeExplicitAutograd, m) {
  m.impl("pinned_take", TORCH_BOX(&PinnedTake));
  m.impl("pinned_trim", TORCH_BOX(&PinnedTrim));
  m.impl("copy_to_device", TORCH_BOX(&CopyToDevice));
  m.impl("copy_to_host", TORCH_BOX(&CopyToHost));
  m.impl("wait_on_stream", TORCH_BOX(&WaitOnStream));
  m.impl("wait_on_host", TORCH_BOX(&WaitOnHost));
  m.impl("done", TORCH_BOX(&Done));
  m.impl("release", TORCH_BOX(&Release));
  m.impl("stats", TORCH_BOX(&Stats));
}

// The module itself is empty: loading it registers the operators above.
PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_cuda", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
