#include "events.h"

#include <string>

#include "check.h"

namespace zero_cuda {

EventPool& EventPool::Global() {
  static EventPool* const pool = new EventPool;
  return *pool;
}

cudaEvent_t EventPool::Take(int32_t device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<cudaEvent_t>& free = free_[device];
  if (!free.empty()) {
    cudaEvent_t const event = free.back();
    free.pop_back();
    return event;
  }
  cudaEvent_t event = nullptr;
  // A host that waits sleeps: its cores have an optimizer to run.
  Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
        "cudaEventCreateWithFlags",
        [&] { return "making an event of cuda:" + std::to_string(device); });
  made_ += 1;
  return event;
}

void EventPool::Give(int32_t device, cudaEvent_t event) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_[device].push_back(event);
}

int64_t EventPool::Made() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return made_;
}

}  // namespace zero_cuda
