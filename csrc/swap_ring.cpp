#include "swap_ring.h"

#ifdef ZERO_SWAP_RING

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

namespace zero_native {
namespace {

unsigned Load(const unsigned* from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }

void Store(unsigned* to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

void* MapQueue(int fd, size_t nbytes, uint64_t what) {
  void* const memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                            static_cast<off_t>(what));
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

std::unique_ptr<Ring> Ring::Open(unsigned entries, int* code) {
  io_uring_params params{};
  const long fd = syscall(__NR_io_uring_setup, entries, &params);
  if (fd < 0) {
    *code = errno;
    return nullptr;
  }
  std::unique_ptr<Ring> ring(new Ring(static_cast<int>(fd)));
  *code = ring->Map(params);
  return *code == 0 ? std::move(ring) : nullptr;
}

int Ring::Map(const io_uring_params& params) {
  // Older kernels map the queues one by one, and lack plain reads and writes too.
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) return ENOSYS;
  queues_size_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                  params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  queues_ = static_cast<char*>(MapQueue(fd_, queues_size_, IORING_OFF_SQ_RING));
  if (queues_ == nullptr) return errno;
  entries_size_ = params.sq_entries * sizeof(io_uring_sqe);
  entries_ = static_cast<io_uring_sqe*>(MapQueue(fd_, entries_size_, IORING_OFF_SQES));
  if (entries_ == nullptr) return errno;
  const auto word = [&](uint32_t at) { return reinterpret_cast<unsigned*>(queues_ + at); };
  submit_head_ = word(params.sq_off.head);
  submit_tail_ = word(params.sq_off.tail);
  submit_mask_ = *word(params.sq_off.ring_mask);
  complete_head_ = word(params.cq_off.head);
  complete_tail_ = word(params.cq_off.tail);
  complete_mask_ = *word(params.cq_off.ring_mask);
  completions_ = reinterpret_cast<io_uring_cqe*>(queues_ + params.cq_off.cqes);
  for (unsigned i = 0; i < params.sq_entries; ++i) word(params.sq_off.array)[i] = i;
  return 0;
}

Ring::~Ring() {
  if (entries_ != nullptr) munmap(entries_, entries_size_);
  if (queues_ != nullptr) munmap(queues_, queues_size_);
  close(fd_);
}

io_uring_sqe* Ring::Prepare(uint8_t opcode, int fd, uint64_t tag) {
  const unsigned tail = *submit_tail_;
  io_uring_sqe* const entry = &entries_[tail & submit_mask_];
  std::memset(entry, 0, sizeof(*entry));
  entry->opcode = opcode;
  entry->fd = fd;
  entry->user_data = tag;
  // The kernel looks at it in Enter only, so the caller may still fill in the rest.
  Store(submit_tail_, tail + 1);
  return entry;
}

int Ring::Enter(unsigned completions) {
  const unsigned waiting = *submit_tail_ - Load(submit_head_);
  if (waiting == 0 && completions == 0) return 0;
  const unsigned flags = completions > 0 ? IORING_ENTER_GETEVENTS : 0;
  const long sent =
      syscall(__NR_io_uring_enter, fd_, waiting, completions, flags, nullptr, size_t{0});
  return sent < 0 ? errno : 0;
}

bool Ring::Pop(uint64_t* tag, int32_t* result) {
  const unsigned head = *complete_head_;
  if (head == Load(complete_tail_)) return false;
  const io_uring_cqe& completion = completions_[head & complete_mask_];
  *tag = completion.user_data;
  *result = completion.res;
  Store(complete_head_, head + 1);
  return true;
}

void Ring::Withdraw(const std::function<void(uint64_t tag)>& take) {
  const unsigned head = Load(submit_head_);
  std::vector<uint64_t> tags;
  for (unsigned at = head; at != *submit_tail_; ++at) {
    tags.push_back(entries_[at & submit_mask_].user_data);
  }
  Store(submit_tail_, head);
  for (const uint64_t tag : tags) take(tag);
}

int Ring::Register(const StagingSlots& slots) {
  std::vector<iovec> buffers;
  for (int64_t i = 0; i < slots.count(); ++i) {
    buffers.push_back({slots.At(i), static_cast<size_t>(slots.nbytes())});
  }
  const long done = syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, buffers.data(),
                            static_cast<unsigned>(buffers.size()));
  return done < 0 ? errno : 0;
}

}  // namespace zero_native

#endif  // ZERO_SWAP_RING
