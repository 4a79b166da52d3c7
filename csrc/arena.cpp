#include "arena.h"

#include <sys/mman.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>

namespace zero_native {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kCacheLine = 64;
constexpr size_t kLarge = size_t{1} << 20;
constexpr size_t kSlack = size_t{8} << 20;

// Below a page the capacities are powers of two, further apart than the slack a fit may have:
// small blocks are only ever reused within their class.
size_t CapacityFor(size_t nbytes) {
  if (nbytes > kPage / 2) return (nbytes + kPage - 1) / kPage * kPage;
  size_t capacity = kCacheLine;
  while (capacity < nbytes) capacity *= 2;
  return capacity;
}

// Large blocks are mapped one by one, because malloc would keep their pages after a free.
void* OsAllocate(size_t capacity) {
  void* data = nullptr;
  if (capacity < kLarge) {
    return posix_memalign(&data, kCacheLine, capacity) == 0 ? data : nullptr;
  }
  data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

void OsFree(void* data, size_t capacity) {
  if (capacity < kLarge) {
    std::free(data);
  } else {
    munmap(data, capacity);
  }
}

}  // namespace

Arena& Arena::Global() {
  static Arena* const arena = new Arena;
  return *arena;
}

void* Arena::Take(int64_t nbytes) {
  STD_TORCH_CHECK(nbytes >= 0, "arena_take: nbytes must not be negative, got ", nbytes);
  const size_t wanted = CapacityFor(static_cast<size_t>(nbytes));
  const std::lock_guard<std::mutex> lock(mutex_);
  Block block = TakeFree(wanted);
  if (block.data == nullptr) block = TakeNew(wanted);
  STD_TORCH_CHECK(block.data != nullptr, "arena_take: out of memory, cannot get ", nbytes,
                  " bytes (", stats_.live, " bytes are in use)");
  live_[block.data] = {block.capacity, nbytes};
  in_use_ += block.capacity;
  most_in_use_ = std::max(most_in_use_, in_use_);
  stats_.live += nbytes;
  stats_.peak = std::max(stats_.peak, stats_.live);
  stats_.takes += 1;
  return block.data;
}

void Arena::Give(void* data) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = live_.find(data);
  if (found == live_.end()) return;
  free_.emplace(found->second.capacity, data);
  stats_.live -= found->second.requested;
  in_use_ -= found->second.capacity;
  live_.erase(found);
}

ArenaStats Arena::Stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Arena::ResetPeak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.peak = stats_.live;
}

void Arena::Trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Release(std::numeric_limits<size_t>::max());
  most_in_use_ = in_use_;
}

Arena::Block Arena::TakeFree(size_t wanted) {
  const auto fit = free_.lower_bound(wanted);
  if (fit == free_.end() || fit->first > wanted + wanted / 4) return {};
  const Block block{fit->second, fit->first};
  free_.erase(fit);
  return block;
}

Arena::Block Arena::TakeNew(size_t wanted) {
  Release(Surplus(wanted));
  void* data = OsAllocate(wanted);
  if (data == nullptr) {
    Release(std::numeric_limits<size_t>::max());
    data = OsAllocate(wanted);
  }
  if (data == nullptr) return {};
  stats_.held += static_cast<int64_t>(wanted);
  stats_.os_allocations += 1;
  return {data, wanted};
}

size_t Arena::Surplus(size_t wanted) const {
  const size_t most = std::max(most_in_use_, in_use_ + wanted);
  const size_t may_hold = most + std::max(most / 4, kSlack);
  const size_t held = static_cast<size_t>(stats_.held) + wanted;
  return held > may_hold ? held - may_hold : 0;
}

// One block that covers the rest is preferred over many that do: the fewer blocks are lost, the
// more of the next requests still find one.
void Arena::Release(size_t at_least) {
  size_t released = 0;
  while (released < at_least && !free_.empty()) {
    const auto covering = free_.lower_bound(at_least - released);
    released += ReleaseOne(covering != free_.end() ? covering : std::prev(free_.end()));
  }
}

size_t Arena::ReleaseOne(FreeBlocks::iterator block) {
  const size_t capacity = block->first;
  OsFree(block->second, capacity);
  free_.erase(block);
  stats_.held -= static_cast<int64_t>(capacity);
  return capacity;
}

}  // namespace zero_native
