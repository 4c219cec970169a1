// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "dualdecoder/load_weights.hpp"
#include "src/model_files.hpp"

namespace dualdecoder::detail {

/// Checks, dequantises and copies the tensors of a parsed model into memory of `backend`; waits until done. `release`, if not null, is
/// given the parts of the files that have been read. Throws as load_weights.
std::shared_ptr<const ModelWeights> load_source_model(const SourceModel& model, Backend& backend, const LoadOptions& options,
                                                      void (*release)(std::span<const std::byte>) noexcept = nullptr);

}  // namespace dualdecoder::detail
