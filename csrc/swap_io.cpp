#include "swap_io.h"

#include <fcntl.h>
#include <torch/headeronly/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>

namespace zero_native {
namespace {

class PlainIo : public SwapIo {
 public:
  ssize_t Read(int fd, char* data, size_t count, int64_t offset) override {
    return pread(fd, data, count, static_cast<off_t>(offset));
  }

  ssize_t Write(int fd, const char* data, size_t count, int64_t offset) override {
    return pwrite(fd, data, count, static_cast<off_t>(offset));
  }

  int Allocate(int fd, int64_t nbytes) override {
#ifdef __APPLE__
    return ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
#else
    return posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
#endif
  }

  bool MayBeDirect() const override { return true; }
};

class FaultyIo : public PlainIo {
 public:
  explicit FaultyIo(const SwapFaults& faults) : faults_(faults) {}

  ssize_t Read(int fd, char* data, size_t count, int64_t offset) override {
    const int64_t call = ++calls_;
    const int error = Before(call);
    if (error != 0) return Fail(error);
    return PlainIo::Read(fd, data, Shortened(call, count, offset), offset);
  }

  ssize_t Write(int fd, const char* data, size_t count, int64_t offset) override {
    const int64_t call = ++calls_;
    const int error = Before(call);
    if (error != 0) return Fail(error);
    const size_t allowed = TakeRoom(Shortened(call, count, offset));
    return allowed == 0 ? Fail(ENOSPC) : PlainIo::Write(fd, data, allowed, offset);
  }

  int Allocate(int fd, int64_t nbytes) override {
    if (faults_.disk_bytes >= 0 && nbytes > faults_.disk_bytes) return ENOSPC;
    return PlainIo::Allocate(fd, nbytes);
  }

  bool MayBeDirect() const override { return faults_.no_direct == 0; }

 private:
  static ssize_t Fail(int error) {
    errno = error;
    return -1;
  }

  static bool Hits(int64_t call, int64_t every) { return every > 0 && call % every == 0; }

  int Before(int64_t call) const {
    const int64_t delays = faults_.reorder != 0 ? 4 - (call - 1) % 4 : 1;
    if (faults_.delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(faults_.delay_us * delays));
    }
    if (call == faults_.eio_on) return EIO;
    return Hits(call, faults_.interrupt_every) ? EINTR : 0;
  }

  // Half of an aligned request is aligned again, so that O_DIRECT takes the rest too.
  size_t Shortened(int64_t call, size_t count, int64_t offset) const {
    if (!Hits(call, faults_.short_every)) return count;
    const auto page = static_cast<size_t>(kSwapPage);
    const bool aligned = count % page == 0 && offset % kSwapPage == 0;
    const size_t half = aligned ? count / 2 / page * page : count / 2;
    return half == 0 ? count : half;
  }

  // The part of a write for which the disk has room, in whole pages where it is not all of it.
  size_t TakeRoom(size_t count) {
    if (faults_.enospc_after < 0) return count;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto wanted = static_cast<int64_t>(count);
    const int64_t room = faults_.enospc_after - taken_;
    const int64_t allowed = wanted <= room ? wanted : room / kSwapPage * kSwapPage;
    taken_ += allowed;
    return static_cast<size_t>(allowed);
  }

  const SwapFaults faults_;
  std::atomic<int64_t> calls_{0};
  std::mutex mutex_;
  int64_t taken_ = 0;
};

}  // namespace

std::unique_ptr<SwapIo> MakeSwapIo(const std::vector<int64_t>& faults) {
  if (faults.empty()) return std::make_unique<PlainIo>();
  STD_TORCH_CHECK(faults.size() == 8, "swap_open: ", faults.size(), " faults, expected 8");
  const SwapFaults chosen{faults[0], faults[1], faults[2], faults[3],
                          faults[4], faults[5], faults[6], faults[7]};
  return std::make_unique<FaultyIo>(chosen);
}

}  // namespace zero_native
