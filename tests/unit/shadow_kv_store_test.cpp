// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The store of low-rank keys against a twin in double precision written from the paper (arXiv 2410.21465, section 4 and algorithms 1 and
// 2): a singular value decomposition by one-sided Jacobi rotations, RoPE from its definition, means of chunks, outliers by the cosine of
// their worst token, softmax over the means per query head, and attention over outliers, chosen chunks with rebuilt keys, and the window.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "src/low_rank.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;

namespace {

constexpr int kLayers = 2;
constexpr int kKvHeads = 2;
constexpr int kGroup = 3;
constexpr int kHeads = kKvHeads * kGroup;
constexpr int kDim = 16;
constexpr int kWidth = kKvHeads * kDim;
constexpr int kChunk = 8;
constexpr float kTheta = 500.0F;

std::size_t at(int i) { return static_cast<std::size_t>(i); }

StoreOptions small_options() {
  return {.kind = StoreKind::shadow_kv,
          .layers = kLayers,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = kDim,
          .max_context = 256,
          .kv_type = DataType::f32,
          .selection = {.chunk_tokens = kChunk, .budget_tokens = 4 * kChunk},
          .shadow_kv = {.rank = 16, .outlier_chunks = 3, .local_chunks = 2},
          .rope = {.theta = kTheta}};
}

using Row = std::vector<double>;

/// Turns a head at a position, or back: pair (i, i + dim/2) by position * theta^(-2i/dim).
void turn(double* head, int position, bool back) {
  for (int i = 0; i < kDim / 2; ++i) {
    const double angle = (back ? -1.0 : 1.0) * position * std::pow(double(kTheta), -2.0 * i / kDim);
    const double low = head[i];
    const double high = head[i + kDim / 2];
    head[i] = low * std::cos(angle) - high * std::sin(angle);
    head[i + kDim / 2] = high * std::cos(angle) + low * std::sin(angle);
  }
}

/// Queries, keys and values of one sequence in all layers. Keys before RoPE have twelve strong directions and weak ones beside them, and
/// some tokens stand apart from their neighbours.
struct Text {
  int tokens;
  std::vector<float> q, k, v;  // [layers, tokens, heads or kv_heads, dim]

  Text(int count, unsigned seed) : tokens(count) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto numbers = [&](int n) {
      std::vector<double> made(at(n));
      for (double& x : made) x = normal(random);
      return made;
    };
    q.resize(at(kLayers * count * kHeads * kDim));
    v.resize(at(kLayers * count * kWidth));
    for (float& x : q) x = float(1.5 * normal(random));
    for (float& x : v) x = float(normal(random));
    for (Layer layer = 0; layer < kLayers; ++layer) {
      constexpr int kStrong = 12;
      const std::vector<double> directions = numbers(kStrong * kWidth);
      for (int t = 0; t < count; ++t) {
        Row row(at(kWidth));
        const std::vector<double> weights = numbers(kStrong);
        for (int r = 0; r < kStrong; ++r) {
          const double weight = (t % 23 == 5 ? 3.0 : 1.0) * (0.6 + 0.4 * weights[at(r)]) / std::sqrt(double(kStrong));
          for (int d = 0; d < kWidth; ++d) row[at(d)] += weight * directions[at(r * kWidth + d)];
        }
        for (double& x : row) x += 0.1 * normal(random);
        for (int head = 0; head < kKvHeads; ++head) turn(row.data() + head * kDim, t, false);
        for (double x : row) k.push_back(float(x));
      }
    }
  }
  const float* queries(Layer layer, int t) const { return q.data() + at((layer * tokens + t) * kHeads * kDim); }
  const float* keys(Layer layer, int t) const { return k.data() + at((layer * tokens + t) * kWidth); }
  const float* values(Layer layer, int t) const { return v.data() + at((layer * tokens + t) * kWidth); }
};

