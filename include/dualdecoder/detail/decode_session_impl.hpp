// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>

#include "dualdecoder/decode_session.hpp"

namespace dualdecoder {

// -- set-up ------------------------------------------------------------------------------------------------------------------------------

inline DecodeSession::DecodeSession(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights,
                                    const SessionOptions& options, std::unique_ptr<RetrievalPredictor> predictor)
    : backend_(std::move(backend)), weights_(std::move(weights)), options_(options) {
  if (!backend_ || !weights_ || !predictor) throw InvalidArgument("DecodeSession: backend, weights and predictor must all be given");
  traits_ = predictor->traits();
  if (options_.prefill_block == 0) options_.prefill_block = backend_->prefill_block();
  const ModelConfig& config = weights_->config();
  const StoreOptions store_options = make_store_options(config, options, traits_);
  const int places = options.max_sequences;

  dense_ = backend_->make_dense(weights_, dense_limits(options_, traits_));
  activation_ = dense_->activation_type();
  auto store = backend_->make_store(store_options);
  const KvStore::Capacities capacities = store->capacities();
  auto scheduler =
      backend_->make_scheduler({.layers = config.layers,
                                .max_items_per_submit = std::max({capacities.urgent, capacities.prefetch, capacities.write_back}),
                                .bytes_per_second = options.link_bytes_per_second,
                                .latency = options.link_latency,
                                .single_lane = options.single_lane,
                                .concurrent_prefetch = prefers_concurrent_prefetch(store_options),
                                .trace = backend_->trace()});
  attention_ = std::make_unique<SparseAttention>(
      SparseAttentionParts{.store = std::move(store),
                           .predictor = std::move(predictor),
                           .scheduler = std::move(scheduler),
                           .kernels = &backend_->kernels(),
                           .device_memory = &backend_->memory(MemoryKind::device),
                           .trace = backend_->trace()},
      SparseAttentionShape{.layers = config.layers, .kv_heads = config.kv_heads, .max_sequences = places}, stream());

  const WorkShape shape{.places = places, .rows = rows_of(places), .ahead = traits_.layer_ahead, .activation = activation_};
  Carver counting;
  carve_work(counting, config, shape);
  work_buffer_ = Buffer(backend_->memory(MemoryKind::device), counting.bytes(), stream());
  Carver carving(work_buffer_.data());
  work_ = carve_work(carving, config, shape);

  places_.resize(at(places));
  const std::size_t block = mirror_bytes(places, rows_of(places));
  host_buffer_ = Buffer(backend_->memory(MemoryKind::pinned), passes_.size() * block, stream());
  for (std::size_t i = 0; i < passes_.size(); ++i) {
    Carver host(host_buffer_.data() + i * block);
    passes_[i].after = carve_mirror(host, places, rows_of(places));
    passes_[i].readback = backend_->make_readback();
    passes_[i].ran.resize(places_.size());
  }
  forced_.assign(places_.size(), -1);
  backend_->kernels().upload(work_.forced, forced_.data(), forced_.size() * sizeof(Token), stream());
  pending_.reserve(places_.size());
  result_.tokens.reserve(3 * places_.size());
  for (int place = 0; place < places; ++place) {
    put(work_.state.mode, place, RowMode::idle);
    put(work_.state.waits, place, std::uint8_t{0});
    put(work_.state.position, place, 0);
    put(work_.slot_of, place, 0);
    put(work_.seen, place, static_cast<std::uint64_t*>(nullptr));
  }
}

inline DecodeSession& DecodeSession::operator=(DecodeSession&& other) noexcept {
  if (this != &other) {  // members must go in the order of a destruction, the backend last
    std::destroy_at(this);
    std::construct_at(this, std::move(other));
  }
  return *this;
}

inline DecodeSession::Mirror DecodeSession::carve_mirror(Carver& carver, int places, int rows) {
  Mirror mirror{};
  mirror.position = carver.take<int>(at(places));
  mirror.token = carver.take<Token>(at(places));
  mirror.guess = carver.take<Token>(at(places));
  mirror.mode = carver.take<RowMode>(at(places));
  mirror.waits = carver.take<std::uint8_t>(at(places));
  mirror.sampled = carver.take<Token>(at(rows));
  return mirror;
}

/// A whole number of Buffer alignments, so that blocks that stand one behind the other are carved alike.
inline std::size_t DecodeSession::mirror_bytes(int places, int rows) {
  Carver counting;
  carve_mirror(counting, places, rows);
  return (counting.bytes() + Buffer::kAlignment - 1) / Buffer::kAlignment * Buffer::kAlignment;
}

inline DecodeSession::Work DecodeSession::carve_work(Carver& carver, const ModelConfig& config, const WorkShape& shape) {
  const auto r = at(shape.rows);
  const std::size_t q_row = at(config.q_width()) * size_of(shape.activation);
  const std::size_t kv_row = at(config.kv_width()) * size_of(shape.activation);
  Work work{};
  work.state = carve_mirror(carver, shape.places, shape.rows);
  work.slot_of = carver.take<int>(at(shape.places));
  work.sampling = carver.take<SamplingOptions>(at(shape.places));
  work.seen = carver.take<std::uint64_t*>(at(shape.places));
  work.seen_bits = carver.take<std::uint64_t>(at(shape.places) * seen_words(config));
  work.tokens = carver.take<Token>(r);
  work.forced = carver.take<Token>(at(shape.places));
  work.positions = carver.take<int>(r);
  work.hidden = carver.take<float>(r * at(config.hidden));
  work.q = carver.take<std::byte>(r * q_row);
  work.ahead = carver.take<std::byte>(shape.ahead ? r * q_row : 0);
  work.k = carver.take<std::byte>(r * kv_row);
  work.v = carver.take<std::byte>(r * kv_row);
  work.attention = carver.take<std::byte>(r * q_row);
  work.logits = carver.take<float>(r * at(config.vocabulary));
  return work;
}

inline MemoryPlan DecodeSession::memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& wanted,
                                             const PredictorTraits& traits) {
  SessionOptions options = wanted;
  if (options.prefill_block == 0) options.prefill_block = backend.prefill_block();
  const StoreOptions store_options = make_store_options(config, options, traits);
  const int rows = options.max_sequences * traits.rows_per_sequence;
  MemoryPlan plan = backend.store_plan(store_options);
  plan.add(backend.dense_plan(config, dense_limits(options, traits)));
  const DataType activation = backend.activation_type();
  Carver counting;
  carve_work(counting, config, {.places = options.max_sequences, .rows = rows, .ahead = traits.layer_ahead, .activation = activation});
  plan.add("activations", MemoryKind::device, counting.bytes());
  // lists as long as those of the resident store, which asks for the most of its budget
  const int budget = options.store == StoreKind::specache ? options.specache.fetched_tokens : options.budget_tokens;
  const int selected = std::max(1, std::min(budget, options.max_context) / selected_tokens(store_options));
  const int heads = options.max_sequences * config.kv_heads;
  plan.add("chosen chunks and transfer lists", MemoryKind::device,
           SparseAttention::list_bytes(
               {.layers = config.layers, .kv_heads = config.kv_heads, .max_sequences = options.max_sequences}, traits,
               {.urgent = heads * selected, .prefetch = 2 * heads * selected, .write_back = heads * config.layers, .selection = selected}));
  plan.add("prefill work space", MemoryKind::device,
           detail::Prefill::bytes(config, activation, options.prefill_block, options.max_context));
  plan.add("tokens read by the host", MemoryKind::pinned, std::tuple_size_v<decltype(passes_)> * mirror_bytes(options.max_sequences, rows));
  return plan;
}

