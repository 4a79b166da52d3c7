#include "swap.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "swap_checksum.h"

namespace zero_native {
namespace {

// Of a read that finds other bytes than were written; file systems with checksums say so too.
constexpr int kChanged = EBADMSG;

std::string ReasonOf(int code) {
  return code == kChanged ? "the data has changed on the disk: its checksum is another one"
                          : SwapErrorText(code);
}

}  // namespace

SwapFile::SwapFile(const SwapOptions& options, const SwapFaults& faults)
    : options_(options), faults_(faults) {
  if (options.capacity <= 0 || options.threads <= 0 || options.slots <= 0 ||
      options.ring.depth <= 0 || options.block_size <= 0 || options.block_size % kSwapPage != 0) {
    throw SwapFailure(EINVAL, "swap file " + options.path + ": a size is not positive, or " +
                                  "block_size is no multiple of " + std::to_string(kSwapPage));
  }
  stats_.capacity = WholePages(options.capacity);
  free_[0] = stats_.capacity;
  Open();
  try {
    io_->Start(this);
  } catch (...) {
    Close();
    throw;
  }
}

SwapFile::~SwapFile() { Close(); }

SwapExtent SwapFile::Allocate(const std::string& name, int64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CheckOpen();
  if (extents_.count(name) != 0) {
    throw SwapFailure(EEXIST,
                      "tensor '" + name + "' has an extent in " + options_.path + " already");
  }
  const int64_t wanted = WholePages(std::max<int64_t>(nbytes, 1));
  int64_t largest = 0;
  for (auto stretch = free_.begin(); stretch != free_.end(); ++stretch) {
    const auto [offset, length] = *stretch;
    largest = std::max(largest, length);
    if (length < wanted) continue;
    free_.erase(stretch);
    if (length > wanted) free_[offset + wanted] = length - wanted;
    stats_.allocated += wanted;
    Extent& extent = extents_[name];
    extent.place = {offset, nbytes};
    extent.sums.resize(static_cast<size_t>(nbytes / options_.block_size + 1));
    return extent.place;
  }
  throw SwapFailure(ENOSPC, "tensor '" + name + "' of " + std::to_string(nbytes) +
                                " bytes does not fit into " + options_.path + " of " +
                                std::to_string(stats_.capacity) + " bytes: the largest free " +
                                "stretch has " + std::to_string(largest));
}

void SwapFile::Free(const std::string& name) {
  std::unique_lock<std::mutex> lock(mutex_);
  CheckOpen();
  Lookup(name);
  complete_.wait(lock, [&] {
    const auto found = extents_.find(name);
    return found == extents_.end() || found->second.queue.empty();
  });
  const SwapExtent place = Lookup(name).place;
  extents_.erase(name);
  int64_t begin = place.offset;
  int64_t length = WholePages(std::max<int64_t>(place.length, 1));
  stats_.allocated -= length;
  const auto after = free_.find(begin + length);
  if (after != free_.end()) {
    length += after->second;
    free_.erase(after);
  }
  const auto above = free_.lower_bound(begin);
  if (above != free_.begin() && std::prev(above)->first + std::prev(above)->second == begin) {
    std::prev(above)->second += length;
  } else {
    free_[begin] = length;
  }
}

SwapExtent SwapFile::Find(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return Lookup(name).place;
}

int64_t SwapFile::Write(const std::string& name, const char* source, int64_t nbytes,
                        std::shared_ptr<void> owner) {
  auto operation = std::make_shared<Operation>();
  operation->write = true;
  operation->name = name;
  operation->owner = std::move(owner);
  operation->data = const_cast<char*>(source);
  operation->nbytes = nbytes;
  return Start(std::move(operation));
}

int64_t SwapFile::Read(const std::string& name, char* out, int64_t nbytes,
                       std::shared_ptr<void> owner) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  operation->owner = std::move(owner);
  operation->data = out;
  operation->nbytes = nbytes;
  return Start(std::move(operation));
}

int64_t SwapFile::Start(std::shared_ptr<Operation> operation) {
  Collect();
  const std::lock_guard<std::mutex> lock(mutex_);
  CheckOpen();
  Extent& extent = Lookup(operation->name);
  if (operation->nbytes > extent.place.length) {
    throw SwapFailure(EINVAL, "tensor '" + operation->name + "' of " +
                                  std::to_string(operation->nbytes) +
                                  " bytes does not fit into its extent of " +
                                  std::to_string(extent.place.length) + " in " + options_.path);
  }
  operation->ticket = ++tickets_;
  operation->extent = &extent;
  operation->offset = extent.place.offset;
  if (operation->nbytes == 0) return operation->ticket;
  if (operation->write) {
    extent.written = operation->nbytes;
  } else if (operation->nbytes != extent.written) {
    throw SwapFailure(EINVAL, "tensor '" + operation->name + "': cannot read " +
                                  std::to_string(operation->nbytes) + " bytes of " + options_.path +
                                  ", where " +
                                  (extent.written < 0 ? "none" : std::to_string(extent.written)) +
                                  " were written");
  }
  operations_[operation->ticket] = operation;
  unfinished_ += 1;
  extent.queue.push_back(operation);
  if (extent.queue.size() == 1) {
    ready_.push_back(operation);
    work_.notify_all();
    io_->Wake();
  }
  return operation->ticket;
}

