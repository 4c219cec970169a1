// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"

namespace dualdecoder::detail {

inline constexpr int kMostThreads = 1'024;

/// Throws InvalidArgument.
inline void check_load_options(const LoadOptions& options) {
  require(options.matrix_type == DataType::f32 || options.matrix_type == DataType::bf16, "LoadOptions.matrix_type",
          name_of(options.matrix_type), "f32 or bf16");
  require(options.threads >= 0 && options.threads <= kMostThreads, "LoadOptions.threads", options.threads, "0 .. 1024");
}

/// The configuration with its context stretched as LoadOptions::yarn_factor says. Throws InvalidArgument.
inline ModelConfig stretched(ModelConfig config, float yarn_factor) {
  if (yarn_factor == 0.0F) return config;
  require(yarn_factor > 1.0F && yarn_factor <= 64.0F, "LoadOptions.yarn_factor", yarn_factor, "0 (off) or above 1 and at most 64");
  require(config.rope.scaling == RopeScaling::none && config.rope.frequency_factors.empty(), "LoadOptions.yarn_factor", yarn_factor,
          "0 for a model whose file scales its positions already");
  config.rope.scaling = RopeScaling::yarn;
  config.rope.factor = yarn_factor;
  config.rope.original_context = config.context;
  config.context = static_cast<int>(static_cast<float>(config.context) * yarn_factor);
  return config;
}

}  // namespace dualdecoder::detail
