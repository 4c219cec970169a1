// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "examples/generate/report.hpp"

namespace dualdecoder::examples {

/// The logits of every generated token, kept for compare_with_full.
class LogitsRecord {
 public:
  /// Throws InvalidArgument when `tokens` times `vocabulary` logits are more than 8 GiB.
  LogitsRecord(int tokens, int vocabulary);

  void add(std::span<const float> logits) { values_.insert(values_.end(), logits.begin(), logits.end()); }
  std::span<const float> of(std::size_t token) const { return std::span(values_).subspan(token * vocabulary_, vocabulary_); }
  std::size_t size() const { return values_.size() / vocabulary_; }

 private:
  std::size_t vocabulary_;
  std::vector<float> values_;
};

/// Runs full attention over prompt and generated tokens, teacher forced, and compares its logits with those of the record. `progress` is
/// told the tokens done. Needs memory for the whole context.
Comparison compare_with_full(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             const SessionOptions& options, std::span<const Token> prompt, std::span<const Token> generated,
                             const LogitsRecord& record, const std::function<void(std::size_t)>& progress);

/// KL(p || q) in nats of the distributions that two rows of logits stand for.
double kl_divergence(std::span<const float> p, std::span<const float> q);

}  // namespace dualdecoder::examples