bool SwapFile::Done(int64_t ticket) {
  Collect();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = operations_.find(ticket);
  return found == operations_.end() || found->second->complete;
}

void SwapFile::Wait(int64_t ticket) {
  std::shared_ptr<Operation> operation;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = operations_.find(ticket);
    if (found != operations_.end()) {
      operation = found->second;
      operation->waited_for = true;
      complete_.wait(lock, [&] { return operation->complete; });
    }
  }
  Collect();
  if (operation != nullptr && operation->code != 0) throw Failure(*operation);
}

void SwapFile::Drain() {
  std::shared_ptr<Operation> failed;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    complete_.wait(lock, [&] { return unfinished_ == 0; });
    for (const auto& entry : operations_) {
      if (failed == nullptr && !entry.second->waited_for) failed = entry.second;
      entry.second->waited_for = true;
    }
  }
  Collect();
  if (failed != nullptr) throw Failure(*failed);
}

void SwapFile::Close() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_) {
      complete_.wait(lock, [&] { return closed_; });
      return;
    }
    closing_ = true;
    work_.notify_all();
    io_->Wake();
  }
  io_->Join();
  Collect();
  const std::lock_guard<std::mutex> lock(mutex_);
  io_.reset();
  staging_.reset();
  Delete();
  closed_ = true;
  complete_.notify_all();
}

SwapStats SwapFile::Stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

SwapFile::Extent& SwapFile::Lookup(const std::string& name) {
  const auto found = extents_.find(name);
  if (found == extents_.end()) {
    throw SwapFailure(ENOENT, "tensor '" + name + "' has no extent in " + options_.path);
  }
  return found->second;
}

void SwapFile::CheckOpen() const {
  if (closing_) throw SwapFailure(EBADF, "swap file " + options_.path + " is closed");
}

// The last reference to a tensor may need Python, for which no lock must be held.
void SwapFile::Collect() {
  std::vector<std::shared_ptr<void>> owners;
  const std::lock_guard<std::mutex> lock(mutex_);
  owners.swap(let_go_);
}

SwapSupply SwapFile::Take(bool wait, SwapRequest* request) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ended = [&] { return closing_ && unfinished_ == 0; };
  if (wait) work_.wait(lock, [&] { return !ready_.empty() || ended(); });
  if (ready_.empty()) return ended() ? SwapSupply::kEnded : SwapSupply::kNone;
  const std::shared_ptr<Operation> operation = ready_.front();
  const int64_t begin = operation->next;
  const int64_t count = std::min(options_.block_size, operation->nbytes - begin);
  operation->next += count;
  operation->running += 1;
  if (operation->next == operation->nbytes) ready_.pop_front();
  *request = {operation, operation->write, operation->data + begin, count,
              operation->offset + begin};
  return SwapSupply::kRequest;
}

// Each block belongs to one request at a time, as operations on one extent follow one another.
uint32_t& SwapFile::SumOf(const SwapRequest& request) const {
  const auto* const operation = static_cast<const Operation*>(request.owner.get());
  const int64_t block = (request.offset - operation->offset) / options_.block_size;
  return operation->extent->sums[static_cast<size_t>(block)];
}

void SwapFile::Complete(const SwapRequest& request, int code) {
  const auto operation = std::static_pointer_cast<Operation>(request.owner);
  if (code == 0 && options_.checksum) {
    const uint32_t sum = SwapChecksum(request.data, request.count);
    if (request.write) SumOf(request) = sum;
    if (SumOf(request) != sum) code = kChanged;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  operation->running -= 1;
  if (code == 0) {
    (operation->write ? stats_.bytes_written : stats_.bytes_read) += request.count;
  } else if (operation->code == 0) {
    operation->code = code;
  }
  Finish(operation);
}

// Called with the lock, after each request.
void SwapFile::Finish(const std::shared_ptr<Operation>& operation) {
  if (operation->code != 0 && operation->next < operation->nbytes) {
    operation->next = operation->nbytes;
    ready_.erase(std::find(ready_.begin(), ready_.end(), operation));
  }
  if (operation->running > 0 || operation->next < operation->nbytes) return;
  Extent& extent = *operation->extent;
  if (operation->write) {
    extent.broken = operation->code;
  } else if (extent.broken != 0) {
    operation->code = extent.broken;
  }
  extent.queue.pop_front();
  if (!extent.queue.empty()) ready_.push_back(extent.queue.front());
  let_go_.push_back(std::move(operation->owner));
  operation->complete = true;
  if (operation->code == 0) operations_.erase(operation->ticket);
  unfinished_ -= 1;
  if (!extent.queue.empty() || unfinished_ == 0) work_.notify_all();
  complete_.notify_all();
}

SwapFailure SwapFile::Failure(const Operation& operation) const {
  const std::string verb = operation.write ? "write" : "read";
  return {operation.code, "tensor '" + operation.name + "': cannot " + verb + " " +
                              std::to_string(operation.nbytes) + " bytes at offset " +
                              std::to_string(operation.offset) + " of " + options_.path + ": " +
                              ReasonOf(operation.code)};
}

}  // namespace zero_native
