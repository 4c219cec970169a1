// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.hpp"

/// A kernel that starts while the one before it in its stream still runs ("programmatic dependent launch", CUDA programming guide), so that
/// its launch and what it reads first cost no time of their own. Older devices than compute capability 9.0 start it as ever.
namespace dualdecoder::cuda {

/// The next kernel may start when all blocks of this one have called it or ended. Says nothing of what was written.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Waits until the kernel before has ended and all that it wrote can be read.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

/// Whether the current device can start a kernel early.
inline bool launches_early() {
  int device = 0;
  int major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major >= 9;
}

/// The attribute of a launch that may be early; the kernel calls wait_for_kernel_before().
inline cudaLaunchAttribute early_launch() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace dualdecoder::cuda
