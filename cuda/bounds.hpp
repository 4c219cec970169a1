// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"

namespace dualdecoder::cuda {

/// Shapes and device arrays of a store that ranks by bounds, passed to kernels by value. Bounds of a chunk are the least elements of its
/// keys [dim], then the largest, bf16.
struct BoundsLayout {
  int layers;
  int kv_heads;
  int group;  ///< query heads of a KV head
  int dim;
  int max_sequences;
  int rows_per_sequence;
  int chunk;         ///< tokens
  int first_chunk;   ///< that can be chosen, behind the sinks
  int local_tokens;  ///< of the window
  int selected;      ///< chunks of a row list at most
  int stride;        ///< chunks of the longest sequence, a multiple of 4

  std::byte** bounds;   ///< [max_sequences] [layers, kv_heads, chunks] bounds
  int* chunks;          ///< [max_sequences]
  std::uint16_t* row0;  ///< [max_sequences, layers, kv_heads, dim] bf16 keys that a commit keeps
  float* scores;        ///< [row lists, group, stride] of a layer, in units of log 2
  float* ranks;         ///< [row lists, stride] log 2 of the largest share over the group

  DUALDECODER_HOST_DEVICE std::size_t row_list(int row, int kv_head) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  /// Chunks that can be chosen when a sequence has `length` tokens; may be negative.
  DUALDECODER_HOST_DEVICE int choosable(int length) const { return (length - local_tokens) / chunk - first_chunk; }
};

// bounds.cu; each enqueues its kernels on `stream`, neither waits nor allocates, and may be captured.

/// Widens the bounds of the chunks of tokens first .. first+count-1, which begin anew with their first token. keys: [count, kv_heads, dim].
void widen_by_block(const BoundsLayout& layout, Layer layer, int slot, int first, int count, RowsIn keys, cudaStream_t stream);
/// Keeps the keys [rows, kv_heads, dim] of row 0 until a commit.
void keep_row0(const BoundsLayout& layout, Layer layer, const StepView& view, RowsIn keys, cudaStream_t stream);
/// Widens by the kept keys of the rows that become part of the context.
void widen_by_row0(const BoundsLayout& layout, const StepView& view, cudaStream_t stream);
/// The best chunks of every live row, ascending, with shares; dead rows get none.
void choose_by_bounds(const BoundsLayout& layout, Layer layer, const StepView& view, RowsIn queries, const Selection& by_row,
                      cudaStream_t stream);

}  // namespace dualdecoder::cuda
