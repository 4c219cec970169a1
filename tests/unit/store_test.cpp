// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The CPU stores against a twin in double precision that follows docs/concepts.md (selection, tail estimate) from scratch: chunk means,
// softmax over chunks per query head, maximum over the group, top-k, and attention over every token with the unselected chunks replaced by
// their estimates, whose values may be the mean of several chunks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "src/store.hpp"
#include "tests/catch.hpp"

using namespace dualdecoder;

namespace {

constexpr int kLayers = 2;
constexpr int kKvHeads = 2;
constexpr int kGroup = 3;
constexpr int kHeads = kKvHeads * kGroup;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

StoreOptions small_options(int dim = 16) {
  return {.kind = StoreKind::resident,
          .layers = kLayers,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = dim,
          .max_context = 512,
          .max_sequences = 1,
          .rows_per_sequence = 1,
          .kv_type = DataType::f32,
          .selection = {.chunk_tokens = 4, .budget_tokens = 32, .sink_tokens = 8, .local_tokens = 24},
          .slots_per_budget = 2.0F,
          .miss_policy = MissPolicy::wait};
}

/// Keys and values of one sequence in all layers, with queries for every position.
struct Text {
  int dim;
  int tokens;
  std::vector<float> q, k, v;  // [layers, tokens, heads or kv_heads, dim]

  Text(int head_dim, int count, unsigned seed, float sharpness = 1.0F) : dim(head_dim), tokens(count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    q.resize(at(kLayers) * at(count) * at(kHeads) * at(dim));
    k.resize(at(kLayers) * at(count) * at(kKvHeads) * at(dim));
    v.resize(k.size());
    for (float& x : q) x = sharpness * normal(random);
    for (float& x : k) x = normal(random) + 0.3F;
    for (float& x : v) x = normal(random);
  }
  float* queries(Layer layer, int t) { return q.data() + (at(layer) * at(tokens) + at(t)) * at(kHeads) * at(dim); }
  float* keys(Layer layer, int t) { return k.data() + (at(layer) * at(tokens) + at(t)) * at(kKvHeads) * at(dim); }
  float* values(Layer layer, int t) { return v.data() + (at(layer) * at(tokens) + at(t)) * at(kKvHeads) * at(dim); }
  const float* key(Layer layer, int t, int head) { return keys(layer, t) + at(head) * at(dim); }
  const float* value(Layer layer, int t, int head) { return values(layer, t) + at(head) * at(dim); }
};

/// What the twin knows of one KV head at one moment.
class Twin {
 public:
  Twin(const StoreOptions& options, Text& text) : options_(options), text_(text) {}

  int first_chunk() const { return (options_.selection.sink_tokens + chunk() - 1) / chunk(); }
  int end_chunk(int length) const { return std::max(first_chunk(), (length - options_.selection.local_tokens) / chunk()); }

