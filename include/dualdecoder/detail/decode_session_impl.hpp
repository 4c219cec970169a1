// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/decode_session.hpp"

namespace dualdecoder {

inline DecodeSession::DecodeSession(std::shared_ptr<Backend> backend, std::shared_ptr<const ModelWeights> weights,
                                    const SessionOptions& options, std::unique_ptr<RetrievalPredictor> predictor)
    : backend_(std::move(backend)), weights_(std::move(weights)), options_(options) {
  if (!backend_ || !weights_ || !predictor) throw InvalidArgument("DecodeSession: backend, weights and predictor must all be given");
  traits_ = predictor->traits();
  if (options_.prefill_block == 0) options_.prefill_block = backend_->prefill_block();
  const ModelConfig& config = weights_->config();
  const StoreOptions store_options = make_store_options(config, options, traits_);
  const int rows = options.max_sequences * traits_.rows_per_sequence;

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
                                .trace = backend_->trace()});
  attention_ = std::make_unique<SparseAttention>(
      SparseAttentionParts{.store = std::move(store),
                           .predictor = std::move(predictor),
                           .scheduler = std::move(scheduler),
                           .kernels = &backend_->kernels(),
                           .device_memory = &backend_->memory(MemoryKind::device),
                           .trace = backend_->trace()},
      SparseAttentionShape{.layers = config.layers, .kv_heads = config.kv_heads, .max_sequences = options.max_sequences}, stream());

  const WorkShape shape{.places = options.max_sequences, .rows = rows, .ahead = traits_.layer_ahead, .activation = activation_};
  Carver counting;
  carve_work(counting, config, shape);
  work_buffer_ = Buffer(backend_->memory(MemoryKind::device), counting.bytes(), stream());
  Carver carving(work_buffer_.data());
  work_ = carve_work(carving, config, shape);
  Carver mirror_counting;
  carve_mirror(mirror_counting, options.max_sequences, rows);
  // carved at the device block's own alignment, so that one copy fills it
  mirror_buffer_.resize(mirror_counting.bytes() + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(mirror_buffer_.data());
  Carver mirror_carving(mirror_buffer_.data() + (64 - address % 64) % 64);
  mirror_ = carve_mirror(mirror_carving, options.max_sequences, rows);

  places_.resize(at(options.max_sequences));
  committed_.resize(places_.size());
  forced_.assign(places_.size(), -1);
  backend_->kernels().upload(work_.forced, forced_.data(), forced_.size() * sizeof(Token), stream());
  first_tokens_.reserve(places_.size());
  result_.tokens.reserve(2 * places_.size());
  for (int place = 0; place < options.max_sequences; ++place) {
    mirror_.mode[at(place)] = RowMode::idle;
    put(work_.state.mode, place, RowMode::idle);
    put(work_.state.waits, place, std::uint8_t{0});
    put(work_.state.position, place, 0);
    put(work_.slot_of, place, 0);
    put(work_.seen, place, static_cast<std::uint64_t*>(nullptr));
  }
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

inline std::size_t DecodeSession::prefill_bytes(const ModelConfig& config, const SessionOptions& options, DataType activation, int tokens) {
  const std::size_t n = at(tokens);
  const std::size_t block = at(prefill_block(options, tokens));
  const std::size_t elements = n * 2 * at(config.kv_width()) + 2 * block * at(config.q_width());
  return elements * size_of(activation) + n * at(config.hidden) * sizeof(float) + n * (sizeof(Token) + sizeof(int)) + 8 * 64;
}

inline MemoryPlan DecodeSession::memory_plan(const Backend& backend, const ModelConfig& config, const SessionOptions& wanted,
                                             const PredictorTraits& traits) {
  SessionOptions options = wanted;
  if (options.prefill_block == 0) options.prefill_block = backend.prefill_block();
  const StoreOptions store_options = make_store_options(config, options, traits);
  MemoryPlan plan = backend.store_plan(store_options);
  plan.add(backend.dense_plan(config, dense_limits(options, traits)));
  const DataType activation = backend.activation_type();
  Carver counting;
  carve_work(counting, config,
             {.places = options.max_sequences,
              .rows = options.max_sequences * traits.rows_per_sequence,
              .ahead = traits.layer_ahead,
              .activation = activation});
  plan.add("activations", MemoryKind::device, counting.bytes());
  // lists as long as those of the resident store, which asks for the most
  const int selected = std::max(1, std::min(options.budget_tokens, options.max_context) / options.chunk_tokens);
  const int heads = options.max_sequences * config.kv_heads;
  plan.add("chosen chunks and transfer lists", MemoryKind::device,
           SparseAttention::list_bytes(
               {.layers = config.layers, .kv_heads = config.kv_heads, .max_sequences = options.max_sequences}, traits,
               {.urgent = heads * selected, .prefetch = 2 * heads * selected, .write_back = heads * config.layers, .selection = selected}));
  plan.add("prefill work space", MemoryKind::device, prefill_bytes(config, options, activation, options.max_context));
  return plan;
}

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

inline int DecodeSession::free_place() const {
  for (int place = 0; place < options_.max_sequences; ++place) {
    if (!places_[at(place)].used) return place;
  }
  throw InvalidArgument("sequences: all " + std::to_string(options_.max_sequences) + " planned by max_sequences are active");
}

inline SequenceId DecodeSession::add(std::span<const Token> prompt, AddOptions options) {
  check_usable();
  check_prompt(prompt, options);
  const int place = free_place();
  const auto begin = Clock::now();
  Place fresh;
  fresh.id = SequenceId{next_id_};
  fresh.used = true;
  const std::size_t wanted = options.forced.empty() ? at(options.max_new_tokens) : options.forced.size();
  fresh.capacity = static_cast<int>(std::min(prompt.size() + wanted, at(options_.max_context)));
  fresh.options = std::move(options);
  std::vector<std::uint64_t> seen(fresh.options.sampling.repetition_penalty != 1.0F ? seen_words(config()) : 0);
  for (Token token : prompt) {
    if (!seen.empty()) seen[at(token) / 64] |= std::uint64_t{1} << (at(token) % 64);
  }
  fresh.slot = attention_->open(fresh.capacity, stream());
  places_[at(place)] = std::move(fresh);
  Token first = 0;
  try {
    Place& added = places_[at(place)];
    std::uint64_t* bits = nullptr;
    if (!seen.empty()) {
      bits = work_.seen_bits + at(place) * seen_words(config());
      backend_->kernels().upload(bits, seen.data(), seen.size() * sizeof(std::uint64_t), stream());
    }
    put(work_.seen, place, bits);
    put(work_.sampling, place, added.options.sampling);
    put(work_.slot_of, place, added.slot);
    prefill(place, prompt);
    first = mirror_.sampled[0];
    if (!added.options.forced.empty()) first = added.options.forced.front();
  } catch (...) {
    vacate(place);
    throw;
  }
  // from here on nothing throws
  ++next_id_;
  ++active_;
  places_count_ = std::max(places_count_, place + 1);
  Place& added = places_[at(place)];
  put(work_.state.token, place, first);
  put(work_.state.guess, place, Token{-1});
  put(work_.state.position, place, static_cast<int>(prompt.size()));
  put(work_.state.waits, place, std::uint8_t{0});
  put(work_.state.mode, place, attention_->first_mode());
  mirror_.mode[at(place)] = attention_->first_mode();
  mirror_.position[at(place)] = static_cast<int>(prompt.size());
  mirror_.token[at(place)] = first;
  mirror_.guess[at(place)] = -1;
  first_tokens_.push_back({.sequence = added.id, .token = first});
  statistics_.prompt_tokens += prompt.size();
  statistics_.prefill += Clock::now() - begin;
  return added.id;
}

inline void DecodeSession::prefill(int place, std::span<const Token> prompt) {
  const TraceSpan span(backend_->trace(), "compute", "prefill");
  const ModelConfig& model = config();
  const int count = static_cast<int>(prompt.size());
  const int block = prefill_block(options_, count);
  const int slot = places_[at(place)].slot;
  const auto& on_prefill = places_[at(place)].options.on_prefill;
  const std::size_t total = prompt.size() * at(model.layers);
  Buffer buffer(backend_->memory(MemoryKind::device), prefill_bytes(model, options_, activation_, count), stream());
  Carver carver(buffer.data());
  Token* tokens = carver.take<Token>(at(count));
  int* positions = carver.take<int>(at(count));
  float* hidden = carver.take<float>(at(count) * at(model.hidden));
  const std::size_t element = size_of(activation_);
  auto* keys = carver.take<std::byte>(at(count) * at(model.kv_width()) * element);
  auto* values = carver.take<std::byte>(at(count) * at(model.kv_width()) * element);
  auto* q = carver.take<std::byte>(at(block) * at(model.q_width()) * element);
  auto* out = carver.take<std::byte>(at(block) * at(model.q_width()) * element);
  std::vector<int> ascending(at(count));
  for (int i = 0; i < count; ++i) ascending[at(i)] = i;
  backend_->kernels().upload(tokens, prompt.data(), prompt.size_bytes(), stream());
  backend_->kernels().upload(positions, ascending.data(), ascending.size() * sizeof(int), stream());

  const auto matrix = [](float* data, int first, int rows, int width) {
    return Tensor{data + at(first) * at(width), DataType::f32, {rows, width}};
  };
  const auto heads_of = [&](std::byte* data, int first, int rows, int heads) {
    return Tensor{data + at(first) * at(heads) * at(model.head_dim) * element, activation_, {rows, heads, model.head_dim}};
  };
  for (int first = 0; first < count; first += block) {
    const int rows = std::min(block, count - first);
    dense_->embed(tokens + first, matrix(hidden, first, rows, model.hidden), stream());
  }
  for (Layer layer = 0; layer < model.layers; ++layer) {
    for (int first = 0; first < count; first += block) {
      const int rows = std::min(block, count - first);
      const Tensor block_hidden = matrix(hidden, first, rows, model.hidden);
      const Tensor block_q = heads_of(q, 0, rows, model.heads);
      const Tensor block_k = heads_of(keys, first, rows, model.kv_heads);
      const Tensor block_v = heads_of(values, first, rows, model.kv_heads);
      dense_->before_attention(layer, block_hidden, positions + first, block_q, block_k, block_v, stream());
      const Tensor block_out = heads_of(out, 0, rows, model.heads);
      dense_->prefill_attention(block_q, heads_of(keys, 0, first + rows, model.kv_heads), heads_of(values, 0, first + rows, model.kv_heads),
                                first, block_out, stream());
      dense_->after_attention(layer, block_out, block_hidden, stream());
      const int begin_kept = std::max(first, count - KvStore::kCalibrationQueries);
      ConstTensor last_queries;
      if (begin_kept < first + rows) last_queries = heads_of(q, begin_kept - first, first + rows - begin_kept, model.heads);
      attention_->append(layer, slot, {.keys = block_k, .values = block_v}, last_queries, stream());
      if (on_prefill) on_prefill(at(layer) * prompt.size() + at(first + rows), total);
    }
  }
  attention_->seal(slot, stream());

  // the last token's row alone chooses the first new token; it borrows the place's own row of the decode work space
  Tensor logits{work_.logits, DataType::f32, {1, model.vocabulary}};
  dense_->head(matrix(hidden, count - 1, 1, model.hidden), logits, stream());
  if (places_[at(place)].options.on_logits) {
    host_logits_.resize(at(model.vocabulary));
    backend_->copy(host_logits_.data(), work_.logits, host_logits_.size() * sizeof(float), stream());
    deliver_logits(place, host_logits_);
  }
  const RowMode single = RowMode::single;
  const int last = count - 1;
  put(work_.state.mode, place, single);
  put(work_.state.position, place, last);
  put(work_.tokens, 0, prompt.back());
  const StepView one{.sequences = 1,
                     .rows_per_sequence = 1,
                     .slot_of = work_.slot_of + place,
                     .position = work_.state.position + place,
                     .mode = work_.state.mode + place};
  dense_->sample(logits, {.step = one, .options = work_.sampling + place, .tokens = work_.tokens, .seen = work_.seen + place},
                 work_.state.sampled, stream());
  backend_->copy(mirror_.sampled, work_.state.sampled, sizeof(Token), stream());
}

inline void DecodeSession::run_pass() {
  const ModelConfig& model = config();
  const int rows = places_count_ * traits_.rows_per_sequence;
  const auto block = [&](float* data, int width) { return Tensor{data, DataType::f32, {rows, width}}; };
  const auto heads_of = [&](std::byte* data, int heads) { return Tensor{data, activation_, {rows, heads, model.head_dim}}; };
  const Tensor hidden = block(work_.hidden, model.hidden);
  const Tensor q = heads_of(work_.q, model.heads);
  const Tensor k = heads_of(work_.k, model.kv_heads);
  const Tensor v = heads_of(work_.v, model.kv_heads);
  const Tensor out = heads_of(work_.attention, model.heads);
  StepKernels& kernels = backend_->kernels();

  kernels.lay_out(state(), work_.tokens, work_.positions, stream());
  dense_->embed(work_.tokens, hidden, stream());
  attention_->begin_step(view(), stream());
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
  download_logits();
  dense_->sample(logits, sampling_view(), work_.state.sampled, stream());
  kernels.force(state(), work_.forced, work_.state.sampled, stream());
  kernels.mark_seen(state(), work_.seen, stream());
  attention_->end_step(stream());
  attention_->observe(state(), {.sampled = work_.state.sampled}, active_, stream());
}

/// A pass as a graph where the backend records and nobody looks into the pass; the first pass of a key runs plainly, since what it makes on
/// its first call must not be recorded.
inline void DecodeSession::enqueue_pass() {
  const GraphKey key{.places = places_count_, .lone = active_ == 1};
  const auto known = graphs_.find(key);
  if (traits_.reads_back || wants_logits() || known == graphs_.end()) {
    run_pass();
    if (known == graphs_.end()) graphs_.emplace(key, nullptr);
    return;
  }
  if (!known->second) {
    known->second = backend_->record(
        [&] {
          run_pass();
          attention_->rejoin(stream());
        },
        stream());
  }
  if (known->second) {
    known->second->launch(stream());
  } else {
    run_pass();
  }
}

inline bool DecodeSession::wants_logits() const {
  return std::any_of(places_.begin(), places_.end(), [](const Place& place) { return place.used && place.options.on_logits; });
}

inline void DecodeSession::download_logits() {
  if (!wants_logits()) return;
  host_logits_.resize(at(places_count_ * traits_.rows_per_sequence) * at(config().vocabulary));
  backend_->copy(host_logits_.data(), work_.logits, host_logits_.size() * sizeof(float), stream());
}

inline void DecodeSession::deliver_logits(int place, std::span<const float> logits) {
  const auto& sink = places_[at(place)].options.on_logits;
  if (sink) sink(logits);
}

inline void DecodeSession::upload_forced() {
  bool changed = false;
  for (int place = 0; place < places_count_; ++place) {
    const Place& sequence = places_[at(place)];
    const std::size_t next = at(sequence.generated);
    const bool forced = sequence.used && next < sequence.options.forced.size();
    const Token token = forced ? sequence.options.forced[next] : -1;
    changed = changed || forced_[at(place)] != token;
    forced_[at(place)] = token;
  }
  if (changed) backend_->kernels().upload(work_.forced, forced_.data(), at(places_count_) * sizeof(Token), stream());
}

inline void DecodeSession::finish_token(int place, Token token, StepResult& result) {
  Place& sequence = places_[at(place)];
  ++sequence.generated;
  ++statistics_.generated_tokens;
  const AddOptions& options = sequence.options;
  TokenEvent event{.sequence = sequence.id, .token = token};
  const bool forced = !options.forced.empty();
  const int wanted = forced ? static_cast<int>(options.forced.size()) : options.max_new_tokens;
  if (!forced && std::find(options.stop_tokens.begin(), options.stop_tokens.end(), token) != options.stop_tokens.end()) {
    event.reason = FinishReason::stop_token;
  } else if (sequence.generated >= wanted) {
    event.reason = FinishReason::max_tokens;
  } else if (position_at(place) >= sequence.capacity) {
    event.reason = FinishReason::context_full;
  }
  event.finished = event.reason != FinishReason::none;
  result.tokens.push_back(event);
}

inline void DecodeSession::vacate(int place) {
  Place& sequence = places_[at(place)];
  put(work_.state.mode, place, RowMode::idle);
  mirror_.mode[at(place)] = RowMode::idle;
  const int slot = sequence.slot;
  sequence = Place{};
  while (places_count_ > 0 && !places_[at(places_count_ - 1)].used) --places_count_;
  try {
    attention_->close(slot, stream());
  } catch (...) {
    failed_ = true;  // a transfer was lost, and it may have been another sequence's
    throw;
  }
}

inline const StepResult& DecodeSession::step() {
  check_usable();
  if (!std::exchange(undelivered_, false)) result_.tokens.clear();
  result_.resyncs = 0;
  for (const TokenEvent& first : first_tokens_) finish_token(place_of(first.sequence), first.token, result_);
  first_tokens_.clear();
  end_finished();
  if (active_ == 0) return result_;

  const auto begin = Clock::now();
  {
    const TraceSpan span(backend_->trace(), "compute", "step");
    try {
      upload_forced();
      enqueue_pass();
      const std::size_t rows = at(places_count_ * traits_.rows_per_sequence);
      backend_->copy(mirror_.sampled, work_.state.sampled, rows * sizeof(Token), stream());
      count_pass();
      const auto* const block = reinterpret_cast<const std::byte*>(mirror_.position);
      const auto state_bytes = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(mirror_.sampled) - block);
      backend_->copy(mirror_.position, work_.state.position, state_bytes, stream());
    } catch (...) {
      failed_ = true;
      throw;
    }
  }
  const std::size_t known = result_.tokens.size();
  for (int place = 0; place < places_count_; ++place) {
    if (committed_[at(place)] != 0) finish_token(place, mirror_.sampled[at(place * traits_.rows_per_sequence)], result_);
  }
  statistics_.decode += Clock::now() - begin;
  // a callback may throw; the session is then as after a step without callbacks, and the next step hands these tokens out
  std::exception_ptr failure;
  for (std::size_t event = known; event < result_.tokens.size() && !failure; ++event) {
    const int place = place_of(result_.tokens[event].sequence);
    if (!places_[at(place)].options.on_logits) continue;
    const std::size_t width = at(config().vocabulary);
    try {
      deliver_logits(place, std::span<const float>(host_logits_).subspan(at(place * traits_.rows_per_sequence) * width, width));
    } catch (...) {
      failure = std::current_exception();
    }
  }
  end_finished();
  if (failure) {
    undelivered_ = true;
    std::rethrow_exception(failure);
  }
  return result_;
}