// -- places ------------------------------------------------------------------------------------------------------------------------------

inline void DecodeSession::check_prompt(std::span<const Token> prompt, const AddOptions& options) const {
  if (prompt.empty()) throw InvalidArgument("prompt: must hold at least one token");
  if (prompt.size() > at(options_.max_context)) {
    throw InvalidArgument("prompt = " + std::to_string(prompt.size()) +
                          " tokens: must be at most max_context = " + std::to_string(options_.max_context));
  }
  const auto check_token = [&](Token token, const char* what) {
    if (token < 0 || token >= config().vocabulary) {
      throw InvalidArgument(std::string(what) + " token = " + std::to_string(token) + ": must be in 0 .. " +
                            std::to_string(config().vocabulary - 1));
    }
  };
  for (Token token : prompt) check_token(token, "prompt");
  for (Token token : options.forced) check_token(token, "forced");
  detail::require(options.max_new_tokens >= 1, "max_new_tokens", options.max_new_tokens, "at least 1");
  validate(options.sampling);
}

inline int DecodeSession::place_of(SequenceId id) const {
  for (int place = 0; place < options_.max_sequences; ++place) {
    if (id != SequenceId{} && places_[at(place)].id == id) return place;
  }
  throw InvalidArgument("sequence = " + std::to_string(id.value) + ": must be one that is active");
}

