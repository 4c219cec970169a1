// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"

namespace dualdecoder::cpu {

/// What was predicted for each KV head of each layer and sequence (a list), kept until the layer runs, so that the statistics can say how
/// much of what was needed had been foreseen. Threading: one thread at a time.
class PredictionRecord {
 public:
  PredictionRecord(std::size_t lists, std::size_t capacity) : lists_(lists), capacity_(capacity) {}

  /// Takes the record's memory from `carver`; called once with a counting carver for the size and once with memory, then forget().
  void carve(Carver& carver);
  /// Forgets `count` lists from `first` on.
  void forget(std::size_t first, std::size_t count) noexcept;
  /// `predicted` is ascending; chunks from `limit` on could not be chosen yet.
  void remember(std::size_t list, std::span<const int> predicted, int limit) noexcept;
  /// Adds what row 0 needs, ascending, to the statistics.
  void count(std::size_t list, std::span<const int> needed, StoreStatistics& statistics) const noexcept;

 private:
  std::size_t lists_;
  std::size_t capacity_;
  int* chunks_ = nullptr;  // [lists, capacity]
  int* count_ = nullptr;   // [lists], -1: none
  int* limit_ = nullptr;   // [lists]
};

}  // namespace dualdecoder::cpu