/// The right singular vectors of `rows`, strongest first, by one-sided Jacobi rotations of the columns (Golub and Van Loan, 8.6.3).
std::vector<Row> right_singular_vectors(std::vector<Row> rows) {
  const std::size_t width = rows.front().size();
  std::vector<Row> vectors(width, Row(width));  // vectors[i][j]: row i of V
  for (std::size_t i = 0; i < width; ++i) vectors[i][i] = 1.0;
  double total = 0.0;
  for (const Row& row : rows) total += std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
  for (bool rotated = true; rotated;) {
    rotated = false;
    for (std::size_t a = 0; a < width; ++a) {
      for (std::size_t b = a + 1; b < width; ++b) {
        double aa = 0.0, bb = 0.0, ab = 0.0;
        for (const Row& row : rows) {
          aa += row[a] * row[a];
          bb += row[b] * row[b];
          ab += row[a] * row[b];
        }
        if (std::fabs(ab) <= 1e-12 * std::sqrt(aa * bb) || std::min(aa, bb) <= 1e-24 * total) continue;
        rotated = true;
        const double zeta = (bb - aa) / (2.0 * ab);
        const double tangent = (zeta >= 0.0 ? 1.0 : -1.0) / (std::fabs(zeta) + std::sqrt(1.0 + zeta * zeta));
        const double cosine = 1.0 / std::sqrt(1.0 + tangent * tangent);
        const double sine = cosine * tangent;
        const auto mix = [&](Row& row) {
          const double x = row[a];
          row[a] = cosine * x - sine * row[b];
          row[b] = sine * x + cosine * row[b];
        };
        for (Row& row : rows) mix(row);
        for (Row& row : vectors) mix(row);
      }
    }
  }
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t c = 0; c < width; ++c) {
    double norm = 0.0;
    for (const Row& row : rows) norm += row[c] * row[c];
    order.emplace_back(-norm, c);
  }
  std::sort(order.begin(), order.end());
  std::vector<Row> sorted;
  for (const auto& [norm, c] : order) {
    Row& vector = sorted.emplace_back();
    for (const Row& row : vectors) vector.push_back(row[c]);
  }
  return sorted;
}

/// Brute force for one layer of a text whose first `prompt` tokens were prefilled.
class Twin {
 public:
  Twin(const StoreOptions& options, const Text& text, Layer layer, int prompt) : options_(options), text_(text), layer_(layer) {
    std::vector<Row> rows;
    for (int t = 0; t < prompt; ++t) rows.push_back(before_rope(t));
    directions_ = right_singular_vectors(std::move(rows));
    directions_.resize(std::min(directions_.size(), at(options.shadow_kv.rank)));
    for (int t = 0; t < text.tokens; ++t) rebuilt_.push_back(rebuild(t));
    for (int head = 0; head < kKvHeads; ++head) outliers_.push_back(find_outliers(head, window_begin(prompt)));
  }

  int window_begin(int length) const { return std::max(0, length / kChunk - options_.shadow_kv.local_chunks); }
  const std::vector<int>& outliers(int head) const { return outliers_[at(head)]; }
  bool is_outlier(int head, int chunk) const { return std::binary_search(outliers(head).begin(), outliers(head).end(), chunk); }

