// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/generate/compare.hpp"

namespace dualdecoder::examples {

Comparison compare_with_full(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             const SessionOptions& options, std::span<const Token> prompt, std::span<const Token> generated,
                             const LogProbabilities& record, const std::function<void(std::size_t)>& progress) {
  DecodeSession session = make_session(backend, weights, full_attention(options));
  FidelityMeter meter;
  AddOptions add{.max_new_tokens = static_cast<int>(generated.size()), .forced = {generated.begin(), generated.end()}};
  add.on_logits = [&](std::span<const float> logits) {
    if (meter.size() >= record.size()) return;
    meter.add(log_probabilities(logits), record.row(meter.size()));
    progress(meter.size());
  };
  session.add(prompt, std::move(add));
  while (session.active() > 0) session.step();

  const Fidelity fidelity = meter.over(0, meter.size());
  Comparison result{
      .tokens = static_cast<int>(fidelity.tokens), .agreement = fidelity.agreement, .mean_kl = fidelity.mean_kl, .max_kl = fidelity.max_kl};
  const SessionStatistics statistics = session.statistics();
  const double seconds = std::chrono::duration<double>(statistics.decode).count();
  if (seconds > 0) result.full_tokens_per_second = static_cast<double>(statistics.generated_tokens) / seconds;
  return result;
}

}  // namespace dualdecoder::examples
