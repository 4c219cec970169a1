// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/model_weights.hpp"
#include "dualdecoder/predictors/front_runner.hpp"
#include "dualdecoder/predictors/layer_ahead.hpp"
#include "dualdecoder/predictors/no_prediction.hpp"
#include "dualdecoder/predictors/previous_step.hpp"
#include "dualdecoder/predictors/published_dual_row.hpp"
#include "dualdecoder/sampling.hpp"
#include "dualdecoder/store_options.hpp"

namespace dualdecoder {

/// Predictors that make_session builds by name; others are handed over as objects.
enum class PredictorKind : std::uint8_t { none, previous_step, layer_ahead, published_dual_row, front_runner };

/// Everything a session decides before it allocates. The fields are those of StoreOptions, SelectionOptions and SchedulerOptions that a
/// user chooses; shapes come from the model.
struct SessionOptions {
  int max_context = 8192;  ///< longest sequence in tokens, prompt and generated
  int max_sequences = 1;   ///< that are active at once
  int budget_tokens = 512;
  int chunk_tokens = 2;
  int sink_tokens = 16;
  int local_tokens = 128;
  bool tail_estimate = true;
  bool calibrate_tail = true;
  float bias_scale = 0.5F;
  int value_group_chunks = 1;
  StoreKind store = StoreKind::automatic;  ///< automatic: what choose_store finds fastest
  ShadowKvOptions shadow_kv{};
  SpeCacheOptions specache{};
  float slots_per_budget = 4.0F;
  DataType kv_type = DataType::bf16;
  MissPolicy miss_policy = MissPolicy::wait;
  PredictorKind predictor = PredictorKind::front_runner;
  Resync resync = Resync::automatic;
  int random_guess_below = 0;               ///< see DualRowOptions; for experiments
  std::size_t prefetch_bytes_per_step = 0;  ///< 0: unbounded
  double link_bytes_per_second = 0.0;       ///< throttle of the CPU backend's link; 0: as fast as memory
  std::chrono::nanoseconds link_latency{0};
  bool single_lane = false;
  int prefill_block = 0;  ///< prompt tokens of one dense call; 0: Backend::prefill_block()
  /// Work on enqueued prompts in one step, in prompt tokens times layers; whole blocks that fit, at least one; 0: a whole prompt
  int prefill_tokens_per_step = 8192;
  /// Where the backend works beside the host, a step launches the next pass before it reads this one's tokens. The tokens are the same.
  bool look_ahead = true;
};

/// Options of one sequence.
struct AddOptions {
  int max_new_tokens = 256;
  SamplingOptions sampling{};
  std::vector<Token> stop_tokens{};
  /// Teacher forcing: the i-th generated token is forced[i] whatever was sampled; generation ends with it. For evaluation.
  std::vector<Token> forced{};
  /// Receives row 0's logits [vocabulary] before each token is chosen, in host memory valid during the call. For evaluation; costs a copy.
  std::function<void(std::span<const float>)> on_logits{};
  /// Prompt tokens times layers prefilled so far and in all; an exception from it ends the prefill, see DecodeSession::add and enqueue.
  std::function<void(std::size_t done, std::size_t total)> on_prefill{};
};

/// Why a sequence ended.
enum class FinishReason : std::uint8_t {
  none,          ///< goes on
  stop_token,    ///< the token is one of stop_tokens
  max_tokens,    ///< max_new_tokens were generated, or forced ended
  context_full,  ///< max_context is reached
  failed,        ///< its prefill failed, see TokenEvent::error; only after enqueue
};

/// One generated token.
struct TokenEvent {
  SequenceId sequence;
  Token token = 0;        ///< -1 where reason is failed
  bool finished = false;  ///< the last event of its sequence; its storage is free again
  FinishReason reason = FinishReason::none;
  std::exception_ptr error{};  ///< what ended the prefill where reason is failed, else null
};

/// Counters of a session since it was made.
struct SessionStatistics {
  std::uint64_t passes = 0;  ///< steps that ran the model
  std::uint64_t generated_tokens = 0;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t resyncs = 0;  ///< passes of a sequence in resync mode, its first one included
  std::uint64_t guesses = 0;  ///< guesses that could be checked
  std::uint64_t right_guesses = 0;
  std::chrono::nanoseconds prefill{0};
  std::chrono::nanoseconds decode{0};
};

/// Outcome of one step. Valid until the next call on the session.
struct StepResult {
  std::vector<TokenEvent> tokens;  ///< a sequence in resync has none, a new one may have two
  int resyncs = 0;                 ///< sequences whose pass was a resync
};

/// The store's options for a model, once all of the session's are checked. Throws InvalidArgument naming the field.
inline StoreOptions make_store_options(const ModelConfig& config, const SessionOptions& options, const PredictorTraits& traits) {
  StoreOptions store{.kind = options.store == StoreKind::automatic ? StoreKind::resident : options.store,
                     .layers = config.layers,
                     .heads = config.heads,
                     .kv_heads = config.kv_heads,
                     .head_dim = config.head_dim,
                     .max_context = options.max_context,
                     .max_sequences = options.max_sequences,
                     .rows_per_sequence = traits.rows_per_sequence,
                     .row1_set = traits.row1_set,
                     .kv_type = options.kv_type,
                     .selection = {.chunk_tokens = options.chunk_tokens,
                                   .budget_tokens = options.budget_tokens,
                                   .sink_tokens = options.sink_tokens,
                                   .local_tokens = options.local_tokens,
                                   .tail_estimate = options.tail_estimate,
                                   .calibrate_tail = options.calibrate_tail,
                                   .bias_scale = options.bias_scale,
                                   .value_group_chunks = options.value_group_chunks},
                     .shadow_kv = options.shadow_kv,
                     .rope = config.rope,
                     .specache = options.specache,
                     .slots_per_budget = options.slots_per_budget,
                     .miss_policy = options.miss_policy,
                     .selects_ahead = traits.layer_ahead,
                     .prefetch_bytes_per_step = options.prefetch_bytes_per_step};
  validate(store);
  detail::require(options.prefill_block >= 0, "prefill_block", options.prefill_block, "0 (the backend's choice) or more");
  detail::require(options.prefill_tokens_per_step >= 0, "prefill_tokens_per_step", options.prefill_tokens_per_step,
                  "0 (a whole prompt) or more");
  detail::require(options.link_bytes_per_second >= 0.0, "link_bytes_per_second", options.link_bytes_per_second, "0 or more");
  detail::require(options.link_latency.count() >= 0, "link_latency", options.link_latency.count(), "0 or more nanoseconds");
  if (config.context > 0) {
    detail::require(options.max_context <= config.context, "max_context", options.max_context,
                    ("at most the model's context of " + std::to_string(config.context)).c_str());
  }
  return store;
}

/// A predictor by name with the session's options.
inline std::unique_ptr<RetrievalPredictor> make_predictor(const SessionOptions& options) {
  const DualRowOptions rows{.resync = options.resync, .random_guess_below = options.random_guess_below, .seed = 0};
  switch (options.predictor) {
    case PredictorKind::none: return std::make_unique<NoPrediction>();
    case PredictorKind::previous_step: return std::make_unique<PreviousStep>();
    case PredictorKind::layer_ahead: return std::make_unique<LayerAhead>();
    case PredictorKind::published_dual_row: {
      DualRowOptions published = rows;
      if (options.resync == Resync::automatic) published.resync = Resync::never;
      return std::make_unique<PublishedDualRow>(published);
    }
    case PredictorKind::front_runner: return std::make_unique<FrontRunner>(rows);
  }
  throw InvalidArgument("predictor: unknown kind");
}

}  // namespace dualdecoder
