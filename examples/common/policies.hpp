// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "dualdecoder/error.hpp"
#include "dualdecoder/session_options.hpp"
#include "examples/common/page_bounds.hpp"
#include "examples/common/predicted_set.hpp"

namespace dualdecoder::examples {

/// A way of decoding a long context by the name that plans and results use, with the parameters that its source states.
struct Policy {
  const char* name;
  const char* source;   ///< where its parameters are from
  const char* differs;  ///< from the source; empty: in nothing that decides what is attended to
  /// Selected tokens per KV head that the source uses at a context.
  int (*budget)(int context);
  /// Sets store, predictor and sizes; the others hold the library's defaults.
  void (*apply)(SessionOptions& options);
  bool ranks_by_bounds = false;    ///< chunks are ranked by PageBoundsStore; see backend_of()
  bool attends_predicted = false;  ///< row 0 attends to what was predicted; see backend_of()
  float correct_below = 0.0F;      ///< see PredictedSetOptions
};

namespace detail {

/// 1.56 % of the context.
inline int one_in_64(int context) { return std::max(64, context / 64); }

inline constexpr const char* kSpeCacheDiffers =
    "shares leave out the rows of the pass; values enter the copy with their group instead of one by one; the budget is not read";
inline void apply_specache(SessionOptions& options, int bits) {
  options.store = StoreKind::specache;
  options.predictor = PredictorKind::published_dual_row;
  options.resync = Resync::never;
  options.miss_policy = MissPolicy::estimate;
  options.specache = {.bits = bits, .group = 64, .exact_tokens = 64, .fetched_tokens = 64};
}

struct Pages {
  int page;   ///< tokens
  int first;  ///< tokens of the context that are always attended to, and last ones
  int last;
  float slots_per_budget;
};
/// Pages that stay on the device while there is room, needed ones waited for, the rest dropped.
inline void apply_pages(SessionOptions& options, PredictorKind predictor, const Pages& pages) {
  options.predictor = predictor;
  options.miss_policy = MissPolicy::wait;
  options.chunk_tokens = pages.page;
  options.sink_tokens = pages.first;
  options.local_tokens = pages.last;
  options.slots_per_budget = pages.slots_per_budget;
  options.tail_estimate = false;
}

}  // namespace detail

/// All policies. The library's own is "dualdecoder".
inline std::span<const Policy> policies() {
  static constexpr std::array<Policy, 10> kPolicies{{
      {.name = "full",
       .source = "dense attention, all keys and values on the device",
       .differs = "",
       .budget = [](int context) { return context; },
       .apply =
           [](SessionOptions& o) {
             o.store = StoreKind::full;
             o.predictor = PredictorKind::none;
           }},
      {.name = "dualdecoder",
       .source = "this library's defaults",
       .differs = "selects however short the context is",
       .budget = [](int) { return SessionOptions{}.budget_tokens; },
       .apply = [](SessionOptions&) {}},
      {.name = "dualdecoder-published",
       .source = "arXiv 2607.26475: two layer buffers, row 1 attends to row 0's chunks, a wrong guess is not mended; chunk, budget and "
                 "window of ShadowKV, on whose code it is built",
       .differs = "means are int8 instead of 16 bits; no low-rank keys for layers that predict badly, which the source calls optional",
       .budget = detail::one_in_64,
       .apply =
           [](SessionOptions& o) {
             o.store = StoreKind::ping_pong;
             o.predictor = PredictorKind::published_dual_row;
             o.resync = Resync::never;
             o.miss_policy = MissPolicy::wait;
             o.chunk_tokens = 8;
             o.sink_tokens = 0;
             o.local_tokens = 32;
             o.tail_estimate = false;
           }},
      {.name = "shadowkv",
       .source = "arXiv 2410.21465: keys of rank 160, chunks of 8, 48 outliers, the last 4 chunks, 1/64 of the context",
       .differs = "generated tokens can be chosen too; see the store's documentation",
       .budget = detail::one_in_64,
       .apply =
           [](SessionOptions& o) {
             o.store = StoreKind::shadow_kv;
             o.predictor = PredictorKind::none;
             o.miss_policy = MissPolicy::wait;
             o.chunk_tokens = 8;
             o.shadow_kv = {.rank = 160, .outlier_chunks = 48, .local_chunks = 4};
           }},
      {.name = "specache-1bit",
       .source = "arXiv 2503.16163: 1-bit copy in groups of 64, 64 tokens exact, 64 fetched per KV head for the next step",
       .differs = detail::kSpeCacheDiffers,
       .budget = [](int) { return 64; },
       .apply = [](SessionOptions& o) { detail::apply_specache(o, 1); }},
      {.name = "specache-2bit",
       .source = "arXiv 2503.16163: 2-bit copy in groups of 64, 64 tokens exact, 64 fetched per KV head for the next step",
       .differs = detail::kSpeCacheDiffers,
       .budget = [](int) { return 64; },
       .apply = [](SessionOptions& o) { detail::apply_specache(o, 2); }},
      {.name = "freekv",
       .source = "arXiv 2505.13109, accuracy runs on long inputs: pages of 32, 128 first and 128 last tokens, 1,792 selected with the "
                 "query before; KV heads whose query turned, by a mean cosine below 0.8, select and fetch on the spot",
       .differs = "no dense first layer",
       .budget = [](int) { return 1792; },
       .apply =
           [](SessionOptions& o) {
             detail::apply_pages(o, PredictorKind::previous_step, {.page = 32, .first = 128, .last = 128, .slots_per_budget = 1.0F});
           },
       .ranks_by_bounds = true,
       .attends_predicted = true,
       .correct_below = 0.8F},
      {.name = "hisparse",
       .source = "arXiv 2608.07009 with the pages of 16 that it uses for dense models: top 2,048 tokens, a buffer of 6,144, least recently "
                 "used out first, misses fetched on the spot",
       .differs = "",
       .budget = [](int) { return 2048; },
       .apply =
           [](SessionOptions& o) {
             detail::apply_pages(o, PredictorKind::none, {.page = 16, .first = 0, .last = 16, .slots_per_budget = 3.0F});
           },
       .ranks_by_bounds = true},
      {.name = "quest",
       .source = "arXiv 2406.10774: pages of 16, budget 2,048, everything on the device",
       .differs = "a page comes to the device when it is first needed; the first two layers select too",
       .budget = [](int) { return 2048; },
       .apply =
           [](SessionOptions& o) {
             detail::apply_pages(o, PredictorKind::none, {.page = 16, .first = 0, .last = 16, .slots_per_budget = 1024.0F});
           },
       .ranks_by_bounds = true},
      {.name = "infinigen",
       .source = "InfiniGen, OSDI 2024: the layer before rehearses a layer's queries, at most a fifth of the context is fetched",
       .differs = "chunks of 4 instead of tokens, ranked by all channels of their means instead of a fifth of skewed ones; a fixed budget "
                  "instead of a distance from the best score; the first layer, which none rehearses, fetches on the spot",
       .budget = [](int context) { return std::max(64, context / 5); },
       .apply =
           [](SessionOptions& o) {
             detail::apply_pages(o, PredictorKind::layer_ahead, {.page = 4, .first = 0, .last = 4, .slots_per_budget = 1.0F});
           },
       .attends_predicted = true},
  }};
  return kPolicies;
}

/// "a, b, c" of all policies.
inline std::string policy_names() {
  std::string names;
  for (const Policy& policy : policies()) names += (names.empty() ? "" : ", ") + std::string(policy.name);
  return names;
}

/// Throws InvalidArgument for a name that there is not.
inline const Policy& find_policy(std::string_view name) {
  for (const Policy& policy : policies()) {
    if (policy.name == name) return policy;
  }
  throw InvalidArgument("policy = " + std::string(name) + ": must be one of " + policy_names());
}

/// Options of a session that decodes by `policy`. `base` gives what is no policy: context, sequences, type of keys and values, link and
/// prefill block, and the budget, for which 0 means the source's.
inline SessionOptions options_of(const Policy& policy, const SessionOptions& base) {
  SessionOptions options;
  options.store = StoreKind::resident;  // a policy is measured as itself, however short the context
  options.max_context = base.max_context;
  options.max_sequences = base.max_sequences;
  options.kv_type = base.kv_type;
  options.prefetch_bytes_per_step = base.prefetch_bytes_per_step;
  options.link_bytes_per_second = base.link_bytes_per_second;
  options.link_latency = base.link_latency;
  options.single_lane = base.single_lane;
  options.prefill_block = base.prefill_block;
  policy.apply(options);
  options.budget_tokens = base.budget_tokens > 0 ? base.budget_tokens : policy.budget(base.max_context);
  options.budget_tokens = std::max(options.budget_tokens, options.chunk_tokens);
  return options;
}

/// The same for a model whose keys may have fewer columns than the rank that ShadowKV uses for all of its models.
inline SessionOptions options_of(const Policy& policy, const SessionOptions& base, const ModelConfig& model) {
  SessionOptions options = options_of(policy, base);
  options.shadow_kv.rank = std::min(options.shadow_kv.rank, model.kv_heads * model.head_dim / 8 * 8);
  return options;
}

/// The backend that a session with options_of(policy) is made on.
inline std::shared_ptr<Backend> backend_of(const Policy& policy, std::shared_ptr<Backend> backend) {
  if (policy.ranks_by_bounds) backend = std::make_shared<PageBoundsBackend>(std::move(backend));
  if (!policy.attends_predicted) return backend;
  return std::make_shared<PredictedSetBackend>(std::move(backend), PredictedSetOptions{.correct_below = policy.correct_below});
}

}  // namespace dualdecoder::examples
