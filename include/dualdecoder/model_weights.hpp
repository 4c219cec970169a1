// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// How rotary positions are stretched beyond the trained context.
enum class RopeScaling : std::uint8_t { none, linear, llama3, yarn };

/// Rotary embedding. Rotation pairs are (i, i + head_dim/2), the order of Hugging Face checkpoints; loaders permute files that differ.
struct RopeConfig {
  float theta = 10000.0F;
  RopeScaling scaling = RopeScaling::none;
  float factor = 1.0F;            ///< context multiplier, >= 1
  int original_context = 0;       ///< trained context in tokens (llama3, yarn)
  float low_freq_factor = 1.0F;   ///< llama3
  float high_freq_factor = 4.0F;  ///< llama3
  float beta_fast = 32.0F;        ///< yarn
  float beta_slow = 1.0F;         ///< yarn
  float attention_factor = 0.0F;  ///< yarn; 0: 0.1 ln(factor) + 1
  /// Divisors of the head_dim/2 pair frequencies, applied as they stand; empty: none. GGUF files state llama3 scaling so, with scaling
  /// none.
  std::vector<float> frequency_factors;
};

/// Shape of a decoder-only transformer of the families in docs/concepts.md, "Model families". All counts are elements.
struct ModelConfig {
  std::string architecture;  ///< "llama", "qwen2", "qwen3"
  std::string name;          ///< the file's own name for the model, may be empty
  int layers = 0;
  int hidden = 0;
  int intermediate = 0;  ///< width of the gated MLP
  int heads = 0;         ///< query heads
  int kv_heads = 0;      ///< heads % kv_heads == 0
  int head_dim = 0;
  int vocabulary = 0;
  int context = 0;  ///< longest trained context in tokens, scaling included
  float rms_epsilon = 1e-5F;
  bool attention_bias = false;   ///< q, k, v have biases (Qwen2)
  bool qk_norm = false;          ///< RMSNorm of every q and k head before RoPE (Qwen3)
  bool tied_embeddings = false;  ///< the head is the embedding matrix
  RopeConfig rope;

  int query_group() const noexcept { return kv_heads > 0 ? heads / kv_heads : 0; }
  int q_width() const noexcept { return heads * head_dim; }
  int kv_width() const noexcept { return kv_heads * head_dim; }
};

/// What a tensor is for. Matrices are [out, in], row-major.
enum class TensorRole : std::uint8_t {
  embedding,       ///< [vocabulary, hidden]
  output_norm,     ///< [hidden]
  head,            ///< [vocabulary, hidden]; with tied embeddings the same tensor as embedding
  attention_norm,  ///< [hidden], per layer from here on
  query,           ///< [heads * head_dim, hidden]
  key,             ///< [kv_heads * head_dim, hidden]
  value,           ///< [kv_heads * head_dim, hidden]
  query_bias,      ///< [heads * head_dim], absent without attention_bias
  key_bias,        ///< [kv_heads * head_dim]
  value_bias,      ///< [kv_heads * head_dim]
  query_norm,      ///< [head_dim], absent without qk_norm
  key_norm,        ///< [head_dim]
  attention_out,   ///< [hidden, heads * head_dim]
  mlp_norm,        ///< [hidden]
  gate,            ///< [intermediate, hidden]
  up,              ///< [intermediate, hidden]
  down,            ///< [hidden, intermediate]
};

/// Configuration and tensors of a model, in memory of the backend that it was loaded for. Immutable and shared between sessions; every
/// call is safe from several threads. Vectors (norms, biases) are f32; matrices are f32 or bf16.
class ModelWeights {
 public:
  ModelWeights() = default;
  ModelWeights(const ModelWeights&) = delete;
  ModelWeights& operator=(const ModelWeights&) = delete;
  virtual ~ModelWeights() = default;

  virtual const ModelConfig& config() const noexcept = 0;
  /// The tensor of a role; `layer` is ignored for the roles before attention_norm. An absent optional tensor has null data.
  virtual ConstTensor tensor(TensorRole role, Layer layer) const noexcept = 0;
  /// Bytes held, by kind of memory.
  virtual MemoryPlan memory() const = 0;
};

}  // namespace dualdecoder
