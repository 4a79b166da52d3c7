// Requests by io_uring: one thread submits them and reaps what is complete.

#include <string>

#include "swap_io.h"
#include "swap_ring.h"

#ifdef ZERO_SWAP_RING

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace zero_native {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;
constexpr auto kNap = std::chrono::milliseconds(1);

uint64_t AddressOf(const void* data) {
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
}

class RingIo : public SwapIo {
 public:
  RingIo(const SwapChannel& channel, const SwapRingOptions& options, std::unique_ptr<Ring> ring,
         int event, bool fixed)
      : channel_(channel),
        options_(options),
        ring_(std::move(ring)),
        event_(event),
        fixed_(fixed),
        flights_(static_cast<size_t>(options.depth)) {
    for (size_t i = 0; i < flights_.size(); ++i) idle_.push_back(i);
  }

  ~RingIo() override {
    ring_.reset();
    close(event_);
  }

  void Start(SwapSource* source) override {
    source_ = source;
    thread_ = std::thread(&RingIo::Run, this);
  }

  void Wake() override {
    const uint64_t one = 1;
    // It fails only where the counter is full, and then the thread is awake.
    if (write(event_, &one, sizeof(one)) < 0) errno = 0;
  }

  void Join() override {
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Flight {
    SwapTransfer transfer;
    SwapVerdict verdict;
    bool delayed = false;  // a timeout is in the ring in its place
    __kernel_timespec delay{};
  };

  size_t Busy() const { return flights_.size() - idle_.size(); }

  void Run() {
    for (;;) {
      Fill();
      if (!landed_.empty()) {
        Deliver();
        continue;
      }
      if (ended_ && Busy() == 0) return;
      if (!listening_) Listen();
      const int code = ring_->Enter(1);
      if (code != 0 && code != EINTR) Recover(code);
      Reap();
    }
  }

  // The kernel is short of memory for now, or refuses the ring from now on.
  void Recover(int code) {
    if (code != EAGAIN && code != EBUSY && code != ENOMEM) {
      ring_->Withdraw([&](uint64_t tag) { Arrive(tag, -code); });
    }
    std::this_thread::sleep_for(kNap);
  }

  void Listen() {
    ring_->Prepare(IORING_OP_POLL_ADD, event_, kWakeTag)->poll_events = POLLIN;
    listening_ = true;
  }

  void Fill() {
    if (!options_.overlap && Busy() > 0) return;
    while (!idle_.empty()) {
      if (!next_.has_value() && !TakeNext()) return;
      if (next_->NeedsSlot()) {
        char* const slot = channel_.staging->TryTake();
        if (slot == nullptr) return;  // the next one to arrive leaves its own
        next_->UseSlot(slot);
      }
      const size_t index = idle_.back();
      idle_.pop_back();
      flights_[index].transfer = std::move(*next_);
      next_.reset();
      Launch(index);
    }
  }

  bool TakeNext() {
    SwapRequest request;
    const SwapSupply supply = source_->Take(false, &request);
    ended_ = supply == SwapSupply::kEnded;
    if (supply == SwapSupply::kRequest) next_.emplace(std::move(request), channel_.direct);
    return next_.has_value();
  }

  // Until a call is in the ring, or none must follow.
  void Launch(size_t index) {
    Flight& flight = flights_[index];
    for (;;) {
      const SwapTransfer& transfer = flight.transfer;
      flight.verdict =
          channel_.faults->Judge(transfer.write(), transfer.count(), transfer.offset());
      if (flight.verdict.delay_us > 0) return Delay(index);
      if (flight.verdict.error == 0) return Call(index);
      if (!flight.transfer.Advance(-flight.verdict.error)) return Land(index);
    }
  }

  void Delay(size_t index) {
    Flight& flight = flights_[index];
    const int64_t delay = flight.verdict.delay_us;
    flight.delayed = true;
    flight.delay.tv_sec = delay / 1000000;
    flight.delay.tv_nsec = delay % 1000000 * 1000;
    io_uring_sqe* const entry = ring_->Prepare(IORING_OP_TIMEOUT, -1, index);
    entry->addr = AddressOf(&flight.delay);
    entry->len = 1;
    SubmitIfSingle();
  }

  void Call(size_t index) {
    const Flight& flight = flights_[index];
    const SwapTransfer& transfer = flight.transfer;
    const bool fixed = fixed_ && transfer.slot() != nullptr;
    uint8_t opcode = transfer.write() ? IORING_OP_WRITE : IORING_OP_READ;
    if (fixed) opcode = transfer.write() ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
    io_uring_sqe* const entry = ring_->Prepare(opcode, channel_.fd, index);
    entry->addr = AddressOf(transfer.data());
    entry->len = static_cast<uint32_t>(flight.verdict.count);
    entry->off = static_cast<uint64_t>(transfer.offset());
    if (fixed) {
      entry->buf_index = static_cast<uint16_t>(channel_.staging->IndexOf(transfer.slot()));
    }
    SubmitIfSingle();
  }

  // Should that fail, the next wait submits, or fails alike.
  void SubmitIfSingle() {
    if (options_.single_submit) ring_->Enter(0);
  }

  void Reap() {
    uint64_t tag = 0;
    int32_t result = 0;
    while (ring_->Pop(&tag, &result)) Arrive(tag, result);
  }

  void Arrive(uint64_t tag, int64_t result) {
    if (tag == kWakeTag) {
      uint64_t count = 0;
      if (read(event_, &count, sizeof(count)) < 0) errno = 0;
      listening_ = false;
      return;
    }
    const auto index = static_cast<size_t>(tag);
    Flight& flight = flights_[index];
    if (std::exchange(flight.delayed, false) && result == -ETIME) {
      if (flight.verdict.error == 0) return Call(index);
      result = -flight.verdict.error;
    }
    if (flight.transfer.Advance(result)) {
      Launch(index);
    } else {
      Land(index);
    }
  }

  void Land(size_t index) {
    SwapTransfer transfer = std::move(flights_[index].transfer);
    flights_[index].transfer = SwapTransfer();
    char* const slot = transfer.LeaveSlot();
    if (slot != nullptr) channel_.staging->Give(slot);
    idle_.push_back(index);
    if (transfer.code() != 0) {
      source_->Complete(transfer.request(), transfer.code());  // so that nothing follows it
    } else {
      landed_.push_back(std::move(transfer));
    }
  }

  // The source looks at all of the data, so the disk gets its next requests before.
  void Deliver() {
    ring_->Enter(0);  // should that fail, the next wait submits, or fails alike
    for (const SwapTransfer& transfer : landed_) source_->Complete(transfer.request(), 0);
    landed_.clear();
  }

  const SwapChannel channel_;
  const SwapRingOptions options_;
  std::unique_ptr<Ring> ring_;
  const int event_;  // readable when there may be more to do
  const bool fixed_;
  SwapSource* source_ = nullptr;
  bool listening_ = false;
  bool ended_ = false;
  std::optional<SwapTransfer> next_;  // taken, and waiting for a slot
  std::vector<Flight> flights_;
  std::vector<size_t> idle_;  // indices of flights
  std::vector<SwapTransfer> landed_;
  std::thread thread_;
};

// One read or write; returns bytes or a negative errno.
int64_t CallAlone(Ring* ring, uint8_t opcode, int fd, const char* page) {
  io_uring_sqe* const entry = ring->Prepare(opcode, fd, 0);
  entry->addr = AddressOf(page);
  entry->len = static_cast<uint32_t>(kSwapPage);
  uint64_t tag = 0;
  int32_t result = 0;
  while (!ring->Pop(&tag, &result)) {
    const int code = ring->Enter(1);
    if (code != 0 && code != EINTR) return -code;
  }
  return result;
}

// Returns 0 or an errno.
int PassesThrough(Ring* ring, int fd) {
  StagingSlots pages(2, kSwapPage);
  const auto size = static_cast<size_t>(kSwapPage);
  std::memset(pages.At(0), 0x5A, size);
  int64_t moved = CallAlone(ring, IORING_OP_WRITE, fd, pages.At(0));
  if (moved == kSwapPage) moved = CallAlone(ring, IORING_OP_READ, fd, pages.At(1));
  if (moved < 0) return static_cast<int>(-moved);
  return moved == kSwapPage && std::memcmp(pages.At(0), pages.At(1), size) == 0 ? 0 : EIO;
}

}  // namespace

std::unique_ptr<SwapIo> MakeRingIo(const SwapChannel& channel, const SwapRingOptions& options,
                                   std::string* why) {
  int code = 0;
  // Each request has one entry at most, and the event has one.
  auto ring = Ring::Open(static_cast<unsigned>(options.depth) + 1, &code);
  if (ring != nullptr) code = PassesThrough(ring.get(), channel.fd);
  const int event = code == 0 ? eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC) : -1;
  if (code == 0 && event < 0) code = errno;
  if (code != 0) {
    *why = "io_uring: " + SwapErrorText(code);
    return nullptr;
  }
  why->clear();
  if (channel.staging != nullptr) {
    code = ring->Register(*channel.staging);
    *why = code == 0 ? "registered buffers"
                     : "plain buffers (registering them: " + SwapErrorText(code) + ")";
  }
  return std::make_unique<RingIo>(channel, options, std::move(ring), event,
                                  channel.staging != nullptr && code == 0);
}

}  // namespace zero_native

#else

namespace zero_native {

std::unique_ptr<SwapIo> MakeRingIo(const SwapChannel&, const SwapRingOptions&, std::string* why) {
  *why = "built without io_uring";
  return nullptr;
}

}  // namespace zero_native

#endif  // ZERO_SWAP_RING
