// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.hpp"

namespace dualdecoder::cuda {

/// The device that device memory lies on. Throws CudaError.
inline int device_of(const void* memory) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.device;
}

}  // namespace dualdecoder::cuda
