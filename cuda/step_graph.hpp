// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <shared_mutex>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

/// Records what `work` enqueues on `stream`, and on streams forked from it and joined again, as a CUDA graph of `device`; see
/// Backend::record. Other threads may allocate and launch meanwhile; what waits for the whole device breaks the recording, see
/// recordings().
std::unique_ptr<StepGraph> record_graph(int device, const std::function<void()>& work, StreamRef stream);

/// Held shared while a step is recorded. The library's own calls that wait for the whole device hold it exclusively: making and destroying
/// a cuBLAS handle does, and CUDA refuses that while any thread records and breaks its recording.
std::shared_mutex& recordings() noexcept;

}  // namespace dualdecoder::cuda
