// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/step_runner.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/forwarding.hpp"
#include "examples/bench/statistics.hpp"
#include "examples/bench/switched_loads.hpp"

namespace dualdecoder::examples {
namespace {

std::size_t at(int index) noexcept { return static_cast<std::size_t>(index); }

/// What a layer is to have chosen in the step that runs now.
using Replayed = std::function<Selection(Layer)>;

/// Lets the store choose, and then goes on with the choices that lie ready in place of these.
class ReplayStore final : public testing::ForwardingStore {
 public:
  ReplayStore(std::unique_ptr<KvStore> inner, Replayed replayed) : ForwardingStore(std::move(inner)), replayed_(std::move(replayed)) {}

  void resolve_needed(Layer layer, const StepView& view, const Selection&, const TransferList& urgent, StreamRef stream) override {
    ForwardingStore::resolve_needed(layer, view, replayed_(layer), urgent, stream);
  }
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef stream) override {
    ForwardingStore::attend(layer, view, rows, replayed_(layer), out, stream);
  }

 private:
  Replayed replayed_;
};

/// Shows another predictor the same choices.
class ReplayPredictor final : public RetrievalPredictor {
 public:
  ReplayPredictor(std::unique_ptr<RetrievalPredictor> inner, Replayed replayed)
      : inner_(std::move(inner)), replayed_(std::move(replayed)) {}

  PredictorTraits traits() const noexcept override { return inner_->traits(); }
  RowMode first_mode() const noexcept override { return inner_->first_mode(); }
  void predict(Layer layer, const StepView& view, const Selection&, const Selection& ahead, Prediction& prediction, StepKernels& kernels,
               StreamRef stream) override {
    inner_->predict(layer, view, replayed_(layer), ahead.chunks != nullptr ? replayed_(layer + 1) : ahead, prediction, kernels, stream);
  }
  void observe(const StepState& state, const Outcome& outcome, int active, StepKernels& kernels, StreamRef stream) override {
    inner_->observe(state, outcome, active, kernels, stream);
  }

 private:
  std::unique_ptr<RetrievalPredictor> inner_;
  Replayed replayed_;
};

/// Writes what a sequence's passes choose into a trace. Downloads everything: a tool, not for speed.
class RecordingStore final : public testing::ForwardingStore {
 public:
  RecordingStore(std::unique_ptr<KvStore> inner, StepTrace& trace, StepKernels& kernels)
      : ForwardingStore(std::move(inner)), trace_(trace), kernels_(kernels) {}

  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override {
    ForwardingStore::select(layer, view, queries, by_row, stream);
    if (layer == 0) {
      RowMode mode{};
      int position = 0;
      kernels_.download(&mode, view.mode, sizeof(mode), stream);
      kernels_.download(&position, view.position, sizeof(position), stream);
      trace_.mode.push_back(mode);
      trace_.position.push_back(position);
    }
    const std::size_t lists = at(StepTrace::kRows) * at(by_row.kv_heads);
    std::vector<int> chunks(lists * at(by_row.capacity));
    std::vector<int> count(lists);
    const std::size_t live = at(view.rows_per_sequence) * at(by_row.kv_heads);
    kernels_.download(chunks.data(), by_row.chunks, live * at(by_row.capacity) * sizeof(int), stream);
    kernels_.download(count.data(), by_row.count, live * sizeof(int), stream);
    for (int c : chunks) trace_.chunks.push_back(static_cast<std::uint32_t>(std::max(c, 0)));
    for (int c : count) trace_.count.push_back(static_cast<std::uint16_t>(c));
  }

 private:
  StepTrace& trace_;
  StepKernels& kernels_;
};

/// Another backend whose stores record, and whose passes are not recorded as graphs, since the host looks into them.
class RecordingBackend final : public testing::ForwardingBackend {
 public:
  /// `trace` must outlive the backend.
  RecordingBackend(std::shared_ptr<Backend> inner, StepTrace& trace) : ForwardingBackend(std::move(inner)), trace_(trace) {}

