// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/simd/dispatch.hpp"
#include "src/thread_pool.hpp"

namespace dualdecoder::cpu {

/// What a store of the CPU backend works with; everything outlives it.
struct StoreResources {
  MemoryResource* device = nullptr;  ///< slots, summaries, sinks, window, work space; null: the store only counts, for memory plans
  MemoryResource* host = nullptr;    ///< the host tier
  ThreadPool* threads = nullptr;
  StreamRef stream;
  Isa isa = detected_isa();
  int thread_count = threads->size();  ///< that work space is sized for
};

/// A store of the kind that the options name. Throws InvalidArgument naming the option, OutOfMemory.
std::unique_ptr<KvStore> make_cpu_store(const StoreOptions& options, const StoreResources& resources);

/// What make_cpu_store and max_sequences sequences of max_context tokens take. Throws InvalidArgument naming the option.
MemoryPlan cpu_store_plan(const StoreOptions& options, int threads);

}  // namespace dualdecoder::cpu
