// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "dualdecoder/error.hpp"
#include "dualdecoder/model_weights.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

class TraceSink;

/// Which KvStore a backend makes.
enum class StoreKind : std::uint8_t {
  resident,   ///< slots keep the chunks of earlier steps, LRU (docs/concepts.md, "Resident set")
  ping_pong,  ///< two layer buffers that swap, nothing survives a step (the published mode)
  full,       ///< the whole context on the device, dense attention
  shadow_kv,  ///< keys as low-rank factors on the device, values of chosen chunks fetched (docs/concepts.md)
  specache,   ///< a low-bit copy of every token on the device, the tokens that a guess looks at laid over it (docs/concepts.md)
  automatic,  ///< full where the context is too short to gain by selecting, else resident; for SessionOptions, no store is of this kind
};

/// The parameters of StoreKind::shadow_kv as ShadowKV publishes them (arXiv 2410.21465), besides chunks of 8 and a budget of 1/64 of the
/// context. Of SelectionOptions the store reads chunk_tokens and budget_tokens alone; MissPolicy::estimate is refused, since it drops the
/// tail. The factors take a build with LAPACK on the CPU backend and with cuSOLVER on the CUDA backend; without, the kind is refused.
struct ShadowKvOptions {
  int rank = 160;           ///< of the factors of a layer's keys, all KV heads side by side: a multiple of 8; at most kv_heads * head_dim
  int outlier_chunks = 48;  ///< prompt chunks of a KV head that are kept whole on the device, 0 .. 65536
  int local_chunks = 4;     ///< last whole chunks, always on the device, 1 .. 65536
  bool reuse = true;        ///< what was chosen in the last step too is not fetched again
};

/// The low-bit copy of StoreKind::specache, as SpeCache publishes it (arXiv 2503.16163). The store goes by single tokens: of
/// SelectionOptions it reads nothing.
struct SpeCacheOptions {
  int bits = 2;             ///< of an element of the copy, 1 or 2
  int group = 64;           ///< elements that share a scale: tokens of a key channel, channels of a value; 32 or 64
  int exact_tokens = 64;    ///< last tokens that are not quantised, and those behind the last whole group; >= 1
  int fetched_tokens = 64;  ///< tokens of a KV head that are fetched for the next step, 0 .. 4096
};

/// Which chunks are attended to exactly, and what stands for the others.
struct SelectionOptions {
  int chunk_tokens = 2;        ///< 2, 4, 8, 16 or 32; at least 4 for StoreKind::shadow_kv
  int budget_tokens = 512;     ///< selected tokens per KV head, >= chunk_tokens
  int sink_tokens = 16;        ///< first tokens, always resident; rounded up to whole chunks
  int local_tokens = 128;      ///< last tokens, always resident
  bool tail_estimate = true;   ///< unselected chunks count by their summaries (docs/concepts.md, "Tail estimate"), else they are dropped
  bool calibrate_tail = true;  ///< one log bias per layer and query head, set at the end of prefill
  float bias_scale = 0.5F;     ///< times the calibrated bias, 0 .. 2
  /// Consecutive chunks whose values have one mean in the estimate, 1, 2 or 4 (docs/concepts.md, "Tail estimate")
  int value_group_chunks = 1;
};

/// Shape, sizes and policies of a store.
struct StoreOptions {
  StoreKind kind = StoreKind::resident;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int max_context = 0;  ///< longest sequence in tokens, prompt and generated
  int max_sequences = 1;
  int rows_per_sequence = 1;  ///< rows of a pass, 1 or 2
  Row1Set row1_set = Row1Set::own_resident;
  DataType kv_type = DataType::bf16;  ///< f32 or bf16: keys and values on the host and in slots
  SelectionOptions selection;
  ShadowKvOptions shadow_kv{};
  RopeConfig rope{};  ///< that keys were rotated with; read by StoreKind::shadow_kv alone
  SpeCacheOptions specache{};
  float slots_per_budget = 4.0F;  ///< m of docs/concepts.md, "Resident set", >= 1; slots of one KV head = m * budget / chunk
  MissPolicy miss_policy = MissPolicy::wait;
  bool selects_ahead = true;  ///< select of the next layer may come before attend of this one; without, a store may keep less
  /// Bound on prefetched bytes of one step over all layers and sequences, shared evenly by the layers, of which each
  /// may ask for one load whatever its share; 0: unbounded
  std::size_t prefetch_bytes_per_step = 0;
};

/// Tokens that one entry of a Selection stands for.
constexpr int selected_tokens(const StoreOptions& options) noexcept {
  return options.kind == StoreKind::specache ? 1 : options.selection.chunk_tokens;
}

/// The link that a scheduler drives.
struct SchedulerOptions {
  int layers = 0;
  int max_items_per_submit = 0;         ///< longest list of one submission
  double bytes_per_second = 0.0;        ///< throttle that plays the bus on the CPU backend; 0: as fast as memory
  std::chrono::nanoseconds latency{0};  ///< of every item on a throttled link
  bool single_lane = false;             ///< urgent loads queue behind prefetch: what the urgent lane is worth
  bool concurrent_prefetch = false;     ///< see prefers_concurrent_prefetch(); nothing to the CPU backend
  TraceSink* trace = nullptr;           ///< may be null; outlives the scheduler
};

