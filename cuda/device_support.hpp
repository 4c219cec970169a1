// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

/// What this library asks of a device and of its driver, apart from asking the machine, so that machines which nobody has can be tested.
namespace dualdecoder::cuda {

inline constexpr int kOldestMajor = 8;  // compute capability: mma.sync on bf16 and cp.async

/// 1000 * major + 10 * minor, as the runtime gives them.
struct CudaVersions {
  int runtime = 0;
  int driver = 0;  // the newest CUDA that it serves, 0: there is none
};

/// "CUDA runtime 13.0, driver for CUDA 12.4".
std::string to_string(const CudaVersions& versions);

/// One device; its name and compute capability are the runtime's.
struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  int major = 0;
  int minor = 0;
};

/// "NVIDIA H200, compute capability 9.0".
std::string to_string(const DeviceFacts& device);

/// Throws CudaError, which names the versions, unless cudaGetDeviceCount gave at least one: no driver, one that is older than the runtime,
/// no device.
void require_some_device(cudaError_t counting, int count, const CudaVersions& versions);

/// Throws CudaError, which names the device and what is needed, where its compute capability is too low.
void require_capability(const DeviceFacts& device);

/// Throws CudaError for `first_use`, the outcome of the first call that needs this library's code for the device.
void require_code(cudaError_t first_use, const DeviceFacts& device);

}  // namespace dualdecoder::cuda
