// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/store.hpp"

#include <cstddef>

#include "dualdecoder/error.hpp"
#include "src/chunk_geometry.hpp"
#include "src/full_store.hpp"
#include "src/ping_pong_store.hpp"
#include "src/resident_store.hpp"
#include "src/shadow_kv_store.hpp"
#include "src/specache_store.hpp"

namespace dualdecoder::cpu {

std::unique_ptr<KvStore> make_cpu_store(const StoreOptions& options, const StoreResources& resources) {
  validate(options);
  switch (options.kind) {
    case StoreKind::resident: return std::make_unique<ResidentStore>(options, resources);
    case StoreKind::ping_pong: return std::make_unique<PingPongStore>(options, resources);
    case StoreKind::full: return std::make_unique<FullStore>(options, resources);
    case StoreKind::shadow_kv: return std::make_unique<ShadowKvStore>(options, resources);
    case StoreKind::specache: return std::make_unique<SpeCacheStore>(options, resources);
    case StoreKind::automatic: break;  // refused above
  }
  throw InvalidArgument("store kind: unknown");
}

MemoryPlan cpu_store_plan(const StoreOptions& options, int threads) {
  validate(options);
  ThreadPool alone(1);
  const StoreResources counting{
      .device = nullptr, .host = nullptr, .threads = &alone, .stream = static_cast<CUstream_st*>(nullptr), .thread_count = threads};
  const std::size_t sequences = index(options.max_sequences);
  MemoryPlan plan;
  if (options.kind == StoreKind::specache) {
    SpeCacheStore(options, counting).plan(plan);
    return plan;
  }
  if (options.kind == StoreKind::full) {
    plan.add("attention work space", MemoryKind::device, FullStore(options, counting).device_bytes());
    plan.add("keys and values", MemoryKind::device, sequences * FullStore::sequence_bytes(options, options.max_context));
    return plan;
  }
  if (options.kind == StoreKind::shadow_kv) return ShadowKvStore(options, counting).plan();
  if (options.kind == StoreKind::resident) return ResidentStore(options, counting).plan();
  return PingPongStore(options, counting).plan();
}

}  // namespace dualdecoder::cpu
