#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace zero_cuda {

using torch::stable::Tensor;

enum class Direction { kToDevice, kToHost };

struct Flight;

// Copies between host and devices, on streams of their own: one for each device, direction and
// queue. Each copy begins after what the device's current stream has been given by then, and after
// the copies before it on the same queue.
//
// A copy is known by a ticket. No ticket is used twice, so a stale one is noticed; the events
// behind them are pooled. Tensors are held until the copy is complete, also where its ticket was
// released before; the device's tensor only until the stream that started the copy waits for it.
class Copies {
 public:
  // Never destroyed: CUDA may be gone before static destructors run.
  static Copies& Global();

  // Tensors are contiguous, of the same dtype and number of elements. Throws std::runtime_error,
  // like all the others, where they are not, and where CUDA fails: then nothing is in flight.
  int64_t Start(const Tensor& host, const Tensor& device, Direction direction, int64_t queue);
  // The device's current stream waits, the host does not.
  void WaitOnStream(int64_t ticket);
  // Returns once the copy is complete; throws where it failed.
  void WaitOnHost(int64_t ticket);
  // Whether the copy is complete, successful or not.
  bool Done(int64_t ticket);
  // Forgets the ticket, which need not be complete; unknown ones are none.
  void Release(int64_t ticket);
  // How many copies were not found complete yet.
  int64_t InFlight();

 private:
  using LaneKey = std::tuple<int32_t, Direction, int64_t>;
  using FlightPtr = std::shared_ptr<Flight>;

  cudaStream_t StreamOf(const LaneKey& key);
  FlightPtr Find(int64_t ticket);
  // Takes complete copies out of `abandoned_`.
  std::vector<FlightPtr> Sweep();

  std::mutex mutex_;
  std::map<LaneKey, cudaStream_t> streams_;
  std::unordered_map<int64_t, FlightPtr> flights_;
  std::vector<FlightPtr> abandoned_;  // released while in flight
  int64_t tickets_ = 0;
};

}  // namespace zero_cuda
