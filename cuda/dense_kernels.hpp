// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

/// Largest head_dim that launch_finish_heads takes.
inline constexpr int kMostHeadDim = 256;

/// hidden[r] = embedding[tokens[r]], zeros for tokens outside 0 .. vocabulary - 1. hidden: [rows, width]; width % 8 == 0.
cudaError_t launch_embed(const Token* tokens, int rows, const __nv_bfloat16* embedding, int vocabulary, int width, float* hidden,
                         cudaStream_t stream);

/// Largest width that launch_rms_norm takes.
inline constexpr int kMostNormWidth = 16384;

/// RMSNorm of rows [rows, width] f32, rounded to bf16; width % 8 == 0. `weight` is not written by any kernel that is under way.
cudaError_t launch_rms_norm(const float* hidden, const float* weight, float epsilon, int rows, int width, __nv_bfloat16* out,
                            cudaStream_t stream);

/// What stands between the projections and attention: bias, norm of every q and k head, RoPE, rounding.
struct FinishHeads {
  int rows = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  const float* projected = nullptr;  // [rows, stride]: q, then k and v unless `k` is null
  int stride = 0;
  const int* positions = nullptr;  // [rows]
  const float* inverse = nullptr;  // [head_dim / 2] radians per token
  float attention_factor = 1.0F;
  float epsilon = 0.0F;
  const float *query_bias = nullptr, *key_bias = nullptr, *value_bias = nullptr;  // null: none
  const float *query_norm = nullptr, *key_norm = nullptr;                         // null: none
  void *q = nullptr, *k = nullptr, *v = nullptr;                                  // [rows, heads or kv_heads, head_dim]
  DataType type = DataType::bf16;                                                 // of q, k and v: f32 or bf16
};
cudaError_t launch_finish_heads(const FinishHeads& job, cudaStream_t stream);

/// out = silu(gate) * up, where gate_up: [rows, 2, width] and out: [rows, width]; width % 8 == 0.
cudaError_t launch_gate(const __nv_bfloat16* gate_up, int rows, int width, __nv_bfloat16* out, cudaStream_t stream);

/// Rounds `count` values to bf16; count % 8 == 0, pointers at 16 bytes.
cudaError_t launch_round(const float* values, std::size_t count, __nv_bfloat16* out, cudaStream_t stream);

}  // namespace dualdecoder::cuda
