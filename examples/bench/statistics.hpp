// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/session_options.hpp"

namespace dualdecoder::examples {

/// The value below which `share` of the values lie; 0.5: the lower median. There must be one.
inline double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

/// A part of a whole, 0 of nothing.
inline double share_of(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

/// What was counted in between.
inline StoreStatistics difference(const StoreStatistics& after, const StoreStatistics& before) {
  return {.needed = after.needed - before.needed,
          .predicted_hit = after.predicted_hit - before.predicted_hit,
          .predictable = after.predictable - before.predictable,
          .resident_hit = after.resident_hit - before.resident_hit,
          .estimated = after.estimated - before.estimated,
          .urgent_bytes = after.urgent_bytes - before.urgent_bytes,
          .prefetch_bytes = after.prefetch_bytes - before.prefetch_bytes,
          .write_back_bytes = after.write_back_bytes - before.write_back_bytes,
          .prefetch_dropped = after.prefetch_dropped - before.prefetch_dropped};
}

inline SessionStatistics difference(const SessionStatistics& after, const SessionStatistics& before) {
  return {.passes = after.passes - before.passes,
          .generated_tokens = after.generated_tokens - before.generated_tokens,
          .prompt_tokens = after.prompt_tokens - before.prompt_tokens,
          .resyncs = after.resyncs - before.resyncs,
          .guesses = after.guesses - before.guesses,
          .right_guesses = after.right_guesses - before.right_guesses,
          .prefill = after.prefill - before.prefill,
          .decode = after.decode - before.decode};
}

}  // namespace dualdecoder::examples