inline int DecodeSession::free_place() const {
  for (int place = 0; place < options_.max_sequences; ++place) {
    if (places_[at(place)].id == SequenceId{}) return place;
  }
  throw InvalidArgument("sequences: all " + std::to_string(options_.max_sequences) + " planned by max_sequences are active");
}

/// The place whose prompt is prefilled next, or -1.
inline int DecodeSession::oldest_waiting() const {
  int oldest = -1;
  for (int place = 0; place < options_.max_sequences; ++place) {
    const Place& sequence = places_[at(place)];
    if (sequence.prompt.empty()) continue;
    if (oldest < 0 || sequence.id < places_[at(oldest)].id) oldest = place;
  }
  return oldest;
}

/// Gives a place's storage back. `kept` stays as its id until its last event is handed out.
inline void DecodeSession::vacate(int place, SequenceId kept) {
  Place& sequence = places_[at(place)];
  const int slot = sequence.slot;
  if (!sequence.prompt.empty() && slot != kNoSlot) prefill_.reset();
  sequence = Place{};
  sequence.id = kept;
  if (slot == kNoSlot) return;
  try {
    put(work_.state.mode, place, RowMode::idle);
    attention_->close(slot, stream());
  } catch (...) {
    failed_ = true;  // the stream is broken, or a transfer was lost, and it may have been another sequence's
    throw;
  }
}

inline SequenceId DecodeSession::enqueue(std::span<const Token> prompt, AddOptions options) {
  check_usable();
  check_prompt(prompt, options);
  Place& place = places_[at(free_place())];
  Place fresh;
  fresh.id = SequenceId{next_id_};
  fresh.prompt.assign(prompt.begin(), prompt.end());
  const std::size_t wanted = options.forced.empty() ? at(options.max_new_tokens) : options.forced.size();
  fresh.capacity = static_cast<int>(std::min(prompt.size() + wanted, at(options_.max_context)));
  fresh.options = std::move(options);
  place = std::move(fresh);
  ++next_id_;
  ++active_;
  return place.id;
}

inline SequenceId DecodeSession::add(std::span<const Token> prompt, AddOptions options) {
  const SequenceId id = enqueue(prompt, std::move(options));
  try {
    const int place = place_of(id);
    for (int oldest = oldest_waiting(); oldest != place; oldest = oldest_waiting()) advance_queued(oldest, 0);
    advance_prefill(place, 0);
  } catch (...) {
    places_[at(place_of(id))] = Place{};
    --active_;
    throw;
  }
  return id;
}

inline void DecodeSession::remove(SequenceId id) {
  check_usable();
  const int place = place_of(id);
  std::erase_if(pending_, [&](const TokenEvent& event) { return event.sequence == id; });
  --active_;
  vacate(place);
}

// -- prefill -----------------------------------------------------------------------------------------------------------------------------

