// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <source_location>
#include <utility>

#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

/// Throws unless `status` is success: OutOfMemory for what the device could not allocate (`bytes` asked for, where known), else CudaError
/// with `what`, the place and the runtime's own words. A pending error that the context survives is cleared, so the next call starts clean.
void check(cudaError_t status, const char* what, std::size_t bytes = 0, std::source_location place = std::source_location::current());

/// The error of a kernel launch just made: check(cudaGetLastError(), what) for launchers that throw themselves.
inline void check_launch(const char* what, std::source_location place = std::source_location::current()) {
  check(cudaGetLastError(), what, 0, place);
}

/// Makes `device` current for the scope and restores the caller's device after it. Throws CudaError where the device cannot be used.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  int before_ = -1;  // the device to restore, -1: none was changed
};

/// An owned non-blocking stream of the current device; empty by default. Work still on it when it is destroyed runs to its end.
class Stream {
 public:
  Stream() = default;
  /// `priority` as in cudaStreamCreateWithPriority: lower is more urgent, out-of-range values are clamped by the runtime.
  static Stream create(int priority = 0);
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~Stream();

  cudaStream_t get() const noexcept { return stream_; }
  operator StreamRef() const noexcept { return stream_; }  // NOLINT: a stream is where a StreamRef is asked for

 private:
  cudaStream_t stream_ = nullptr;
};

/// An owned event without timing, for order between streams; empty by default.
class Event {
 public:
  Event() = default;
  static Event create();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  /// Marks what `stream` holds so far.
  void record(StreamRef stream);
  /// `stream` goes on when what was marked last has run; neither call makes the host wait.
  void hold(StreamRef stream) const;
  cudaEvent_t get() const noexcept { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace dualdecoder::cuda
