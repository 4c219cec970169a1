// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/fidelity.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

constexpr std::size_t kMostBytes = std::size_t{8} << 30U;

/// Several times as fast as std::max_element, which branches; a row has a whole vocabulary.
float largest_of(std::span<const float> values) {
  float largest = values.front();
  for (const float value : values) largest = std::max(largest, value);
  return largest;
}

/// Subtracts the logarithm of the sum of exponentials.
void normalize(std::span<float> logits) {
  const float largest = largest_of(logits);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  const auto shift = static_cast<float>(largest + std::log(sum));
  for (float& value : logits) value -= shift;
}

std::ptrdiff_t likeliest(std::span<const float> values) {
  return std::find(values.begin(), values.end(), largest_of(values)) - values.begin();
}

}  // namespace

std::vector<float> log_probabilities(std::span<const float> logits) {
  std::vector<float> out(logits.begin(), logits.end());
  normalize(out);
  return out;
}

double kl_divergence(std::span<const float> log_p, std::span<const float> log_q) {
  double sum = 0.0;
  for (std::size_t i = 0; i < log_p.size(); ++i) sum += std::exp(log_p[i]) * (log_p[i] - log_q[i]);
  return std::max(sum, 0.0);
}

LogProbabilities::LogProbabilities(int tokens, int vocabulary) : vocabulary_(static_cast<std::size_t>(vocabulary)) {
  const std::size_t most = kMostBytes / sizeof(float) / std::max<std::size_t>(vocabulary_, 1);
  dualdecoder::detail::require(static_cast<std::size_t>(tokens) <= most, "max_new_tokens", tokens,
                               ("at most " + std::to_string(most) + " to keep the logits for a comparison with full attention").c_str());
  values_.reserve(static_cast<std::size_t>(tokens) * vocabulary_);
}

void LogProbabilities::add(std::span<const float> logits) {
  values_.insert(values_.end(), logits.begin(), logits.end());
  normalize(std::span(values_).last(vocabulary_));
}

void FidelityMeter::add(std::span<const float> log_reference, std::span<const float> log_other) {
  kl_.push_back(kl_divergence(log_reference, log_other));
  same_.push_back(likeliest(log_reference) == likeliest(log_other));
}

Fidelity FidelityMeter::over(std::size_t first, std::size_t last) const {
  Fidelity fidelity;
  if (first >= last) return fidelity;
  std::vector<double> kl(kl_.begin() + static_cast<std::ptrdiff_t>(first), kl_.begin() + static_cast<std::ptrdiff_t>(last));
  std::sort(kl.begin(), kl.end());
  const auto count = static_cast<double>(kl.size());
  std::size_t same = 0;
  for (std::size_t i = first; i < last; ++i) same += same_[i] ? 1 : 0;
  fidelity.tokens = kl.size();
  fidelity.agreement = static_cast<double>(same) / count;
  for (const double value : kl) fidelity.mean_kl += value / count;
  fidelity.kl95 = kl[static_cast<std::size_t>(0.95 * (count - 1))];
  fidelity.max_kl = kl.back();
  return fidelity;
}

std::size_t FidelityMeter::first_divergence(std::size_t first) const {
  std::size_t at = first;
  while (at < same_.size() && same_[at]) ++at;
  return at - first;
}

SessionOptions full_attention(SessionOptions options) {
  options.store = StoreKind::full;
  options.predictor = PredictorKind::none;
  return options;
}

Reference make_reference(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                         const SessionOptions& options, std::span<const Token> prompt, AddOptions add) {
  Reference reference{.tokens = {}, .log_probabilities = {add.max_new_tokens, weights->config().vocabulary}, .session = {}};
  DecodeSession session = make_session(backend, weights, full_attention(options));
  add.on_logits = [&reference, then = std::move(add.on_logits)](std::span<const float> logits) {
    reference.log_probabilities.add(logits);
    if (then) then(logits);
  };
  session.add(prompt, std::move(add));
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) reference.tokens.push_back(event.token);
  }
  reference.session = session.statistics();
  return reference;
}

}  // namespace dualdecoder::examples
