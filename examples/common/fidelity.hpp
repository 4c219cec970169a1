// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "dualdecoder/decode_session.hpp"

namespace dualdecoder::examples {

/// The logarithms of the probabilities that a row of logits stands for.
std::vector<float> log_probabilities(std::span<const float> logits);

/// KL(p || q) in nats of two rows of log-probabilities.
double kl_divergence(std::span<const float> log_p, std::span<const float> log_q);

/// One row of log-probabilities per token of a text, kept for a comparison. As large as tokens times vocabulary floats.
class LogProbabilities {
 public:
  /// Throws InvalidArgument when `tokens` rows are more than 8 GiB.
  LogProbabilities(int tokens, int vocabulary);

  void add(std::span<const float> logits);
  std::span<const float> row(std::size_t token) const { return std::span(values_).subspan(token * vocabulary_, vocabulary_); }
  std::size_t size() const { return vocabulary_ == 0 ? 0 : values_.size() / vocabulary_; }

 private:
  std::size_t vocabulary_;
  std::vector<float> values_;
};

/// How near one model's distributions are to another's, over a run of tokens.
struct Fidelity {
  std::size_t tokens = 0;
  double agreement = 0.0;  ///< share of tokens with the same likeliest token
  double mean_kl = 0.0;    ///< KL(reference || other), nats
  double kl95 = 0.0;       ///< its 95th percentile
  double max_kl = 0.0;
};

/// Compares two texts' distributions token by token.
class FidelityMeter {
 public:
  void add(std::span<const float> log_reference, std::span<const float> log_other);

  std::size_t size() const { return kl_.size(); }
  /// Of tokens first .. last-1; zeros where there are none.
  Fidelity over(std::size_t first, std::size_t last) const;
  /// The first token at or behind `first` whose likeliest token differs, counted from there; size() - first when none does.
  std::size_t first_divergence(std::size_t first) const;

 private:
  std::vector<double> kl_;
  std::vector<bool> same_;
};

/// A model's own greedy continuation under full attention, with the distributions behind it: what others are compared with.
struct Reference {
  std::vector<Token> tokens;
  LogProbabilities log_probabilities;
  SessionStatistics session;
};

/// Runs full attention with the formats of `options` over `prompt`; `add` says how long and where it stops. Throws as make_session and
/// DecodeSession::add, and what a callback of `add` throws.
Reference make_reference(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                         const SessionOptions& options, std::span<const Token> prompt, AddOptions add);

/// `options` for full attention: everything resident, nothing predicted.
SessionOptions full_attention(SessionOptions options);

}  // namespace dualdecoder::examples
