// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/chunk_geometry.hpp"
#include "src/low_rank.hpp"
#include "src/rotation_table.hpp"
#include "src/store.hpp"

namespace dualdecoder::cpu {

/// The keys of whole chunks before RoPE as two factors, per layer over all KV heads side by side: one row of `rank` coefficients a token,
/// times `rank` directions, which are the leading right singular vectors of the prompt's keys. Both are kept in the type of the keys. The
/// singular values stay with the coefficients, so that a token that comes later is projected on the same directions; with a rank of
/// kv_heads * head_dim that loses nothing. Threading: calls for different layers or chunks may run at once with different workers.
class LowRankKeys {
 public:
  /// Keys after RoPE of consecutive tokens: [tokens, dim] of KV head 0, of head h `head_bytes` times h behind.
  struct Source {
    const std::byte* base = nullptr;
    std::size_t head_bytes = 0;
  };
  /// Work space of one worker for factor(); needed during prefill alone.
  struct PrefillWork {
    LowRankFactor factor;
    float* rows = nullptr;     // [kBlock, width]
    float* vectors = nullptr;  // [rank, width]
  };

  /// Throws InvalidArgument where the build has no LAPACK, or naming the field of `options` that is out of range.
  LowRankKeys(const StoreOptions& options, const ChunkGeometry& geometry, const StoreResources& resources);

  int rank() const noexcept { return rank_; }
  /// Take memory from `carver`; called once with a counting carver for the size and once with memory, then fill().
  void carve_factors(Carver& carver);
  void carve_work(Carver& carver);
  void fill() noexcept { rotations_.fill(); }
  PrefillWork carve_prefill_work(Carver& carver) const;

  /// Finds a layer's directions from the keys of a prompt of `tokens`. Throws Error.
  void factor(int slot, Layer layer, const Source& keys, int tokens, PrefillWork& work);
  /// Projects a whole chunk; `keys` are its tokens.
  void project(int slot, Layer layer, int chunk, const Source& keys, int worker);
  /// Writes a KV head's keys of a chunk [chunk, dim], after RoPE, in the type of the keys.
  void rebuild(int slot, Layer layer, int kv_head, int chunk, void* keys, int worker) const;

 private:
  static constexpr int kBlock = 128;  // tokens of one product

  std::size_t layer_of(int slot, Layer layer) const noexcept { return index(slot) * index(layers_) + index(layer); }
  std::byte* directions_of(int slot, Layer layer, int kv_head) const noexcept;
  std::byte* coefficients_of(int slot, Layer layer, int chunk) const noexcept;
  float* worker_row(int worker) const noexcept { return worker_rows_ + index(worker) * worker_floats(); }
  std::size_t worker_floats() const noexcept { return index(geometry_.chunk) * index(geometry_.dim + 2 * rank_); }

  ChunkGeometry geometry_;
  int layers_;
  int kv_heads_;
  int sequences_;
  int threads_;
  int rank_;
  bool bf16_;
  const AttentionKernels& kernels_;
  RotationTable rotations_;
  std::byte* directions_ = nullptr;    // [sequences, layers, kv_heads, rank, dim]
  std::byte* coefficients_ = nullptr;  // [sequences, layers, max_chunks * chunk, rank]
  float* worker_rows_ = nullptr;       // [threads, worker_floats()]
};

}  // namespace dualdecoder::cpu
