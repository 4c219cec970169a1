// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {

inline constexpr int kScoreChunks = 512;  ///< chunks whose landmarks one block scores

/// Shapes and device arrays of the store of low-rank keys, passed to kernels by value. Slots, predictions and counts are those of a
/// resident store whose slots are one budget and whose host tier holds values alone; it has no sinks and no summaries.
struct ShadowLayout {
  StoreLayout store;
  int rank;              ///< of the factors, a multiple of 8
  int outlier_slots;     ///< of a list
  int parts;             ///< of kPartTokens that what a row attends to can take
  float rotation_scale;  ///< that RoPE multiplies keys with

  float* inverse;               ///< [dim / 2] radians per token
  __nv_bfloat16* directions;    ///< [lists, rank, dim]
  __nv_bfloat16* coefficients;  ///< [max_sequences, layers, max_chunks * chunk, rank]
  __nv_bfloat16* landmarks;     ///< [lists, max_chunks, dim] means of keys after RoPE
  std::byte* outliers;          ///< [lists, outlier_slots] chunk-heads
  int* outlier_chunks;          ///< [lists, outlier_slots] ascending
  int* outlier_count;           ///< [lists]
  std::uint32_t* outlier_bits;  ///< [lists, bit_words()]
  int* keys_of;                 ///< [lists, slots] the chunk whose keys were rebuilt in the slot, -1: none

  // of one layer of a pass
  float* scores;     ///< [row lists, group, max_chunks] -infinity for outliers
  float* score_max;  ///< [row lists, score_splits(), group]
  float* score_sum;  ///< [row lists, score_splits(), group] of exp(score - score_max)
  float* ranks;      ///< [row lists or the lists of one sequence, max_chunks]
  float* partials;   ///< [row lists, parts, group, dim + 2]

  DUALDECODER_HOST_DEVICE int bit_words() const { return (store.max_chunks + 31) / 32; }
  DUALDECODER_HOST_DEVICE int score_splits() const { return (store.max_chunks + kScoreChunks - 1) / kScoreChunks; }
  DUALDECODER_HOST_DEVICE int width() const { return store.kv_heads * store.dim; }
  DUALDECODER_HOST_DEVICE __nv_bfloat16* directions_of(std::size_t list) const {
    return directions + list * static_cast<std::size_t>(rank) * static_cast<std::size_t>(store.dim);
  }
  DUALDECODER_HOST_DEVICE __nv_bfloat16* coefficients_of(int slot, Layer layer, int token) const {
    const std::size_t of_layer = store.list(slot, layer, 0) / static_cast<std::size_t>(store.kv_heads);
    const std::size_t tokens = static_cast<std::size_t>(store.max_chunks) * static_cast<std::size_t>(store.chunk);
    return coefficients + (of_layer * tokens + static_cast<std::size_t>(token)) * static_cast<std::size_t>(rank);
  }
  DUALDECODER_HOST_DEVICE __nv_bfloat16* landmark(std::size_t list, int chunk) const {
    return landmarks +
           (list * static_cast<std::size_t>(store.max_chunks) + static_cast<std::size_t>(chunk)) * static_cast<std::size_t>(store.dim);
  }
  DUALDECODER_HOST_DEVICE std::byte* outlier(std::size_t list, int number) const {
    return outliers + (list * static_cast<std::size_t>(outlier_slots) + static_cast<std::size_t>(number)) * store.chunk_bytes;
  }
  DUALDECODER_HOST_DEVICE int* outlier_chunks_of(std::size_t list) const {
    return outlier_chunks + list * static_cast<std::size_t>(outlier_slots);
  }
  DUALDECODER_HOST_DEVICE std::uint32_t* outlier_bits_of(std::size_t list) const {
    return outlier_bits + list * static_cast<std::size_t>(bit_words());
  }
  DUALDECODER_HOST_DEVICE float* ranks_of(std::size_t list) const { return ranks + list * static_cast<std::size_t>(store.max_chunks); }
};

