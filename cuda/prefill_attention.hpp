// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "dualdecoder/types.hpp"

namespace dualdecoder::cuda {

/// Query row i sees keys 0 .. offset + i. Keys and values hold offset + rows tokens. All data at 16 bytes, of f32 or bf16; f32 is rounded
/// to bf16 while it is loaded.
struct PrefillAttention {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int rows = 0;
  int offset = 0;
  const void* queries = nullptr;  // [rows, heads, head_dim]
  const void* keys = nullptr;     // [offset + rows, kv_heads, head_dim]
  const void* values = nullptr;   // like keys
  void* out = nullptr;            // [rows, heads, head_dim]
  DataType query_type = DataType::bf16;
  DataType key_type = DataType::bf16;  // of values too
  DataType out_type = DataType::bf16;
};

/// Whether there is a kernel for this head_dim: 64, 80, 96, 128 and 256.
bool has_prefill_attention(int head_dim) noexcept;

/// Shared memory of a block in bytes, which the device must offer; 0 where there is no kernel.
std::size_t prefill_attention_shared_bytes(int head_dim) noexcept;

/// Lets the kernels of the current device use that much; once, outside of a recording.
cudaError_t prepare_prefill_attention(int head_dim);

/// Causal attention on tensor cores with a streaming softmax (FlashAttention-2, arXiv 2307.08691). Takes no memory; a row's bits depend
/// neither on the other rows nor on its place among them.
cudaError_t launch_prefill_attention(const PrefillAttention& job, cudaStream_t stream);

}  // namespace dualdecoder::cuda
