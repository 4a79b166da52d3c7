#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zero_native {

using torch::stable::Tensor;

// Swap files as operators, each named by a handle; see swap.h. A failure is a std::runtime_error
// with the text "[errno] message". `faults` is empty, or lists the fields of SwapFaults.
// `backend` is a SwapBackend.
int64_t SwapOpen(std::string path, int64_t fd, int64_t capacity, int64_t block_size,
                 int64_t threads, int64_t depth, int64_t slots, bool direct, bool checksum,
                 int64_t backend, bool single_submit, bool overlap, std::vector<int64_t> faults);
std::string SwapMode(int64_t file);
// Offset and length, in bytes.
std::vector<int64_t> SwapAllocate(int64_t file, std::string name, int64_t nbytes);
void SwapFree(int64_t file, std::string name);
std::vector<int64_t> SwapFind(int64_t file, std::string name);
int64_t SwapWrite(int64_t file, std::string name, Tensor source);
int64_t SwapRead(int64_t file, std::string name, Tensor out);
bool SwapDone(int64_t file, int64_t ticket);
void SwapWait(int64_t file, int64_t ticket);
void SwapDrain(int64_t file);
void SwapClose(int64_t file);
// Closes and forgets the file; unknown handles are none.
void SwapRelease(int64_t file);
// The fields of SwapStats.
std::vector<int64_t> SwapStatsList(int64_t file);

}  // namespace zero_native
