// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/check.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "cuda/check_cublas.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

// "cuda/backend.cu:12": the folder of the build machine is nobody's business
std::string place_of(const std::source_location& place) {
  std::string_view file = place.file_name();
  const std::size_t name = file.rfind('/');
  if (name != std::string_view::npos && name > 0) {
    const std::size_t folder = file.rfind('/', name - 1);
    if (folder != std::string_view::npos) file.remove_prefix(folder + 1);
  }
  return std::string(file) + ":" + std::to_string(place.line());
}

}  // namespace

void check(cudaError_t status, const char* what, std::size_t bytes, std::source_location place) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // what the context survives is not left for the next call to report
  if (status == cudaErrorMemoryAllocation) {
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
      free = 0;
      cudaGetLastError();
    }
    throw OutOfMemory(bytes > 0 ? std::string(what) : std::string(what) + " (of a size that only the driver knows)", bytes, free);
  }
  throw CudaError(std::string(what) + " failed at " + place_of(place) + ": " + cudaGetErrorName(status) + " (" +
                  cudaGetErrorString(status) + ")");
}

void check(cublasStatus_t status, const char* what, std::source_location place) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  cudaGetLastError();
  throw CudaError(std::string(what) + " failed at " + place_of(place) + ": " + cublasGetStatusName(status) + " (" +
                  cublasGetStatusString(status) + ")");
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  check(cudaSetDevice(device), "cudaSetDevice");
  before_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (before_ >= 0) cudaSetDevice(before_);
}

Stream Stream::create(int priority) {
  Stream stream;
  check(cudaStreamCreateWithPriority(&stream.stream_, cudaStreamNonBlocking, priority), "cudaStreamCreateWithPriority");
  return stream;
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Event Event::create() {
  Event event;
  check(cudaEventCreateWithFlags(&event.event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

void Event::record(StreamRef stream) { check(cudaEventRecord(event_, stream.get()), "cudaEventRecord"); }

void Event::hold(StreamRef stream) const { check(cudaStreamWaitEvent(stream.get(), event_, 0), "cudaStreamWaitEvent"); }

}  // namespace dualdecoder::cuda
