// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "src/prefetch_bound.hpp"

namespace dualdecoder::cuda {

/// cpu::most_prefetches as StoreLayout takes it: 0 without a bound.
inline int prefetch_bound(const StoreOptions& options, std::size_t bytes) {
  if (options.prefetch_bytes_per_step == 0) return 0;
  return static_cast<int>(std::min<std::size_t>(cpu::most_prefetches(options, bytes), std::numeric_limits<int>::max()));
}

}  // namespace dualdecoder::cuda
