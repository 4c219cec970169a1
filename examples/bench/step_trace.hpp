// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "dualdecoder/types.hpp"

namespace dualdecoder::examples {

/// What a real model chose in every pass of one sequence: the rows' modes, positions and chunks. Speed on made-up weights is measured with
/// these choices in place of the model's own, which would have no locality.
struct StepTrace {
  static constexpr int kRows = 2;

  int layers = 0;
  int kv_heads = 0;
  int capacity = 0;                    ///< chunks of one list
  int chunk = 0;                       ///< tokens
  bool recorded = false;               ///< from a real model; else drawn at random
  std::vector<RowMode> mode;           ///< [steps]
  std::vector<std::int32_t> position;  ///< [steps]
  std::vector<std::uint32_t> chunks;   ///< [steps, layers, rows, kv_heads, capacity] ascending
  std::vector<std::uint16_t> count;    ///< [steps, layers, rows, kv_heads]

  int steps() const noexcept { return static_cast<int>(mode.size()); }
  std::size_t list(int step, Layer layer, int row, int kv_head) const noexcept {
    return ((static_cast<std::size_t>(step) * static_cast<std::size_t>(layers) + static_cast<std::size_t>(layer)) * kRows +
            static_cast<std::size_t>(row)) *
               static_cast<std::size_t>(kv_heads) +
           static_cast<std::size_t>(kv_head);
  }

  /// Throws IoError.
  void save(const std::filesystem::path& path) const;
  /// Throws IoError, FormatError.
  static StepTrace load(const std::filesystem::path& path);
  /// Made-up choices with the locality measured on a real model: from step to step a list keeps `stays` of its chunks, and what row 1 names
  /// is what row 0 chooses next up to `hit`.
  static StepTrace random(int layers, int kv_heads, int capacity, int chunk, int position, int steps, double stays, double hit);
};

}  // namespace dualdecoder::examples