  /// log(n) + score of chunk c for a query head, from int8 means.
  double estimate(Layer layer, int head, const float* query, int c) {
    const std::vector<double> mean = quantised(layer, head, c, 1, true);
    double dot = 0.0;
    for (int d = 0; d < text_.dim; ++d) dot += query[d] * mean[at(d)];
    return dot / std::sqrt(double(text_.dim));
  }
  std::vector<int> choose(Layer layer, int head, int length, const float* queries) {
    const int first = first_chunk();
    const int count = end_chunk(length) - first;
    std::vector<double> rank(at(std::max(0, count)), -1e300);
    for (int g = 0; g < kGroup; ++g) {
      std::vector<double> s;
      for (int c = 0; c < count; ++c) s.push_back(estimate(layer, head, queries + at(head * kGroup + g) * at(text_.dim), first + c));
      double sum = 0.0;
      for (double x : s) sum += std::exp(x);
      for (int c = 0; c < count; ++c) rank[at(c)] = std::max(rank[at(c)], s[at(c)] - std::log(sum));
    }
    std::vector<int> order;
    for (int c = 0; c < count; ++c) order.push_back(c);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank[at(a)] > rank[at(b)]; });
    order.resize(std::min(order.size(), at(options_.selection.budget_tokens / chunk())));
    std::sort(order.begin(), order.end());
    for (int& c : order) c += first;
    return order;
  }
  /// log of the unselected chunks' true mass minus log of the estimated one.
  double log_ratio(Layer layer, int head, int length, const float* queries, int g) {
    const std::vector<int> chosen = choose(layer, head, length, queries);
    const float* query = queries + at(head * kGroup + g) * at(text_.dim);
    double exact = 0.0;
    double estimated = 0.0;
    for (int c = first_chunk(); c < end_chunk(length); ++c) {
      if (std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      for (int t = c * chunk(); t < (c + 1) * chunk(); ++t) exact += std::exp(score(layer, head, query, t));
      estimated += chunk() * std::exp(estimate(layer, head, query, c));
    }
    return std::clamp(std::log(exact / estimated), -3.0, 6.0);
  }
  /// Attention of the row at position `length`. tail: whether unselected chunks are estimated, with `bias` on the logs.
  std::vector<double> attend(Layer layer, int head, int g, int length, const float* queries, bool tail, double bias) {
    const std::vector<int> chosen = choose(layer, head, length, queries);
    const float* query = queries + at(head * kGroup + g) * at(text_.dim);
    std::vector<double> out(at(text_.dim), 0.0);
    double sum = 0.0;
    for (int t = 0; t <= length; ++t) {
      const int c = t / chunk();
      if (c >= first_chunk() && c < end_chunk(length) && !std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      const double weight = std::exp(score(layer, head, query, t));
      sum += weight;
      for (int d = 0; d < text_.dim; ++d) out[at(d)] += weight * text_.value(layer, t, head)[d];
    }
    for (int c = first_chunk(); tail && c < end_chunk(length); ++c) {
      if (std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      const double weight = chunk() * std::exp(estimate(layer, head, query, c) + bias);
      const std::vector<double> mean = group_value(layer, head, c, length);
      sum += weight;
      for (int d = 0; d < text_.dim; ++d) out[at(d)] += weight * mean[at(d)];
    }
    for (double& x : out) x /= sum;
    return out;
  }
  std::vector<double> dense(Layer layer, int head, int g, int length, const float* queries) {
    const float* query = queries + at(head * kGroup + g) * at(text_.dim);
    std::vector<double> out(at(text_.dim), 0.0);
    double sum = 0.0;
    for (int t = 0; t <= length; ++t) {
      const double weight = std::exp(score(layer, head, query, t));
      sum += weight;
      for (int d = 0; d < text_.dim; ++d) out[at(d)] += weight * text_.value(layer, t, head)[d];
    }
    for (double& x : out) x /= sum;
    return out;
  }

 private:
  int chunk() const { return options_.selection.chunk_tokens; }
  double score(Layer layer, int head, const float* query, int t) {
    double dot = 0.0;
    for (int d = 0; d < text_.dim; ++d) dot += query[d] * text_.key(layer, t, head)[d];
    return dot / std::sqrt(double(text_.dim));
  }
  /// Mean value of the aligned group of chunk c, as far as its chunks are whole after `length` tokens.
  std::vector<double> group_value(Layer layer, int head, int c, int length) {
    const int together = options_.selection.value_group_chunks;
    const int first = c / together * together;
    return quantised(layer, head, first, std::min(together, length / chunk() - first), false);
  }
  std::vector<double> quantised(Layer layer, int head, int first, int chunks, bool keys) {
    std::vector<double> mean(at(text_.dim), 0.0);
    double largest = 0.0;
    for (int d = 0; d < text_.dim; ++d) {
      float sum = 0.0F;  // in the order and precision of the store, so that levels agree
      for (int t = first * chunk(); t < (first + chunks) * chunk(); ++t) {
        sum += keys ? text_.key(layer, t, head)[d] : text_.value(layer, t, head)[d];
      }
      mean[at(d)] = sum / float(chunks * chunk());
      largest = std::max(largest, std::fabs(mean[at(d)]));
    }
    const float levels = keys ? 127.0F : 7.0F;
    const float scale = float(largest) / levels;
    for (double& x : mean) x = std::nearbyint(float(x) / scale) * scale;
    return mean;
  }

  StoreOptions options_;
  Text& text_;
};

/// Drives one sequence of a store by hand, moving every transfer at once.
class Bench {
 public:
  explicit Bench(const StoreOptions& options, int threads = 2)
      : backend(cpu::make_cpu_backend({.threads = threads})), store(backend->make_store(options)), options_(options) {
    const KvStore::Capacities capacities = store->capacities();
    chunks_.resize(at(options.rows_per_sequence * kKvHeads * capacities.selection));
    scores_.resize(chunks_.size());
    counts_.resize(at(options.rows_per_sequence * kKvHeads));
    items_.resize(at(std::max({capacities.urgent, capacities.prefetch, capacities.write_back, 1})));
    selection = {chunks_.data(), scores_.data(), counts_.data(), capacities.selection, kKvHeads};
    list_ = {items_.data(), &count_, static_cast<int>(items_.size())};
  }

  void prefill(Text& text, int tokens, int block = 1 << 20) {
    StreamRef stream = backend->stream();
    store->open(0, std::min(options_.max_context, text.tokens), stream);
    for (Layer layer = 0; layer < kLayers; ++layer) {
      for (int first = 0; first < tokens; first += block) {
        const int rows = std::min(block, tokens - first);
        store->append(layer, 0,
                      {{text.keys(layer, first), DataType::f32, {rows, kKvHeads, text.dim}},
                       {text.values(layer, first), DataType::f32, {rows, kKvHeads, text.dim}}},
                      {text.queries(layer, first), DataType::f32, {rows, kHeads, text.dim}}, stream);
      }
    }
    store->seal(0, stream);
    length = tokens;
  }
  /// Runs a pass of one row per live row of `mode`, whose queries, keys and values are those of the text at the row's position, and
  /// returns [rows, heads, dim] per layer.
  std::vector<std::vector<float>> pass(Text& text, RowMode mode, int guess_offset = 0, Selection* predicted = nullptr) {
    StreamRef stream = backend->stream();
    const int rows = options_.rows_per_sequence;
    const int slot = 0;
    const StepView view{.sequences = 1, .rows_per_sequence = rows, .slot_of = &slot, .position = &length, .mode = &mode};
    std::vector<std::vector<float>> outs;
    for (Layer layer = 0; layer < kLayers; ++layer) {
      std::vector<float> q(at(rows * kHeads * text.dim)), k(at(rows * kKvHeads * text.dim)), v(k.size());
      for (int row = 0; row < rows; ++row) {
        int t = std::min(row_position(mode, row, length), text.tokens - 1);
        if (row == 1) t = (t + guess_offset) % text.tokens;
        std::copy_n(text.queries(layer, t), kHeads * text.dim, q.data() + row * kHeads * text.dim);
        std::copy_n(text.keys(layer, t), kKvHeads * text.dim, k.data() + row * kKvHeads * text.dim);
        std::copy_n(text.values(layer, t), kKvHeads * text.dim, v.data() + row * kKvHeads * text.dim);
      }
      const ConstTensor queries{q.data(), DataType::f32, {rows, kHeads, text.dim}};
      const RowBlock block{
          queries, {k.data(), DataType::f32, {rows, kKvHeads, text.dim}}, {v.data(), DataType::f32, {rows, kKvHeads, text.dim}}};
      store->select(layer, view, queries, selection, stream);
      store->resolve_needed(layer, view, selection, list_, stream);
      move();
      std::vector<float> out(q.size(), 7.0F);
      store->attend(layer, view, block, selection, {out.data(), DataType::f32, {rows, kHeads, text.dim}}, stream);
      Prediction prediction{.layer = layer, .this_step = false, .chunks = {}};
      if (predicted != nullptr) prediction.chunks = *predicted;
      store->resolve_predicted(layer, view, prediction, list_, stream);
      move();
      outs.push_back(std::move(out));
    }
    store->commit(view, list_, stream);
    move();
    if (row_is_live(mode, 0)) ++length;
    return outs;
  }

  std::shared_ptr<Backend> backend;
  std::unique_ptr<KvStore> store;
  Selection selection;
  int length = 0;
  bool torn = false;

 private:
  void move() {
    for (int i = 0; i < count_; ++i) std::copy_n(items_[at(i)].source, items_[at(i)].bytes, items_[at(i)].target);
  }
  StoreOptions options_;
  std::vector<int> chunks_, counts_;
  std::vector<float> scores_;
  std::vector<TransferItem> items_;
  int count_ = 0;
  TransferList list_;
};

void expect_near(const float* got, const std::vector<double>& want, double bound) {
  for (std::size_t d = 0; d < want.size(); ++d) {
    if (std::fabs(got[d] - want[d]) > bound) {
      INFO("element " << d);
      REQUIRE(got[d] == Approx(want[d]).margin(bound));
    }
  }
}

}  // namespace

TEST_CASE("selection, tail estimate and calibration equal the brute-force twin", "[store]") {
  for (const int dim : {16, 24, 64}) {
    for (const int chunk : {2, 4, 8, 16}) {
      StoreOptions options = small_options(dim);
      options.selection.chunk_tokens = chunk;
      Text text(dim, 330, unsigned(dim + chunk));
      Bench bench(options);
      bench.prefill(text, 300);
      Twin twin(options, text);
      double largest_bias = 0.0;
      for (int step = 0; step < 20; ++step) {
        const int length = bench.length;
        const auto outs = bench.pass(text, RowMode::single);
        for (Layer layer = 0; layer < kLayers; ++layer) {
          for (int head = 0; head < kKvHeads; ++head) {
            for (int g = 0; g < kGroup; ++g) {
              // calibration equals its formula: the mean over the last 64 prompt queries, times its scale
              double bias = 0.0;
              int used = 0;
              for (int t = 300 - 64; t < 300; ++t) {
                if (t < twin.end_chunk(300) * chunk - 1) continue;  // does not see every chunk yet
                bias += twin.log_ratio(layer, head, 300, text.queries(layer, t), g);
                ++used;
              }
              bias *= static_cast<double>(options.selection.bias_scale) / used;
              largest_bias = std::max(largest_bias, std::fabs(bias));
              INFO("dim " << dim << " chunk " << chunk << " step " << step << " layer " << layer << " head " << head << " " << g);
              const auto want = twin.attend(layer, head, g, length, text.queries(layer, length), true, bias);
              expect_near(outs[at(layer)].data() + (head * kGroup + g) * dim, want, 3e-5);
            }
          }
        }
      }
      CHECK(largest_bias > 0.05);  // the data make calibration matter
    }
  }
}

TEST_CASE("chunks whose values share a mean equal the brute-force twin, with groups cut by sinks and window", "[store]") {
  for (const auto& [chunk, together] : {std::pair(2, 2), std::pair(2, 4), std::pair(4, 2), std::pair(4, 4)}) {
    for (const int sinks : {4, 8, 12}) {  // one to six chunks
      for (const int local : {1, 24}) {   // with one token the group at the window is not complete
        StoreOptions options = small_options(24);
        options.rows_per_sequence = 2;  // row 1 begins the next chunk
        options.selection.chunk_tokens = chunk;
        options.selection.sink_tokens = sinks;
        options.selection.local_tokens = local;
        options.selection.value_group_chunks = together;
        options.selection.calibrate_tail = false;
        Text text(24, 330, unsigned(together + sinks + local));
        Bench bench(options);
        bench.prefill(text, 290, 53);
        Twin twin(options, text);
        for (int step = 0; step < 30; ++step) {
          if (step == 20) {  // back into a group, and on with the same text
            bench.store->truncate(0, 295, bench.backend->stream());
            bench.length = 295;
          }
          const int length = bench.length;
          const auto outs = bench.pass(text, RowMode::dual);
          for (int h = 0; h < kHeads; ++h) {
            INFO("chunk " << chunk << " together " << together << " sinks " << sinks << " local " << local << " step " << step << " head "
                          << h);
            const auto want = twin.attend(1, h / kGroup, h % kGroup, length, text.queries(1, length), true, 0.0);
            expect_near(outs[1].data() + h * 24, want, 3e-5);
          }
        }
      }
    }
  }
}

TEST_CASE("without the tail unselected chunks are dropped", "[store]") {
  StoreOptions options = small_options();
  options.selection.tail_estimate = false;
  Text text(16, 300, 5);
  Bench bench(options);
  bench.prefill(text, 290);
  Twin twin(options, text);
  const auto outs = bench.pass(text, RowMode::single);
  for (int h = 0; h < kHeads; ++h) {
    expect_near(outs[1].data() + h * 16, twin.attend(1, h / kGroup, h % kGroup, 290, text.queries(1, 290), false, 0.0), 3e-5);
  }
}

TEST_CASE("a budget of the whole context equals dense attention", "[store]") {
  for (const StoreKind kind : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    StoreOptions options = small_options();
    options.kind = kind;
    options.selection.budget_tokens = 512;
    Text text(16, 300, 6);
    Bench bench(options);
    bench.prefill(text, 200, 37);
    Twin twin(options, text);
    for (int step = 0; step < 60; ++step) {
      const int length = bench.length;
      const auto outs = bench.pass(text, RowMode::single);
      for (int h = 0; h < kHeads; ++h) {
        expect_near(outs[0].data() + h * 16, twin.dense(0, h / kGroup, h % kGroup, length, text.queries(0, length)), 3e-5);
      }
    }
  }
}

TEST_CASE("row 1 leaves no mark and sees row 0", "[store]") {
  StoreOptions options = small_options();
  options.rows_per_sequence = 2;
  options.selection.budget_tokens = 512;
  Text text(16, 300, 7);
  Bench with(options);
  Bench without(options);
  with.prefill(text, 150);
  without.prefill(text, 150);
  Twin twin(options, text);
  for (int step = 0; step < 40; ++step) {
    const int length = with.length;
    if (step % 5 == 0) {  // a resync pass changes nothing either
      const auto outs = with.pass(text, RowMode::resync);
      const auto* row1 = outs[1].data() + kHeads * 16;
      expect_near(row1, twin.dense(1, 0, 0, length, text.queries(1, length)), 3e-5);
      CHECK(std::all_of(outs[1].begin(), outs[1].begin() + kHeads * 16, [](float x) { return x == 0.0F; }));
      CHECK(with.length == length);
    }
    const auto dual = with.pass(text, RowMode::dual, step % 3 == 0 ? 11 : 0);
    const auto single = without.pass(text, RowMode::single);
    for (int i = 0; i < kHeads * 16; ++i) REQUIRE(dual[1][at(i)] == single[1][at(i)]);
    if (step % 3 != 0) {
      expect_near(dual[1].data() + kHeads * 16, twin.dense(1, 0, 0, length + 1, text.queries(1, length + 1)), 3e-5);
    }
  }
}

TEST_CASE("under wait row 0 is bit-identical for any slots, store and prediction", "[store]") {
  Text text(16, 400, 8);
  const auto run = [&](StoreKind kind, float slots, bool predict) {
    StoreOptions options = small_options();
    options.kind = kind;
    options.slots_per_budget = slots;
    Bench bench(options);
    bench.prefill(text, 300);
    std::vector<std::vector<float>> all;
    for (int step = 0; step < 60; ++step) {
      for (auto& out : bench.pass(text, RowMode::single, 0, predict ? &bench.selection : nullptr)) all.push_back(std::move(out));
    }
    return all;
  };
  const auto reference = run(StoreKind::resident, 4.0F, true);
  CHECK(run(StoreKind::resident, 1.0F, false) == reference);
  CHECK(run(StoreKind::resident, 1.0F, true) == reference);
  CHECK(run(StoreKind::resident, 16.0F, false) == reference);
  CHECK(run(StoreKind::ping_pong, 4.0F, true) == reference);
  CHECK(run(StoreKind::ping_pong, 4.0F, false) == reference);
}

TEST_CASE("the number of threads does not change a bit", "[store]") {
  Text text(16, 400, 9);
  const auto run = [&](int threads) {
    Bench bench(small_options(), threads);
    bench.prefill(text, 350);
    return bench.pass(text, RowMode::single);
  };
  CHECK(run(1) == run(3));
}

TEST_CASE("a context that several threads score in parts equals the brute-force twin, bit for bit on any number of them", "[store]") {
  StoreOptions options = small_options();
  options.selection.chunk_tokens = 4;
  options.max_context = 2400;  // almost 600 chunks: more than two parts of a selection, and more than one of a tail
  options.rows_per_sequence = 2;
  options.selection.value_group_chunks = GENERATE(1, 2, 4);
  Text text(16, 2400, 19);
  const auto run = [&](int threads) {
    Bench bench(options, threads);
    bench.prefill(text, 2350);
    std::vector<std::vector<float>> all;
    for (int step = 0; step < 5; ++step) {
      for (auto& out : bench.pass(text, RowMode::dual)) all.push_back(std::move(out));
    }
    return all;
  };
  options.selection.calibrate_tail = false;
  const auto reference = run(1);
  CHECK(run(2) == reference);
  CHECK(run(5) == reference);
  Twin twin(options, text);
  for (int step = 0; step < 5; ++step) {
    for (Layer layer = 0; layer < kLayers; ++layer) {
      for (int h = 0; h < kHeads; ++h) {
        const auto want = twin.attend(layer, h / kGroup, h % kGroup, 2350 + step, text.queries(layer, 2350 + step), true, 0.0);
        expect_near(reference[at(step * kLayers + layer)].data() + h * 16, want, 3e-5);
      }
    }
  }
}

TEST_CASE("truncate takes a sequence back to an earlier moment", "[store]") {
  Text text(16, 400, 10);
  for (const StoreKind kind : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    StoreOptions options = small_options();
    options.kind = kind;
    options.selection.value_group_chunks = 4;
    Bench bench(options);
    bench.prefill(text, 300);
    std::vector<std::vector<float>> first;
    for (int step = 0; step < 50; ++step) first.push_back(bench.pass(text, RowMode::single)[1]);
    bench.store->truncate(0, 310, bench.backend->stream());
    bench.length = 310;
    for (int step = 10; step < 50; ++step) REQUIRE(bench.pass(text, RowMode::single)[1] == first[at(step)]);
    CHECK_THROWS_AS(bench.store->truncate(0, 1000, bench.backend->stream()), InvalidArgument);
  }
}

TEST_CASE("under estimate a missing chunk is estimated and comes for the next step", "[store]") {
  StoreOptions options = small_options();
  options.miss_policy = MissPolicy::estimate;
  Text text(16, 400, 11);
  Bench bench(options);
  bench.prefill(text, 300);
  bench.pass(text, RowMode::single);
  const StoreStatistics first = bench.store->statistics();
  CHECK(first.urgent_bytes == 0);
  CHECK(first.estimated > 0);
  CHECK(first.prefetch_bytes > 0);
  CHECK(first.needed == first.resident_hit + first.estimated);
}
