// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "dualdecoder/export.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/stream.hpp"

/// Decorators that make the CUDA backend's stores of chunks choose or attend as published rivals do, for comparisons. Passes through them
/// can be recorded. Threading: as the other store.
namespace dualdecoder::cuda {

/// Ranks chunks by the least and the largest element of their keys per channel instead of their means, as Quest (arXiv 2406.10774) and
/// ArkVale do: no token of a chunk scores more than sum over channels of max(q * least, q * largest). A softmax over the chunks makes
/// shares of a query head's bounds, and the largest share of the query group ranks the chunk. truncate leaves the bounds of the chunk that
/// it cuts as wide as they were. `memory` is the device's and outlives the store; `stream` orders what the call enqueues. Throws
/// InvalidArgument for a tail estimate or keys that are not bf16, OutOfMemory, CudaError, and Error in
/// a build without the CUDA backend.
DUALDECODER_EXPORT std::unique_ptr<KvStore> rank_by_bounds(std::unique_ptr<KvStore> inner, const StoreOptions& options,
                                                           MemoryResource& memory, StreamRef stream);
/// Adds what rank_by_bounds takes for max_sequences sequences of max_context tokens to `plan`.
DUALDECODER_EXPORT void plan_bounds(const StoreOptions& options, MemoryPlan& plan);

/// Row 0 attends to what was predicted for it in place of what its query selects, as FreeKV (with corrections) and InfiniGen (without) do;
/// where nothing was predicted yet, to what it selects. KV heads whose queries turned since the last step, by a mean cosine over the query
/// group below `correct_below`, attend to what they select; 0: none do. With a store that waits they fetch what they lack on the spot.
/// `needed` and `predicted_hit` of the statistics count what the query selects, `resident_hit` what is attended to. For one row a
/// sequence. Throws as rank_by_bounds does.
DUALDECODER_EXPORT std::unique_ptr<KvStore> attend_predicted(std::unique_ptr<KvStore> inner, const StoreOptions& options,
                                                             float correct_below, MemoryResource& memory, StreamRef stream);
/// Adds what attend_predicted takes to `plan`.
DUALDECODER_EXPORT void plan_predicted(const StoreOptions& options, float correct_below, MemoryPlan& plan);

}  // namespace dualdecoder::cuda