  std::unique_ptr<StepGraph> record(const std::function<void()>&, StreamRef) override { return nullptr; }
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override {
    return std::make_unique<RecordingStore>(ForwardingBackend::make_store(options), trace_, kernels());
  }

 private:
  StepTrace& trace_;
};

/// The trace's context carried over to one of another length: shifted where that is longer, squeezed where it is shorter.
class ContextMap {
 public:
  /// `first` becomes the position of the trace's first step, up to a chunk.
  ContextMap(const StepTrace& trace, const StoreOptions& store, int first) : chunk_(trace.chunk) {
    shift_ = (first - trace.position.front()) / chunk_;
    sinks_ = (store.selection.sink_tokens + chunk_ - 1) / chunk_;
    source_ = range_of(trace.position.front(), store);
    target_ = range_of(position(trace.position.front()), store);
  }

  int position(int recorded) const noexcept { return recorded + shift_ * chunk_; }

  /// `count` chunks, ascending and distinct again, at most as many as there are.
  int map(const std::uint32_t* from, int count, int* to) const {
    count = std::min(count, target_);
    for (int i = 0; i < count; ++i) {
      const int chunk = std::max(static_cast<int>(from[i]) - sinks_, 0);
      to[i] = shift_ >= 0 ? chunk + shift_ : static_cast<int>(static_cast<std::int64_t>(chunk) * target_ / source_);
      if (i > 0) to[i] = std::max(to[i], to[i - 1] + 1);
    }
    for (int i = count - 1, limit = target_ + std::max(shift_, 0); i >= 0; --i) limit = to[i] = std::min(to[i], limit - 1);
    for (int i = 0; i < count; ++i) to[i] += sinks_;
    return count;
  }

  /// Puts others of the context in the place of `share` of the chunks; ascending and distinct again.
  void replace(int* chunks, int count, double share, std::mt19937_64& random) const {
    const int replaced = std::min(static_cast<int>(std::lround(share * count)), target_ - count);
    std::uniform_int_distribution<int> any(sinks_, sinks_ + target_ - 1);
    for (int i = 0; i < replaced; ++i) {
      std::swap(chunks[i], chunks[std::uniform_int_distribution<int>(i, count - 1)(random)]);
      int other = any(random);
      while (std::find(chunks, chunks + count, other) != chunks + count) other = any(random);
      chunks[i] = other;
    }
    std::sort(chunks, chunks + count);
  }

 private:
  int range_of(int position, const StoreOptions& store) const {
    return std::max(1, (position - store.selection.local_tokens) / chunk_ - sinks_);
  }

  int chunk_;
  int shift_ = 0;  // chunks
  int sinks_ = 0;
  int source_ = 1;  // choosable chunks of the recorded context, and of this one
  int target_ = 1;
};

/// State of a batch and of one pass, in memory of the backend.
struct Pass {
  int* slot_of;
  int* position;
  RowMode* mode;
  Token* token;
  Token* guess;
  std::uint8_t* waits;
  // what advance() may write, so that its time counts; the trace says what really comes next
  int* next_position;
  RowMode* next_mode;
  Token* next_token;
  SamplingOptions* sampling;
  std::uint64_t** seen;
  Token* sampled;
  Token* tokens;
  int* positions;
  float* hidden;
  std::byte* q;
  std::byte* ahead;
  std::byte* k;
  std::byte* v;
  std::byte* attention;
  float* logits;
};

Pass carve_pass(Carver& carver, const ModelConfig& config, int places, int rows, std::size_t element) {
  const std::size_t p = at(places);
  const std::size_t r = at(rows);
  Pass pass{};
  pass.slot_of = carver.take<int>(p);
  pass.position = carver.take<int>(p);
  pass.mode = carver.take<RowMode>(p);
  pass.token = carver.take<Token>(p);
  pass.guess = carver.take<Token>(p);
  pass.waits = carver.take<std::uint8_t>(p);
  pass.next_position = carver.take<int>(p);
  pass.next_mode = carver.take<RowMode>(p);
  pass.next_token = carver.take<Token>(p);
  pass.sampling = carver.take<SamplingOptions>(p);
  pass.seen = carver.take<std::uint64_t*>(p);
  pass.sampled = carver.take<Token>(r);
  pass.tokens = carver.take<Token>(r);
  pass.positions = carver.take<int>(r);
  pass.hidden = carver.take<float>(r * at(config.hidden));
  pass.q = carver.take<std::byte>(r * at(config.q_width()) * element);
  pass.ahead = carver.take<std::byte>(r * at(config.q_width()) * element);
  pass.k = carver.take<std::byte>(r * at(config.kv_width()) * element);
  pass.v = carver.take<std::byte>(r * at(config.kv_width()) * element);
  pass.attention = carver.take<std::byte>(r * at(config.q_width()) * element);
  pass.logits = carver.take<float>(r * at(config.vocabulary));
  return pass;
}

std::uint16_t bf16_of(float value) noexcept {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x8000U) >> 16U);
}