/// A part of the prefill of oldest_waiting(). After an exception the place keeps nothing but its id.
inline void DecodeSession::advance_prefill(int place, std::size_t layer_tokens) {
  Place& sequence = places_[at(place)];
  const auto begin = Clock::now();
  const TraceSpan span(backend_->trace(), "compute", "prefill");
  try {
    if (!prefill_) {
      sequence.slot = attention_->open(sequence.capacity, stream());
      const detail::PrefillParts parts{.backend = backend_.get(),
                                       .dense = dense_.get(),
                                       .attention = attention_.get(),
                                       .model = &config(),
                                       .activation = activation_,
                                       .block = options_.prefill_block};
      prefill_.emplace(parts, sequence.slot, sequence.prompt);
    }
    prefill_->advance(layer_tokens, sequence.options.on_prefill);
    if (prefill_->done()) start_decoding(place);
  } catch (...) {
    vacate(place, sequence.id);
    throw;
  }
  statistics_.prefill += Clock::now() - begin;
}

/// The same for a prompt whose caller has gone on: a failure is its sequence's last event.
inline void DecodeSession::advance_queued(int place, std::size_t layer_tokens) {
  const SequenceId id = places_[at(place)].id;
  try {
    advance_prefill(place, layer_tokens);
  } catch (...) {
    if (failed_) throw;
    pending_.push_back({.sequence = id, .token = -1, .finished = true, .reason = FinishReason::failed, .error = std::current_exception()});
  }
}

/// Chooses the first token of a prompt that is prefilled. Passes take part in it from here on.
inline void DecodeSession::start_decoding(int place) {
  Place& sequence = places_[at(place)];
  const int length = static_cast<int>(sequence.prompt.size());
  put(work_.seen, place, upload_seen(place));
  put(work_.sampling, place, sequence.options.sampling);
  put(work_.slot_of, place, sequence.slot);

  // the last token's row alone is needed; it borrows the first row of the passes' work space, and the place's own state
  Tensor logits{work_.logits, DataType::f32, {1, config().vocabulary}};
  dense_->head(prefill_->last_hidden(), logits, stream());
  if (sequence.options.on_logits) {
    host_logits_.resize(at(config().vocabulary));
    backend_->copy(host_logits_.data(), work_.logits, host_logits_.size() * sizeof(float), stream());
    sequence.options.on_logits(host_logits_);
  }
  put(work_.state.mode, place, RowMode::single);
  put(work_.state.position, place, length - 1);
  put(work_.tokens, 0, sequence.prompt.back());
  const StepView one{.sequences = 1,
                     .rows_per_sequence = 1,
                     .slot_of = work_.slot_of + place,
                     .position = work_.state.position + place,
                     .mode = work_.state.mode + place};
  dense_->sample(logits, {.step = one, .options = work_.sampling + place, .tokens = work_.tokens, .seen = work_.seen + place},
                 work_.state.sampled, stream());
  Token first = 0;
  backend_->copy(&first, work_.state.sampled, sizeof first, stream());
  if (!sequence.options.forced.empty()) first = sequence.options.forced.front();

  put(work_.state.token, place, first);
  put(work_.state.guess, place, Token{-1});
  put(work_.state.position, place, length);
  put(work_.state.waits, place, std::uint8_t{0});
  put(work_.state.mode, place, attention_->first_mode());
  prefill_.reset();
  sequence.prompt = {};
  sequence.decoding = true;
  sequence.mode = attention_->first_mode();
  sequence.position = length;
  pending_.push_back({.sequence = sequence.id, .token = first});
  statistics_.prompt_tokens += at(length);
}

/// The prompt's tokens as a place's seen bits; null where its sampling asks for none.
inline std::uint64_t* DecodeSession::upload_seen(int place) {
  const Place& sequence = places_[at(place)];
  if (sequence.options.sampling.repetition_penalty == 1.0F) return nullptr;
  std::vector<std::uint64_t> seen(seen_words(config()));
  for (Token token : sequence.prompt) seen[at(token) / 64] |= std::uint64_t{1} << (at(token) % 64);
  std::uint64_t* const bits = work_.seen_bits + at(place) * seen_words(config());
  backend_->kernels().upload(bits, seen.data(), seen.size() * sizeof(std::uint64_t), stream());
  return bits;
}

// -- passes ------------------------------------------------------------------------------------------------------------------------------

inline StepView DecodeSession::view(PassShape pass) const {
  // whether a sequence may be told to wait in its next step; see Resync::automatic
  const bool may_wait = options_.resync == Resync::automatic && pass.sequences == 1;
  return {.sequences = pass.places,
          .rows_per_sequence = traits_.rows_per_sequence,
          .slot_of = work_.slot_of,
          .position = work_.state.position,
          .mode = work_.state.mode,
          .waits = may_wait ? work_.state.waits : nullptr};
}

