#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace zero_cuda {

// CUDA events of each device, made once and used again.
class EventPool {
 public:
  // Never destroyed: CUDA may be gone before static destructors run.
  static EventPool& Global();

  // The device must be the current one. Throws where CUDA has no event left.
  cudaEvent_t Take(int32_t device);
  void Give(int32_t device, cudaEvent_t event) noexcept;
  // How many were ever made.
  int64_t Made();

 private:
  std::mutex mutex_;
  std::map<int32_t, std::vector<cudaEvent_t>> free_;
  int64_t made_ = 0;
};

// An event that returns to the pool when this object ends. What waits for it by then is not
// affected when it is recorded anew.
class Event {
 public:
  explicit Event(int32_t device) : device_(device), event_(EventPool::Global().Take(device)) {}
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { EventPool::Global().Give(device_, event_); }

  cudaEvent_t get() const { return event_; }

 private:
  int32_t device_;
  cudaEvent_t event_;
};

}  // namespace zero_cuda