/// Everything of one run, in the order in which it has to go.
class StepRun {
 public:
  StepRun(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, const StepTrace& trace,
          const StepSetting& setting)
      : backend_(*backend),
        config_(weights->config()),
        trace_(trace),
        setting_(setting),
        element_(size_of(backend->activation_type())),
        stream_(backend->stream()) {
    SessionOptions options = setting.options;
    options.max_context = setting.context + 8;
    options.max_sequences = setting.batch;
    auto predictor = make_predictor(options);
    traits_ = predictor->traits();
    store_options_ = make_store_options(config_, options, traits_);
    rows_ = setting.batch * traits_.rows_per_sequence;
    // SpeCache chooses single tokens, as many in every step and all of them fetched, so that its time does not hang on which
    replays_ = options.store != StoreKind::full && options.store != StoreKind::specache;
    if (replays_ && trace.chunk != options.chunk_tokens) {
      throw InvalidArgument("trace: was made with chunks of " + std::to_string(trace.chunk) + " tokens, not " +
                            std::to_string(options.chunk_tokens));
    }
    for (double share : setting.injected_misses) {
      detail::require(share >= 0.0 && share <= 1.0, "injected_misses", share, "in 0 .. 1");
    }
    const int wanted = all_steps();
    spread_ = setting.batch > 1 ? (trace.steps() - wanted) / (setting.batch - 1) : 0;
    if (trace.steps() < wanted) throw InvalidArgument("trace: holds fewer steps than are run: " + std::to_string(wanted));

    plan_ = backend->store_plan(store_options_);
    if (setting.device_kv_limit > 0 && plan_.device_bytes() > setting.device_kv_limit) {
      throw InvalidArgument("device KV state = " + std::to_string(plan_.device_bytes()) + " bytes: must be at most " +
                            std::to_string(setting.device_kv_limit));
    }
    dense_ = backend->make_dense(weights, {.decode_rows = rows_, .prefill_rows = rows_});
    auto store = backend->make_store(store_options_);
    capacities_ = store->capacities();
    if (replays_) {
      const auto replayed = [this](Layer layer) {
        Carver placing(current_buffer_.data() + at(layer) * layer_bytes_);
        return carve_lists(placing, capacities_.selection);
      };
      store = std::make_unique<ReplayStore>(std::move(store), replayed);
      predictor = std::make_unique<ReplayPredictor>(std::move(predictor), replayed);
    }
    auto scheduler =
        backend->make_scheduler({.layers = config_.layers,
                                 .max_items_per_submit = std::max({capacities_.urgent, capacities_.prefetch, capacities_.write_back}),
                                 .bytes_per_second = options.link_bytes_per_second,
                                 .latency = options.link_latency,
                                 .single_lane = options.single_lane,
                                 .concurrent_prefetch = prefers_concurrent_prefetch(store_options_),
                                 .trace = nullptr});
    if (setting.loads_in_order) scheduler = std::make_unique<InOrderScheduler>(std::move(scheduler));
    attention_ = std::make_unique<SparseAttention>(
        SparseAttentionParts{.store = std::move(store),
                             .predictor = std::move(predictor),
                             .scheduler = std::make_unique<SwitchedScheduler>(std::move(scheduler), moves_),
                             .kernels = &backend->kernels(),
                             .device_memory = &backend->memory(MemoryKind::device)},
        SparseAttentionShape{.layers = config_.layers, .kv_heads = config_.kv_heads, .max_sequences = setting.batch}, stream_);
    Carver counting;
    carve_pass(counting, config_, setting.batch, rows_, element_);
    buffer_ = Buffer(backend->memory(MemoryKind::device), counting.bytes(), stream_);
    Carver carving(buffer_.data());
    pass_ = carve_pass(carving, config_, setting.batch, rows_, element_);
  }

