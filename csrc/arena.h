#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

namespace zero_native {

// All sizes are in bytes.
struct ArenaStats {
  int64_t live = 0;            // requested by blocks now in use
  int64_t peak = 0;            // largest `live` since the last reset
  int64_t held = 0;            // obtained from the OS and not given back
  int64_t os_allocations = 0;  // requests to the OS, ever
  int64_t takes = 0;           // blocks handed out, ever
};

// A thread-safe cache of CPU blocks for buffers that come and go with every layer.
//
// A request is served by the smallest free block that is at most a quarter too large. Where there
// is none, free blocks go back to the OS before new memory is asked for, so that a change of sizes
// never adds the old blocks to the new ones: the blocks held stay within the most that were ever in
// use at once, and a quarter, or 8 MiB where that is more. Steps whose sizes alternate find their
// blocks again in it.
class Arena {
 public:
  // Never destroyed: tensors may outlive every static destructor.
  static Arena& Global();

  // Blocks are aligned to 64 bytes, from 1 MiB on to 4096. A request of 0 bytes gets a block too.
  // Throws where nbytes is negative or the OS has no memory left.
  void* Take(int64_t nbytes);
  void Give(void* data) noexcept;

  ArenaStats Stats();
  void ResetPeak();
  // Gives every free block back to the OS.
  void Trim();

 private:
  struct Live {
    size_t capacity;
    int64_t requested;
  };
  struct Block {
    void* data = nullptr;
    size_t capacity = 0;
  };
  using FreeBlocks = std::multimap<size_t, void*>;

  Block TakeFree(size_t wanted);
  Block TakeNew(size_t wanted);
  // The bytes that must go back before `wanted` are asked of the OS.
  size_t Surplus(size_t wanted) const;
  void Release(size_t at_least);
  size_t ReleaseOne(FreeBlocks::iterator block);

  std::mutex mutex_;
  FreeBlocks free_;  // by capacity
  std::unordered_map<void*, Live> live_;
  size_t in_use_ = 0;       // capacity of live_
  size_t most_in_use_ = 0;  // largest `in_use_` since the last trim
  ArenaStats stats_;
};

}  // namespace zero_native
