// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/session_options.hpp"
#include "dualdecoder/sparse_attention.hpp"
#include "dualdecoder/trace.hpp"

namespace dualdecoder {

/// A model that generates: weights, SparseAttention and sampler, driven one step at a time. Sequences of any lengths run in one batch and
/// come and go between steps. After an exception from step() the session goes on, or is failed() and good only for destruction; tokens of a
/// step that a callback broke off come with the next one.
/// Threading: one thread at a time; sessions know nothing of each other.
class DecodeSession {
 public:
  /// Throws InvalidArgument naming the option, OutOfMemory. Nothing is allocated later but by add() and the first step().
  DecodeSession(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights, const SessionOptions& options,
                std::unique_ptr<RetrievalPredictor> predictor);
  DecodeSession(DecodeSession&&) = default;
  DecodeSession& operator=(DecodeSession&&) = default;
  ~DecodeSession() = default;

  /// Prefills a prompt and chooses its first token; waits until done. Other sequences stay as they are. Throws InvalidArgument (empty
  /// prompt, token or length out of range, more sequences than max_sequences), OutOfMemory; then the session is as it was.
  SequenceId add(std::span<const Token> prompt, AddOptions options = {});
  /// Runs one pass over all active sequences and returns the tokens that came out; with nothing to do the result is empty.
  const StepResult& step();
  /// Ends a sequence and frees its storage. Throws InvalidArgument when the id is unknown or already finished.
  void remove(SequenceId id);

  /// Sequences that step() still has tokens for.
  int active() const noexcept { return active_; }
  bool failed() const noexcept { return failed_; }
  /// Committed tokens of an active sequence, prompt included. Throws InvalidArgument for an unknown id.
  int length(SequenceId id) const { return position_at(place_of(id)); }

  const ModelConfig& config() const noexcept { return weights_->config(); }
  SessionStatistics statistics() const noexcept { return statistics_; }
  StoreStatistics store_statistics() const { return attention_->store_statistics(); }
  LaneStatistics lane_statistics(Lane lane) const { return attention_->lane_statistics(lane); }

  /// What a session of these options takes at most, weights left out; nothing is allocated. Throws InvalidArgument naming the option.
  static MemoryPlan memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& options,
                                const PredictorTraits& traits);

 private:
  using Clock = std::chrono::steady_clock;

  struct Place {
    SequenceId id{};
    bool used = false;
    int slot = 0;
    int generated = 0;
    int capacity = 0;
    AddOptions options;
  };
  /// What the host mirrors of the device's state after every pass, in one block.
  struct Mirror {
    int* position;
    Token* token;
    Token* guess;
    RowMode* mode;
    std::uint8_t* waits;
    Token* sampled;
  };

  static Mirror carve_mirror(Carver& carver, int places, int rows) {
    const auto p = static_cast<std::size_t>(places);
    Mirror mirror{};
    mirror.position = carver.take<int>(p);
    mirror.token = carver.take<Token>(p);
    mirror.guess = carver.take<Token>(p);
    mirror.mode = carver.take<RowMode>(p);
    mirror.waits = carver.take<std::uint8_t>(p);
    mirror.sampled = carver.take<Token>(static_cast<std::size_t>(rows));
    return mirror;
  }
  struct Work {
    Mirror state;
    int* slot_of;
    SamplingOptions* sampling;
    std::uint64_t** seen;
    std::uint64_t* seen_bits;
    Token* tokens;
    Token* forced;  // [places] -1: none
    int* positions;
    float* hidden;
    std::byte* q;  // of activation_type(), as the next four
    std::byte* ahead;
    std::byte* k;
    std::byte* v;
    std::byte* attention;
    float* logits;
  };
  /// Passes differ in these; one graph serves all that agree.
  struct GraphKey {
    int places = 0;
    bool lone = false;
    friend auto operator<=>(const GraphKey&, const GraphKey&) = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14 misreads it
  };
  struct WorkShape {
    int places;
    int rows;
    bool ahead;
    DataType activation;
  };
  static Work carve_work(Carver& carver, const ModelConfig& config, const WorkShape& shape);
  static std::size_t prefill_bytes(const ModelConfig& config, const SessionOptions& options, DataType activation, int tokens);
  static int prefill_block(const SessionOptions& options, int tokens) { return std::min(options.prefill_block, tokens); }
  static std::size_t seen_words(const ModelConfig& config) { return (static_cast<std::size_t>(config.vocabulary) + 63) / 64; }
  static DenseLimits dense_limits(const SessionOptions& options, const PredictorTraits& traits) {
    return {.decode_rows = options.max_sequences * traits.rows_per_sequence, .prefill_rows = options.prefill_block};
  }

