#include "pinned.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "check.h"

namespace zero_cuda {

PinnedArena& PinnedArena::Global() {
  static PinnedArena* const arena = new PinnedArena;
  return *arena;
}

void* PinnedArena::Take(int64_t nbytes, int32_t device) {
  if (nbytes < 0) {
    throw std::runtime_error("pinned_take: nbytes must not be negative, got " +
                             std::to_string(nbytes));
  }
  // PyTorch's own message would not say what is missing where there is no driver.
  int devices = 0;
  Check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount",
        [&] { return "locking " + std::to_string(nbytes) + " bytes of host memory"; });
  const torch::stable::accelerator::DeviceGuard guard(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t wanted = std::max<size_t>(static_cast<size_t>(nbytes), 1);
  Block block = TakeFree(wanted);
  if (block.data == nullptr) block = TakeNew(wanted);
  live_[block.data] = {block.capacity, nbytes};
  stats_.live += nbytes;
  stats_.peak = std::max(stats_.peak, stats_.live);
  return block.data;
}

void PinnedArena::Give(void* data) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(data);
  if (found == live_.end()) return;
  free_.emplace(found->second.capacity, data);
  stats_.live -= found->second.requested;
  live_.erase(found);
}

PinnedStats PinnedArena::Stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void PinnedArena::Trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ReleaseDownTo(0);
}

PinnedArena::Block PinnedArena::TakeFree(size_t wanted) {
  const auto fit = free_.lower_bound(wanted);
  if (fit == free_.end() || fit->first > wanted + wanted / 4) return {};
  const Block block{fit->second, fit->first};
  free_.erase(fit);
  return block;
}

PinnedArena::Block PinnedArena::TakeNew(size_t wanted) {
  const auto size = static_cast<int64_t>(wanted);
  ReleaseDownTo(std::max(stats_.peak, stats_.live + size) - size);
  void* data = nullptr;
  cudaError_t error = cudaHostAlloc(&data, wanted, cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation && !free_.empty()) {
    (void)cudaGetLastError();
    ReleaseDownTo(0);
    error = cudaHostAlloc(&data, wanted, cudaHostAllocPortable);
  }
  Check(error, "cudaHostAlloc", [&] {
    return "locking " + std::to_string(wanted) + " bytes of host memory, beside " +
           std::to_string(stats_.held) + " bytes already held";
  });
  stats_.held += size;
  return {data, wanted};
}

void PinnedArena::ReleaseDownTo(int64_t limit) {
  while (stats_.held > limit && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    const size_t capacity = largest->first;
    void* const data = largest->second;
    free_.erase(largest);
    stats_.held -= static_cast<int64_t>(capacity);
    Check(cudaFreeHost(data), "cudaFreeHost", [&] {
      return "giving " + std::to_string(capacity) + " bytes of locked host memory back";
    });
  }
}

}  // namespace zero_cuda
