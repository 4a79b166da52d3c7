#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace zero_cuda {

// Throws where `error` is one, with the call's name, the error's, and what() that was being done.
// The error is taken from the thread, so that PyTorch does not find it after its own next kernel.
template <typename What>
void Check(cudaError_t error, const char* call, const What& what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + " failed with " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + "), while " + what());
}

}  // namespace zero_cuda
