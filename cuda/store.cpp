// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/store.hpp"

#include <cstddef>

#include "cuda/chunk_store.hpp"
#include "cuda/full_store.hpp"
#include "cuda/readout.hpp"
#include "cuda/shadow_kv_store.hpp"
#include "cuda/specache_store.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::cuda {
namespace {

/// What the kernels are built for, beyond what StoreOptions allow.
void check_options(const StoreOptions& options) {
  using dualdecoder::detail::require;
  validate(options);
  require(options.kv_type == DataType::bf16, "kv_type", name_of(options.kv_type), "bf16 on the CUDA backend");
  const int dim = options.head_dim;
  require(dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256, "head_dim", dim, "64, 80, 96, 128 or 256 on the CUDA backend");
  const int group = options.heads / options.kv_heads;
  require(group <= 16, "heads / kv_heads", group, "in 1 .. 16 on the CUDA backend");
  if (options.kind == StoreKind::ping_pong) require(options.layers >= 2, "layers", options.layers, "at least 2 for the ping-pong store");
}

}  // namespace

std::unique_ptr<KvStore> make_cuda_store(const StoreOptions& options, const StoreResources& resources) {
  check_options(options);
  switch (options.kind) {
    case StoreKind::resident:
    case StoreKind::ping_pong: return std::make_unique<ChunkStore>(options, resources);
    case StoreKind::full: return std::make_unique<FullStore>(options, resources);
    case StoreKind::shadow_kv: return std::make_unique<ShadowKvStore>(options, resources);
    case StoreKind::specache: return std::make_unique<SpeCacheStore>(options, resources);
    case StoreKind::automatic: break;  // refused above
  }
  throw InvalidArgument("store kind: unknown");
}

MemoryPlan cuda_store_plan(const StoreOptions& options) {
  check_options(options);
  if (options.kind == StoreKind::shadow_kv) return ShadowKvStore::plan(options);
  const auto sequences = static_cast<std::size_t>(options.max_sequences);
  MemoryPlan plan;
  if (options.kind == StoreKind::full) {
    plan.add("attention work space", MemoryKind::device, FullStore::device_bytes(options));
    plan.add("keys and values", MemoryKind::device, sequences * FullStore::sequence_bytes(options, options.max_context));
    plan.add("lengths read by the host", MemoryKind::pinned, FullStore::readout_bytes());
    return plan;
  }
  if (options.kind == StoreKind::specache) {
    SpeCacheStore::plan(options, plan);
    return plan;
  }
  plan.add("slots, summaries, window and work space", MemoryKind::device, ChunkStore::device_bytes(options));
  plan.add("calibration queries of one prefill", MemoryKind::device, ChunkStore::calibration_bytes(options));
  plan.add("keys and values", MemoryKind::pinned, sequences * ChunkStore::sequence_bytes(options, options.max_context));
  plan.add("counts read by the host", MemoryKind::pinned, kReadoutBytes);
  return plan;
}

}  // namespace dualdecoder::cuda
