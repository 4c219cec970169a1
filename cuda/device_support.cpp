// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/device_support.hpp"

#include "cuda/check.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

std::string with_ordinal(const DeviceFacts& device) { return "device " + std::to_string(device.ordinal) + " (" + to_string(device) + ")"; }

}  // namespace

std::string to_string(const CudaVersions& versions) {
  return "CUDA runtime " + version_text(versions.runtime) + ", " +
         (versions.driver == 0 ? "no driver" : "driver for CUDA " + version_text(versions.driver));
}

std::string to_string(const DeviceFacts& device) {
  return device.name + ", compute capability " + std::to_string(device.major) + "." + std::to_string(device.minor);
}

void require_some_device(cudaError_t counting, int count, const CudaVersions& versions) {
  const std::string sentence = "no CUDA device can be used (" + to_string(versions) + "): ";
  if (counting != cudaSuccess) throw CudaError(sentence + cudaGetErrorString(counting));
  if (count == 0) throw CudaError(sentence + "there is none");
}

void require_capability(const DeviceFacts& device) {
  if (device.major >= kOldestMajor) return;
  throw CudaError(with_ordinal(device) + " is too old: this library needs compute capability " + std::to_string(kOldestMajor) + ".0");
}

void require_code(cudaError_t first_use, const DeviceFacts& device) {
  if (first_use == cudaErrorNoKernelImageForDevice || first_use == cudaErrorInvalidDeviceFunction) {
    throw CudaError(with_ordinal(device) + " is none that this build holds code for; build with its CMAKE_CUDA_ARCHITECTURES");
  }
  check(first_use, "the first use of the device");
}

}  // namespace dualdecoder::cuda
