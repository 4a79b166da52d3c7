// Tests of the swap engine alone, for sanitizers: swap_test FOLDER [threads]. Prints what it runs,
// and ends with 1 at the first thing that is wrong. With `threads` it leaves io_uring out.

// All in one, which compiles in half of the time.
#include "../swap.cpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../swap_checksum.cpp"
#include "../swap_disk.cpp"
#include "../swap_faults.cpp"
#include "../swap_ring.cpp"
#include "../swap_threads.cpp"
#include "../swap_transfer.cpp"
#include "../swap_uring.cpp"

namespace zero_native {
namespace {

constexpr unsigned kSecondsAtMost = 120;
constexpr int64_t kCapacity = 4 << 20;

#define CHECK(condition) Check((condition), #condition, __LINE__)

void Check(bool holds, const char* what, int line) {
  if (holds) return;
  std::printf("line %d: not so: %s\n", line, what);
  std::fflush(stdout);
  std::_Exit(1);
}

// Memory that counts itself, at some distance from a page.
class Bytes {
 public:
  static std::atomic<int> live;

  Bytes(int64_t nbytes, int64_t shift) : memory_(static_cast<size_t>(nbytes + 2 * kSwapPage)) {
    live += 1;
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    const auto page = static_cast<uintptr_t>(kSwapPage);
    data_ = memory_.data() + (page - address % page) % page + shift;
    nbytes_ = nbytes;
  }
  ~Bytes() { live -= 1; }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  char* data() { return data_; }
  int64_t nbytes() const { return nbytes_; }

  void Fill(uint32_t seed) {
    std::minstd_rand random(seed + 1);
    for (int64_t i = 0; i < nbytes_; ++i) data_[i] = static_cast<char>(random() & 0xFF);
  }

  bool Holds(uint32_t seed) const {
    std::minstd_rand random(seed + 1);
    for (int64_t i = 0; i < nbytes_; ++i) {
      if (data_[i] != static_cast<char>(random() & 0xFF)) return false;
    }
    return true;
  }

