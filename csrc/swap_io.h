#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zero_native {

// What O_DIRECT asks of addresses, file offsets and counts, in bytes.
constexpr int64_t kSwapPage = 4096;

// The system calls of a swap file. They return what the system calls do: a byte count, or -1 with
// errno set; Allocate returns 0 or an errno. Any thread may call them.
class SwapIo {
 public:
  virtual ~SwapIo() = default;
  virtual ssize_t Read(int fd, char* data, size_t count, int64_t offset) = 0;
  virtual ssize_t Write(int fd, const char* data, size_t count, int64_t offset) = 0;
  virtual int Allocate(int fd, int64_t nbytes) = 0;
  // Whether O_DIRECT may be tried.
  virtual bool MayBeDirect() const = 0;
};

// What is to go wrong; calls of Read and Write are counted together, from 1.
struct SwapFaults {
  int64_t disk_bytes = -1;      // Allocate of more than this fails with ENOSPC; -1: never
  int64_t enospc_after = -1;    // bytes that Write takes before ENOSPC; -1: no end
  int64_t eio_on = 0;           // the one call that fails with EIO; 0: none
  int64_t short_every = 0;      // every so many calls transfer about half; 0: none
  int64_t interrupt_every = 0;  // every so many calls fail with EINTR; 0: none
  int64_t delay_us = 0;         // microseconds that each call takes longer
  int64_t reorder = 0;          // 1: four delays for the first of four calls, one for the last
  int64_t no_direct = 0;        // 1: O_DIRECT is refused
};

// Plain system calls where `faults` is empty, otherwise with the faults that it lists in the order
// of the fields of SwapFaults.
std::unique_ptr<SwapIo> MakeSwapIo(const std::vector<int64_t>& faults);

}  // namespace zero_native
