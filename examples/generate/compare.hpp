// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "dualdecoder/decode_session.hpp"
#include "examples/common/fidelity.hpp"
#include "examples/generate/report.hpp"

namespace dualdecoder::examples {

/// Runs full attention over prompt and generated tokens, teacher forced, and compares its distributions with those of the record.
/// `progress` is told the tokens done. Needs memory for the whole context.
Comparison compare_with_full(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             const SessionOptions& options, std::span<const Token> prompt, std::span<const Token> generated,
                             const LogProbabilities& record, const std::function<void(std::size_t)>& progress);

}  // namespace dualdecoder::examples
