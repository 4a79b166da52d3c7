#pragma once

#include <cstdint>

namespace zero_native {

// Tells bytes from those that were written: CRC-32C of four interleaved lanes, which the
// processor's instruction computes at the speed of memory. Of use within one process only.
uint32_t SwapChecksum(const char* data, int64_t nbytes);

// The same without the instruction.
uint32_t SwapChecksumByTable(const char* data, int64_t nbytes);

// One step of CRC-32C by eight bytes.
uint64_t SwapChecksumStepByTable(uint64_t sum, uint64_t word);

}  // namespace zero_native
