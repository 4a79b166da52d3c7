// Requests by threads that each make one blocking call at a time.

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "swap_io.h"

namespace zero_native {
namespace {

class ThreadIo : public SwapIo {
 public:
  ThreadIo(const SwapChannel& channel, int64_t threads) : channel_(channel), count_(threads) {}

  void Start(SwapSource* source) override {
    for (int64_t i = 0; i < count_; ++i) threads_.emplace_back(&ThreadIo::Work, this, source);
  }

  void Wake() override {}  // they wait in the source

  void Join() override {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void Work(SwapSource* source) const {
    SwapRequest request;
    while (source->Take(true, &request) == SwapSupply::kRequest) {
      SwapTransfer transfer(std::move(request), channel_.direct);
      if (transfer.NeedsSlot()) transfer.UseSlot(channel_.staging->Take());
      while (transfer.Advance(Call(transfer))) {
      }
      char* const slot = transfer.LeaveSlot();
      if (slot != nullptr) channel_.staging->Give(slot);
      source->Complete(transfer.request(), transfer.code());
    }
  }

  int64_t Call(const SwapTransfer& transfer) const {
    const SwapVerdict verdict =
        channel_.faults->Judge(transfer.write(), transfer.count(), transfer.offset());
    if (verdict.delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(verdict.delay_us));
    }
    if (verdict.error != 0) return -verdict.error;
    const auto count = static_cast<size_t>(verdict.count);
    const auto offset = static_cast<off_t>(transfer.offset());
    const ssize_t moved = transfer.write() ? pwrite(channel_.fd, transfer.data(), count, offset)
                                           : pread(channel_.fd, transfer.data(), count, offset);
    return moved < 0 ? -static_cast<int64_t>(errno) : static_cast<int64_t>(moved);
  }

  const SwapChannel channel_;
  const int64_t count_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<SwapIo> MakeThreadIo(const SwapChannel& channel, int64_t threads) {
  return std::make_unique<ThreadIo>(channel, threads);
}

}  // namespace zero_native
