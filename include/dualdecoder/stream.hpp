// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

struct CUstream_st;  // what cudaStream_t points to; core needs no CUDA header

namespace dualdecoder {

/// A non-owning reference to a stream of the backend: the order in which enqueued work runs. It cannot be made from 0 or nullptr, so a
/// forgotten stream does not compile. On the CPU backend the calling thread is the stream and every call returns with its work done.
class StreamRef {
 public:
  StreamRef(CUstream_st* stream) noexcept : stream_(stream) {}  // NOLINT: implicit from cudaStream_t by design
  StreamRef(int) = delete;
  StreamRef(std::nullptr_t) = delete;

  CUstream_st* get() const noexcept { return stream_; }
  friend bool operator==(StreamRef, StreamRef) = default;

 private:
  CUstream_st* stream_;
};

}  // namespace dualdecoder
