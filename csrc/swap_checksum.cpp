#include "swap_checksum.h"

#include <array>
#include <cstddef>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace zero_native {
namespace {

constexpr size_t kWord = sizeof(uint64_t);
constexpr size_t kLanes = 4;  // the instruction takes three cycles, and one can start in each

using Tables = std::array<std::array<uint32_t, 256>, kWord>;

// What a byte does to the sum when 0 to 7 bytes follow it.
Tables MakeTables() {
  constexpr uint32_t kPolynomial = 0x82F63B78;
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) * kPolynomial);
    tables[0][byte] = sum;
  }
  for (size_t after = 1; after < kWord; ++after) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t sum = tables[after - 1][byte];
      tables[after][byte] = (sum >> 8) ^ tables[0][sum & 0xFF];
    }
  }
  return tables;
}

struct ByTable {
  static uint64_t Step(uint64_t sum, uint64_t word) {
    static const Tables tables = MakeTables();
    word ^= sum;
    uint32_t next = 0;
    for (size_t i = 0; i < kWord; ++i) next ^= tables[kWord - 1 - i][(word >> (8 * i)) & 0xFF];
    return next;
  }
};

// In assembly, so that the rest of the library needs no such processor.
#if defined(__x86_64__)
#define ZERO_CHECKSUM_INSTRUCTION
struct ByInstruction {
  static uint64_t Step(uint64_t sum, uint64_t word) {
    __asm__("crc32q %1, %0" : "+r"(sum) : "r"(word));
    return sum;
  }
  static bool Exists() { return __builtin_cpu_supports("sse4.2") != 0; }
};
#elif defined(__aarch64__) && defined(__linux__)
#define ZERO_CHECKSUM_INSTRUCTION
struct ByInstruction {
  static uint64_t Step(uint64_t sum, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(sum) : "r"(word));
    return sum;
  }
  static bool Exists() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
};
#endif

template <typename How>
uint32_t Fold(const char* data, size_t nbytes) {
  uint64_t lanes[kLanes] = {};
  uint64_t word = 0;
  size_t at = 0;
  for (; at + kLanes * kWord <= nbytes; at += kLanes * kWord) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      std::memcpy(&word, data + at + lane * kWord, kWord);
      lanes[lane] = How::Step(lanes[lane], word);
    }
  }
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum = How::Step(sum, lane);
  for (; at < nbytes; at += kWord) {
    word = 0;
    std::memcpy(&word, data + at, nbytes - at < kWord ? nbytes - at : kWord);
    sum = How::Step(sum, word);
  }
  return static_cast<uint32_t>(sum);
}

}  // namespace

uint32_t SwapChecksum(const char* data, int64_t nbytes) {
#ifdef ZERO_CHECKSUM_INSTRUCTION
  static const bool exists = ByInstruction::Exists();
  if (exists) return Fold<ByInstruction>(data, static_cast<size_t>(nbytes));
#endif
  return SwapChecksumByTable(data, nbytes);
}

uint32_t SwapChecksumByTable(const char* data, int64_t nbytes) {
  return Fold<ByTable>(data, static_cast<size_t>(nbytes));
}

uint64_t SwapChecksumStepByTable(uint64_t sum, uint64_t word) { return ByTable::Step(sum, word); }

}  // namespace zero_native