inline StepState DecodeSession::state(int places) const {
  return {.sequences = places,
          .rows_per_sequence = traits_.rows_per_sequence,
          .mode = work_.state.mode,
          .position = work_.state.position,
          .token = work_.state.token,
          .guess = work_.state.guess,
          .waits = work_.state.waits};
}

inline void DecodeSession::run(PassShape pass) {
  const ModelConfig& model = config();
  const int rows = rows_of(pass.places);
  const auto block = [&](float* data, int width) { return Tensor{data, DataType::f32, {rows, width}}; };
  const auto heads_of = [&](std::byte* data, int heads) { return Tensor{data, activation_, {rows, heads, model.head_dim}}; };
  const Tensor hidden = block(work_.hidden, model.hidden);
  const Tensor q = heads_of(work_.q, model.heads);
  const Tensor k = heads_of(work_.k, model.kv_heads);
  const Tensor v = heads_of(work_.v, model.kv_heads);
  const Tensor out = heads_of(work_.attention, model.heads);
  const StepView step = view(pass);
  const StepState after = state(pass.places);
  StepKernels& kernels = backend_->kernels();

  kernels.lay_out(after, work_.tokens, work_.positions, stream());
  dense_->embed(work_.tokens, hidden, stream());
  attention_->begin_step(step, stream());
  for (Layer layer = 0; layer < model.layers; ++layer) {
    dense_->before_attention(layer, hidden, work_.positions, q, k, v, stream());
    ConstTensor ahead;
    if (traits_.layer_ahead && layer + 1 < model.layers) {
      const Tensor rehearsed = heads_of(work_.ahead, model.heads);
      dense_->before_attention(layer + 1, hidden, work_.positions, rehearsed, Tensor{}, Tensor{}, stream());
      ahead = rehearsed;
    }
    attention_->attend(layer, {.queries = q, .keys = k, .values = v}, ahead, out, stream());
    dense_->after_attention(layer, out, hidden, stream());
  }
  const Tensor logits = block(work_.logits, model.vocabulary);
  dense_->head(hidden, logits, stream());
  download_logits(pass);
  dense_->sample(logits, {.step = step, .options = work_.sampling, .tokens = work_.tokens, .seen = work_.seen}, work_.state.sampled,
                 stream());
  kernels.force(after, work_.forced, work_.state.sampled, stream());
  kernels.mark_seen(after, work_.seen, stream());
  attention_->end_step(stream());
  attention_->observe(after, {.sampled = work_.state.sampled}, pass.sequences, stream());
}

/// A pass as a graph where the backend records and nobody looks into the pass; the first pass of a key runs plainly, since what it makes on
/// its first call must not be recorded.
inline void DecodeSession::launch(PassShape pass) {
  const GraphKey key{.places = pass.places, .lone = pass.sequences == 1};
  const auto known = graphs_.find(key);
  if (traits_.reads_back || wants_logits() || known == graphs_.end()) {
    run(pass);
    if (known == graphs_.end()) graphs_.emplace(key, nullptr);
    return;
  }
  if (!known->second) {
    known->second = backend_->record(
        [this, pass] {
          run(pass);
          attention_->rejoin(stream());
        },
        stream());
  }
  if (known->second) {
    known->second->launch(stream());
  } else {
    run(pass);
  }
}

/// Whether the pass in flight gives the place a token. A pass's modes are known once the one before it is read.
inline bool DecodeSession::commits_in_flight(int place) const noexcept {
  const Place& sequence = places_[at(place)];
  return in_flight_ == 1 && passes_[oldest_pass_].ran[at(place)] == sequence.id && row_is_live(sequence.mode, 0);
}

