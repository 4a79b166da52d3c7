#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <vector>

#include "arena.h"
#include "pack.h"

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
}

// Without a tensor argument there is no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(zero_native, CompositeExplicitAutograd, m) {
  m.impl("arena_take", TORCH_BOX(&ArenaTake));
  m.impl("arena_stats", TORCH_BOX(&ArenaStatsList));
  m.impl("arena_reset_peak", TORCH_BOX(&ArenaResetPeak));
  m.impl("arena_trim", TORCH_BOX(&ArenaTrim));
}

STABLE_TORCH_LIBRARY_IMPL(zero_native, CPU, m) {
  m.impl("pack", TORCH_BOX(&zero_native::Pack));
  m.impl("unpack", TORCH_BOX(&zero_native::Unpack));
  m.impl("sum_chunks", TORCH_BOX(&zero_native::SumChunks));
}

// The module itself is empty: loading it registers the operators above.
PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
