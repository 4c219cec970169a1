// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/prediction_record.hpp"

#include <algorithm>

namespace dualdecoder::cpu {

void PredictionRecord::carve(Carver& carver) {
  chunks_ = carver.take<int>(lists_ * capacity_);
  count_ = carver.take<int>(lists_);
  limit_ = carver.take<int>(lists_);
}

void PredictionRecord::forget(std::size_t first, std::size_t count) noexcept { std::fill_n(count_ + first, count, -1); }

void PredictionRecord::remember(std::size_t list, std::span<const int> predicted, int limit) noexcept {
  const std::size_t count = std::min(predicted.size(), capacity_);
  std::copy_n(predicted.begin(), count, chunks_ + list * capacity_);
  count_[list] = static_cast<int>(count);
  limit_[list] = limit;
}

void PredictionRecord::count(std::size_t list, std::span<const int> needed, StoreStatistics& statistics) const noexcept {
  statistics.needed += needed.size();
  if (count_[list] < 0) return;
  const int* predicted = chunks_ + list * capacity_;
  const int* const end = predicted + count_[list];
  for (int chunk : needed) {
    if (chunk >= limit_[list]) break;  // left the window since; nobody had to predict it
    ++statistics.predictable;
    predicted = std::lower_bound(predicted, end, chunk);
    if (predicted != end && *predicted == chunk) ++statistics.predicted_hit;
  }
}

}  // namespace dualdecoder::cpu
