// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/sampler.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "dualdecoder/counter_random.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

bool seen_before(const RowHistory& history, std::size_t index) {
  const auto token = static_cast<std::uint32_t>(history.pass[index]);
  if (history.seen != nullptr && (history.seen[token / 64] >> (token % 64) & 1U) != 0) return true;
  const auto earlier = history.pass.first(index);
  return std::find(earlier.begin(), earlier.end(), history.pass[index]) != earlier.end();
}

void penalise(std::span<float> logits, float penalty, const RowHistory& history) {
  if (penalty == 1.0F) return;
  const auto apply = [&](std::size_t token) { logits[token] = logits[token] > 0.0F ? logits[token] / penalty : logits[token] * penalty; };
  if (history.seen != nullptr) {
    for (std::size_t word = 0; word * 64 < logits.size(); ++word) {
      for (std::uint64_t bits = history.seen[word]; bits != 0; bits &= bits - 1) {
        const std::size_t token = word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
        if (token < logits.size()) apply(token);
      }
    }
  }
  for (std::size_t i = 0; i < history.pass.size(); ++i) {
    if (history.pass[i] >= 0 && !seen_before(history, i)) apply(static_cast<std::size_t>(history.pass[i]));
  }
}

Token likeliest(std::span<const float> logits) {
  std::size_t best = 0;
  float value = kNever;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > value) {
      value = logits[i];
      best = i;
    }
  }
  return static_cast<Token>(best);
}

bool likelier(const Candidate& a, const Candidate& b) { return a.value != b.value ? a.value > b.value : a.token < b.token; }
bool numbered_before(const Candidate& a, const Candidate& b) { return a.token < b.token; }

double sum_of(std::span<const Candidate> candidates) {
  double sum = 0.0;
  for (const Candidate& candidate : candidates) sum += static_cast<double>(candidate.value);
  return sum;
}

/// The smallest set of the likeliest with at least the share `top_p`; sorts only as far as that takes.
std::span<Candidate> nucleus(std::span<Candidate> candidates, float top_p) {
  const double target = static_cast<double>(top_p) * sum_of(candidates);
  double sum = 0.0;
  std::size_t sorted = 0;
  while (sorted < candidates.size()) {
    const std::size_t next = std::min(candidates.size(), sorted == 0 ? 64 : sorted * 4);
    const auto at = [&](std::size_t i) { return candidates.begin() + static_cast<std::ptrdiff_t>(i); };
    if (next < candidates.size()) std::nth_element(at(sorted), at(next), candidates.end(), likelier);
    std::sort(at(sorted), at(next), likelier);
    for (; sorted < next; ++sorted) {
      sum += static_cast<double>(candidates[sorted].value);
      if (sum >= target) return candidates.first(sorted + 1);
    }
  }
  return candidates;
}

Token draw(std::span<const Candidate> candidates, double uniform) {
  const double target = uniform * sum_of(candidates);
  double sum = 0.0;
  Token last = candidates.front().token;
  for (const Candidate& candidate : candidates) {
    if (candidate.value <= 0.0F) continue;
    last = candidate.token;
    sum += static_cast<double>(candidate.value);
    if (sum > target) break;
  }
  return last;
}

}  // namespace

Token sample_row(std::span<float> logits, const SamplingOptions& options, int position, const RowHistory& history,
                 std::span<Candidate> scratch) {
  penalise(logits, options.repetition_penalty, history);
  const Token best = likeliest(logits);
  const float top = logits[static_cast<std::size_t>(best)];
  if (options.temperature == 0.0F || options.top_k == 1 || !std::isfinite(top)) return best;

  std::span<Candidate> candidates = scratch.first(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) candidates[i] = {std::isnan(logits[i]) ? kNever : logits[i], static_cast<Token>(i)};
  const auto top_k = static_cast<std::size_t>(options.top_k);
  if (top_k > 0 && top_k < candidates.size()) {
    std::nth_element(candidates.begin(), candidates.begin() + options.top_k, candidates.end(), likelier);
    candidates = candidates.first(top_k);
  }
  // Probabilities up to the factor of the likeliest one's, which is 1.
  for (Candidate& candidate : candidates) candidate.value = std::exp((candidate.value - top) / options.temperature);
  if (options.top_p < 1.0F) candidates = nucleus(candidates, options.top_p);
  if (options.min_p > 0.0F) {
    const auto kept =
        std::partition(candidates.begin(), candidates.end(), [&](const Candidate& candidate) { return candidate.value >= options.min_p; });
    candidates = candidates.first(static_cast<std::size_t>(kept - candidates.begin()));
  }
  if (!std::is_sorted(candidates.begin(), candidates.end(), numbered_before)) {
    std::sort(candidates.begin(), candidates.end(), numbered_before);
  }
  return draw(candidates, detail::counter_uniform(options.seed, static_cast<std::uint64_t>(position)));
}

}  // namespace dualdecoder::cpu
