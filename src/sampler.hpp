// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "dualdecoder/sampling.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder::cpu {

/// A token in the running for being chosen, with its logit, or its probability up to a factor.
struct Candidate {
  float value;
  Token token;
};

/// Tokens of a row's history: those in `seen` (one bit per vocabulary entry, may be null) and those of the pass itself (-1: none).
struct RowHistory {
  const std::uint64_t* seen = nullptr;
  std::span<const Token> pass;
};

/// Chooses the token after a row. `logits` may be overwritten; `scratch` holds as many candidates as there are logits. A draw goes through
/// the candidates in the order of their numbers with the one random number of (seed, position), so a guess and the true row that later
/// stands at the same position mostly agree even where their logits differ a little. Logits that are NaN are never chosen unless all are.
Token sample_row(std::span<float> logits, const SamplingOptions& options, int position, const RowHistory& history,
                 std::span<Candidate> scratch);

}  // namespace dualdecoder::cpu
