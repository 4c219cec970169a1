// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/specache_layout.hpp"
#include "dualdecoder/step_view.hpp"

/// What the kernels that score and attend to a low-bit copy share: which part of a sequence a block works on, for which rows.
namespace dualdecoder::cuda {

/// A pass over one layer. A block serves `shared_rows` rows of a sequence: as many as have 16 query heads of a KV head together.
struct CopyPass {
  SpeCacheLayout layout;
  Layer layer;
  StepView view;
  RowsIn queries;
  int shared_rows;

  CopyPass(const SpeCacheLayout& from, Layer of, const StepView& pass, RowsIn rows)
      : layout(from), layer(of), view(pass), queries(rows), shared_rows(pass.rows_per_sequence) {
    if (shared_rows * layout.group > 16) shared_rows = 1;
  }
  __host__ __device__ int shares() const { return view.rows_per_sequence / shared_rows; }
  /// (part, KV head, place and share)
  dim3 grid() const {
    return {static_cast<unsigned>(layout.parts()), static_cast<unsigned>(layout.kv_heads),
            static_cast<unsigned>(view.sequences * shares())};
  }
};

/// What a block of such a grid works on.
struct CopyBlock {
  int part;
  int kv_head;
  int place;
  int first_number;  ///< of its first row in the sequence
  int first_row;     ///< in the pass
  int slot;
  int length;
  int copied;
  unsigned live;  ///< bit r: row first_number + r
  std::size_t list;

  __device__ explicit CopyBlock(const CopyPass& pass) {
    const StepView& view = pass.view;
    part = static_cast<int>(blockIdx.x);
    kv_head = static_cast<int>(blockIdx.y);
    place = static_cast<int>(blockIdx.z) / pass.shares();
    first_number = static_cast<int>(blockIdx.z) % pass.shares() * pass.shared_rows;
    first_row = place * view.rows_per_sequence + first_number;
    const RowMode mode = view.mode[place];
    live = 0;
    for (int r = 0; r < pass.shared_rows; ++r) live |= static_cast<unsigned>(row_is_live(mode, first_number + r)) << r;
    if (live == 0) return;
    slot = view.slot_of[place];
    length = view.position[place];
    copied = pass.layout.copied(length);
    list = pass.layout.list(slot, pass.layer, kv_head);
  }
  /// Whether row 0 waits for the tokens that it needs.
  __device__ bool waits(const CopyPass& pass) const {
    return pass.layout.wait_policy || (pass.view.waits != nullptr && pass.view.waits[place] != 0);
  }
  __device__ bool is_live(int r) const { return (live >> r & 1U) != 0; }
  /// First element of a column's query, or negative for a column without a live row.
  __device__ std::ptrdiff_t query(const SpeCacheLayout& layout, int column) const {
    const int r = column / layout.group;
    if (!is_live(r)) return -1;  // there is no bit for columns behind the last
    return static_cast<std::ptrdiff_t>((layout.row_list(first_row + r, kv_head) * static_cast<std::size_t>(layout.group) +
                                        static_cast<std::size_t>(column % layout.group)) *
                                       static_cast<std::size_t>(layout.dim));
  }
};

inline constexpr int kSplitWords = kMostSplitTokens / 32;

/// Sets the bits of a split's tokens, `end - first` from `first` on, that were fetched and lie over the copy; `bits` are zero. The block
/// synchronises afterwards.
__device__ inline void mark_fetched(const SpeCacheLayout& layout, std::size_t list, int first, int end, std::uint32_t* bits) {
  const int* const tokens = layout.fetched_token + list * static_cast<std::size_t>(layout.selected);
  const int count = layout.fetched_count[list];
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int token = tokens[i];
    if (token >= first && token < end) atomicOr(bits + (token - first) / 32, 1U << ((token - first) % 32));
  }
}

}  // namespace dualdecoder::cuda
