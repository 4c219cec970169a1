// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/export.hpp"
#include "dualdecoder/memory.hpp"

namespace dualdecoder::cpu {

/// What a CPU backend is made from. All pointers may be null, and must outlive the backend where they are not.
struct BackendOptions {
  int threads = 0;  ///< that compute, the caller's included; 0: as many as the machine has
  LogSink* log = nullptr;
  TraceSink* trace = nullptr;
  MemoryResource* device = nullptr;  ///< serves MemoryKind::device in place of the backend's own; likewise the next two
  MemoryResource* pinned = nullptr;
  MemoryResource* pageable = nullptr;
};

/// A backend that computes on the host: the calling thread is the stream, every call returns with its work done, and `device` and `pinned`
/// memory are ordinary memory. Throws InvalidArgument, std::system_error (no thread).
DUALDECODER_EXPORT std::shared_ptr<Backend> make_cpu_backend(const BackendOptions& options = {});

}  // namespace dualdecoder::cpu