/// Who takes part in a pass behind the one in flight: whoever goes on whatever that one samples. False: nobody.
inline bool DecodeSession::plan(Pass& pass) {
  pass.shape = {};
  for (int place = 0; place < options_.max_sequences; ++place) {
    const Place& sequence = places_[at(place)];
    const int more = commits_in_flight(place) ? 1 : 0;
    const bool runs = sequence.decoding && !is_spent(sequence, sequence.generated + more, sequence.position + more);
    pass.ran[at(place)] = runs ? sequence.id : SequenceId{};
    if (!runs) continue;
    ++pass.shape.sequences;
    pass.shape.places = place + 1;
  }
  for (int place = 0; place < pass.shape.places; ++place) {
    if (pass.ran[at(place)] == SequenceId{} && places_[at(place)].decoding) put(work_.state.mode, place, RowMode::idle);
  }
  return pass.shape.sequences > 0;
}

inline void DecodeSession::upload_forced(const Pass& pass) {
  bool changed = false;
  for (int place = 0; place < pass.shape.places; ++place) {
    const Place& sequence = places_[at(place)];
    const std::size_t next = at(sequence.generated + (commits_in_flight(place) ? 1 : 0));
    const bool forced = pass.ran[at(place)] != SequenceId{} && next < sequence.options.forced.size();
    const Token token = forced ? sequence.options.forced[next] : -1;
    changed = changed || forced_[at(place)] != token;
    forced_[at(place)] = token;
  }
  if (changed) backend_->kernels().upload(work_.forced, forced_.data(), forced_.size() * sizeof(Token), stream());
}

/// Launches the next pass and the reading of its outcome. False: nobody takes part.
inline bool DecodeSession::enqueue_pass() {
  Pass& pass = passes_[(oldest_pass_ + in_flight_) % passes_.size()];
  if (!plan(pass)) return false;
  upload_forced(pass);
  launch(pass.shape);
  const std::size_t bytes = mirror_bytes(options_.max_sequences, rows_of(options_.max_sequences));
  if (pass.readback) {
    pass.readback->enqueue(pass.after.position, work_.state.position, bytes, stream());
  } else {
    backend_->copy(pass.after.position, work_.state.position, bytes, stream());
  }
  ++in_flight_;
  return true;
}

/// Waits for the oldest pass. What it did for sequences that have ended since is dropped.
inline void DecodeSession::read_pass() {
  const Pass& pass = passes_[oldest_pass_];
  if (pass.readback) pass.readback->wait();
  oldest_pass_ = (oldest_pass_ + 1) % passes_.size();
  --in_flight_;
  ++statistics_.passes;
  for (int place = 0; place < pass.shape.places; ++place) {
    Place& sequence = places_[at(place)];
    if (!sequence.decoding || pass.ran[at(place)] != sequence.id) continue;
    const RowMode mode = std::exchange(sequence.mode, pass.after.mode[at(place)]);
    const Token guess = std::exchange(sequence.guess, pass.after.guess[at(place)]);
    const Token sampled = pass.after.sampled[at(rows_of(place))];
    sequence.position = pass.after.position[at(place)];
    if (mode == RowMode::resync) ++result_.resyncs;
    if (mode == RowMode::dual) {
      ++statistics_.guesses;
      if (guess == sampled) ++statistics_.right_guesses;
    }
    if (row_is_live(mode, 0)) finish_token(place, sampled);
  }
  statistics_.resyncs += static_cast<std::uint64_t>(result_.resyncs);
}

/// Forgets a pass in flight all of whose sequences have ended by something that no host could know when it was launched.
inline void DecodeSession::drop_surplus() {
  if (in_flight_ == 0) return;
  const Pass& pass = passes_[oldest_pass_];
  for (int place = 0; place < pass.shape.places; ++place) {
    if (pass.ran[at(place)] != SequenceId{} && pass.ran[at(place)] == places_[at(place)].id) return;
  }
  pass.readback->wait();
  oldest_pass_ = (oldest_pass_ + 1) % passes_.size();
  --in_flight_;
}

/// Whether the next pass is launched before the outcome of this one is known, so that the device goes on meanwhile.
inline bool DecodeSession::looks_ahead() const noexcept {
  return options_.look_ahead && passes_[0].readback && !traits_.reads_back && !wants_logits();
}

