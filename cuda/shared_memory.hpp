// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/check.hpp"

namespace dualdecoder::cuda {

/// Lets `kernel` be launched with `bytes` of dynamic shared memory. Throws CudaError with `what` where the current device has less.
template <class Kernel>
void allow_shared_memory(Kernel kernel, std::size_t bytes, const char* what) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), what);
}

/// Bytes of shared memory that a block of the current device can have.
inline std::size_t offered_shared_memory() {
  int device = 0;
  int bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}

}  // namespace dualdecoder::cuda
