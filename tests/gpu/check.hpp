// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/check.hpp"

/// What the programs of this folder share: checks that count, device arrays, and a main that skips where there is no device.
namespace dualdecoder::test {

inline int failures = 0;

/// Prints the sentence (a printf format) and counts a failure unless `ok`. The first twenty are printed.
#define DUALDECODER_EXPECT(ok, ...)                        \
  do {                                                     \
    if (!(ok) && ++::dualdecoder::test::failures <= 20) {  \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #ok); \
      std::printf(__VA_ARGS__);                            \
      std::printf("\n");                                   \
    }                                                      \
  } while (false)

/// The message of the Expected that `action` throws; anything else is a failure.
template <class Expected, class Action>
std::string thrown(const char* what, Action&& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    DUALDECODER_EXPECT(false, "%s: threw something else: %s", what, error.what());
    return "";
  }
  DUALDECODER_EXPECT(false, "%s: nothing was thrown", what);
  return "";
}

/// An array in device memory, with copies to and from it that wait.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    cuda::check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T) + 1), "cudaMalloc", count * sizeof(T));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { upload(values); }
  DeviceArray(DeviceArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  void upload(std::span<const T> values) {
    cuda::check(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::vector<T> download() const {
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> values(count_);
    cuda::check(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    return values;
  }
  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// Times what `enqueue` puts on the stream: milliseconds of one of `rounds`, after one that does not count.
template <class F>
double milliseconds(cudaStream_t stream, int rounds, F&& enqueue) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cuda::check(cudaEventCreate(&begin), "cudaEventCreate");
  cuda::check(cudaEventCreate(&end), "cudaEventCreate");
  enqueue();
  cuda::check(cudaEventRecord(begin, stream), "cudaEventRecord");
  for (int round = 0; round < rounds; ++round) enqueue();
  cuda::check(cudaEventRecord(end, stream), "cudaEventRecord");
  cuda::check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float total = 0.0F;
  cuda::check(cudaEventElapsedTime(&total, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return static_cast<double>(total) / rounds;
}

/// Whether the program runs under a tool that makes it many times slower: what takes long or keeps time is then left out or cut down.
inline bool small_run() {
  const char* kind = std::getenv("DUALDECODER_GPU_TESTS");
  return kind != nullptr && std::strcmp(kind, "small") == 0;
}

/// Runs `tests` where there is a device. The result is main's: 0, 1 for failures, 77 for skipped.
template <class F>
int run_on_device(F&& tests) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: no CUDA device on this machine\n");
    return 77;
  }
  try {
    tests();
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  } catch (const std::exception& error) {
    std::printf("an unexpected exception: %s\n", error.what());
    return 1;
  }
  std::printf(failures == 0 ? "all as expected\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace dualdecoder::test