  std::vector<int> choose(int head, int length) const {
    std::vector<int> candidates;
    for (int c = 0; c < window_begin(length); ++c) {
      if (!is_outlier(head, c)) candidates.push_back(c);
    }
    std::vector<double> best(candidates.size(), -1.0);
    for (int g = 0; g < kGroup; ++g) {
      Row share;
      for (int c : candidates) share.push_back(std::exp(dot(query(head, g, length), mean(head, c)) / std::sqrt(double(kDim))));
      const double sum = std::accumulate(share.begin(), share.end(), 0.0);
      for (std::size_t i = 0; i < share.size(); ++i) best[i] = std::max(best[i], share[i] / sum);
    }
    std::vector<std::size_t> order(candidates.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return best[a] > best[b]; });
    order.resize(std::min(order.size(), at(options_.selection.budget_tokens / kChunk)));
    std::vector<int> chosen;
    for (std::size_t i : order) chosen.push_back(candidates[i]);
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }
  /// Attention of the row at position `length`.
  Row attend(int head, int g, int length, const std::vector<int>& chosen) const {
    Row out(at(kDim));
    double sum = 0.0;
    for (int t = 0; t <= length; ++t) {
      const int c = t / kChunk;
      const bool whole = c >= window_begin(length) || is_outlier(head, c);
      if (!whole && !std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      const double weight = std::exp(dot(query(head, g, length), whole ? key(t, head) : rebuilt(t, head)) / std::sqrt(double(kDim)));
      sum += weight;
      for (int d = 0; d < kDim; ++d) out[at(d)] += weight * double(text_.values(layer_, t)[head * kDim + d]);
    }
    for (double& x : out) x /= sum;
    return out;
  }

 private:
  static double dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }
  Row query(int head, int g, int t) const {
    const float* from = text_.queries(layer_, t) + (head * kGroup + g) * kDim;
    return {from, from + kDim};
  }
  Row key(int t, int head) const {
    const float* from = text_.keys(layer_, t) + head * kDim;
    return {from, from + kDim};
  }
  Row rebuilt(int t, int head) const { return {rebuilt_[at(t)].begin() + head * kDim, rebuilt_[at(t)].begin() + (head + 1) * kDim}; }
  Row before_rope(int t) const {
    Row row(text_.keys(layer_, t), text_.keys(layer_, t) + kWidth);
    for (int head = 0; head < kKvHeads; ++head) turn(row.data() + head * kDim, t, true);
    return row;
  }
  Row rebuild(int t) const {
    const Row row = before_rope(t);
    Row sum(at(kWidth));
    for (const Row& direction : directions_) {
      const double coefficient = dot(row, direction);
      for (int d = 0; d < kWidth; ++d) sum[at(d)] += coefficient * direction[at(d)];
    }
    for (int head = 0; head < kKvHeads; ++head) turn(sum.data() + head * kDim, t, false);
    return sum;
  }
  Row mean(int head, int c) const {
    Row sum(at(kDim));
    for (int t = c * kChunk; t < (c + 1) * kChunk; ++t) {
      for (int d = 0; d < kDim; ++d) sum[at(d)] += key(t, head)[at(d)] / kChunk;
    }
    return sum;
  }
  std::vector<int> find_outliers(int head, int chunks) const {
    std::vector<std::pair<double, int>> order;
    for (int c = 0; c < chunks; ++c) {
      const Row center = mean(head, c);
      double worst = 1.0;
      for (int t = c * kChunk; t < (c + 1) * kChunk; ++t) {
        worst = std::min(worst, dot(key(t, head), center) / std::sqrt(dot(center, center) * dot(key(t, head), key(t, head))));
      }
      order.emplace_back(worst, c);
    }
    std::sort(order.begin(), order.end());
    order.resize(std::min(order.size(), at(options_.shadow_kv.outlier_chunks)));
    std::vector<int> found;
    for (const auto& [cosine, c] : order) found.push_back(c);
    std::sort(found.begin(), found.end());
    return found;
  }

  StoreOptions options_;
  const Text& text_;
  Layer layer_;
  std::vector<Row> directions_;
  std::vector<Row> rebuilt_;  // [tokens] after RoPE
  std::vector<std::vector<int>> outliers_;
};

/// Drives one sequence of one row by hand, moving every transfer at once.
class Bench {
 public:
  struct Pass {
    std::vector<std::vector<float>> out;                // [layers] of [heads, dim]
    std::vector<std::vector<std::vector<int>>> chosen;  // [layers][kv_heads]
  };