inline void DecodeSession::count_pass() {
  ++statistics_.passes;
  for (int place = 0; place < places_count_; ++place) {
    const RowMode mode = mirror_.mode[at(place)];
    committed_[at(place)] = row_is_live(mode, 0) ? 1 : 0;
    if (mode == RowMode::resync) ++result_.resyncs;
    if (mode == RowMode::dual) {
      ++statistics_.guesses;
      if (mirror_.guess[at(place)] == mirror_.sampled[at(place * traits_.rows_per_sequence)]) ++statistics_.right_guesses;
    }
  }
  statistics_.resyncs += static_cast<std::uint64_t>(result_.resyncs);
}

inline void DecodeSession::end_finished() {
  for (const TokenEvent& event : result_.tokens) {
    if (!event.finished) continue;
    for (int place = 0; place < places_count_; ++place) {
      const Place& sequence = places_[at(place)];
      if (!sequence.used || sequence.id != event.sequence) continue;
      --active_;
      vacate(place);
      break;
    }
  }
}

inline void DecodeSession::remove(SequenceId id) {
  check_usable();
  const int place = place_of(id);
  std::erase_if(first_tokens_, [&](const TokenEvent& event) { return event.sequence == id; });
  --active_;
  vacate(place);
}

}  // namespace dualdecoder
