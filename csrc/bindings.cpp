#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <vector>

#include "arena.h"
#include "host_optimizer.h"
#include "pack.h"
#include "swap_ops.h"

namespace {

using torch::stable::Tensor;
using zero_native::Arena;
using zero_native::ArenaStats;

Tensor ArenaTake(int64_t nbytes) {
  void* const data = Arena::Global().Take(nbytes);
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(data, {nbytes}, {1}, cpu, torch::headeronly::ScalarType::Byte,
                                  [](void* block) { Arena::Global().Give(block); });
}

std::vector<int64_t> ArenaStatsList() {
  const ArenaStats stats = Arena::Global().Stats();
  return {stats.live, stats.peak, stats.held, stats.os_allocations, stats.takes};
}

void ArenaResetPeak() { Arena::Global().ResetPeak(); }

void ArenaTrim() { Arena::Global().Trim(); }

}  // namespace

STABLE_TORCH_LIBRARY(zero_native, m) {
  m.def("arena_take(int nbytes) -> Tensor");
  m.def("arena_stats() -> int[]");
  m.def("arena_reset_peak() -> ()");
  m.def("arena_trim() -> ()");
  m.def("pack(Tensor[] sources, int[] offsets, Tensor(a!) out) -> ()");
  m.def("unpack(Tensor source, int[] offsets, Tensor(a!)[] outs) -> ()");
  m.def("sum_chunks(Tensor chunks, float scale, Tensor(a!) out) -> ()");
  m.def(
      "swap_open(str path, int fd, int capacity, int block_size, int threads, int depth, "
      "int slots, bool direct, bool checksum, int backend, bool single_submit, bool overlap, int[] "
      "faults) -> "
      "int");
  m.def("swap_mode(int file) -> str");
  m.def("swap_allocate(int file, str name, int nbytes) -> int[]");
  m.def("swap_free(int file, str name) -> ()");
  m.def("swap_find(int file, str name) -> int[]");
  m.def("swap_write(int file, str name, Tensor source) -> int");
  m.def("swap_read(int file, str name, Tensor(a!) out) -> int");
  m.def("swap_done(int file, int ticket) -> bool");
  m.def("swap_wait(int file, int ticket) -> ()");
  m.def("swap_drain(int file) -> ()");
  m.def("swap_close(int file) -> ()");
  m.def("swap_release(int file) -> ()");
  m.def("swap_stats(int file) -> int[]");
  m.def(
      "host_adam(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, Tensor(c!)? copy, "
      "float[] coefficients, float[] factors, int check, int isa) -> bool");
  m.def(
      "host_sgd(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, Tensor(c!)? copy, "
      "float[] coefficients, float[] factors, int check, int isa) -> bool");
  m.def(
      "host_adagrad(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, Tensor(c!)? copy, "
      "float[] coefficients, float[] factors, int check, int isa) -> bool");
  m.def(
      "host_lion(Tensor(a!) param, Tensor grad, Tensor(b!)[] state, Tensor(c!)? copy, "
      "float[] coefficients, float[] factors, int check, int isa) -> bool");
  m.def("host_non_finite(Tensor grad, int isa) -> bool");
  m.def("host_isas() -> int[]");
}

// Without a tensor argument there is no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(zero_native, CompositeExplicitAutograd, m) {
  m.impl("arena_take", TORCH_BOX(&ArenaTake));
  m.impl("arena_stats", TORCH_BOX(&ArenaStatsList));
  m.impl("arena_reset_peak", TORCH_BOX(&ArenaResetPeak));
  m.impl("arena_trim", TORCH_BOX(&ArenaTrim));
  m.impl("swap_open", TORCH_BOX(&zero_native::SwapOpen));
  m.impl("swap_mode", TORCH_BOX(&zero_native::SwapMode));
  m.impl("swap_allocate", TORCH_BOX(&zero_native::SwapAllocate));
  m.impl("swap_free", TORCH_BOX(&zero_native::SwapFree));
  m.impl("swap_find", TORCH_BOX(&zero_native::SwapFind));
  m.impl("swap_done", TORCH_BOX(&zero_native::SwapDone));
  m.impl("swap_wait", TORCH_BOX(&zero_native::SwapWait));
  m.impl("swap_drain", TORCH_BOX(&zero_native::SwapDrain));
  m.impl("swap_close", TORCH_BOX(&zero_native::SwapClose));
  m.impl("swap_release", TORCH_BOX(&zero_native::SwapRelease));
  m.impl("swap_stats", TORCH_BOX(&zero_native::SwapStatsList));
  m.impl("host_isas", TORCH_BOX(&zero_native::HostIsas));
}

STABLE_TORCH_LIBRARY_IMPL(zero_native, CPU, m) {
  m.impl("pack", TORCH_BOX(&zero_native::Pack));
  m.impl("unpack", TORCH_BOX(&zero_native::Unpack));
  m.impl("sum_chunks", TORCH_BOX(&zero_native::SumChunks));
  m.impl("swap_write", TORCH_BOX(&zero_native::SwapWrite));
  m.impl("swap_read", TORCH_BOX(&zero_native::SwapRead));
  m.impl("host_adam", TORCH_BOX(&zero_native::HostAdam));
  m.impl("host_sgd", TORCH_BOX(&zero_native::HostSgd));
  m.impl("host_adagrad", TORCH_BOX(&zero_native::HostAdagrad));
  m.impl("host_lion", TORCH_BOX(&zero_native::HostLion));
  m.impl("host_non_finite", TORCH_BOX(&zero_native::HostNonFinite));
}

// The module itself is empty: loading it registers the operators above.
PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