  std::vector<StepMeasured> run() {
    const auto begin = Clock::now();
    fill();
    const double fill_seconds = seconds_since(begin);
    prepare_trace();
    std::vector<StepMeasured> all(setting_.injected_misses.size());
    for (StepMeasured& measured : all) {
      const std::vector<double> timed = time_steps(measured);
      measured.ms_step = quantile(timed, 0.5);
      measured.ms_step_95 = quantile(timed, 0.95);
    }
    moves_ = false;  // what the slots hold from here on is not what the tables say, which changes no time
    StepMeasured ignored;
    const double ms_compute = quantile(time_steps(ignored), 0.5);
    for (StepMeasured& measured : all) {
      measured.ms_compute = ms_compute;
      measured.device_kv_bytes = plan_.device_bytes();
      measured.pinned_bytes = plan_.pinned_bytes();
      measured.fill_seconds = fill_seconds;
    }
    for (int slot = 0; slot < setting_.batch; ++slot) attention_->close(slots_[at(slot)], stream_);
    backend_.synchronize(stream_);
    return all;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  int block_steps() const noexcept { return setting_.warm_up + setting_.steps; }
  /// With the loads, a block for each injected share, and once without.
  int all_steps() const noexcept { return (static_cast<int>(setting_.injected_misses.size()) + 1) * block_steps(); }
  int first_step(int place) const noexcept { return place * spread_; }
  ContextMap context_map() const {
    return {trace_, store_options_, setting_.context - trace_.position.back() + trace_.position.front() - 1};
  }

  /// Every sequence up to the position of its first step, with keys and values drawn once and used again.
  void fill() {
    constexpr int kBlock = 4096;
    const std::size_t width = at(config_.kv_width());
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> host(at(kBlock) * width * 2);
    for (std::uint16_t& value : host) value = bf16_of(normal(random));
    Buffer block(backend_.memory(MemoryKind::device), host.size() * sizeof(std::uint16_t), stream_);
    backend_.copy(block.data(), host.data(), block.bytes(), stream_);
    const std::size_t query_width = at(config_.q_width());
    std::vector<std::uint16_t> host_queries(at(KvStore::kCalibrationQueries) * query_width);
    for (std::uint16_t& value : host_queries) value = bf16_of(0.3F * normal(random));
    Buffer queries(backend_.memory(MemoryKind::device), host_queries.size() * sizeof(std::uint16_t), stream_);
    backend_.copy(queries.data(), host_queries.data(), queries.bytes(), stream_);
    const ContextMap map = context_map();
    for (int place = 0; place < setting_.batch; ++place) {
      const int slot = attention_->open(setting_.context + 8, stream_);
      slots_.push_back(slot);
      const int length = map.position(trace_.position[at(first_step(place))]);
      for (Layer layer = 0; layer < config_.layers; ++layer) {
        for (int first = 0; first < length; first += kBlock) {
          const int count = std::min(kBlock, length - first);
          const auto tensor = [&](std::byte* data) {
            return ConstTensor{data, DataType::bf16, {count, config_.kv_heads, config_.head_dim}};
          };
          ConstTensor last;
          if (first + count == length) {
            const int kept = std::min(count, KvStore::kCalibrationQueries);
            last = ConstTensor{queries.data(), DataType::bf16, {kept, config_.heads, config_.head_dim}};
          }
          attention_->append(layer, slot,
                             {.keys = tensor(block.data()), .values = tensor(block.data() + at(kBlock) * width * sizeof(std::uint16_t))},
                             last, stream_);
        }
      }
      attention_->seal(slot, stream_);
    }
    backend_.synchronize(stream_);
  }

  /// Lays the choices of every step out as the selections of a pass lie, in memory of the backend.
  void prepare_trace() {
    StepKernels& kernels = backend_.kernels();
    kernels.upload(pass_.slot_of, slots_.data(), slots_.size() * sizeof(int), stream_);
    const std::vector<SamplingOptions> greedy(slots_.size());
    kernels.upload(pass_.sampling, greedy.data(), greedy.size() * sizeof(SamplingOptions), stream_);
    const std::vector<std::uint64_t*> none(slots_.size(), nullptr);
    kernels.upload(pass_.seen, none.data(), none.size() * sizeof(std::uint64_t*), stream_);
    std::vector<Token> tokens;
    for (int place = 0; place < setting_.batch; ++place) tokens.push_back((37 * place + 11) % config_.vocabulary);
    kernels.upload(pass_.token, tokens.data(), tokens.size() * sizeof(Token), stream_);
    kernels.upload(pass_.guess, tokens.data(), tokens.size() * sizeof(Token), stream_);
    const std::vector<std::uint8_t> zeros(slots_.size(), 0);
    kernels.upload(pass_.waits, zeros.data(), zeros.size(), stream_);

    const int steps = all_steps();
    std::mt19937_64 random(7);
    const ContextMap map = context_map();
    const int capacity = capacities_.selection;
    Carver counting;
    carve_lists(counting, capacity);
    layer_bytes_ = replays_ ? counting.bytes() : 0;
    const std::size_t step_bytes = layer_bytes_ * at(config_.layers);
    modes_.resize(at(steps) * slots_.size());
    positions_.resize(modes_.size());
    std::vector<std::byte> host(step_bytes * at(steps));
    for (int step = 0; step < steps; ++step) {
      const double missed = setting_.injected_misses[std::min(at(step / block_steps()), setting_.injected_misses.size() - 1)];
      for (int place = 0; place < setting_.batch; ++place) {
        const int from = first_step(place) + step;
        const std::size_t to = at(step) * slots_.size() + at(place);
        RowMode mode = trace_.mode[at(from)];
        positions_[to] = map.position(trace_.position[at(from)]);
        if (traits_.rows_per_sequence == 1) mode = mode == RowMode::resync ? RowMode::idle : RowMode::single;
        modes_[to] = mode;
      }
      for (Layer layer = 0; replays_ && layer < config_.layers; ++layer) {
        Carver placing(host.data() + at(step) * step_bytes + at(layer) * layer_bytes_);
        const Selection lists = carve_lists(placing, capacity);
        std::fill_n(lists.scores, lists.list(rows_, 0) * at(capacity), 1.0F / static_cast<float>(capacity));
        for (int row = 0; row < rows_; ++row) {
          const int place = row / traits_.rows_per_sequence;
          const int of_place = row % traits_.rows_per_sequence;
          const bool live = row_is_live(modes_[at(step) * slots_.size() + at(place)], of_place);
          for (int head = 0; head < config_.kv_heads; ++head) {
            const std::size_t list = trace_.list(first_step(place) + step, layer % trace_.layers, of_place, head % trace_.kv_heads);
            const int count = live ? std::min(static_cast<int>(trace_.count[list]), capacity) : 0;
            int* const chunks = lists.chunks_of(row, head);
            lists.count_of(row, head) = map.map(trace_.chunks.data() + list * at(trace_.capacity), count, chunks);
            if (of_place == 0 && missed > 0.0) map.replace(chunks, lists.count_of(row, head), missed, random);
          }
        }
      }
    }
    trace_buffer_ = Buffer(backend_.memory(MemoryKind::device), host.size(), stream_);
    backend_.copy(trace_buffer_.data(), host.data(), host.size(), stream_);
    mode_buffer_ = Buffer(backend_.memory(MemoryKind::device), modes_.size() * sizeof(RowMode), stream_);
    backend_.copy(mode_buffer_.data(), modes_.data(), mode_buffer_.bytes(), stream_);
    position_buffer_ = Buffer(backend_.memory(MemoryKind::device), positions_.size() * sizeof(int), stream_);
    backend_.copy(position_buffer_.data(), positions_.data(), position_buffer_.bytes(), stream_);
    current_buffer_ = Buffer(backend_.memory(MemoryKind::device), step_bytes, stream_);
  }

  Selection carve_lists(Carver& carver, int capacity) const {
    const std::size_t lists = at(rows_) * at(config_.kv_heads);
    Selection selection;
    selection.chunks = carver.take<int>(lists * at(capacity));
    selection.scores = carver.take<float>(lists * at(capacity));
    selection.count = carver.take<int>(lists);
    selection.capacity = capacity;
    selection.kv_heads = config_.kv_heads;
    return selection;
  }

  void set_step(int step) {
    StepKernels& kernels = backend_.kernels();
    const std::size_t places = slots_.size();
    kernels.copy(pass_.mode, mode_buffer_.data() + at(step) * places * sizeof(RowMode), places * sizeof(RowMode), stream_);
    kernels.copy(pass_.position, position_buffer_.data() + at(step) * places * sizeof(int), places * sizeof(int), stream_);
    if (current_buffer_.bytes() > 0) {
      kernels.copy(current_buffer_.data(), trace_buffer_.data() + at(step) * current_buffer_.bytes(), current_buffer_.bytes(), stream_);
    }
  }

  void enqueue() {
    const DataType type = backend_.activation_type();
    const int per_sequence = traits_.rows_per_sequence;
    const auto heads_of = [&](std::byte* data, int heads) { return Tensor{data, type, {rows_, heads, config_.head_dim}}; };
    const Tensor hidden{pass_.hidden, DataType::f32, {rows_, config_.hidden}};
    const Tensor logits{pass_.logits, DataType::f32, {rows_, config_.vocabulary}};
    const Tensor q = heads_of(pass_.q, config_.heads);
    const Tensor k = heads_of(pass_.k, config_.kv_heads);
    const Tensor v = heads_of(pass_.v, config_.kv_heads);
    const Tensor out = heads_of(pass_.attention, config_.heads);
    const StepState state{.sequences = setting_.batch,
                          .rows_per_sequence = per_sequence,
                          .mode = pass_.mode,
                          .position = pass_.position,
                          .token = pass_.token,
                          .guess = pass_.guess,
                          .waits = pass_.waits};
    const StepView view{.sequences = setting_.batch,
                        .rows_per_sequence = per_sequence,
                        .slot_of = pass_.slot_of,
                        .position = pass_.position,
                        .mode = pass_.mode};
    StepKernels& kernels = backend_.kernels();
    kernels.lay_out(state, pass_.tokens, pass_.positions, stream_);
    dense_->embed(pass_.tokens, hidden, stream_);
    attention_->begin_step(view, stream_);
    for (Layer layer = 0; layer < config_.layers; ++layer) {
      dense_->before_attention(layer, hidden, pass_.positions, q, k, v, stream_);
      ConstTensor ahead;
      if (traits_.layer_ahead && layer + 1 < config_.layers) {
        const Tensor rehearsed = heads_of(pass_.ahead, config_.heads);
        dense_->before_attention(layer + 1, hidden, pass_.positions, rehearsed, Tensor{}, Tensor{}, stream_);
        ahead = rehearsed;
      }
      attention_->attend(layer, {.queries = q, .keys = k, .values = v}, ahead, out, stream_);
      dense_->after_attention(layer, out, hidden, stream_);
    }
    dense_->head(hidden, logits, stream_);
    dense_->sample(logits, {.step = view, .options = pass_.sampling, .tokens = pass_.tokens, .seen = pass_.seen}, pass_.sampled, stream_);
    attention_->end_step(stream_);
    kernels.copy(pass_.next_mode, pass_.mode, slots_.size() * sizeof(RowMode), stream_);
    StepState next = state;
    next.mode = pass_.next_mode;
    next.position = pass_.next_position;
    next.token = pass_.next_token;
    next.guess = pass_.next_token;
    attention_->observe(next, {.sampled = pass_.sampled}, setting_.batch, stream_);
    attention_->rejoin(stream_);
  }

  /// Milliseconds of every timed step, each until the host has its tokens.
  std::vector<double> time_steps(StepMeasured& measured) {
    std::vector<double> times;
    std::vector<Token> tokens(at(rows_));
    std::unique_ptr<StepGraph> graph;
    StoreStatistics before;
    std::uint64_t moved = 0;
    std::chrono::nanoseconds busy{0};
    int committed = 0;
    for (int step = 0; step < block_steps(); ++step, ++next_step_) {
      if (step == setting_.warm_up) {
        before = attention_->store_statistics();
        moved = lane_bytes();
        busy = lane_busy();
      }
      const auto begin = Clock::now();
      set_step(next_step_);
      if (graph) {
        graph->launch(stream_);
      } else {
        enqueue();
      }
      backend_.copy(tokens.data(), pass_.sampled, tokens.size() * sizeof(Token), stream_);
      if (step >= setting_.warm_up) {
        times.push_back(1e3 * seconds_since(begin));
        for (int place = 0; place < setting_.batch; ++place) {
          committed += row_is_live(modes_[at(next_step_) * slots_.size() + at(place)], 0) ? 1 : 0;
        }
      }
      if (step == 0) graph = backend_.record([this] { enqueue(); }, stream_);
    }
    measured.store = difference(attention_->store_statistics(), before);
    measured.moved_bytes = lane_bytes() - moved;
    measured.ms_link = 1e3 * std::chrono::duration<double>(lane_busy() - busy).count() / setting_.steps;
    measured.tokens_per_step = static_cast<double>(committed) / setting_.steps;
    return times;
  }

  std::uint64_t lane_bytes() const {
    std::uint64_t sum = 0;
    for (Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) sum += attention_->lane_statistics(lane).moved_bytes;
    return sum;
  }
  std::chrono::nanoseconds lane_busy() const {
    std::chrono::nanoseconds sum{0};
    for (Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) sum += attention_->lane_statistics(lane).busy;
    return sum;
  }

  Backend& backend_;
  const ModelConfig& config_;
  const StepTrace& trace_;
  const StepSetting& setting_;
  std::size_t element_;
  StreamRef stream_;
  PredictorTraits traits_;
  StoreOptions store_options_;
  KvStore::Capacities capacities_;
  MemoryPlan plan_;
  int rows_ = 0;
  int spread_ = 0;
  bool replays_ = false;
  bool moves_ = true;
  int next_step_ = 0;
  std::size_t layer_bytes_ = 0;
  std::vector<int> slots_;
  std::vector<RowMode> modes_;  // [steps, places]
  std::vector<int> positions_;  // [steps, places]
  Buffer buffer_, trace_buffer_, mode_buffer_, position_buffer_, current_buffer_;
  Pass pass_{};
  std::unique_ptr<DenseModel> dense_;
  std::unique_ptr<SparseAttention> attention_;
};

}  // namespace

std::vector<StepMeasured> run_steps(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                                    const StepTrace& trace, const StepSetting& setting) {
  return StepRun(backend, weights, trace, setting).run();
}

StepTrace record_steps(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                       const SessionOptions& options, std::span<const Token> prompt, int steps) {
  StepTrace trace;
  trace.layers = weights->config().layers;
  trace.kv_heads = weights->config().kv_heads;
  trace.capacity = options.budget_tokens / options.chunk_tokens;
  trace.chunk = options.chunk_tokens;
  trace.recorded = true;
  SessionOptions own = options;
  own.max_context = static_cast<int>(prompt.size()) + steps + 1;
  own.max_sequences = 1;
  auto session = make_session(std::make_shared<RecordingBackend>(backend, trace), weights, own);
  session.add(prompt, {.max_new_tokens = steps});
  while (session.active() > 0 && trace.steps() < steps) session.step();
  return trace;
}

}  // namespace dualdecoder::examples