  StepView view() const {
    return {.sequences = places_count_,
            .rows_per_sequence = traits_.rows_per_sequence,
            .slot_of = work_.slot_of,
            .position = work_.state.position,
            .mode = work_.state.mode,
            .waits = may_wait() ? work_.state.waits : nullptr};
  }
  /// Whether a sequence may be told to wait in its next step; see Resync::automatic.
  bool may_wait() const noexcept { return options_.resync == Resync::automatic && active_ == 1; }
  StepState state() const {
    return {.sequences = places_count_,
            .rows_per_sequence = traits_.rows_per_sequence,
            .mode = work_.state.mode,
            .position = work_.state.position,
            .token = work_.state.token,
            .guess = work_.state.guess,
            .waits = work_.state.waits};
  }
  SamplingView sampling_view() const { return {.step = view(), .options = work_.sampling, .tokens = work_.tokens, .seen = work_.seen}; }
  int place_of(SequenceId id) const {
    for (int place = 0; place < places_count_; ++place) {
      if (places_[at(place)].used && places_[at(place)].id == id) return place;
    }
    throw InvalidArgument("sequence = " + std::to_string(id.value) + ": must be one that is active");
  }
  static std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }
  int position_at(int place) const noexcept { return mirror_.position[at(place)]; }
  template <class T>
  void put(T* target, int index, const T& value) {
    backend_->kernels().upload(target + index, &value, sizeof(T), stream());
  }
  StreamRef stream() const noexcept { return backend_->stream(); }

  void check_usable() const {
    if (failed_) throw Error("the session failed in an earlier step and can only be destroyed");
  }
  void check_prompt(std::span<const Token> prompt, const AddOptions& options) const;
  int free_place() const;
  void prefill(int place, std::span<const Token> prompt);
  void run_pass();
  bool wants_logits() const;
  void download_logits();
  void deliver_logits(int place, std::span<const float> logits);
  void enqueue_pass();
  void upload_forced();
  void count_pass();
  void end_finished();
  void finish_token(int place, Token token, StepResult& result);
  void vacate(int place);

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const ModelWeights> weights_;
  SessionOptions options_;
  PredictorTraits traits_;
  std::unique_ptr<DenseModel> dense_;
  std::unique_ptr<SparseAttention> attention_;
  int places_count_ = 0;
  DataType activation_ = DataType::f32;
  Buffer work_buffer_;
  Work work_{};
  std::map<GraphKey, std::unique_ptr<StepGraph>> graphs_;
  std::vector<Token> forced_;  // [places] what work_.forced holds
  std::vector<std::byte> mirror_buffer_;
  Mirror mirror_{};
  std::vector<Place> places_;
  std::vector<std::uint8_t> committed_;   // [places] row 0 ran in the last pass
  std::vector<TokenEvent> first_tokens_;  // chosen by add, handed out by the next step
  std::vector<float> host_logits_;
  StepResult result_;
  SessionStatistics statistics_;
  std::uint64_t next_id_ = 1;
  int active_ = 0;
  bool failed_ = false;
  bool undelivered_ = false;  // a callback threw after result_ was complete
};

/// A session with a predictor of SessionOptions::predictor. Throws as the constructor.
inline DecodeSession make_session(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights,
                                  const SessionOptions& options) {
  return DecodeSession(std::move(backend), std::move(weights), options, make_predictor(options));
}

/// What make_session would take at most, weights left out. Throws InvalidArgument naming the option.
inline MemoryPlan memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& options) {
  return DecodeSession::memory_plan(backend, config, options, make_predictor(options)->traits());
}

}  // namespace dualdecoder

#include "dualdecoder/detail/decode_session_impl.hpp"  // IWYU pragma: keep
