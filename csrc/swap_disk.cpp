// The part of SwapFile that touches the disk: the file itself, and how its data will move.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "swap.h"

#ifdef __linux__
#include <sys/vfs.h>
#endif

namespace zero_native {
namespace {

int ReserveBytes(int fd, int64_t nbytes) {
#ifdef __APPLE__
  return ftruncate(fd, static_cast<off_t>(nbytes)) == 0 ? 0 : errno;
#else
  return posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
#endif
}

// Its files are memory already: passing the page cache by only means another copy.
bool IsTmpfs(int fd) {
#ifdef __linux__
  constexpr auto kTmpfsMagic = 0x01021994;
  struct statfs found;
  return fstatfs(fd, &found) == 0 && found.f_type == kTmpfsMagic;
#else
  static_cast<void>(fd);
  return false;
#endif
}

// Only a transfer shows whether a file system that opens with O_DIRECT also works with it. Returns
// 0 or an errno.
int PassPage(int fd) {
  StagingSlots pages(2, kSwapPage);
  const auto size = static_cast<size_t>(kSwapPage);
  std::memset(pages.At(0), 0xA5, size);
  errno = EIO;
  const bool works = pwrite(fd, pages.At(0), size, 0) == kSwapPage &&
                     pread(fd, pages.At(1), size, 0) == kSwapPage &&
                     std::memcmp(pages.At(0), pages.At(1), size) == 0;
  return works ? 0 : errno;
}

}  // namespace

void SwapFile::Open() {
  fd_ = fcntl(options_.fd, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) {
    const int code = errno;
    throw SwapFailure(code, "cannot use swap file " + options_.path + ": " + SwapErrorText(code));
  }
  try {
    Reserve();
    const std::string way = ChooseWay();
    if (stats_.direct) {
      staging_ = std::make_unique<StagingSlots>(options_.slots, options_.block_size);
    }
    mode_ = MakeIo(way);
  } catch (...) {
    Delete();
    throw;
  }
}

void SwapFile::Reserve() {
  const int64_t limit = faults_.faults().disk_bytes;
  int code = limit >= 0 && stats_.capacity > limit ? ENOSPC : 0;
  if (code == 0) {
    do {
      code = ReserveBytes(fd_, stats_.capacity);
    } while (code == EINTR);
  }
  if (code == 0) return;
  throw SwapFailure(code, "cannot reserve " + std::to_string(stats_.capacity) +
                              " bytes for swap file " + options_.path + ": " + SwapErrorText(code));
}

// Has requests pass the page cache by, where they can. Returns the part of the mode.
std::string SwapFile::ChooseWay() {
  std::string why = "as asked for";
#ifdef O_DIRECT
  if (options_.direct && IsTmpfs(fd_)) {
    why = "tmpfs is memory";
  } else if (options_.direct) {
    const int flags = fcntl(fd_, F_GETFL);
    int code = faults_.faults().no_direct != 0 ? EINVAL : 0;
    if (code == 0 && fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) code = errno;
    if (code == 0) code = PassPage(fd_);
    if (code == 0) {
      stats_.direct = true;
      return "O_DIRECT";
    }
    fcntl(fd_, F_SETFL, flags);
    why = "O_DIRECT: " + SwapErrorText(code);
  }
#else
  if (options_.direct) why = "there is no O_DIRECT";
#endif
  return "buffered (" + why + ")";
}

// `way` is how the file is open. Returns the mode.
std::string SwapFile::MakeIo(const std::string& way) {
  const SwapChannel channel{fd_, stats_.direct, staging_.get(), &faults_};
  std::string why = "as asked for";
  if (options_.backend != SwapBackend::kThreads) {
    io_ = MakeRingIo(channel, options_.ring, &why);
    if (io_ != nullptr) return "io_uring, " + way + (why.empty() ? "" : ", " + why);
    if (options_.backend == SwapBackend::kRing) {
      throw SwapFailure(ENOTSUP, "swap file " + options_.path + " was to use io_uring: " + why);
    }
  }
  io_ = MakeThreadIo(channel, options_.threads);
  return "threads (" + why + "), " + way;
}

// A child that inherited the descriptor does not keep the space.
void SwapFile::Delete() {
  if (fd_ < 0) return;
  if (ftruncate(fd_, 0) != 0) errno = 0;
  close(fd_);
  fd_ = -1;
}

}  // namespace zero_native
