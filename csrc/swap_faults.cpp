#include "swap_faults.h"

#include <cerrno>
#include <iterator>
#include <string>

#include "swap_transfer.h"

namespace zero_native {
namespace {

bool Hits(int64_t call, int64_t every) { return every > 0 && call % every == 0; }

// Half of an aligned request is aligned again, so that O_DIRECT takes the rest too.
int64_t About(int64_t count, int64_t offset) {
  const bool aligned = count % kSwapPage == 0 && offset % kSwapPage == 0;
  const int64_t half = aligned ? count / 2 / kSwapPage * kSwapPage : count / 2;
  return half == 0 ? count : half;
}

}  // namespace

SwapFaults SwapFaults::Of(const std::vector<int64_t>& fields) {
  SwapFaults faults;
  if (fields.empty()) return faults;
  int64_t* const all[] = {&faults.disk_bytes,  &faults.enospc_after,    &faults.eio_on,
                          &faults.short_every, &faults.interrupt_every, &faults.delay_us,
                          &faults.reorder,     &faults.no_direct,       &faults.enospc_every};
  if (fields.size() != std::size(all)) {
    throw SwapFailure(EINVAL, std::to_string(fields.size()) + " faults, expected " +
                                  std::to_string(std::size(all)));
  }
  for (size_t i = 0; i < fields.size(); ++i) *all[i] = fields[i];
  return faults;
}

SwapVerdict SwapFaultPlan::Judge(bool write, int64_t count, int64_t offset) {
  const int64_t call = ++calls_;
  SwapVerdict verdict{faults_.delay_us, 0, count};
  if (faults_.reorder != 0) verdict.delay_us *= 4 - (call - 1) % 4;
  if (call == faults_.eio_on) verdict.error = EIO;
  if (verdict.error == 0 && Hits(call, faults_.interrupt_every)) verdict.error = EINTR;
  if (verdict.error != 0) return verdict;
  if (Hits(call, faults_.short_every)) verdict.count = About(count, offset);
  if (!write) return verdict;
  if (Hits(++writes_, faults_.enospc_every)) verdict.count = 0;
  verdict.count = TakeRoom(verdict.count);
  if (verdict.count == 0) verdict.error = ENOSPC;
  return verdict;
}

// The part of a write for which the disk has room, in whole pages where it is not all of it.
int64_t SwapFaultPlan::TakeRoom(int64_t count) {
  if (faults_.enospc_after < 0) return count;
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t room = faults_.enospc_after - taken_;
  const int64_t allowed = count <= room ? count : room / kSwapPage * kSwapPage;
  taken_ += allowed;
  return allowed;
}

}  // namespace zero_native
