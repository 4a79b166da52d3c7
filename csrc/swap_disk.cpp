// The part of SwapFile that touches the disk: the file itself, and one request at a time.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "swap.h"

namespace zero_native {
namespace {

// Attempts of an O_DIRECT request that did not even move one page.
constexpr int kMaxStuck = 16;

int64_t WholePages(int64_t nbytes) { return (nbytes + kSwapPage - 1) / kSwapPage * kSwapPage; }

bool IsAligned(const char* data) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(kSwapPage) == 0;
}

}  // namespace

std::string SwapErrorText(int code) { return std::generic_category().message(code); }

StagingSlots::StagingSlots(int64_t slots, int64_t nbytes)
    : nbytes_(static_cast<size_t>(slots * nbytes)) {
  void* const memory =
      mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  for (int64_t i = 0; i < slots; ++i) free_.push_back(memory_ + i * nbytes);
}

StagingSlots::~StagingSlots() { munmap(memory_, nbytes_); }

char* StagingSlots::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  freed_.wait(lock, [&] { return !free_.empty(); });
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

void SwapFile::Open() {
  // Whoever held the lock may delete the file that was opened; then there is a new one to open.
  while (!OpenLocked()) {
  }
  try {
    Reserve();
    fd_ = lock_fd_;
    mode_ = ProbeDirect();
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
  struct stat own, named;
  if (fstat(fd, &own) != 0 || stat(path, &named) != 0 || own.st_ino != named.st_ino ||
      own.st_dev != named.st_dev) {
    close(fd);
    return false;
  }
  lock_fd_ = fd;
  return true;
}

void SwapFile::Reserve() {
  int code = ftruncate(lock_fd_, 0) == 0 ? 0 : errno;
  while (code == 0) {
    code = io_->Allocate(lock_fd_, stats_.capacity);
    if (code == 0) return;
    if (code == EINTR) code = 0;
  }
  throw SwapFailure(code, "cannot reserve " + std::to_string(stats_.capacity) +
                              " bytes for swap file " + options_.path + ": " + SwapErrorText(code));
}

// Only a transfer shows whether a file system that opens with O_DIRECT also works with it.
std::string SwapFile::ProbeDirect() {
  if (!options_.direct) return "buffered, as asked for";
  int code = EINVAL;
  if (!io_->MayBeDirect()) return "buffered, O_DIRECT is refused: " + SwapErrorText(code);
#ifdef O_DIRECT
  const int fd = open(options_.path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (fd < 0) return "buffered, O_DIRECT is refused: " + SwapErrorText(errno);
  StagingSlots slots(2, kSwapPage);
  char* const sent = slots.Take();
  char* const received = slots.Take();
  const auto page = static_cast<size_t>(kSwapPage);
  std::memset(sent, 0xA5, page);
  errno = EIO;
  const bool works = pwrite(fd, sent, page, 0) == kSwapPage &&
                     pread(fd, received, page, 0) == kSwapPage &&
                     std::memcmp(sent, received, page) == 0;
  if (works) {
    fd_ = fd;
    stats_.direct = true;
    return "O_DIRECT, a page was written and read back";
  }
  code = errno;
  close(fd);
#endif
  return "buffered, a page did not pass through O_DIRECT: " + SwapErrorText(code);
}

// A child that inherited the descriptors keeps neither the space nor the lock.
void SwapFile::Delete() {
  if (lock_fd_ < 0) return;
  unlink(options_.path.c_str());
  if (ftruncate(lock_fd_, 0) != 0) errno = 0;
  if (fd_ >= 0 && fd_ != lock_fd_) close(fd_);
  flock(lock_fd_, LOCK_UN);
  close(lock_fd_);
  fd_ = lock_fd_ = -1;
}

// Moves a part of a tensor and returns 0 or an errno.
int SwapFile::Move(const Operation& operation, int64_t begin, int64_t count) {
  char* const data = operation.data + begin;
  const int64_t offset = operation.offset + begin;
  if (!stats_.direct || (IsAligned(data) && count % kSwapPage == 0)) {
    return Transfer(operation.write, data, count, offset);
  }
  const int64_t padded = WholePages(count);
  const auto used = static_cast<size_t>(count);
  char* const slot = staging_->Take();
  if (operation.write) {
    std::memcpy(slot, data, used);
    std::memset(slot + count, 0, static_cast<size_t>(padded - count));
  }
  const int code = Transfer(operation.write, slot, padded, offset);
  if (!operation.write && code == 0) std::memcpy(data, slot, used);
  staging_->Give(slot);
  return code;
}

// Goes on until all bytes have moved. What O_DIRECT left in the middle of a page starts again at
// the page.
int SwapFile::Transfer(bool write, char* data, int64_t count, int64_t offset) {
  int64_t done = 0;
  int stuck = 0;
  while (done < count) {
    const auto rest = static_cast<size_t>(count - done);
    const ssize_t moved = write ? io_->Write(fd_, data + done, rest, offset + done)
                                : io_->Read(fd_, data + done, rest, offset + done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    int64_t kept = static_cast<int64_t>(moved);
    if (stats_.direct && done + kept < count) kept = kept / kSwapPage * kSwapPage;
    if (kept == 0 && ++stuck == kMaxStuck) return EIO;
    done += kept;
  }
  return 0;
}

}  // namespace zero_native
