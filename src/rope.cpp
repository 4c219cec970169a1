// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/rope.hpp"

#include <cmath>

namespace dualdecoder::cpu {

void rope_angles(const float* inverse, int count, float attention_factor, int position, float* cosine, float* sine) noexcept {
  for (int i = 0; i < count; ++i) {
    const auto angle = static_cast<double>(static_cast<float>(position) * inverse[i]);
    cosine[i] = static_cast<float>(std::cos(angle)) * attention_factor;
    sine[i] = static_cast<float>(std::sin(angle)) * attention_factor;
  }
}

}  // namespace dualdecoder::cpu
