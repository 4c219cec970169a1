// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "src/rope_frequencies.hpp"

namespace dualdecoder::cpu {

using detail::rope_frequencies;
using detail::RopeFrequencies;

/// Cosine and sine of every pair at a position, [count] each. The angle is the float32 product of position and frequency, as transformers
/// forms it; its cosine and sine are then exact to float32.
void rope_angles(const float* inverse, int count, float attention_factor, int position, float* cosine, float* sine) noexcept;

}  // namespace dualdecoder::cpu
