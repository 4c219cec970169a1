// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/detail/prefill.hpp"
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
  /// Throws InvalidArgument naming the option, OutOfMemory. Nothing is allocated later but by prefills and the first step(). `options` does
  /// not choose the predictor; StoreKind::automatic is resident here.
  DecodeSession(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights, const SessionOptions& options,
                std::unique_ptr<RetrievalPredictor> predictor);
  DecodeSession(DecodeSession&&) = default;
  DecodeSession& operator=(DecodeSession&& other) noexcept;
  ~DecodeSession() = default;

  /// Prefills a prompt and chooses its first token; waits until done. Prompts that were enqueued before go first, other sequences stay as
  /// they are. Throws InvalidArgument (empty prompt, token or length out of range, more sequences than max_sequences), OutOfMemory, what a
  /// callback throws; then no trace of the sequence is left.
  SequenceId add(std::span<const Token> prompt, AddOptions options = {});
  /// Leaves the prefill to step(): each prefills prefill_tokens_per_step of the oldest prompt after its pass, and the first token comes
  /// with the step that ends it. Throws InvalidArgument as add. A prefill that fails later ends its sequence with FinishReason::failed and
  /// is felt by no other.
  SequenceId enqueue(std::span<const Token> prompt, AddOptions options = {});
  /// Runs one pass over all sequences that are prefilled, then a part of a prefill where one waits, and returns the tokens that came out;
  /// with nothing to do the result is empty.
  const StepResult& step();
  /// Ends a sequence, prefilled or not, and frees its storage. Throws InvalidArgument when the id is unknown or already finished.
  void remove(SequenceId id);

  /// Sequences that step() still has events for, waiting prompts included.
  int active() const noexcept { return active_; }
  bool failed() const noexcept { return failed_; }
  /// Committed tokens of an active sequence, prompt included; 0 until it is prefilled. Throws InvalidArgument for an unknown id.
  int length(SequenceId id) const { return places_[at(place_of(id))].position; }

  const ModelConfig& config() const noexcept { return weights_->config(); }
  SessionStatistics statistics() const noexcept { return statistics_; }
  StoreStatistics store_statistics() const { return attention_->store_statistics(); }
  LaneStatistics lane_statistics(Lane lane) const { return attention_->lane_statistics(lane); }

  /// What a session of these options takes at most, weights left out; nothing is allocated. Throws InvalidArgument naming the option.
  static MemoryPlan memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& options,
                                const PredictorTraits& traits);

 private:
  using Clock = std::chrono::steady_clock;

  static constexpr int kNoSlot = -1;

  /// One of max_sequences. A prompt waits here, is prefilled, then decodes.
  struct Place {
    SequenceId id{};            // 0: free
    std::vector<Token> prompt;  // until it is prefilled
    int slot = kNoSlot;
    bool decoding = false;
    int generated = 0;
    int capacity = 0;
    AddOptions options;
    // as the oldest pass that is not read yet found it
    RowMode mode = RowMode::idle;
    int position = 0;
    Token guess = -1;
  };
  /// What the host reads after every pass, in one block.
  struct Mirror {
    int* position;
    Token* token;
    Token* guess;
    RowMode* mode;
    std::uint8_t* waits;
    Token* sampled;
  };
  struct PassShape {
    int places = 0;     ///< idle ones included
    int sequences = 0;  ///< that run
  };
  /// A pass from its launch until its outcome is read.
  struct Pass {
    Mirror after{};                      // host memory
    std::unique_ptr<Readback> readback;  // null: the outcome is copied at once
    std::vector<SequenceId> ran;         // [max_sequences] whom each place ran; 0: nobody
    PassShape shape;
  };
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
  static Mirror carve_mirror(Carver& carver, int places, int rows);
  static std::size_t mirror_bytes(int places, int rows);
  static Work carve_work(Carver& carver, const ModelConfig& config, const WorkShape& shape);
  static std::size_t seen_words(const ModelConfig& config) { return (static_cast<std::size_t>(config.vocabulary) + 63) / 64; }
  static DenseLimits dense_limits(const SessionOptions& options, const PredictorTraits& traits) {
    return {.decode_rows = options.max_sequences * traits.rows_per_sequence, .prefill_rows = options.prefill_block};
  }

  static std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }
  StreamRef stream() const noexcept { return backend_->stream(); }
  template <class T>
  void put(T* target, int index, const T& value) {
    backend_->kernels().upload(target + index, &value, sizeof(T), stream());
  }
  int rows_of(int places) const noexcept { return places * traits_.rows_per_sequence; }
  StepView view(PassShape pass) const;
  StepState state(int places) const;
  int place_of(SequenceId id) const;

  void check_usable() const {
    if (failed_) throw Error("the session failed in an earlier step and can only be destroyed");
  }
  void check_prompt(std::span<const Token> prompt, const AddOptions& options) const;

  // places
  int free_place() const;
  int oldest_waiting() const;
  void vacate(int place, SequenceId kept = {});
  static bool is_spent(const Place& place, int generated, int position) noexcept;
  void finish_token(int place, Token token);
  void hand_out_pending();
  void end_finished();

  // prefill
  void advance_prefill(int place, std::size_t layer_tokens);
  void advance_queued(int place, std::size_t layer_tokens);
  void start_decoding(int place);
  std::uint64_t* upload_seen(int place);

  // passes
  std::exception_ptr decode();
  bool enqueue_pass();
  bool plan(Pass& pass);
  bool commits_in_flight(int place) const noexcept;
  bool looks_ahead() const noexcept;
  void upload_forced(const Pass& pass);
  void launch(PassShape pass);
  void run(PassShape pass);
  void read_pass();
  void drop_surplus();
  bool wants_logits() const noexcept;
  void download_logits(PassShape pass);
  std::exception_ptr deliver_logits(std::size_t first_event);

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const ModelWeights> weights_;
  SessionOptions options_;
  PredictorTraits traits_;
  std::unique_ptr<DenseModel> dense_;
  std::unique_ptr<SparseAttention> attention_;
  DataType activation_ = DataType::f32;
  Buffer work_buffer_;
  Work work_{};
  Buffer host_buffer_;
  std::map<GraphKey, std::unique_ptr<StepGraph>> graphs_;
  std::optional<detail::Prefill> prefill_;  // of oldest_waiting(), once it has begun
  std::vector<Place> places_;
  std::vector<Token> forced_;        // [places] what work_.forced holds
  std::vector<TokenEvent> pending_;  // first tokens and failures that no result holds yet
  std::vector<float> host_logits_;
  StepResult result_;
  SessionStatistics statistics_;
  std::uint64_t next_id_ = 1;
  int active_ = 0;
  bool failed_ = false;
  bool undelivered_ = false;  // a callback threw after result_ was complete
  std::size_t oldest_pass_ = 0;
  std::size_t in_flight_ = 0;   // passes launched and not read
  std::array<Pass, 2> passes_;  // last, so that they are waited for before anything goes
};