  explicit Bench(const StoreOptions& options)
      : backend(cpu::make_cpu_backend({.threads = 2})), store(backend->make_store(options)), options_(options) {
    const KvStore::Capacities capacities = store->capacities();
    chunks_.resize(at(kKvHeads * capacities.selection));
    scores_.resize(chunks_.size());
    counts_.resize(at(kKvHeads));
    items_.resize(at(std::max({capacities.urgent, capacities.prefetch, capacities.write_back})));
    selection_ = {chunks_.data(), scores_.data(), counts_.data(), capacities.selection, kKvHeads};
    list_ = {items_.data(), &count_, static_cast<int>(items_.size())};
  }

  void prefill(const Text& text, int tokens, int block) {
    const StreamRef stream = backend->stream();
    store->open(0, options_.max_context, stream);
    for (int first = 0; first < tokens; first += block) {
      const int rows = std::min(block, tokens - first);
      for (Layer layer = 0; layer < kLayers; ++layer) {
        store->append(layer, 0,
                      {{text.keys(layer, first), DataType::f32, {rows, kKvHeads, kDim}},
                       {text.values(layer, first), DataType::f32, {rows, kKvHeads, kDim}}},
                      {}, stream);
      }
    }
    store->seal(0, stream);
    length = tokens;
  }
  Pass pass(const Text& text) {
    const StreamRef stream = backend->stream();
    const int slot = 0;
    const RowMode mode = RowMode::single;
    const StepView view{.sequences = 1, .rows_per_sequence = 1, .slot_of = &slot, .position = &length, .mode = &mode};
    Pass made;
    for (Layer layer = 0; layer < kLayers; ++layer) {
      const ConstTensor queries{text.queries(layer, length), DataType::f32, {1, kHeads, kDim}};
      const RowBlock rows{queries,
                          {text.keys(layer, length), DataType::f32, {1, kKvHeads, kDim}},
                          {text.values(layer, length), DataType::f32, {1, kKvHeads, kDim}}};
      store->select(layer, view, queries, selection_, stream);
      store->resolve_needed(layer, view, selection_, list_, stream);
      move();
      made.out.emplace_back(at(kHeads * kDim));
      store->attend(layer, view, rows, selection_, {made.out.back().data(), DataType::f32, {1, kHeads, kDim}}, stream);
      store->resolve_predicted(layer, view, {.layer = layer, .this_step = false, .chunks = {}}, list_, stream);
      move();
      auto& chosen = made.chosen.emplace_back();
      for (int head = 0; head < kKvHeads; ++head) {
        chosen.emplace_back(selection_.chunks_of(0, head), selection_.chunks_of(0, head) + selection_.count_of(0, head));
      }
    }
    store->commit(view, list_, stream);
    move();
    ++length;
    return made;
  }

  std::shared_ptr<Backend> backend;
  std::unique_ptr<KvStore> store;
  int length = 0;

 private:
  void move() {
    for (int i = 0; i < count_; ++i) std::copy_n(items_[at(i)].source, items_[at(i)].bytes, items_[at(i)].target);
  }

  StoreOptions options_;
  std::vector<int> chunks_, counts_;
  std::vector<float> scores_;
  std::vector<TransferItem> items_;
  Selection selection_;
  int count_ = 0;
  TransferList list_;
};

void expect_near(const float* got, const Row& want, double bound) {
  for (std::size_t d = 0; d < want.size(); ++d) REQUIRE(std::fabs(double(got[d]) - want[d]) <= bound);
}

