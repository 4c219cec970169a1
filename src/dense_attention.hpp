// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "src/simd/dense_simd.hpp"
#include "src/thread_pool.hpp"

namespace dualdecoder::cpu {

/// Query row i sees keys 0 .. offset + i. Keys and values hold offset + rows tokens.
struct DenseAttention {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int rows = 0;
  int offset = 0;
  const float* queries = nullptr;  // [rows, heads, head_dim]
  MatrixRows keys;                 // [tokens, kv_heads, head_dim]; stride kv_heads * head_dim
  MatrixRows values;               // like keys
  float* out = nullptr;            // [rows, heads, head_dim]
};

/// Floats of scratch that each thread needs for run_attention.
std::size_t attention_scratch(const DenseKernels& kernels, int heads, int kv_heads, int head_dim) noexcept;

/// Causal attention in blocks of keys with a streaming softmax (FlashAttention, arXiv 2205.14135); memory does not grow with the context.
/// A row's bits depend on neither threads nor the other rows. `scratch` is [threads, attention_scratch] floats at 64 bytes.
void run_attention(const DenseKernels& kernels, ThreadPool& pool, const DenseAttention& attention, float* scratch);

}  // namespace dualdecoder::cpu
