// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/store_layout.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/stream.hpp"

namespace dualdecoder::cuda {

// What the host reads of a store between passes, through pinned memory of the store. Each function waits for `stream` and throws CudaError.

inline constexpr std::size_t kCounters = static_cast<std::size_t>(Counter::count);
/// Pinned memory that either function takes.
inline constexpr std::size_t kReadoutBytes = kCounters * sizeof(std::uint64_t);

/// A store's counters [Counter::count].
StoreStatistics read_statistics(const std::uint64_t* counters, std::byte* pinned, StreamRef stream);
/// A storage slot's entry in a store's table of lengths; takes the first bytes of `pinned` alone, an int's.
int read_length(const int* lengths, int slot, std::byte* pinned, StreamRef stream);

}  // namespace dualdecoder::cuda
