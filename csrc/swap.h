#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "swap_io.h"

namespace zero_native {

enum class SwapBackend : int64_t { kAny, kRing, kThreads };

// All sizes are in bytes.
struct SwapOptions {
  std::string path;        // what messages call the file
  int fd = -1;             // of an empty file that is nobody else's; stays the caller's
  int64_t capacity = 0;    // of the file, rounded up to whole pages
  int64_t block_size = 0;  // of one request, whole pages
  int64_t threads = 0;     // requests in flight, where threads move them
  int64_t slots = 0;       // aligned buffers of block_size for data that is not aligned itself
  bool direct = true;      // try O_DIRECT
  bool checksum = true;    // of each block, made when it is written and compared when it is read
  SwapBackend backend = SwapBackend::kAny;  // kAny: io_uring where it works
  SwapRingOptions ring;
};

struct SwapExtent {
  int64_t offset = 0;  // in the file, whole pages
  int64_t length = 0;  // as asked for; whole pages are set aside
};

struct SwapStats {
  int64_t bytes_read = 0;     // of tensors, without padding, by requests that succeeded
  int64_t bytes_written = 0;  // likewise
  int64_t allocated = 0;      // set aside for extents
  int64_t capacity = 0;
  bool direct = false;
};

// One preallocated scratch file that holds tensors by name, and what moves them. Any thread may
// call any member.
//
// Operations on one extent run in the order in which they were started, those on different extents
// in any. What owns the memory is kept until its operation is complete, and let go of by whichever
// caller comes next, never by a thread of this class.
class SwapFile : private SwapSource {
 public:
  // Throws SwapFailure where the space or the backend is missing.
  SwapFile(const SwapOptions& options, const SwapFaults& faults);
  // Closes.
  ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  // Throws SwapFailure where the name is taken or no free stretch is long enough.
  SwapExtent Allocate(const std::string& name, int64_t nbytes);
  // Waits for the operations on the extent; its pages are free for others then.
  void Free(const std::string& name);
  SwapExtent Find(const std::string& name);

  // Start moving bytes to or from the beginning of an extent. Return a ticket. The memory, which
  // `owner` keeps, must not be written, when reading not be used, until Wait has returned. A read
  // takes as many bytes as were last written there.
  int64_t Write(const std::string& name, const char* source, int64_t nbytes,
                std::shared_ptr<void> owner);
  int64_t Read(const std::string& name, char* out, int64_t nbytes, std::shared_ptr<void> owner);

  bool Done(int64_t ticket);
  // Both throw SwapFailure where an operation failed. Wait does so every time; Drain waits for all
  // operations and reports the first failure that nobody waited for, once.
  void Wait(int64_t ticket);
  void Drain();
  // Waits for all operations, then empties the file. What failed is still there to be waited for.
  // A second call does nothing.
  void Close();

  SwapStats Stats();
  // How the data moves and why, in a few words.
  const std::string& Mode() const { return mode_; }

 private:
  struct Operation;
  struct Extent {
    SwapExtent place;
    std::deque<std::shared_ptr<Operation>> queue;  // the first one runs
    int broken = 0;                                // errno of the last write, which reads repeat
    int64_t written = -1;                          // bytes, by the last write that was started
    std::vector<uint32_t> sums;                    // of each block as it was last written
  };
  struct Operation {
    int64_t ticket = 0;
    bool write = false;
    std::string name;
    Extent* extent = nullptr;  // lives as long as an operation stands in its queue
    std::shared_ptr<void> owner;
    char* data = nullptr;
    int64_t nbytes = 0;
    int64_t offset = 0;   // in the file
    int64_t next = 0;     // first byte that no request has taken
    int64_t running = 0;  // requests
    int code = 0;         // errno of the first request that failed
    bool waited_for = false;
    bool complete = false;
  };

  void Open();
  void Reserve();
  std::string ChooseWay();
  std::string MakeIo(const std::string& way);
  void Delete();

  int64_t Start(std::shared_ptr<Operation> operation);
  Extent& Lookup(const std::string& name);
  void CheckOpen() const;
  void Collect();

  SwapSupply Take(bool wait, SwapRequest* request) override;
  void Complete(const SwapRequest& request, int code) override;
  uint32_t& SumOf(const SwapRequest& request) const;
  void Finish(const std::shared_ptr<Operation>& operation);
  SwapFailure Failure(const Operation& operation) const;

  const SwapOptions options_;
  SwapFaultPlan faults_;
  int fd_ = -1;
  std::string mode_;
  std::unique_ptr<StagingSlots> staging_;  // with O_DIRECT only
  std::unique_ptr<SwapIo> io_;

  std::mutex mutex_;
  std::condition_variable work_;      // there is work, or none will come, for those that wait
  std::condition_variable complete_;  // an operation is complete
  bool closing_ = false;
  bool closed_ = false;
  std::map<std::string, Extent> extents_;
  std::map<int64_t, int64_t> free_;  // stretches, length by offset
  std::deque<std::shared_ptr<Operation>> ready_;
  // Not complete, or failed; all other tickets were successes.
  std::map<int64_t, std::shared_ptr<Operation>> operations_;
  std::vector<std::shared_ptr<void>> let_go_;
  int64_t tickets_ = 0;
  int64_t unfinished_ = 0;  // operations
  SwapStats stats_;
};

}  // namespace zero_native
