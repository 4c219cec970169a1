// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

/// Reads a store's counters [Counter::count] through as much pinned memory, and waits for `stream`. Throws CudaError.
StoreStatistics read_statistics(const std::uint64_t* counters, std::byte* pinned, StreamRef stream);

}  // namespace dualdecoder::cuda
