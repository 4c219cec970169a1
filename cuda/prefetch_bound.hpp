// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "src/prefetch_bound.hpp"

namespace dualdecoder::cuda {

/// cpu::most_prefetches as StoreLayout takes it: 0 without a bound, so that less than one load is one.
inline int prefetch_bound(const StoreOptions& options, std::size_t bytes) {
  if (options.prefetch_bytes_per_step == 0) return 0;
  return static_cast<int>(std::clamp<std::size_t>(cpu::most_prefetches(options, bytes), 1, std::numeric_limits<int>::max()));
}

}  // namespace dualdecoder::cuda
