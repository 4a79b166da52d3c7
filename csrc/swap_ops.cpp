#include "swap_ops.h"

#include <cerrno>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "swap.h"

namespace zero_native {
namespace {

// Never destroyed: a process that ends, or was forked, must not wait for threads.
struct Registry {
  std::mutex mutex;
  int64_t handles = 0;
  std::unordered_map<int64_t, std::shared_ptr<SwapFile>> files;
};

Registry& Files() {
  static Registry* const registry = new Registry;
  return *registry;
}

std::shared_ptr<SwapFile> Lookup(int64_t file) {
  Registry& registry = Files();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.files.find(file);
  if (found == registry.files.end()) throw SwapFailure(EBADF, "no such swap file");
  return found->second;
}

// Calls `act` and puts the errno of its failure into the message.
template <typename Act>
auto Reporting(Act act) -> decltype(act()) {
  try {
    return act();
  } catch (const SwapFailure& failure) {
    throw std::runtime_error("[" + std::to_string(failure.code) + "] " + failure.what());
  }
}

int64_t CheckedSize(const std::string& name, const Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.is_contiguous()) {
    throw SwapFailure(EINVAL, "tensor '" + name + "' is not contiguous on the CPU");
  }
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

std::vector<int64_t> ListOf(const SwapExtent& extent) { return {extent.offset, extent.length}; }

}  // namespace

int64_t SwapOpen(std::string path, int64_t fd, int64_t capacity, int64_t block_size,
                 int64_t threads, int64_t depth, int64_t slots, bool direct, bool checksum,
                 int64_t backend, bool single_submit, bool overlap, std::vector<int64_t> faults) {
  return Reporting([&] {
    const SwapOptions options{std::move(path),
                              static_cast<int>(fd),
                              capacity,
                              block_size,
                              threads,
                              slots,
                              direct,
                              checksum,
                              static_cast<SwapBackend>(backend),
                              {depth, single_submit, overlap}};
    auto file = std::make_shared<SwapFile>(options, SwapFaults::Of(faults));
    Registry& registry = Files();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.files[++registry.handles] = std::move(file);
    return registry.handles;
  });
}

std::string SwapMode(int64_t file) {
  return Reporting([&] { return Lookup(file)->Mode(); });
}

std::vector<int64_t> SwapAllocate(int64_t file, std::string name, int64_t nbytes) {
  return Reporting([&] { return ListOf(Lookup(file)->Allocate(name, nbytes)); });
}

void SwapFree(int64_t file, std::string name) {
  Reporting([&] { Lookup(file)->Free(name); });
}

std::vector<int64_t> SwapFind(int64_t file, std::string name) {
  return Reporting([&] { return ListOf(Lookup(file)->Find(name)); });
}

int64_t SwapWrite(int64_t file, std::string name, Tensor source) {
  return Reporting([&] {
    const int64_t nbytes = CheckedSize(name, source);
    const auto* const data = static_cast<const char*>(source.const_data_ptr());
    return Lookup(file)->Write(name, data, nbytes, std::make_shared<Tensor>(source));
  });
}

int64_t SwapRead(int64_t file, std::string name, Tensor out) {
  return Reporting([&] {
    const int64_t nbytes = CheckedSize(name, out);
    auto* const data = static_cast<char*>(out.mutable_data_ptr());
    return Lookup(file)->Read(name, data, nbytes, std::make_shared<Tensor>(out));
  });
}

bool SwapDone(int64_t file, int64_t ticket) {
  return Reporting([&] { return Lookup(file)->Done(ticket); });
}

void SwapWait(int64_t file, int64_t ticket) {
  Reporting([&] { Lookup(file)->Wait(ticket); });
}

void SwapDrain(int64_t file) {
  Reporting([&] { Lookup(file)->Drain(); });
}

void SwapClose(int64_t file) {
  Reporting([&] { Lookup(file)->Close(); });
}

void SwapRelease(int64_t file) {
  std::shared_ptr<SwapFile> last;
  Registry& registry = Files();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.files.find(file);
  if (found == registry.files.end()) return;
  last = std::move(found->second);
  registry.files.erase(found);
}

std::vector<int64_t> SwapStatsList(int64_t file) {
  return Reporting([&]() -> std::vector<int64_t> {
    const SwapStats stats = Lookup(file)->Stats();
    return {stats.bytes_read, stats.bytes_written, stats.allocated, stats.capacity, stats.direct};
  });
}

}  // namespace zero_native
