#pragma once

// Where the headers of the kernel are missing, or older than plain reads and writes in a ring, the
// ring is left out.
#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)
#define ZERO_SWAP_RING 1
#endif
#endif
#endif

#ifdef ZERO_SWAP_RING

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "swap_transfer.h"

namespace zero_native {

// The two queues that a process shares with the kernel. One thread at a time may use it.
class Ring {
 public:
  // Null where the kernel refuses, with its errno.
  static std::unique_ptr<Ring> Open(unsigned entries, int* code);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // A cleared entry, which the next Enter submits; there must be room.
  io_uring_sqe* Prepare(uint8_t opcode, int fd, uint64_t tag);
  // Submits and waits for at least `completions`. Returns 0 or an errno.
  int Enter(unsigned completions);
  // False where nothing is complete. `result` is what the call returned, or a negative errno.
  bool Pop(uint64_t* tag, int32_t* result);
  // Takes back what was not submitted and hands each tag on.
  void Withdraw(const std::function<void(uint64_t tag)>& take);
  // Pins the slots, so that fixed reads and writes need not. Returns 0 or an errno.
  int Register(const StagingSlots& slots);

 private:
  explicit Ring(int fd) : fd_(fd) {}
  int Map(const io_uring_params& params);

  const int fd_;
  char* queues_ = nullptr;
  size_t queues_size_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_size_ = 0;
  io_uring_cqe* completions_ = nullptr;
  unsigned* submit_head_ = nullptr;  // the kernel's
  unsigned* submit_tail_ = nullptr;
  unsigned submit_mask_ = 0;
  unsigned* complete_head_ = nullptr;
  unsigned* complete_tail_ = nullptr;  // the kernel's
  unsigned complete_mask_ = 0;
};

}  // namespace zero_native

#endif  // ZERO_SWAP_RING
