// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "dualdecoder/store_options.hpp"

namespace dualdecoder::cuda {

/// Bound on the loads of one layer in a step, of `bytes` each, 0: none; less than one load is still a bound.
inline int prefetch_bound(const StoreOptions& options, std::size_t bytes) {
  if (options.prefetch_bytes_per_step == 0) return 0;
  const std::size_t loads = options.prefetch_bytes_per_step / static_cast<std::size_t>(options.layers) / bytes;
  return static_cast<int>(std::clamp<std::size_t>(loads, 1, std::numeric_limits<int>::max()));
}

}  // namespace dualdecoder::cuda