/// A prompt's keys after RoPE on the host tier until it is sealed: [layers, capacity, kv_heads * dim].
struct PromptKeys {
  __nv_bfloat16* data;
  int capacity;

  DUALDECODER_HOST_DEVICE __nv_bfloat16* row(const ShadowLayout& layout, Layer layer, int token) const {
    return data + (static_cast<std::size_t>(layer) * static_cast<std::size_t>(capacity) + static_cast<std::size_t>(token)) *
                      static_cast<std::size_t>(layout.width());
  }
};

// Each function enqueues its kernels on `stream` and neither waits nor allocates. Those of a step may be captured: their grids follow from
// the view's row counts and the layout's capacities alone.

// shadow_kv_prefill.cu
/// Adds tokens first .. first+count-1 to the host tier; keys, values: [count, kv_heads, dim].
void append_shadow(const ShadowLayout& layout, const PromptKeys& prompt, Layer layer, int slot, int first, int count, RowsIn keys,
                   RowsIn values, cudaStream_t stream);
/// Tokens first .. first+count-1 of a layer before RoPE: rows [count, width].
void unrotate_rows(const ShadowLayout& layout, const PromptKeys& prompt, Layer layer, int first, int count, float* rows,
                   cudaStream_t stream);
/// Keeps the strongest `rank` of eigenvectors [width, width], which ascend by strength; the kept ones as rounded to vectors [rank, width].
void keep_directions(const ShadowLayout& layout, Layer layer, int slot, const float* eigenvectors, float* vectors, cudaStream_t stream);
/// Rounds the coefficients [count, rank] of tokens first .. first+count-1.
void keep_coefficients(const ShadowLayout& layout, Layer layer, int slot, int first, int count, const float* coefficients,
                       cudaStream_t stream);
/// Landmarks of a prompt of `length` tokens, its outliers, and its window.
void finish_prompt(const ShadowLayout& layout, const PromptKeys& prompt, int slot, int length, cudaStream_t stream);

// shadow_kv_select.cu
/// Chooses for every live row the chunks before the window, outliers apart, with the largest share of the softmax over their landmarks, the
/// largest over the group, ties to the lower chunk; ascending, with shares. Dead rows get none.
void select_landmarks(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, const Selection& by_row,
                      cudaStream_t stream);

// shadow_kv_rebuild.cu
/// Rebuilds the keys of what any live row chose and has a slot, unless they are there.
void rebuild_chosen(const ShadowLayout& layout, Layer layer, const StepView& view, const Selection& by_row, cudaStream_t stream);
/// Brings back what the window of `tokens` tokens needs of chunks that lay before the window of `before` tokens: outliers as they were,
/// the others with rebuilt keys and the host tier's values.
void restore_shadow_window(const ShadowLayout& layout, int slot, int tokens, int before, cudaStream_t stream);

// shadow_kv_attend.cu
/// Writes the rows' keys and values into the window, then attends to outliers, chosen chunks that have a slot, and the window.
void attend_shadow(const ShadowLayout& layout, Layer layer, const StepView& view, RowsIn queries, RowsIn keys, RowsIn values,
                   const Selection& by_row, RowsOut out, cudaStream_t stream);

// shadow_kv_upkeep.cu
/// Row 0 of single and dual places becomes part of the context: chunks that are complete get a landmark and coefficients, and their values
/// are listed for the host. Counts the pass.
void commit_shadow(const ShadowLayout& layout, const StepView& view, const TransferList& write_back, cudaStream_t stream);
/// Empties the slots of a layer of every place that is not idle.
void empty_slots(const ShadowLayout& layout, Layer layer, const StepView& view, cudaStream_t stream);
/// Forgets rebuilt keys and outliers of a sequence from `first_chunk` on.
void forget_shadow(const ShadowLayout& layout, int slot, int first_chunk, cudaStream_t stream);

}  // namespace dualdecoder::cuda
