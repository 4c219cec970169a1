// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "dualdecoder/store_options.hpp"

namespace dualdecoder::cpu {

/// How many loads of `bytes` each a layer may ask for in a step: at least one. Without a bound: more than there can be.
inline std::size_t most_prefetches(const StoreOptions& options, std::size_t bytes) noexcept {
  if (options.prefetch_bytes_per_step == 0) return std::numeric_limits<std::size_t>::max();
  return std::max<std::size_t>(options.prefetch_bytes_per_step / static_cast<std::size_t>(options.layers) / bytes, 1);
}

}  // namespace dualdecoder::cpu
