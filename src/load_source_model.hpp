// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/load_weights.hpp"
#include "src/model_files.hpp"

namespace dualdecoder::detail {

/// Checks, dequantises and copies the tensors of a parsed model into memory of `backend`; waits until done. Throws as load_weights.
std::shared_ptr<const ModelWeights> load_source_model(const SourceModel& model, Backend& backend, const LoadOptions& options);

}  // namespace dualdecoder::detail
