#include "swap_transfer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

namespace zero_native {
namespace {

// Calls in a row, with O_DIRECT, that did not even move one page.
constexpr int kMaxStuck = 16;

bool IsAligned(const char* data) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(kSwapPage) == 0;
}

}  // namespace

std::string SwapErrorText(int code) { return std::generic_category().message(code); }

StagingSlots::StagingSlots(int64_t slots, int64_t nbytes) : count_(slots), nbytes_(nbytes) {
  void* const memory = mmap(nullptr, static_cast<size_t>(slots * nbytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  for (int64_t i = 0; i < slots; ++i) free_.push_back(At(i));
}

StagingSlots::~StagingSlots() { munmap(memory_, static_cast<size_t>(count_ * nbytes_)); }

char* StagingSlots::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  freed_.wait(lock, [&] { return !free_.empty(); });
  char* const slot = free_.back();
  free_.pop_back();
  return slot;
}

char* StagingSlots::TryTake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) return nullptr;
  char* const slot = free_.back();
  free_.pop_back();
  return slot;
}

void StagingSlots::Give(char* slot) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(slot);
  }
  freed_.notify_one();
}

SwapTransfer::SwapTransfer(SwapRequest request, bool direct)
    : request_(std::move(request)),
      direct_(direct),
      needs_slot_(direct && !(IsAligned(request_.data) && request_.count % kSwapPage == 0)),
      data_(request_.data),
      total_(request_.count) {}

void SwapTransfer::UseSlot(char* slot) {
  slot_ = data_ = slot;
  total_ = WholePages(request_.count);
  if (!request_.write) return;
  std::memcpy(slot, request_.data, static_cast<size_t>(request_.count));
  std::memset(slot + request_.count, 0, static_cast<size_t>(total_ - request_.count));
}

char* SwapTransfer::LeaveSlot() {
  if (slot_ != nullptr && !request_.write && code_ == 0) {
    std::memcpy(request_.data, slot_, static_cast<size_t>(request_.count));
  }
  return std::exchange(slot_, nullptr);
}

// What O_DIRECT left in the middle of a page starts again at the page.
bool SwapTransfer::Advance(int64_t moved) {
  if (moved == -EINTR) return true;
  if (moved == 0) moved = -EIO;
  if (moved == -EAGAIN && stuck_ + 1 < kMaxStuck) {
    stuck_ += 1;
    return true;
  }
  if (moved < 0) {
    code_ = static_cast<int>(-moved);
    return false;
  }
  int64_t kept = moved;
  if (direct_ && done_ + kept < total_) kept = kept / kSwapPage * kSwapPage;
  stuck_ = kept == 0 ? stuck_ + 1 : 0;
  done_ += kept;
  if (stuck_ == kMaxStuck) code_ = EIO;
  return code_ == 0 && done_ < total_;
}

}  // namespace zero_native
