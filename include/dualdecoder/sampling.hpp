// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// How the next token is chosen. Filters apply in the order repetition penalty, temperature, top-k, top-p, min-p.
struct SamplingOptions {
  float temperature = 0.0F;         ///< 0: greedy; ties go to the lowest token
  int top_k = 0;                    ///< keep the k likeliest; 0: all
  float top_p = 1.0F;               ///< keep the smallest set with at least this probability, in (0, 1]
  float min_p = 0.0F;               ///< drop tokens below this share of the likeliest one's probability, in [0, 1]
  float repetition_penalty = 1.0F;  ///< > 0; logits of seen tokens are divided (positive) or multiplied (negative), CTRL section 4.1
  std::uint64_t seed = 0;           ///< one random number per (seed, position), so a guess draws what the true row will draw
};

/// Throws InvalidArgument naming the first field that is out of range.
inline void validate(const SamplingOptions& options) {
  detail::require(options.temperature >= 0.0F && options.temperature <= 100.0F, "temperature", options.temperature, "in 0 .. 100");
  detail::require(options.top_k >= 0, "top_k", options.top_k, "0 (off) or more");
  detail::require(options.top_p > 0.0F && options.top_p <= 1.0F, "top_p", options.top_p, "in (0, 1]");
  detail::require(options.min_p >= 0.0F && options.min_p <= 1.0F, "min_p", options.min_p, "in [0, 1]");
  detail::require(options.repetition_penalty > 0.0F && options.repetition_penalty <= 100.0F, "repetition_penalty",
                  options.repetition_penalty, "in (0, 100]");
}

/// What DenseModel::sample needs, in memory of the backend. A row's history is its sequence's tokens up to and including the row's own.
struct SamplingView {
  StepView step;
  const SamplingOptions* options = nullptr;  ///< [sequences]
  const Token* tokens = nullptr;             ///< [rows] the tokens that the pass ran
  /// [sequences] one bit per vocabulary entry, set for committed tokens; null where no sequence has a penalty
  std::uint64_t* const* seen = nullptr;
};

}  // namespace dualdecoder