/// `options` with StoreKind::automatic made definite: full without prediction where the backend says that nothing is faster for contexts of
/// max_context, else resident with the predictor that they name. Other kinds stay. Throws InvalidArgument naming the option.
inline SessionOptions choose_store(const Backend& backend, const ModelConfig& config, SessionOptions options) {
  if (options.store != StoreKind::automatic) return options;
  if (backend.prefers_full(make_store_options(config, options, make_predictor(options)->traits()))) {
    options.store = StoreKind::full;
    options.predictor = PredictorKind::none;
  } else {
    options.store = StoreKind::resident;
  }
  return options;
}

/// A session with a predictor of SessionOptions::predictor, and the store of choose_store. Throws as the constructor.
inline DecodeSession make_session(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights,
                                  const SessionOptions& options) {
  if (!backend || !weights) throw InvalidArgument("make_session: backend and weights must both be given");
  const SessionOptions chosen = choose_store(*backend, weights->config(), options);
  return DecodeSession(std::move(backend), std::move(weights), chosen, make_predictor(chosen));
}

/// What make_session would take at most, weights left out. Throws InvalidArgument naming the option.
inline MemoryPlan memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& options) {
  const SessionOptions chosen = choose_store(backend, config, options);
  return DecodeSession::memory_plan(backend, config, chosen, make_predictor(chosen)->traits());
}

}  // namespace dualdecoder

#include "dualdecoder/detail/decode_session_impl.hpp"  // IWYU pragma: keep