 private:
  std::vector<char> memory_;
  char* data_;
  int64_t nbytes_;
};

std::atomic<int> Bytes::live{0};

std::shared_ptr<Bytes> Filled(int64_t nbytes, uint32_t seed, int64_t shift = 0) {
  auto bytes = std::make_shared<Bytes>(nbytes, shift);
  bytes->Fill(seed);
  return bytes;
}

int64_t Write(SwapFile* file, const std::string& name, const std::shared_ptr<Bytes>& bytes) {
  return file->Write(name, bytes->data(), bytes->nbytes(), bytes);
}

int64_t Read(SwapFile* file, const std::string& name, const std::shared_ptr<Bytes>& bytes) {
  return file->Read(name, bytes->data(), bytes->nbytes(), bytes);
}

bool ReadsBack(SwapFile* file, const std::string& name, int64_t nbytes, uint32_t seed) {
  const auto out = std::make_shared<Bytes>(nbytes, seed % 3);
  file->Wait(Read(file, name, out));
  return out->Holds(seed);
}

int CodeOf(const std::function<void()>& act, const std::string& part = "") {
  try {
    act();
  } catch (const SwapFailure& failure) {
    CHECK(std::string(failure.what()).find(part) != std::string::npos);
    return failure.code;
  }
  return 0;
}

void InThreads(int count, const std::function<void(int)>& act) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(act, i);
  for (std::thread& thread : threads) thread.join();
}

std::string Name(int thread, int number) {
  return std::to_string(thread) + "." + std::to_string(number);
}

// ------------------------------------------------------------------------------ the tests

void RoundTripsFromSeveralThreads(const SwapOptions& options) {
  SwapFile file(options, {});
  const int64_t sizes[] = {1, 4095, 4096, 4097, 3 * 8192, 50'001};
  InThreads(4, [&](int thread) {
    for (size_t i = 0; i < std::size(sizes); ++i) {
      const auto seed = static_cast<uint32_t>(100 * thread) + static_cast<uint32_t>(i);
      const std::string name = Name(thread, static_cast<int>(i));
      CHECK(file.Allocate(name, sizes[i]).length == sizes[i]);
      Write(&file, name, Filled(sizes[i], seed, thread));
      CHECK(ReadsBack(&file, name, sizes[i], seed));
    }
  });
  file.Drain();
  CHECK(file.Stats().bytes_written == file.Stats().bytes_read);
}

void OperationsOnOneExtentKeepTheirOrder(const SwapOptions& options) {
  SwapFaults faults;
  faults.delay_us = 200;
  faults.reorder = 1;
  SwapFile file(options, faults);
  file.Allocate("x", 5 * kSwapPage);
  std::vector<std::shared_ptr<Bytes>> outs;
  for (uint32_t i = 0; i < 6; ++i) {
    Write(&file, "x", Filled(5 * kSwapPage, i));
    outs.push_back(std::make_shared<Bytes>(5 * kSwapPage, 1));
    Read(&file, "x", outs.back());
  }
  file.Drain();
  for (uint32_t i = 0; i < 6; ++i) CHECK(outs[i]->Holds(i));
}

void ShortInterruptedAndDelayedRequests(const SwapOptions& options) {
  SwapFaults faults;
  faults.short_every = 2;
  faults.interrupt_every = 3;
  faults.delay_us = 20;
  faults.reorder = 1;
  SwapFile file(options, faults);
  InThreads(3, [&](int thread) {
    const std::string name = Name(thread, 0);
    file.Allocate(name, 100'003);
    Write(&file, name, Filled(100'003, static_cast<uint32_t>(thread), thread));
    CHECK(ReadsBack(&file, name, 100'003, static_cast<uint32_t>(thread)));
  });
}

void AFailureBelongsToItsTicket(const SwapOptions& options) {
  for (int64_t every = 1; every <= 5; ++every) {
    SwapFaults faults;
    faults.enospc_every = every;
    SwapFile file(options, faults);
    std::vector<int64_t> tickets;
    for (int i = 0; i < 10; ++i) {
      file.Allocate(Name(0, i), kSwapPage);
      tickets.push_back(Write(&file, Name(0, i), Filled(kSwapPage, static_cast<uint32_t>(i))));
    }
    int64_t failed = 0;
    for (int i = 0; i < 10; ++i) {
      const int code = CodeOf([&] { file.Wait(tickets[static_cast<size_t>(i)]); }, Name(0, i));
      CHECK(code == 0 || code == ENOSPC);
      failed += code != 0;
      if (code == 0) CHECK(ReadsBack(&file, Name(0, i), kSwapPage, static_cast<uint32_t>(i)));
    }
    CHECK(failed == 10 / every);
    file.Drain();
  }
}

void AFileThatLostItsEnd(const SwapOptions& options) {
  SwapFile file(options, {});
  file.Allocate("x", 10 * kSwapPage);
  Write(&file, "x", Filled(10 * kSwapPage, 1));
  file.Drain();
  CHECK(ftruncate(options.fd, kSwapPage) == 0);
  const auto out = std::make_shared<Bytes>(10 * kSwapPage, 0);
  CHECK(CodeOf([&] { file.Wait(Read(&file, "x", out)); }, options.path) == EIO);
}

void ABlockThatChangedOnTheDisk(const SwapOptions& options) {
  const int64_t nbytes = 3 * options.block_size - 5;
  for (const int64_t place : {int64_t{0}, options.block_size - 1, nbytes - 1}) {
    SwapFile file(options, {});
    file.Allocate("below", 1);
    const int64_t begin = file.Allocate("x", nbytes).offset;
    Write(&file, "below", Filled(1, 1));
    Write(&file, "x", Filled(nbytes, 2));
    file.Drain();
    StagingSlots page(1, kSwapPage);
    const int64_t at = (begin + place) / kSwapPage * kSwapPage;
    CHECK(pread(options.fd, page.At(0), kSwapPage, at) == kSwapPage);
    page.At(0)[(begin + place) % kSwapPage] ^= 1;
    CHECK(pwrite(options.fd, page.At(0), kSwapPage, at) == kSwapPage);
    const auto out = std::make_shared<Bytes>(nbytes, 1);
    CHECK(CodeOf([&] { file.Wait(Read(&file, "x", out)); }, "'x'") == EBADMSG);
    CHECK(ReadsBack(&file, "below", 1, 1));
    Write(&file, "x", Filled(nbytes, 3));
    CHECK(ReadsBack(&file, "x", nbytes, 3));
  }
}

void AReadTakesWhatWasWritten(const SwapOptions& options) {
  SwapFile file(options, {});
  file.Allocate("x", 100);
  const auto out = std::make_shared<Bytes>(50, 0);
  CHECK(CodeOf([&] { Read(&file, "x", out); }, "where none were written") == EINVAL);
  Write(&file, "x", Filled(60, 1));
  CHECK(CodeOf([&] { Read(&file, "x", out); }, "where 60 were written") == EINVAL);
  Write(&file, "x", Filled(50, 2));
  CHECK(ReadsBack(&file, "x", 50, 2));
}

void TheChecksumIsTheSameInEachWay(const SwapOptions&) {
  uint64_t sum = 0xFFFFFFFF;
  for (int i = 0; i < 4; ++i) sum = SwapChecksumStepByTable(sum, 0);
  CHECK((sum ^ 0xFFFFFFFF) == 0x8A9136AA);  // of 32 zeros, by RFC 3720
  for (int64_t nbytes = 0; nbytes < 300; ++nbytes) {
    const auto bytes = Filled(nbytes, static_cast<uint32_t>(nbytes), nbytes % 9);
    sum = SwapChecksum(bytes->data(), nbytes);
    CHECK(sum == SwapChecksumByTable(bytes->data(), nbytes));
    for (int64_t i = 0; i < nbytes; ++i) {
      bytes->data()[i] ^= static_cast<char>(1 << (i % 8));
      CHECK(sum != SwapChecksum(bytes->data(), nbytes));
      bytes->data()[i] ^= static_cast<char>(1 << (i % 8));
    }
  }
}

void ManyWaitForOneTicket(const SwapOptions& options) {
  SwapFaults faults;
  faults.delay_us = 2000;
  faults.eio_on = 2;
  SwapFile file(options, faults);
  file.Allocate("good", kSwapPage);
  file.Allocate("bad", kSwapPage);
  const int64_t good = Write(&file, "good", Filled(kSwapPage, 1));
  file.Wait(good);
  const int64_t bad = Write(&file, "bad", Filled(kSwapPage, 2));
  InThreads(4, [&](int thread) {
    if (thread == 3) CodeOf([&] { file.Drain(); });
    CHECK(CodeOf([&] { file.Wait(good); }) == 0);
    CHECK(CodeOf([&] { file.Wait(bad); }, "'bad'") == EIO);
    CHECK(file.Done(bad));
  });
}

void ExtentsAreFreedAndUsedAgain(const SwapOptions& options) {
  SwapFile file(options, {});
  InThreads(4, [&](int thread) {
    std::minstd_rand random(static_cast<uint32_t>(thread) + 7);
    for (int i = 0; i < 25; ++i) {
      const auto nbytes = static_cast<int64_t>(random() % 40'000 + 1);
      const std::string name = Name(thread, i);
      const auto seed = static_cast<uint32_t>(1000 * thread + i);
      file.Allocate(name, nbytes);
      Write(&file, name, Filled(nbytes, seed, i % 2));
      if (i % 3 != 0) CHECK(ReadsBack(&file, name, nbytes, seed));
      file.Free(name);  // a third of them with the write in flight
    }
  });
  CHECK(file.Stats().allocated == 0);
  CHECK(file.Allocate("whole", kCapacity).offset == 0);
}

void CloseUnderLoad(const SwapOptions& options) {
  SwapFaults faults;
  faults.delay_us = 100;
  SwapFile file(options, faults);
  for (int thread = 0; thread < 3; ++thread) file.Allocate(Name(thread, 0), 30'000);
  std::atomic<int> started{0};
  std::thread closer([&] {
    while (started < 40) std::this_thread::yield();
    file.Close();
  });
  InThreads(3, [&](int thread) {
    const std::string name = Name(thread, 0);
    int code = 0;
    while (code == 0) {
      code = CodeOf([&] {
        Write(&file, name, Filled(30'000, 1));
        Read(&file, name, std::make_shared<Bytes>(30'000, 1));
      });
      started += 1;
    }
    CHECK(code == EBADF);
  });
  closer.join();
  file.Close();
  file.Drain();
  CHECK(lseek(options.fd, 0, SEEK_END) == 0);
  CHECK(file.Stats().bytes_written >= file.Stats().bytes_read);
}

struct Test {
  const char* name;
  void (*run)(const SwapOptions& options);
};

constexpr Test kTests[] = {
    {"round trips from several threads", RoundTripsFromSeveralThreads},
    {"operations on one extent keep their order", OperationsOnOneExtentKeepTheirOrder},
    {"short, interrupted and delayed requests", ShortInterruptedAndDelayedRequests},
    {"a failure belongs to its ticket", AFailureBelongsToItsTicket},
    {"a file that lost its end", AFileThatLostItsEnd},
    {"a block that changed on the disk", ABlockThatChangedOnTheDisk},
    {"a read takes what was written", AReadTakesWhatWasWritten},
    {"the checksum is the same in each way", TheChecksumIsTheSameInEachWay},
    {"many wait for one ticket", ManyWaitForOneTicket},
    {"extents are freed and used again", ExtentsAreFreedAndUsedAgain},
    {"close under load", CloseUnderLoad},
};

SwapOptions Options(const std::string& folder, SwapBackend backend, bool direct) {
  SwapOptions options;
  options.path = folder + "/swap_test_XXXXXX";
  options.fd = mkstemp(options.path.data());
  CHECK(options.fd >= 0 && unlink(options.path.c_str()) == 0);
  options.capacity = kCapacity;
  options.block_size = 4 * kSwapPage;
  options.threads = 3;
  options.slots = 2;
  options.direct = direct;
  options.backend = backend;
  options.ring.depth = 4;
  return options;
}

// Whether the backend can be had here.
bool Announce(const SwapOptions& options) {
  std::string mode;
  const int code = CodeOf([&] { mode = SwapFile(options, {}).Mode(); });
  if (code == 0) std::printf("%s\n", mode.c_str());
  if (code == ENOTSUP) std::printf("left out: io_uring does not work here\n");
  CHECK(code == 0 || code == ENOTSUP);
  return code == 0;
}

void RunAll(const SwapOptions& options) {
  if (!Announce(options)) return;
  for (const Test& test : kTests) {
    std::printf("  %s\n", test.name);
    std::fflush(stdout);
    test.run(options);
    CHECK(Bytes::live == 0);
  }
}

}  // namespace
}  // namespace zero_native

int main(int count, char** arguments) {
  using zero_native::SwapBackend;
  const bool only_threads = count == 3 && std::string(arguments[2]) == "threads";
  if (count != 2 && !only_threads) {
    std::printf("usage: %s FOLDER [threads]\n", arguments[0]);
    return 2;
  }
  alarm(zero_native::kSecondsAtMost);
  for (const SwapBackend backend : {SwapBackend::kRing, SwapBackend::kThreads}) {
    if (only_threads && backend == SwapBackend::kRing) continue;
    for (const bool direct : {true, false}) {
      zero_native::RunAll(zero_native::Options(arguments[1], backend, direct));
    }
  }
  std::printf("all is well\n");
  return 0;
}