/// The pass of a step. Returns what a callback threw, after all that had to be done.
inline std::exception_ptr DecodeSession::decode() {
  const bool decoding = std::any_of(places_.begin(), places_.end(), [](const Place& place) { return place.decoding; });
  if (!decoding) return nullptr;
  const auto begin = Clock::now();
  const std::size_t known = result_.tokens.size();
  {
    const TraceSpan span(backend_->trace(), "compute", "step");
    try {
      drop_surplus();
      if (in_flight_ == 0) enqueue_pass();
      if (looks_ahead()) enqueue_pass();
      read_pass();
    } catch (...) {
      failed_ = true;
      throw;
    }
  }
  statistics_.decode += Clock::now() - begin;
  // a callback may throw; the session is then as after a step without callbacks, and the next step hands these tokens out
  std::exception_ptr failure = deliver_logits(known);
  end_finished();
  return failure;
}

inline bool DecodeSession::wants_logits() const noexcept {
  return std::any_of(places_.begin(), places_.end(), [](const Place& place) { return place.decoding && place.options.on_logits; });
}

inline void DecodeSession::download_logits(PassShape pass) {
  if (!wants_logits()) return;
  host_logits_.resize(at(rows_of(pass.places)) * at(config().vocabulary));
  backend_->copy(host_logits_.data(), work_.logits, host_logits_.size() * sizeof(float), stream());
}

/// Hands the logits of a pass to the sequences of its events; returns what the first that threw threw.
inline std::exception_ptr DecodeSession::deliver_logits(std::size_t first_event) {
  const std::size_t width = at(config().vocabulary);
  try {
    for (std::size_t event = first_event; event < result_.tokens.size(); ++event) {
      const int place = place_of(result_.tokens[event].sequence);
      const auto& sink = places_[at(place)].options.on_logits;
      if (sink) sink(std::span<const float>(host_logits_).subspan(at(rows_of(place)) * width, width));
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// -- steps -------------------------------------------------------------------------------------------------------------------------------

inline bool DecodeSession::is_spent(const Place& place, int generated, int position) noexcept {
  const std::size_t wanted = place.options.forced.empty() ? at(place.options.max_new_tokens) : place.options.forced.size();
  return at(generated) >= wanted || position >= place.capacity;
}

inline void DecodeSession::finish_token(int place, Token token) {
  Place& sequence = places_[at(place)];
  ++sequence.generated;
  ++statistics_.generated_tokens;
  const AddOptions& options = sequence.options;
  TokenEvent event{.sequence = sequence.id, .token = token};
  const bool stops = std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) != options.stop_tokens.end();
  if (stops && options.forced.empty()) {
    event.reason = FinishReason::stop_token;
  } else if (is_spent(sequence, sequence.generated, 0)) {
    event.reason = FinishReason::max_tokens;
  } else if (is_spent(sequence, sequence.generated, sequence.position)) {
    event.reason = FinishReason::context_full;
  }
  event.finished = event.reason != FinishReason::none;
  result_.tokens.push_back(event);
}

inline void DecodeSession::hand_out_pending() {
  for (TokenEvent& event : pending_) {
    if (event.finished) {
      result_.tokens.push_back(std::move(event));
    } else {
      finish_token(place_of(event.sequence), event.token);
    }
  }
  pending_.clear();
  end_finished();
}

inline void DecodeSession::end_finished() {
  for (const TokenEvent& event : result_.tokens) {
    if (!event.finished) continue;
    for (int place = 0; place < options_.max_sequences; ++place) {
      if (places_[at(place)].id != event.sequence) continue;
      --active_;
      vacate(place);
      break;
    }
  }
}

inline const StepResult& DecodeSession::step() {
  check_usable();
  if (!std::exchange(undelivered_, false)) result_.tokens.clear();
  result_.resyncs = 0;
  hand_out_pending();
  const std::exception_ptr failure = decode();
  if (const int waiting = oldest_waiting(); waiting >= 0) advance_queued(waiting, at(options_.prefill_tokens_per_step));
  hand_out_pending();
  if (failure) {
    undelivered_ = true;
    std::rethrow_exception(failure);
  }
  return result_;
}

}  // namespace dualdecoder