/// Whether prefetched items had better move beside the making of later layers' lists than in turn with it. They had where loads are most of
/// a step: two-layer buffers, and stores that estimate what they miss, which gain up to 42 % on a slow link and lose nothing. Stores that
/// wait for what they miss lose 3 % to the further stream: docs/adr/0012-gathers-beside-compute.md.
constexpr bool prefers_concurrent_prefetch(const StoreOptions& options) noexcept {
  return options.miss_policy == MissPolicy::estimate || options.kind == StoreKind::ping_pong;
}

/// Throws InvalidArgument naming the first field that is out of range.
inline void validate(const SelectionOptions& options) {
  const int chunk = options.chunk_tokens;
  detail::require(chunk == 2 || chunk == 4 || chunk == 8 || chunk == 16 || chunk == 32, "chunk_tokens", chunk, "2, 4, 8, 16 or 32");
  detail::require(options.budget_tokens >= chunk, "budget_tokens", options.budget_tokens, "at least chunk_tokens");
  detail::require(options.sink_tokens >= 0 && options.sink_tokens <= 4096, "sink_tokens", options.sink_tokens, "in 0 .. 4096");
  detail::require(options.local_tokens >= 1 && options.local_tokens <= 65536, "local_tokens", options.local_tokens, "in 1 .. 65536");
  detail::require(options.bias_scale >= 0.0F && options.bias_scale <= 2.0F, "bias_scale", options.bias_scale, "in 0 .. 2");
  const int together = options.value_group_chunks;
  detail::require(together == 1 || together == 2 || together == 4, "value_group_chunks", together, "1, 2 or 4");
}

inline void validate(const ShadowKvOptions& options) {
  detail::require(options.rank >= 8 && options.rank <= 65536 && options.rank % 8 == 0, "shadow_kv.rank", options.rank,
                  "a multiple of 8 in 8 .. 65536");
  detail::require(options.outlier_chunks >= 0 && options.outlier_chunks <= 65536, "shadow_kv.outlier_chunks", options.outlier_chunks,
                  "in 0 .. 65536");
  detail::require(options.local_chunks >= 1 && options.local_chunks <= 65536, "shadow_kv.local_chunks", options.local_chunks,
                  "in 1 .. 65536");
}

inline void validate(const SpeCacheOptions& options) {
  detail::require(options.bits == 1 || options.bits == 2, "specache.bits", options.bits, "1 or 2");
  detail::require(options.group == 32 || options.group == 64, "specache.group", options.group, "32 or 64");
  detail::require(options.exact_tokens >= 1 && options.exact_tokens <= (1 << 26), "specache.exact_tokens", options.exact_tokens,
                  "in 1 .. 67108864");
  detail::require(options.fetched_tokens >= 0 && options.fetched_tokens <= 4096, "specache.fetched_tokens", options.fetched_tokens,
                  "in 0 .. 4096");
}

inline void validate(const StoreOptions& options) {
  if (options.kind == StoreKind::automatic) throw InvalidArgument("kind = automatic: must be a definite kind, see choose_store");
  detail::require(options.layers >= 1, "layers", options.layers, "at least 1");
  detail::require(options.kv_heads >= 1, "kv_heads", options.kv_heads, "at least 1");
  detail::require(options.heads >= options.kv_heads && options.heads % options.kv_heads == 0, "heads", options.heads,
                  "a multiple of kv_heads");
  detail::require(options.head_dim >= 8 && options.head_dim <= 512 && options.head_dim % 8 == 0, "head_dim", options.head_dim,
                  "a multiple of 8 in 8 .. 512");
  detail::require(options.max_context >= 1 && options.max_context <= (1 << 26), "max_context", options.max_context, "in 1 .. 67108864");
  detail::require(options.max_sequences >= 1 && options.max_sequences <= 65536, "max_sequences", options.max_sequences, "in 1 .. 65536");
  detail::require(options.rows_per_sequence == 1 || options.rows_per_sequence == 2, "rows_per_sequence", options.rows_per_sequence,
                  "1 or 2");
  detail::require(options.kv_type == DataType::f32 || options.kv_type == DataType::bf16, "kv_type", name_of(options.kv_type),
                  "f32 or bf16");
  detail::require(options.slots_per_budget >= 1.0F && options.slots_per_budget <= 1024.0F, "slots_per_budget", options.slots_per_budget,
                  "in 1 .. 1024");
  validate(options.selection);
  validate(options.shadow_kv);
  validate(options.specache);
  detail::require(options.kind != StoreKind::shadow_kv || options.selection.chunk_tokens >= 4, "chunk_tokens",
                  options.selection.chunk_tokens, "4, 8, 16 or 32 for the store shadow_kv");
  detail::require(options.kind != StoreKind::shadow_kv || options.miss_policy == MissPolicy::wait, "miss_policy", "estimate",
                  "wait for the store shadow_kv, which drops what it does not attend to");
}

inline void validate(const SchedulerOptions& options) {
  detail::require(options.layers >= 1, "layers", options.layers, "at least 1");
  detail::require(options.max_items_per_submit >= 0, "max_items_per_submit", options.max_items_per_submit, "at least 0");
  detail::require(options.bytes_per_second == 0.0 || (options.bytes_per_second >= 1e3 && options.bytes_per_second <= 1e15),
                  "bytes_per_second", options.bytes_per_second, "0 (unthrottled) or in 1e3 .. 1e15");
  detail::require(options.latency.count() >= 0 && options.latency <= std::chrono::seconds(60), "latency in nanoseconds",
                  options.latency.count(), "in 0 .. 60000000000");
}

}  // namespace dualdecoder