/// Decodes `steps` tokens behind a prompt and compares everything with the twin.
void compare(const StoreOptions& options, int prompt, int steps) {
  const Text text(prompt + steps, 3);
  Bench bench(options);
  bench.prefill(text, prompt, 50);
  std::vector<Twin> twins;
  for (Layer layer = 0; layer < kLayers; ++layer) twins.emplace_back(options, text, layer, prompt);
  std::vector<std::vector<int>> before(at(kLayers * kKvHeads));
  std::uint64_t needed = 0, hits = 0;
  for (int step = 0; step < steps; ++step) {
    const int length = bench.length;
    const Bench::Pass pass = bench.pass(text);
    for (Layer layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        INFO("step " << step << " layer " << layer << " head " << head);
        const std::vector<int> chosen = twins[at(layer)].choose(head, length);
        REQUIRE(pass.chosen[at(layer)][at(head)] == chosen);
        std::vector<int>& last = before[at(layer * kKvHeads + head)];
        needed += chosen.size();
        for (int c : chosen) hits += options.shadow_kv.reuse && std::binary_search(last.begin(), last.end(), c) ? 1 : 0;
        last = chosen;
        for (int g = 0; g < kGroup; ++g) {
          expect_near(pass.out[at(layer)].data() + (head * kGroup + g) * kDim, twins[at(layer)].attend(head, g, length, chosen), 1e-4);
        }
      }
    }
  }
  constexpr std::uint64_t kValueBytes = kChunk * kDim * sizeof(float);
  const StoreStatistics statistics = bench.store->statistics();
  CHECK(statistics.needed == needed);
  CHECK(statistics.resident_hit >= hits);  // a chunk of an older step may still lie where nothing was needed
  CHECK(statistics.urgent_bytes == (needed - statistics.resident_hit) * kValueBytes);
  if (!options.shadow_kv.reuse) CHECK(statistics.resident_hit == 0);
  CHECK(statistics.prefetch_bytes == 0);
  const auto completed = static_cast<std::uint64_t>((prompt + steps) / kChunk - prompt / kChunk);
  CHECK(statistics.write_back_bytes == completed * kLayers * kKvHeads * kValueBytes);
}

}  // namespace

TEST_CASE("low-rank keys, outliers, selection, attention and traffic equal the brute-force twin", "[shadow_kv]") {
  if (!cpu::has_lapack()) DUALDECODER_SKIP("a build without LAPACK");
  StoreOptions options = small_options();
  SECTION("as published") { compare(options, 171, 60); }
  SECTION("nothing kept over a step") {
    options.shadow_kv.reuse = false;
    compare(options, 171, 30);
  }
  SECTION("no outliers, a rank of a quarter") {
    options.shadow_kv = {.rank = 8, .outlier_chunks = 0, .local_chunks = 1};
    compare(options, 128, 30);
  }
  SECTION("a prompt shorter than its local window") {
    options.shadow_kv.rank = 160;  // with less, the directions that five tokens leave open decide
    compare(options, 5, 60);
  }
  SECTION("a rank of all directions") {
    options.shadow_kv.rank = 160;
    compare(options, 100, 30);
  }
}

TEST_CASE("at full rank a budget of the whole context is dense attention", "[shadow_kv]") {
  if (!cpu::has_lapack()) DUALDECODER_SKIP("a build without LAPACK");
  const test::SessionModel model;
  SessionOptions options = test::tiny_options();
  options.store = StoreKind::full;
  options.predictor = PredictorKind::none;
  const AddOptions add{.max_new_tokens = 40};
  const std::vector<std::vector<Token>> prompts{test::random_tokens(150, 1), test::random_tokens(9, 2)};
  options.max_sequences = 2;
  auto full = make_session(model.backend, model.weights, options);
  const auto want = test::generate(full, prompts, add);
  options.store = StoreKind::shadow_kv;
  options.budget_tokens = options.max_context;
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::previous_step, PredictorKind::layer_ahead,
                                        PredictorKind::published_dual_row, PredictorKind::front_runner}) {
    options.predictor = predictor;
    auto session = make_session(model.backend, model.weights, options);
    const auto got = test::generate(session, prompts, add);
    for (std::size_t s = 0; s < prompts.size(); ++s) {
      CHECK(got[s].tokens == want[s].tokens);
      for (std::size_t i = 0; i < want[s].logits.size(); ++i) {
        for (std::size_t j = 0; j < want[s].logits[i].size(); ++j) {
          REQUIRE(std::fabs(got[s].logits[i][j] - want[s].logits[i][j]) < 2e-3F);
        }
      }
    }
  }
}

