// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// One pass over a padded batch. All arrays are memory of the backend: the host fills capacities, the device fills contents, and nobody
/// reads them back inside a step. Row r of a pass belongs to place r / rows_per_sequence and is its row r % rows_per_sequence.
struct StepView {
  int sequences = 0;              ///< places in the batch, idle ones included
  int rows_per_sequence = 1;      ///< 1 or 2
  const int* slot_of = nullptr;   ///< [sequences] storage of the KvStore
  const int* position = nullptr;  ///< [sequences] position of the true token, which is the committed length, in tokens
  const RowMode* mode = nullptr;  ///< [sequences]
  /// [sequences] 1: row 0 waits for what it needs in this step, whatever the miss policy says; null: the policy decides
  const std::uint8_t* waits = nullptr;

  constexpr int rows() const noexcept { return sequences * rows_per_sequence; }
};

/// Whether a row computes anything, given its sequence's mode.
constexpr bool row_is_live(RowMode mode, int row) noexcept {
  switch (mode) {
    case RowMode::idle: return false;
    case RowMode::single: return row == 0;
    case RowMode::dual: return row <= 1;
    case RowMode::resync: return row == 1;
  }
  return false;
}

/// Position of a live row in tokens: the guess stands one behind the true token, a resync row stands in the true token's place.
constexpr int row_position(RowMode mode, int row, int position) noexcept {
  return mode == RowMode::dual && row == 1 ? position + 1 : position;
}

/// Chunk indices chosen per row and KV head, ascending, in memory of the backend.
struct Selection {
  int* chunks = nullptr;    ///< [rows, kv_heads, capacity]
  float* scores = nullptr;  ///< [rows, kv_heads, capacity] share of the summaries' softmax, largest over the query group
  int* count = nullptr;     ///< [rows, kv_heads]
  int capacity = 0;
  int kv_heads = 0;

  constexpr std::size_t list(int row, int kv_head) const noexcept {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head);
  }
  constexpr int* chunks_of(int row, int kv_head) const noexcept { return chunks + list(row, kv_head) * static_cast<std::size_t>(capacity); }
  constexpr float* scores_of(int row, int kv_head) const noexcept {
    return scores + list(row, kv_head) * static_cast<std::size_t>(capacity);
  }
  constexpr int& count_of(int row, int kv_head) const noexcept { return count[list(row, kv_head)]; }
};

/// What row 1 attends to; row 0 always attends to its own set.
enum class Row1Set : std::uint8_t {
  own_resident,  ///< its own chunks as far as they are resident, the rest by estimate (docs/concepts.md, "Front runner")
  row0,          ///< row 0's chunks, as DualDecoder publishes it
};

}  // namespace dualdecoder
