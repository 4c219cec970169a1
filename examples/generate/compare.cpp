// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/generate/compare.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

double log_sum_exp(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return most + std::log(sum);
}

std::ptrdiff_t argmax(std::span<const float> logits) { return std::max_element(logits.begin(), logits.end()) - logits.begin(); }

}  // namespace

LogitsRecord::LogitsRecord(int tokens, int vocabulary) : vocabulary_(static_cast<std::size_t>(vocabulary)) {
  constexpr std::size_t kMostBytes = std::size_t{8} << 30;
  const std::size_t most = kMostBytes / sizeof(float) / std::max<std::size_t>(vocabulary_, 1);
  detail::require(static_cast<std::size_t>(tokens) <= most, "max_new_tokens", tokens,
                  ("at most " + std::to_string(most) + " to keep the logits for a comparison with full attention").c_str());
}

double kl_divergence(std::span<const float> p, std::span<const float> q) {
  const double p_norm = log_sum_exp(p);
  const double q_norm = log_sum_exp(q);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double log_p = p[i] - p_norm;
    sum += std::exp(log_p) * (log_p - (q[i] - q_norm));
  }
  return std::max(sum, 0.0);
}

Comparison compare_with_full(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             const SessionOptions& options, std::span<const Token> prompt, std::span<const Token> generated,
                             const LogitsRecord& record, const std::function<void(std::size_t)>& progress) {
  SessionOptions full = options;
  full.store = StoreKind::full;
  full.predictor = PredictorKind::none;
  DecodeSession session = make_session(backend, weights, full);

  Comparison result;
  std::size_t same = 0;
  std::size_t index = 0;
  double kl_sum = 0;
  AddOptions add{.max_new_tokens = static_cast<int>(generated.size()), .forced = {generated.begin(), generated.end()}};
  add.on_logits = [&](std::span<const float> logits) {
    if (index >= record.size()) return;
    const auto ours = record.of(index++);
    same += argmax(logits) == argmax(ours) ? 1 : 0;
    const double kl = kl_divergence(logits, ours);
    kl_sum += kl;
    result.max_kl = std::max(result.max_kl, kl);
    progress(index);
  };
  session.add(prompt, std::move(add));
  while (session.active() > 0) session.step();

  result.tokens = static_cast<int>(index);
  if (index > 0) {
    result.agreement = static_cast<double>(same) / static_cast<double>(index);
    result.mean_kl = kl_sum / static_cast<double>(index);
  }
  const SessionStatistics statistics = session.statistics();
  const double seconds = std::chrono::duration<double>(statistics.decode).count();
  if (seconds > 0) result.full_tokens_per_second = static_cast<double>(statistics.generated_tokens) / seconds;
  return result;
}

}  // namespace dualdecoder::examples
