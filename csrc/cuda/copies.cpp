#include "copies.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "events.h"

namespace zero_cuda {

// Tensors may run Python when they end, and Python may call back: they are only ever moved out
// under a lock, and dropped without one.
struct Held {
  std::optional<Tensor> host;
  std::optional<Tensor> device;
};

struct Flight {
  Flight(const Tensor& host, const Tensor& device, Direction way, cudaStream_t stream)
      : held{host, device},
        nbytes(host.numel() * static_cast<int64_t>(host.element_size())),
        index(device.get_device_index()),
        direction(way),
        started_on(stream),
        event(index) {}

  std::string What() const {
    const std::string place = "cuda:" + std::to_string(index);
    const bool to_device = direction == Direction::kToDevice;
    return "copying " + std::to_string(nbytes) + " bytes from " + (to_device ? "host" : place) +
           " to " + (to_device ? place : "host");
  }

  std::mutex mutex;  // of `held`
  Held held;
  const int64_t nbytes;
  const int32_t index;
  const Direction direction;
  const cudaStream_t started_on;
  const Event event;
  std::atomic<bool> complete{false};
};

namespace {

constexpr int64_t kQueues = 16;

cudaStream_t CurrentStream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

void Require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(std::string("copy between host and device: ") + message);
}

void CheckTensors(const Tensor& host, const Tensor& device, int64_t queue) {
  Require(host.is_cpu(), "the host's tensor is not on the CPU");
  Require(device.is_cuda(), "the device's tensor is not on a CUDA device");
  Require(host.scalar_type() == device.scalar_type(), "the tensors' dtypes differ");
  Require(host.numel() == device.numel(), "the tensors' sizes differ");
  Require(host.is_contiguous(), "the host's tensor is not contiguous");
  Require(device.is_contiguous(), "the device's tensor is not contiguous");
  Require(queue >= 0 && queue < kQueues, "queues are numbered from 0 to 15");
}

void Enqueue(const Tensor& host, const Tensor& device, const Flight& flight, cudaStream_t stream) {
  const bool to_device = flight.direction == Direction::kToDevice;
  const void* const from = to_device ? host.const_data_ptr() : device.const_data_ptr();
  void* const to = to_device ? device.mutable_data_ptr() : host.mutable_data_ptr();
  const auto kind = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  const auto what = [&] { return flight.What(); };
  const auto size = static_cast<size_t>(flight.nbytes);
  if (size > 0) Check(cudaMemcpyAsync(to, from, size, kind, stream), "cudaMemcpyAsync", what);
  const cudaError_t recorded = cudaEventRecord(flight.event.get(), stream);
  // Nothing could wait for this copy, so it must not outlive the call.
  if (recorded != cudaSuccess) (void)cudaStreamSynchronize(stream);
  Check(recorded, "cudaEventRecord", what);
}

Held LetGo(Flight& flight) {
  const std::lock_guard<std::mutex> lock(flight.mutex);
  return std::exchange(flight.held, Held{});
}

std::optional<Tensor> LetGoOfDevice(Flight& flight) {
  const std::lock_guard<std::mutex> lock(flight.mutex);
  return std::exchange(flight.held.device, std::nullopt);
}

// A copy that failed is complete too; whoever waits for it is told.
bool IsComplete(Flight& flight) {
  if (flight.complete) return true;
  const cudaError_t state = cudaEventQuery(flight.event.get());
  if (state != cudaSuccess) (void)cudaGetLastError();
  if (state == cudaErrorNotReady) return false;
  flight.complete = true;
  return true;
}

}  // namespace

Copies& Copies::Global() {
  static Copies* const copies = new Copies;
  return *copies;
}

int64_t Copies::Start(const Tensor& host, const Tensor& device, Direction direction,
                      int64_t queue) {
  CheckTensors(host, device, queue);
  const int32_t index = device.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  const cudaStream_t current = CurrentStream(index);
  const auto flight = std::make_shared<Flight>(host, device, direction, current);
  const auto what = [&] { return flight->What(); };
  const Event ready(index);
  std::vector<FlightPtr> swept;  // ends after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  swept = Sweep();
  const cudaStream_t stream = StreamOf({index, direction, queue});
  Check(cudaEventRecord(ready.get(), current), "cudaEventRecord", what);
  Check(cudaStreamWaitEvent(stream, ready.get(), 0), "cudaStreamWaitEvent", what);
  Enqueue(host, device, *flight, stream);
  flights_[++tickets_] = flight;
  return tickets_;
}

void Copies::WaitOnStream(int64_t ticket) {
  const FlightPtr flight = Find(ticket);
  const cudaStream_t current = CurrentStream(flight->index);
  Check(cudaStreamWaitEvent(current, flight->event.get(), 0), "cudaStreamWaitEvent",
        [&] { return flight->What(); });
  // What this stream is given the device's memory for next runs after the copy. The host is in no
  // such order: its memory stays.
  if (current == flight->started_on) LetGoOfDevice(*flight);
}

void Copies::WaitOnHost(int64_t ticket) {
  const FlightPtr flight = Find(ticket);
  const cudaError_t state = cudaEventSynchronize(flight->event.get());
  flight->complete = true;
  LetGo(*flight);
  Check(state, "cudaEventSynchronize", [&] { return flight->What(); });
}

bool Copies::Done(int64_t ticket) {
  const FlightPtr flight = Find(ticket);
  if (!IsComplete(*flight)) return false;
  LetGo(*flight);
  return true;
}

void Copies::Release(int64_t ticket) {
  FlightPtr last;
  std::vector<FlightPtr> swept;
  const std::lock_guard<std::mutex> lock(mutex_);
  swept = Sweep();
  const auto found = flights_.find(ticket);
  if (found == flights_.end()) return;
  last = std::move(found->second);
  flights_.erase(found);
  if (!IsComplete(*last)) abandoned_.push_back(last);
}

int64_t Copies::InFlight() {
  std::vector<FlightPtr> swept;
  const std::lock_guard<std::mutex> lock(mutex_);
  swept = Sweep();
  const auto flying = std::count_if(flights_.begin(), flights_.end(),
                                    [](const auto& entry) { return !IsComplete(*entry.second); });
  return static_cast<int64_t>(flying) + static_cast<int64_t>(abandoned_.size());
}

cudaStream_t Copies::StreamOf(const LaneKey& key) {
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
        [&] { return "making a stream for copies of cuda:" + std::to_string(std::get<0>(key)); });
  streams_[key] = stream;
  return stream;
}

Copies::FlightPtr Copies::Find(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = flights_.find(ticket);
  if (found == flights_.end()) {
    throw std::runtime_error("no copy has ticket " + std::to_string(ticket));
  }
  return found->second;
}

std::vector<Copies::FlightPtr> Copies::Sweep() {
  const auto first = std::stable_partition(abandoned_.begin(), abandoned_.end(),
                                           [](const auto& flight) { return !IsComplete(*flight); });
  std::vector<FlightPtr> swept(std::make_move_iterator(first),
                               std::make_move_iterator(abandoned_.end()));
  abandoned_.erase(first, abandoned_.end());
  return swept;
}

}  // namespace zero_cuda
