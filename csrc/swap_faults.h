#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace zero_native {

// What is to go wrong; reads and writes are counted together, from 1, unless said otherwise.
struct SwapFaults {
  int64_t disk_bytes = -1;      // a file of more than this cannot be reserved; -1: any can
  int64_t enospc_after = -1;    // bytes that can be written before ENOSPC; -1: no end
  int64_t eio_on = 0;           // the one request that fails with EIO; 0: none
  int64_t short_every = 0;      // every so many requests transfer about half; 0: none
  int64_t interrupt_every = 0;  // every so many requests fail with EINTR; 0: none
  int64_t delay_us = 0;         // microseconds that each request takes longer
  int64_t reorder = 0;          // 1: four delays for the first of four requests, one for the last
  int64_t no_direct = 0;        // 1: O_DIRECT is refused
  int64_t enospc_every = 0;     // every so many writes, counted alone, fail with ENOSPC; 0: none

  // From the fields in their order, or none of them.
  static SwapFaults Of(const std::vector<int64_t>& fields);
};

// What becomes of one call to the kernel.
struct SwapVerdict {
  int64_t delay_us = 0;  // to wait first
  int error = 0;         // an errno to fail with
  int64_t count = 0;     // bytes to ask for, where it does not fail
};

// Decides what goes wrong and when. Any thread may call any member.
class SwapFaultPlan {
 public:
  explicit SwapFaultPlan(const SwapFaults& faults) : faults_(faults) {}
  SwapVerdict Judge(bool write, int64_t count, int64_t offset);
  const SwapFaults& faults() const { return faults_; }

 private:
  int64_t TakeRoom(int64_t count);

  const SwapFaults faults_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> writes_{0};
  std::mutex mutex_;
  int64_t taken_ = 0;
};

}  // namespace zero_native
