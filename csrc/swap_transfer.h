#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace zero_native {

// What O_DIRECT asks of addresses, file offsets and counts, in bytes.
constexpr int64_t kSwapPage = 4096;

inline int64_t WholePages(int64_t nbytes) {
  return (nbytes + kSwapPage - 1) / kSwapPage * kSwapPage;
}

// What a swap file cannot do; `code` is an errno.
class SwapFailure : public std::runtime_error {
 public:
  SwapFailure(int failed, const std::string& message) : std::runtime_error(message), code(failed) {}
  const int code;
};

std::string SwapErrorText(int code);

// One stretch of the file to move; `owner` means something to whoever made it.
struct SwapRequest {
  std::shared_ptr<void> owner;
  bool write = false;
  char* data = nullptr;
  int64_t count = 0;   // bytes
  int64_t offset = 0;  // in the file
};

// Aligned buffers of one size, lent to one transfer at a time.
class StagingSlots {
 public:
  StagingSlots(int64_t slots, int64_t nbytes);
  ~StagingSlots();
  StagingSlots(const StagingSlots&) = delete;
  StagingSlots& operator=(const StagingSlots&) = delete;
  char* Take();     // waits until one is free
  char* TryTake();  // null where none is
  void Give(char* slot);
  int64_t count() const { return count_; }
  int64_t nbytes() const { return nbytes_; }  // of each
  char* At(int64_t index) const { return memory_ + index * nbytes_; }
  int64_t IndexOf(const char* slot) const { return (slot - memory_) / nbytes_; }

 private:
  const int64_t count_;
  const int64_t nbytes_;
  char* memory_;
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<char*> free_;
};

// One request on its way to or from the disk, in as many calls to the kernel as that takes.
class SwapTransfer {
 public:
  SwapTransfer() = default;
  SwapTransfer(SwapRequest request, bool direct);

  // Whether O_DIRECT would not take the request's own memory; UseSlot must come first then.
  bool NeedsSlot() const { return needs_slot_ && slot_ == nullptr; }
  void UseSlot(char* slot);
  char* slot() const { return slot_; }
  // Ends the use of the slot, which is null where there was none; what was read is in place then.
  char* LeaveSlot();

  // The next call.
  bool write() const { return request_.write; }
  char* data() const { return data_ + done_; }
  int64_t count() const { return total_ - done_; }
  int64_t offset() const { return request_.offset + done_; }
  // Takes what the call returned, bytes or a negative errno. Returns whether another must follow.
  bool Advance(int64_t moved);
  // 0 or an errno, at the end.
  int code() const { return code_; }
  const SwapRequest& request() const { return request_; }

 private:
  SwapRequest request_;
  bool direct_ = false;
  bool needs_slot_ = false;
  char* slot_ = nullptr;
  char* data_ = nullptr;
  int64_t total_ = 0;
  int64_t done_ = 0;
  int stuck_ = 0;
  int code_ = 0;
};

}  // namespace zero_native
