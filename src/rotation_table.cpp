// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/rotation_table.hpp"

#include "src/chunk_geometry.hpp"

namespace dualdecoder::cpu {

RotationTable::RotationTable(const RopeConfig& rope, int head_dim, int positions, const DenseKernels& kernels)
    : rope_(rope_frequencies(rope, head_dim)), half_(head_dim / 2), positions_(positions), kernels_(kernels) {}

void RotationTable::carve(Carver& carver) {
  cosine_ = carver.take<float>(index(positions_) * index(half_));
  sine_ = carver.take<float>(index(positions_) * index(half_));
}

void RotationTable::fill() noexcept {
  for (int position = 0; position < positions_; ++position) {
    const std::size_t at = index(position) * index(half_);
    rope_angles(rope_.inverse.data(), half_, rope_.attention_factor, position, cosine_ + at, sine_ + at);
  }
}

void RotationTable::rotate(float* head, int position) const noexcept {
  const std::size_t at = index(position) * index(half_);
  kernels_.rotate(head, cosine_ + at, sine_ + at, index(half_));
}

void RotationTable::unrotate(float* head, int position) const noexcept {
  const std::size_t half = index(half_);
  const float* cosine = cosine_ + index(position) * half;
  const float* sine = sine_ + index(position) * half;
  const float scale = 1.0F / (rope_.attention_factor * rope_.attention_factor);
  for (std::size_t i = 0; i < half; ++i) {
    const float low = head[i];
    const float high = head[i + half];
    head[i] = (low * cosine[i] + high * sine[i]) * scale;
    head[i + half] = (high * cosine[i] - low * sine[i]) * scale;
  }
}

}  // namespace dualdecoder::cpu
