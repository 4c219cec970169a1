// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/export.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder {

struct LoadProgress {
  std::uint64_t done_bytes = 0;  ///< of the file
  std::uint64_t total_bytes = 0;
};

struct LoadOptions {
  DataType matrix_type = DataType::bf16;  ///< f32 or bf16: what matrices are dequantised to
  int threads = 0;                        ///< for dequantising; 0: as many as the machine has
  /// > 1: stretches the file's context by YaRN (Peng and others 2023) with this factor; 0: as the file says. Not for a file that scales
  /// itself.
  float yarn_factor = 0.0F;
  /// Called from the loading thread; an exception thrown from it stops the load, frees what was loaded and reaches the caller.
  std::function<void(const LoadProgress&)> on_progress;
};

/// Reads a GGUF file, or a folder with config.json and *.safetensors, into memory of `backend`; waits until done.
/// Throws IoError (cannot read), FormatError (malformed, NaN or Inf, unknown architecture or quantisation), OutOfMemory.
DUALDECODER_EXPORT std::shared_ptr<const ModelWeights> load_weights(const std::filesystem::path& path, Backend& backend,
                                                                    const LoadOptions& options = {});

/// A model of any shape with seeded normal weights scaled by 1/sqrt(fan-in); the same seed gives the same bytes. For tests and benchmarks.
DUALDECODER_EXPORT std::shared_ptr<const ModelWeights> make_synthetic_weights(const ModelConfig& config, std::uint64_t seed,
                                                                              Backend& backend, const LoadOptions& options = {});

/// Configuration alone, without reading weights: what memory_plan() needs; `yarn_factor` as in LoadOptions. Throws as load_weights.
DUALDECODER_EXPORT ModelConfig read_model_config(const std::filesystem::path& path, float yarn_factor = 0.0F);

}  // namespace dualdecoder
