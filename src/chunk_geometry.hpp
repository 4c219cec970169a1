// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "dualdecoder/store_options.hpp"
#include "src/simd/attention_simd.hpp"

namespace dualdecoder::cpu {

constexpr std::size_t index(int i) noexcept { return static_cast<std::size_t>(i); }

/// Sizes that follow from the options of a store. A chunk-head is keys [chunk, dim], then values [chunk, dim], wherever it lies.
struct ChunkGeometry {
  int chunk;            ///< tokens
  int dim;              ///< head_dim
  int group;            ///< query heads of a KV head
  int sink_chunks;      ///< always resident, at the beginning
  int window_chunks;    ///< room for the local window, the unfinished chunk and the rows of a pass
  int max_chunks;       ///< whole chunks of the longest sequence
  int value_group;      ///< chunks whose values have one mean
  int value_groups;     ///< that max_chunks take
  int selected_chunks;  ///< budget in chunks
  int slots;            ///< of one KV head in a resident store
  std::size_t element_bytes;
  std::size_t chunk_bytes;  ///< of a chunk-head

  explicit ChunkGeometry(const StoreOptions& options) {
    const SelectionOptions& selection = options.selection;
    chunk = selection.chunk_tokens;
    dim = options.head_dim;
    group = options.heads / options.kv_heads;
    sink_chunks = (selection.sink_tokens + chunk - 1) / chunk;
    value_group = selection.value_group_chunks;
    // of the group that a pass completes no chunk may have left when a row 1 has begun the next chunk
    window_chunks = std::max((selection.local_tokens + chunk - 1) / chunk + 3, value_group + 1);
    max_chunks = std::max(1, options.max_context / chunk);
    value_groups = (max_chunks + value_group - 1) / value_group;
    selected_chunks = std::min(selection.budget_tokens / chunk, max_chunks);
    const double wanted = std::ceil(static_cast<double>(options.slots_per_budget) * selected_chunks);
    slots = static_cast<int>(std::min(wanted, static_cast<double>(max_chunks)));
    element_bytes = size_of(options.kv_type);
    chunk_bytes = 2 * index(chunk) * index(dim) * element_bytes;
  }

  SegmentLayout layout() const noexcept { return {index(chunk), index(dim), element_bytes == 2}; }
  /// First chunk behind the choosable ones of a sequence of `length` tokens, whose `local_tokens` last are the window.
  int window_begin(int length, int local_tokens) const noexcept { return std::max(sink_chunks, (length - local_tokens) / chunk); }
};

}  // namespace dualdecoder::cpu
