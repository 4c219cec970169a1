// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "src/weight_layout.hpp"

namespace dualdecoder::detail {

/// Fills the tensors of a model through a small staging buffer, a piece of whole rows at a time; several threads fill a piece.
class WeightWriter {
 public:
  /// Writes rows [begin, end) of the tensor to `out`; called from several threads at once with disjoint ranges. May throw.
  using Produce = std::function<void(std::int64_t begin, std::int64_t end, std::byte* out)>;
  /// Told after each piece how many rows are done. May throw.
  using Done = std::function<void(std::int64_t rows)>;

  /// `threads` 0: as many as the machine has. Throws OutOfMemory.
  WeightWriter(Backend& backend, const ModelConfig& config, DataType matrix_type, int threads);

  /// Fills one tensor of shape [rows, columns] or [columns] and waits until it is there. What a producer throws reaches the caller; of
  /// several, the one with the first rows.
  void write(const Tensor& target, const Produce& produce, const Done& done);

 private:
  void fill(std::int64_t begin, std::int64_t end, std::size_t row_bytes, const Produce& produce);

  Backend& backend_;
  std::int64_t threads_;
  Buffer staging_;
};

}  // namespace dualdecoder::detail
