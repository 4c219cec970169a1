// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

/// Records what `work` enqueues on `stream`, and on streams forked from it and joined again, as a CUDA graph of `device`; see
/// Backend::record. Other threads may allocate and launch meanwhile.
std::unique_ptr<StepGraph> record_graph(int device, const std::function<void()>& work, StreamRef stream);

}  // namespace dualdecoder::cuda
