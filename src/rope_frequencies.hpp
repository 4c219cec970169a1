// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::detail {

/// Rotary embedding made ready: pair i of a head turns by position * inverse[i], and cosines and sines are multiplied by the attention
/// factor. Computed as transformers' modeling_rope_utils.py does, whose float32 steps decide the angle at long positions.
struct RopeFrequencies {
  std::vector<float> inverse;  // [head_dim / 2] radians per token
  float attention_factor = 1.0F;
};

inline void check_rope(const RopeConfig& rope, int head_dim) {
  require(head_dim >= 2 && head_dim % 2 == 0, "head_dim", head_dim, "even and at least 2");
  require(std::isfinite(rope.theta) && rope.theta > 1.0F, "rope.theta", rope.theta, "finite and above 1");
  require(std::isfinite(rope.factor) && rope.factor >= 1.0F, "rope.factor", rope.factor, "finite and at least 1");
  const bool trained = rope.scaling == RopeScaling::llama3 || rope.scaling == RopeScaling::yarn;
  require(!trained || rope.original_context >= 1, "rope.original_context", rope.original_context, "at least 1 for llama3 and yarn");
  require(rope.scaling != RopeScaling::llama3 || (rope.low_freq_factor > 0.0F && rope.high_freq_factor > rope.low_freq_factor),
          "rope.high_freq_factor", rope.high_freq_factor, "above low_freq_factor, which is above 0");
  require(rope.scaling != RopeScaling::yarn || (rope.beta_slow > 0.0F && rope.beta_fast >= rope.beta_slow), "rope.beta_fast",
          rope.beta_fast, "at least beta_slow, which is above 0");
  const std::size_t factors = rope.frequency_factors.size();
  require(factors == 0 || factors == static_cast<std::size_t>(head_dim / 2), "rope.frequency_factors", factors,
          "empty or one factor for each of head_dim / 2 pairs");
}

/// theta^(2i / head_dim).
inline std::vector<float> wavelengths(const RopeConfig& rope, int head_dim) {
  std::vector<float> powers(static_cast<std::size_t>(head_dim / 2));
  for (int i = 0; i < head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    powers[static_cast<std::size_t>(i)] = static_cast<float>(std::pow(static_cast<double>(rope.theta), static_cast<double>(exponent)));
  }
  return powers;
}

/// Slow pairs are stretched by the factor, fast ones kept, those between blended (Llama 3.1's reference code).
inline void stretch_llama3(const RopeConfig& rope, std::vector<float>& inverse) {
  const auto context = static_cast<double>(rope.original_context);
  const auto longest = static_cast<float>(context / static_cast<double>(rope.low_freq_factor));
  const auto shortest = static_cast<float>(context / static_cast<double>(rope.high_freq_factor));
  for (float& frequency : inverse) {
    const float wavelength = static_cast<float>(2.0 * std::numbers::pi) / frequency;
    if (wavelength > longest) {
      frequency /= rope.factor;
    } else if (wavelength >= shortest) {
      const float blend =
          (static_cast<float>(context) / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      frequency = (1.0F - blend) * frequency / rope.factor + blend * frequency;
    }
  }
}

/// Pairs blend from kept to stretched between the two that turn beta_fast and beta_slow times in the trained context (YaRN,
/// arXiv 2309.00071, section 3.2).
inline void stretch_yarn(const RopeConfig& rope, int head_dim, const std::vector<float>& powers, std::vector<float>& inverse) {
  const auto pair_of = [&](float turns) {
    return head_dim * std::log(rope.original_context / (static_cast<double>(turns) * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(static_cast<double>(rope.theta)));
  };
  const double low = std::max(std::floor(pair_of(rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_of(rope.beta_slow)), head_dim - 1.0);
  if (high == low) high += 0.001;
  for (std::size_t i = 0; i < inverse.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0F, 1.0F);
    const float kept = 1.0F - ramp;
    inverse[i] = 1.0F / (rope.factor * powers[i]) * (1.0F - kept) + 1.0F / powers[i] * kept;
  }
}

/// Throws InvalidArgument naming the field that is out of range. Inline, for the compiled components share no hidden symbols.
inline RopeFrequencies rope_frequencies(const RopeConfig& rope, int head_dim) {
  check_rope(rope, head_dim);
  const std::vector<float> powers = wavelengths(rope, head_dim);
  RopeFrequencies made;
  made.inverse.resize(powers.size());
  std::transform(powers.begin(), powers.end(), made.inverse.begin(), [](float power) { return 1.0F / power; });
  switch (rope.scaling) {
    case RopeScaling::none: break;
    case RopeScaling::linear:
      for (float& frequency : made.inverse) frequency /= rope.factor;
      break;
    case RopeScaling::llama3: stretch_llama3(rope, made.inverse); break;
    case RopeScaling::yarn:
      stretch_yarn(rope, head_dim, powers, made.inverse);
      made.attention_factor =
          rope.attention_factor > 0.0F ? rope.attention_factor : static_cast<float>(0.1 * std::log(static_cast<double>(rope.factor)) + 1.0);
      break;
  }
  for (std::size_t i = 0; i < rope.frequency_factors.size(); ++i) {
    require(std::isfinite(rope.frequency_factors[i]) && rope.frequency_factors[i] > 0.0F, "rope.frequency_factors",
            rope.frequency_factors[i], "finite and above 0");
    made.inverse[i] /= rope.frequency_factors[i];
  }
  return made;
}

}  // namespace dualdecoder::detail
