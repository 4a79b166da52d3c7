// The part of SwapFile that touches the disk: the file itself, and how its data will move.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
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

// Whether the path still leads to the open file.
bool IsNamed(int fd, const char* path) {
  struct stat own, named;
  return fstat(fd, &own) == 0 && stat(path, &named) == 0 && own.st_ino == named.st_ino &&
         own.st_dev == named.st_dev;
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
  // Whoever held the lock may delete the file that was opened; then there is a new one to open.
  while (!OpenLocked()) {
  }
  try {
    Reserve();
    const std::string way = OpenData();
    if (stats_.direct) {
      staging_ = std::make_unique<StagingSlots>(options_.slots, options_.block_size);
    }
    mode_ = MakeIo(way);
  } catch (...) {
    Delete();
    throw;
  }
}

bool SwapFile::OpenLocked() {
  const char* const path = options_.path.c_str();
  const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) {
    const int code = errno;
    throw SwapFailure(code,
                      "cannot create swap file " + options_.path + ": " + SwapErrorText(code));
  }
  // A file system without locks is taken at its word.
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(fd);
    throw SwapFailure(EWOULDBLOCK, "swap file " + options_.path + " is in use: give each rank " +
                                       "and each session a name of its own");
  }
  if (!IsNamed(fd, path)) {
    close(fd);
    return false;
  }
  lock_fd_ = fd;
  return true;
}

void SwapFile::Reserve() {
  const int64_t limit = faults_.faults().disk_bytes;
  int code = ftruncate(lock_fd_, 0) == 0 ? 0 : errno;
  if (limit >= 0 && stats_.capacity > limit) code = ENOSPC;
  if (code == 0) {
    do {
      code = ReserveBytes(lock_fd_, stats_.capacity);
    } while (code == EINTR);
  }
  if (code == 0) return;
  throw SwapFailure(code, "cannot reserve " + std::to_string(stats_.capacity) +
                              " bytes for swap file " + options_.path + ": " + SwapErrorText(code));
}

// A description of its own even without O_DIRECT: calls that a killed process left in the kernel
// hold theirs a little longer, which must not hold the lock. Returns the part of the mode.
std::string SwapFile::OpenData() {
  const char* const path = options_.path.c_str();
  std::string why = "as asked for";
#ifdef O_DIRECT
  if (options_.direct && IsTmpfs(lock_fd_)) {
    why = "tmpfs is memory";
  } else if (options_.direct) {
    const bool refused = faults_.faults().no_direct != 0;
    fd_ = refused ? -1 : open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    int code = refused ? EINVAL : errno;
    if (fd_ >= 0) code = PassPage(fd_);
    if (fd_ >= 0 && code == 0) {
      stats_.direct = true;
      return "O_DIRECT";
    }
    why = "O_DIRECT: " + SwapErrorText(code);
    if (fd_ >= 0) close(fd_);
  }
#else
  if (options_.direct) why = "there is no O_DIRECT";
#endif
  fd_ = open(path, O_RDWR | O_CLOEXEC);
  if (fd_ < 0) {
    const int code = errno;
    throw SwapFailure(code, "cannot open swap file " + options_.path + ": " + SwapErrorText(code));
  }
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

// A child that inherited the descriptors keeps neither the space nor the lock.
void SwapFile::Delete() {
  if (lock_fd_ < 0) return;
  if (IsNamed(lock_fd_, options_.path.c_str())) unlink(options_.path.c_str());
  if (ftruncate(lock_fd_, 0) != 0) errno = 0;
  if (fd_ >= 0) close(fd_);
  flock(lock_fd_, LOCK_UN);
  close(lock_fd_);
  fd_ = lock_fd_ = -1;
}

}  // namespace zero_native
