// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::cpu {

/// Rotary embedding made ready: pair i of a head turns by position * inverse[i], and cosines and sines are multiplied by the attention
/// factor. Computed as transformers' modeling_rope_utils.py does, whose float32 steps decide the angle at long positions.
struct RopeFrequencies {
  std::vector<float> inverse;  // [head_dim / 2] radians per token
  float attention_factor = 1.0F;
};

/// Throws InvalidArgument naming the field that is out of range.
RopeFrequencies rope_frequencies(const RopeConfig& rope, int head_dim);

/// Cosine and sine of every pair at a position, [count] each. The angle is the float32 product of position and frequency, as transformers
/// forms it; its cosine and sine are then exact to float32.
void rope_angles(const float* inverse, int count, float attention_factor, int position, float* cosine, float* sine) noexcept;

}  // namespace dualdecoder::cpu
