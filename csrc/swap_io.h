#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "swap_faults.h"
#include "swap_transfer.h"

namespace zero_native {

enum class SwapSupply { kRequest, kNone, kEnded };

// Where a SwapIo gets its requests; any thread may call either member.
class SwapSource {
 public:
  // Fills `request` and returns kRequest. Where there is none now, waits or returns kNone; kEnded
  // where there will be none.
  virtual SwapSupply Take(bool wait, SwapRequest* request) = 0;
  // `code` is 0 or an errno.
  virtual void Complete(const SwapRequest& request, int code) = 0;

 protected:
  ~SwapSource() = default;
};

// Where the data goes. All of it outlives the SwapIo.
struct SwapChannel {
  int fd = -1;
  bool direct = false;              // `fd` is open with O_DIRECT
  StagingSlots* staging = nullptr;  // with O_DIRECT only
  SwapFaultPlan* faults = nullptr;
};

// Moves requests, several at once.
class SwapIo {
 public:
  // Only before Start or after Join.
  virtual ~SwapIo() = default;
  // Begins to take from the source; called once.
  virtual void Start(SwapSource* source) = 0;
  // Tells that the source may answer something else than kNone now.
  virtual void Wake() = 0;
  // Waits for the source to end, which must be certain.
  virtual void Join() = 0;
};

std::unique_ptr<SwapIo> MakeThreadIo(const SwapChannel& channel, int64_t threads);

struct SwapRingOptions {
  int64_t depth = 0;           // requests in flight
  bool single_submit = false;  // each request is a submission of its own
  bool overlap = true;         // requests follow one by one, not batch by batch
};

// io_uring, after a page went through it to offset 0 and back. Null where that failed, and then
// `why` says the reason, otherwise how it uses the staging slots, if there are any.
std::unique_ptr<SwapIo> MakeRingIo(const SwapChannel& channel, const SwapRingOptions& options,
                                   std::string* why);

}  // namespace zero_native
