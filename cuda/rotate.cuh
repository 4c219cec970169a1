// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

namespace dualdecoder::cuda {

/// Cosine and sine by which RoPE turns a pair, times its scale.
struct Turn {
  float cosine;
  float sine;

  /// The angle as f32 rounds it, as the dense model forms it.
  __device__ static Turn of(int position, float inverse, float scale) {
    Turn turn;
    sincosf(__fmul_rn(static_cast<float>(position), inverse), &turn.sine, &turn.cosine);
    turn.cosine *= scale;
    turn.sine *= scale;
    return turn;
  }
  /// Elements i and i + dim / 2 of a head.
  __device__ void turn(float& low, float& high) const {
    const float before = low;
    low = before * cosine - high * sine;
    high = high * cosine + before * sine;
  }
  /// Undoes turn() where `scale` was 1; else times its square.
  __device__ void turn_back(float& low, float& high) const {
    const float before = low;
    low = before * cosine + high * sine;
    high = high * cosine - before * sine;
  }
};

}  // namespace dualdecoder::cuda
