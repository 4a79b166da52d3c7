#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

namespace zero_cuda {

// All sizes are in bytes.
struct PinnedStats {
  int64_t live = 0;  // requested by blocks now in use
  int64_t peak = 0;  // largest `live` ever
  int64_t held = 0;  // page-locked: in use, or free for reuse
};

// A thread-safe cache of page-locked host memory that every CUDA device can copy from and to.
//
// New blocks have the size asked for, whatever that is. Locking and unlocking pages takes
// milliseconds, and unlocking waits for the device, so free blocks are kept for requests that they
// exceed by a quarter at most. Only where new memory would bring what is held above the largest
// amount that was ever in use at once are free blocks given back first.
class PinnedArena {
 public:
  // Never destroyed: tensors may outlive every static destructor, and the CUDA driver.
  static PinnedArena& Global();

  // Blocks are aligned to at least 256 bytes. Memory is asked for in the context of `device`.
  // Throws where nbytes is negative or memory cannot be locked.
  void* Take(int64_t nbytes, int32_t device);
  void Give(void* data) noexcept;

  PinnedStats Stats();
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

  Block TakeFree(size_t wanted);
  Block TakeNew(size_t wanted);
  // Gives the largest free blocks back until at most `limit` bytes are held or none is free.
  void ReleaseDownTo(int64_t limit);

  std::mutex mutex_;
  std::multimap<size_t, void*> free_;  // by capacity
  std::unordered_map<void*, Live> live_;
  PinnedStats stats_;
};

}  // namespace zero_cuda