TEST_CASE("the plan of the store of low-rank keys names every part and is what it takes", "[shadow_kv]") {
  if (!cpu::has_lapack()) DUALDECODER_SKIP("a build without LAPACK");
  testing::HeapMemory heap;
  testing::CountingResource device(heap);
  testing::CountingResource pinned(heap);
  const auto backend = cpu::make_cpu_backend({.threads = 2, .device = &device, .pinned = &pinned});
  StoreOptions options = small_options();
  options.max_sequences = 2;
  const MemoryPlan plan = backend->store_plan(options);
  std::vector<std::string> names;
  for (const MemoryPlan::Item& item : plan.items) names.push_back(item.what);
  CHECK(names == std::vector<std::string>{"low-rank keys", "landmarks", "outlier chunks", "local window", "buffers of chosen chunks",
                                          "tables of chunks", "rotations and work space", "factorisation of one prompt",
                                          "keys of one prompt", "values"});
  // from the paper's shapes: per layer and token 16 coefficients, and 16 directions of 32 numbers; one number of a mean for 8 of keys
  CHECK(plan.items[0].bytes == 2 * kLayers * (256 * 16 + 16 * kWidth) * sizeof(float));
  CHECK(plan.items[1].bytes == 2 * kLayers * (256 / kChunk) * kWidth * sizeof(float));
  CHECK(plan.items[9].bytes == 2 * kLayers * 256 * kWidth * sizeof(float));
  const auto store = backend->make_store(options);
  const Text text(100, 4);
  for (int slot = 0; slot < 2; ++slot) {
    store->open(slot, options.max_context, backend->stream());
    for (Layer layer = 0; layer < kLayers; ++layer) {
      store->append(
          layer, slot,
          {{text.keys(layer, 0), DataType::f32, {100, kKvHeads, kDim}}, {text.values(layer, 0), DataType::f32, {100, kKvHeads, kDim}}}, {},
          backend->stream());
    }
    if (slot == 1) {
      CHECK(device.live_bytes() == plan.device_bytes());
      CHECK(pinned.live_bytes() == plan.pinned_bytes());
    }
    store->seal(slot, backend->stream());
  }
  CHECK(device.live_bytes() == plan.device_bytes() - plan.items[7].bytes);
  CHECK(pinned.live_bytes() == plan.items[9].bytes);
}

TEST_CASE("what the store of low-rank keys cannot do is refused by name", "[shadow_kv]") {
  if (!cpu::has_lapack()) DUALDECODER_SKIP("a build without LAPACK");
  const auto backend = cpu::make_cpu_backend({.threads = 1});
  const auto refused = [&](auto change, std::initializer_list<const char*> words) {
    StoreOptions options = small_options();
    change(options);
    test::expect_error<InvalidArgument>([&] { backend->make_store(options); }, words);
  };
  refused([](StoreOptions& o) { o.miss_policy = MissPolicy::estimate; }, {"miss_policy = estimate", "wait", "shadow_kv"});
  refused([](StoreOptions& o) { o.selection.chunk_tokens = 2; }, {"chunk_tokens = 2", "4, 8, 16 or 32", "shadow_kv"});
  refused([](StoreOptions& o) { o.shadow_kv.rank = 12; }, {"shadow_kv.rank = 12", "a multiple of 8"});
  refused([](StoreOptions& o) { o.shadow_kv.rank = 0; }, {"shadow_kv.rank = 0"});
  refused([](StoreOptions& o) { o.shadow_kv.outlier_chunks = -1; }, {"shadow_kv.outlier_chunks = -1"});
  refused([](StoreOptions& o) { o.shadow_kv.local_chunks = 0; }, {"shadow_kv.local_chunks = 0"});
  refused([](StoreOptions& o) { o.rope.theta = 0.5F; }, {"rope.theta = 0.5"});
}
