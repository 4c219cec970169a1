// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend's store of low-rank keys honours KvStore; what it keeps and computes is compared with a twin in double precision written
// from the paper (arXiv 2410.21465, section 4 and algorithms 1 and 2) on the device's own factors, and these with the best of their rank,
// by Jacobi rotations; and where this build has LAPACK, its passes with those of the CPU backend's store.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/key_factors.hpp"
#include "cuda/shadow_kv_store.hpp"
#include "cuda/store.hpp"
#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/predictors/no_prediction.hpp"
#include "dualdecoder/predictors/oracle.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/store_conformance.hpp"
#include "src/low_rank.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/shadow_kv_text.hpp"
#include "tests/gpu/small_config.hpp"

namespace dualdecoder::test {
namespace {

constexpr double kOutBound = 1e-2;   // attention on the device takes weights in bf16; values are of variance 1; the most seen is 0.0023
constexpr double kCpuBound = 4e-2;   // the two round factors and rebuilt keys to bf16 from sums of their own; the most seen is 0.018
constexpr double kRankBound = 3e-4;  // queries enter as two bf16, products are summed in f32
constexpr double kBf16 = 1.0 / 256;  // of a number that was rounded once, with room for what it was computed from

struct Shape {
  int dim;
  int heads;
  int kv_heads;
  int chunk;
  ShadowKvOptions shadow;
  int budget = 64;
};

StoreOptions options_of(const Shape& shape) {
  StoreOptions options;
  options.kind = StoreKind::shadow_kv;
  options.layers = 2;
  options.heads = shape.heads;
  options.kv_heads = shape.kv_heads;
  options.head_dim = shape.dim;
  options.max_context = 420;
  options.selection.chunk_tokens = shape.chunk;
  options.selection.budget_tokens = shape.budget;
  options.shadow_kv = shape.shadow;
  options.rope.theta = 500.0F;
  return options;
}

/// One sequence of one row on a backend, driven by SparseAttention.
class Run {
 public:
  Run(Backend& backend, const StoreOptions& options)
      : backend_(backend),
        options_(options),
        workplace_(testing::workplace_of(backend)),
        slot_of_(workplace_, 1),
        position_(workplace_, 1),
        mode_(workplace_, 1, RowMode::single) {
    auto store = backend.make_store(options);
    store_ = store.get();
    const KvStore::Capacities capacities = store->capacities();
    auto scheduler = backend.make_scheduler(
        {.layers = options.layers, .max_items_per_submit = std::max({capacities.urgent, capacities.prefetch, capacities.write_back})});
    attention_ = std::make_unique<SparseAttention>(
        SparseAttentionParts{.store = std::move(store),
                             .predictor = std::make_unique<SelectionRecorder>(std::make_unique<NoPrediction>(), trace_),
                             .scheduler = std::move(scheduler),
                             .kernels = &backend.kernels(),
                             .device_memory = &backend.memory(MemoryKind::device)},
        SparseAttentionShape{.layers = options.layers, .kv_heads = options.kv_heads, .max_sequences = 1}, workplace_.stream);
  }

  void prefill(const KeyText& text, int tokens, int block) {
    attention_->open(options_.max_context, workplace_.stream);
    for (int first = 0; first < tokens; first += block) {
      const int count = std::min(block, tokens - first);
      for (Layer layer = 0; layer < options_.layers; ++layer) {
        const auto keys = upload(text.keys, text.tokens, layer, first, count, options_.kv_heads);
        const auto values = upload(text.values, text.tokens, layer, first, count, options_.kv_heads);
        attention_->append(layer, 0, {rows(keys, count, options_.kv_heads), rows(values, count, options_.kv_heads)}, {}, workplace_.stream);
        workplace_.synchronize();
      }
    }
    attention_->seal(0, workplace_.stream);
    length = tokens;
  }
  /// Outputs of every layer [heads, dim].
  std::vector<std::vector<float>> pass(const KeyText& text) {
    position_.host[0] = length;
    position_.upload();
    const StepView view{
        .sequences = 1, .rows_per_sequence = 1, .slot_of = slot_of_.data(), .position = position_.data(), .mode = mode_.data()};
    std::vector<std::vector<float>> outs;
    attention_->begin_step(view, workplace_.stream);
    for (Layer layer = 0; layer < options_.layers; ++layer) {
      const auto queries = upload(text.queries, text.tokens, layer, length, 1, options_.heads);
      const auto keys = upload(text.keys, text.tokens, layer, length, 1, options_.kv_heads);
      const auto values = upload(text.values, text.tokens, layer, length, 1, options_.kv_heads);
      testing::Mirror<float> out(workplace_, at(options_.heads * options_.head_dim));
      attention_->attend(layer, {rows(queries, 1, options_.heads), rows(keys, 1, options_.kv_heads), rows(values, 1, options_.kv_heads)},
                         {}, Tensor(out.data(), DataType::f32, {1, options_.heads, options_.head_dim}), workplace_.stream);
      workplace_.synchronize();
      out.download();
      outs.push_back(out.host);
    }
    attention_->end_step(workplace_.stream);
    workplace_.synchronize();
    ++length;
    return outs;
  }
  void truncate(int tokens) {
    attention_->truncate(0, tokens, workplace_.stream);
    length = tokens;
  }
  std::vector<int> chosen(Layer layer, int kv_head, int position) const {
    const auto found = trace_.find({0, position, layer, kv_head});
    return {found.begin(), found.end()};
  }
  StoreStatistics statistics() const { return attention_->store_statistics(); }
  const cuda::ShadowLayout& layout() const { return static_cast<cuda::ShadowKvStore&>(*store_).layout(); }
  template <class T>
  std::vector<T> read(const T* from, std::size_t count) {
    std::vector<T> values(count);
    workplace_.copy(values.data(), from, count * sizeof(T));
    return values;
  }
  /// bf16 numbers as double.
  Row numbers(const void* from, std::size_t count) {
    const std::vector<std::uint16_t> bits = read(static_cast<const std::uint16_t*>(from), count);
    Row wide;
    for (const std::uint16_t word : bits) wide.push_back(from_bf16(word));
    return wide;
  }

  int length = 0;

 private:
  testing::Mirror<float> upload(const std::vector<float>& all, int tokens, Layer layer, int first, int count, int heads) const {
    const std::size_t row = at(heads * options_.head_dim);
    testing::Mirror<float> mirror(workplace_, at(count) * row);
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>((at(layer) * at(tokens) + at(first)) * row), mirror.host.size(),
                mirror.host.begin());
    mirror.upload();
    return mirror;
  }
  ConstTensor rows(const testing::Mirror<float>& mirror, int count, int heads) const {
    return {mirror.data(), DataType::f32, {count, heads, options_.head_dim}};
  }

  Backend& backend_;
  StoreOptions options_;
  testing::Workplace workplace_;
  testing::Mirror<int> slot_of_;
  testing::Mirror<int> position_;
  testing::Mirror<RowMode> mode_;
  SelectionTrace trace_;
  KvStore* store_ = nullptr;
  std::unique_ptr<SparseAttention> attention_;
};

/// Brute force for one layer on the factors that the device ended with.
class Twin {
 public:
  Twin(Run& run, const StoreOptions& options, const KeyText& text, Layer layer, int prompt)
      : options_(options), text_(text), layer_(layer), prompt_(prompt), dim_(options.head_dim), chunk_(options.selection.chunk_tokens) {
    const cuda::ShadowLayout& layout = run.layout();
    rank_ = layout.rank;
    for (int head = 0; head < options.kv_heads; ++head) {
      const std::size_t list = layout.store.list(0, layer, head);
      directions_.push_back(run.numbers(layout.directions_of(list), at(rank_ * dim_)));
      landmarks_.push_back(run.numbers(layout.landmark(list, 0), at(layout.store.max_chunks * dim_)));
      const int count = run.read(layout.outlier_count + list, 1)[0];
      outliers_.push_back(run.read(layout.outlier_chunks_of(list), at(count)));
    }
    const int whole = run.length / chunk_ * chunk_;
    const Row coefficients = run.numbers(layout.coefficients_of(0, layer, 0), at(whole * rank_));
    for (int t = 0; t < whole; ++t) {
      coefficients_.emplace_back(coefficients.begin() + t * rank_, coefficients.begin() + (t + 1) * rank_);
      rebuilt_.push_back(product(coefficients_.back()));
    }
    for (Row& row : rebuilt_) rotated_.push_back(row);
    for (int t = 0; t < whole; ++t) {
      Row& row = rotated_[at(t)];
      for (int head = 0; head < options.kv_heads; ++head) turn(row.data() + head * dim_, dim_, double(options.rope.theta), t, false);
      for (double& x : row) x = double(rounded_to_bf16(float(x)));
    }
  }

  int window_begin(int length) const { return std::max(0, length / chunk_ - options_.shadow_kv.local_chunks); }
  bool is_outlier(int head, int chunk) const { return std::binary_search(outliers_[at(head)].begin(), outliers_[at(head)].end(), chunk); }
  /// As the store keeps it: bf16.
  Row rebuilt_key(int t, int head) const {
    const auto first = rotated_[at(t)].begin() + head * dim_;
    return {first, first + dim_};
  }

  /// How far the factors are from the prompt's keys before RoPE, and how far the best of their rank is, as shares of the keys' norm.
  std::pair<double, double> factor_error() const {
    std::vector<Row> keys;
    const int whole = prompt_ / chunk_ * chunk_;
    for (int t = 0; t < prompt_; ++t) keys.push_back(before_rope(t));
    const std::size_t width = keys.front().size();
    std::vector<Row> gram(width, Row(width));
    for (const Row& key : keys) {
      for (std::size_t i = 0; i < width; ++i) {
        for (std::size_t j = 0; j < width; ++j) gram[i][j] += key[i] * key[j];
      }
    }
    const std::vector<Row> vectors = eigenvectors(std::move(gram));
    double all = 0.0;
    double best = 0.0;
    double got = 0.0;
    for (int t = 0; t < whole; ++t) {
      const Row& key = keys[at(t)];
      double kept = 0.0;
      for (int r = 0; r < rank_; ++r) kept += std::pow(dot(key, vectors[at(r)]), 2);
      all += dot(key, key);
      best += std::max(0.0, dot(key, key) - kept);
      for (std::size_t i = 0; i < width; ++i) got += std::pow(key[i] - rebuilt_[at(t)][i], 2);
    }
    return {std::sqrt(got / all), std::sqrt(best / all)};
  }
  /// Largest difference between coefficients of generated tokens and products of their keys and the directions, as a share of the norm.
  double projection_error() const {
    double worst = 0.0;
    for (int t = prompt_ / chunk_ * chunk_; t < static_cast<int>(coefficients_.size()); ++t) {
      const Row key = before_rope(t);
      for (int r = 0; r < rank_; ++r) {
        double sum = 0.0;
        for (int head = 0; head < options_.kv_heads; ++head) {
          for (int d = 0; d < dim_; ++d) sum += key[at(head * dim_ + d)] * directions_[at(head)][at(r * dim_ + d)];
        }
        worst = std::max(worst, std::fabs(sum - coefficients_[at(t)][at(r)]) / std::sqrt(dot(key, key)));
      }
    }
    return worst;
  }
  double landmark_error(int head) const {
    double worst = 0.0;
    for (int c = 0; c < static_cast<int>(coefficients_.size()) / chunk_; ++c) {
      const Row center = mean(head, c);
      for (int d = 0; d < dim_; ++d) {
        worst =
            std::max(worst, std::fabs(center[at(d)] - landmarks_[at(head)][at(c * dim_ + d)]) / std::max(1.0, std::fabs(center[at(d)])));
      }
    }
    return worst;
  }
  /// Whether the outliers are those whose worst token has the lowest cosine to the mean.
  bool outliers_are_right(int head) const {
    const int chunks = window_begin(prompt_);
    if (static_cast<int>(outliers_[at(head)].size()) != std::min(chunks, options_.shadow_kv.outlier_chunks)) return false;
    double highest_in = -2.0;
    double lowest_out = 2.0;
    for (int c = 0; c < chunks; ++c) {
      const Row center = mean(head, c);
      double worst = 1.0;
      for (int t = c * chunk_; t < (c + 1) * chunk_; ++t) {
        worst = std::min(worst, dot(key(t, head), center) / std::sqrt(dot(center, center) * dot(key(t, head), key(t, head))));
      }
      if (is_outlier(head, c)) highest_in = std::max(highest_in, worst);
      if (!is_outlier(head, c)) lowest_out = std::min(lowest_out, worst);
    }
    return highest_in <= lowest_out + 1e-5;
  }
  /// Whether these are the candidates with the best ranks, but for what differs by less than the bound.
  bool is_choice(int head, int length, const std::vector<int>& chosen) const {
    std::vector<int> candidates;
    for (int c = 0; c < window_begin(length); ++c) {
      if (!is_outlier(head, c)) candidates.push_back(c);
    }
    if (chosen.size() != std::min(candidates.size(), at(options_.selection.budget_tokens / chunk_))) return false;
    Row best(candidates.size(), -HUGE_VAL);
    for (int g = 0; g < group(); ++g) {
      Row scores;
      double sum = 0.0;
      for (const int c : candidates) {
        const auto first = landmarks_[at(head)].begin() + c * dim_;
        scores.push_back(dot(query(head, g, length), Row(first, first + dim_)) / std::sqrt(double(dim_)));
        sum += std::exp(scores.back());
      }
      for (std::size_t i = 0; i < scores.size(); ++i) best[i] = std::max(best[i], scores[i] - std::log(sum));
    }
    double worst_in = HUGE_VAL;
    double best_out = -HUGE_VAL;
    std::size_t found = 0;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const bool in = std::binary_search(chosen.begin(), chosen.end(), candidates[i]);
      found += in ? 1 : 0;
      if (in) worst_in = std::min(worst_in, best[i]);
      if (!in) best_out = std::max(best_out, best[i]);
    }
    return found == chosen.size() && worst_in >= best_out - kRankBound;
  }
  /// Attention of the row at position `length`.
  Row attend(int head, int g, int length, const std::vector<int>& chosen) const {
    Row out(at(dim_));
    double sum = 0.0;
    const Row asked = query(head, g, length);
    for (int t = 0; t <= length; ++t) {
      const int c = t / chunk_;
      const bool whole = c >= window_begin(length) || is_outlier(head, c);
      if (!whole && !std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      const Row given = whole ? key(t, head) : rebuilt_key(t, head);
      const double weight = std::exp(dot(asked, given) / std::sqrt(double(dim_)));
      sum += weight;
      for (int d = 0; d < dim_; ++d) out[at(d)] += weight * double(value(t, head)[d]);
    }
    for (double& x : out) x /= sum;
    return out;
  }
  Row key(int t, int head) const { return part(text_.keys, t, options_.kv_heads, head); }
  const float* value(int t, int head) const {
    return text_.values.data() + (at(layer_) * at(text_.tokens) + at(t)) * at(options_.kv_heads * dim_) + at(head * dim_);
  }

 private:
  int group() const { return options_.heads / options_.kv_heads; }
  Row part(const std::vector<float>& all, int t, int heads, int head) const {
    const auto first =
        all.begin() + static_cast<std::ptrdiff_t>((at(layer_) * at(text_.tokens) + at(t)) * at(heads * dim_) + at(head * dim_));
    return {first, first + dim_};
  }
  Row query(int head, int g, int t) const { return part(text_.queries, t, options_.heads, head * group() + g); }
  Row before_rope(int t) const {
    Row row;
    for (int head = 0; head < options_.kv_heads; ++head) {
      Row of_head = key(t, head);
      turn(of_head.data(), dim_, double(options_.rope.theta), t, true);
      row.insert(row.end(), of_head.begin(), of_head.end());
    }
    return row;
  }
  Row product(const Row& coefficients) const {
    Row sum(at(options_.kv_heads * dim_));
    for (int head = 0; head < options_.kv_heads; ++head) {
      for (int r = 0; r < rank_; ++r) {
        for (int d = 0; d < dim_; ++d) sum[at(head * dim_ + d)] += coefficients[at(r)] * directions_[at(head)][at(r * dim_ + d)];
      }
    }
    return sum;
  }
  Row mean(int head, int c) const {
    Row sum(at(dim_));
    for (int t = c * chunk_; t < (c + 1) * chunk_; ++t) {
      for (int d = 0; d < dim_; ++d) sum[at(d)] += key(t, head)[at(d)] / chunk_;
    }
    return sum;
  }

  StoreOptions options_;
  const KeyText& text_;
  Layer layer_;
  int prompt_;
  int dim_;
  int chunk_;
  int rank_ = 0;
  std::vector<Row> directions_;  // [kv_heads] of [rank, dim]
  std::vector<Row> landmarks_;   // [kv_heads] of [max_chunks, dim]
  std::vector<std::vector<int>> outliers_;
  std::vector<Row> coefficients_;  // [tokens of whole chunks]
  std::vector<Row> rebuilt_;       // likewise [kv_heads, dim], before RoPE
  std::vector<Row> rotated_;       // after RoPE
};

std::string name_of(const Shape& shape) {
  return "dim " + std::to_string(shape.dim) + " heads " + std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " chunk " +
         std::to_string(shape.chunk) + " rank " + std::to_string(shape.shadow.rank) + " outliers " +
         std::to_string(shape.shadow.outlier_chunks) + (shape.shadow.reuse ? "" : " no reuse");
}

/// Window chunks that truncation brought back: outliers as they were, others rebuilt, values as given.
void check_window(Run& run, const Twin& twin, const StoreOptions& options, Layer layer, const char* name) {
  const cuda::StoreLayout& store = run.layout().store;
  const int dim = options.head_dim;
  for (int head = 0; head < options.kv_heads; ++head) {
    for (int c = twin.window_begin(run.length); (c + 1) * store.chunk <= run.length; ++c) {
      const std::byte* const chunk = store.near_chunk(store.list(0, layer, head), c);
      const Row got = run.numbers(chunk, store.chunk_bytes / 2);
      double worst = 0.0;
      bool equal = true;
      for (int i = 0; i < store.chunk; ++i) {
        const int t = c * store.chunk + i;
        const Row want = twin.is_outlier(head, c) ? twin.key(t, head) : twin.rebuilt_key(t, head);
        for (int d = 0; d < dim; ++d) {
          worst = std::max(worst, std::fabs(got[at(i * dim + d)] - want[at(d)]) / std::max(1.0, std::fabs(want[at(d)])));
          equal = equal && got[at((store.chunk + i) * dim + d)] == double(twin.value(t, head)[d]);
        }
      }
      DUALDECODER_EXPECT(equal, "%s: values of chunk %d of the window after truncate()", name, c);
      DUALDECODER_EXPECT(worst <= kBf16, "%s: a key of chunk %d of the window after truncate() is %g off", name, c, worst);
    }
  }
}

void check_twin(Backend& cuda, Backend* cpu, const Shape& shape, int prompt, int steps) {
  const StoreOptions options = options_of(shape);
  const std::string name = name_of(shape);
  const KeyText text(options, prompt + steps, 3);
  Run run(cuda, options);
  run.prefill(text, prompt, 50);
  std::vector<std::vector<std::vector<float>>> outs;
  for (int step = 0; step < steps; ++step) outs.push_back(run.pass(text));
  std::uint64_t needed = 0;
  double worst = 0.0;
  std::vector<Twin> twins;
  for (Layer layer = 0; layer < options.layers; ++layer) {
    const Twin& twin = twins.emplace_back(run, options, text, layer, prompt);
    if (layer == options.layers - 1) {
      const auto [error, least] = twin.factor_error();
      std::printf("%s: keys rebuilt to %.5f of their norm, the best of the rank %.5f\n", name.c_str(), error, least);
      DUALDECODER_EXPECT(error <= std::hypot(least, kBf16), "%s: factors are off by %g of the keys, the best of their rank by %g",
                         name.c_str(), error, least);
    }
    DUALDECODER_EXPECT(twin.projection_error() <= kBf16, "%s: coefficients of generated tokens are off by %g", name.c_str(),
                       twin.projection_error());
    for (int head = 0; head < options.kv_heads; ++head) {
      DUALDECODER_EXPECT(twin.landmark_error(head) <= kBf16, "%s: a landmark is off by %g", name.c_str(), twin.landmark_error(head));
      DUALDECODER_EXPECT(twin.outliers_are_right(head), "%s: outliers of head %d", name.c_str(), head);
      for (int step = 0; step < steps; ++step) {
        const std::vector<int> chosen = run.chosen(layer, head, prompt + step);
        needed += chosen.size();
        DUALDECODER_EXPECT(twin.is_choice(head, prompt + step, chosen), "%s: choice of layer %d head %d step %d", name.c_str(), layer, head,
                           step);
        for (int g = 0; g < options.heads / options.kv_heads; ++g) {
          const Row want = twin.attend(head, g, prompt + step, chosen);
          const float* got = outs[at(step)][at(layer)].data() + (head * (options.heads / options.kv_heads) + g) * options.head_dim;
          for (int d = 0; d < options.head_dim; ++d) {
            const double difference = std::fabs(double(got[d]) - want[at(d)]);
            worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
          }
        }
      }
    }
  }
  std::printf("%s: outputs within %.4f of the twin\n", name.c_str(), worst);
  DUALDECODER_EXPECT(worst <= kOutBound, "%s: an output is %g off", name.c_str(), worst);

  const std::uint64_t value_bytes = at(shape.chunk * shape.dim * 2);
  const StoreStatistics statistics = run.statistics();
  DUALDECODER_EXPECT(statistics.needed == needed, "%s: needed", name.c_str());
  DUALDECODER_EXPECT(statistics.urgent_bytes == (needed - statistics.resident_hit) * value_bytes, "%s: urgent bytes", name.c_str());
  DUALDECODER_EXPECT((statistics.resident_hit == 0) == !shape.shadow.reuse, "%s: resident hits", name.c_str());
  const auto completed = static_cast<std::uint64_t>((prompt + steps) / shape.chunk - prompt / shape.chunk);
  DUALDECODER_EXPECT(statistics.write_back_bytes == completed * at(options.layers * options.kv_heads) * value_bytes, "%s: write-back",
                     name.c_str());

  if (cpu != nullptr) {
    Run other(*cpu, options);
    other.prefill(text, prompt, 50);
    double apart = 0.0;
    int parted = 0;
    for (int step = 0; step < steps; ++step) {
      const auto want = other.pass(text);
      for (Layer layer = 0; layer < options.layers; ++layer) {
        bool same = true;
        for (int head = 0; head < options.kv_heads; ++head) {
          same = same && other.chosen(layer, head, prompt + step) == run.chosen(layer, head, prompt + step);
        }
        parted += same ? 0 : 1;
        if (same) apart = std::max(apart, testing::detail::largest_difference(want[at(layer)], outs[at(step)][at(layer)]));
      }
    }
    std::printf("%s: outputs within %.4f of the CPU backend's, %d of %d choices differ\n", name.c_str(), apart, parted,
                steps * options.layers);
    DUALDECODER_EXPECT(apart <= kCpuBound, "%s: an output is %g from the CPU backend's", name.c_str(), apart);
    DUALDECODER_EXPECT(parted * 10 <= steps * options.layers, "%s: %d choices differ from the CPU backend's", name.c_str(), parted);
  }

  run.truncate(prompt - 3 * shape.chunk + 1);
  for (Layer layer = 0; layer < options.layers; ++layer) check_window(run, twins[at(layer)], options, layer, name.c_str());
  for (int step = 0; step < 12; ++step) run.pass(text);
}

void check_twins(Backend& cuda, Backend* cpu) {
  check_twin(cuda, cpu, {64, 6, 2, 8, {.rank = 32, .outlier_chunks = 5, .local_chunks = 2}}, 171, small_run() ? 20 : 60);
  if (small_run()) return;
  check_twin(cuda, cpu, {128, 4, 1, 8, {.rank = 40, .outlier_chunks = 0, .local_chunks = 1}}, 301, 30);
  check_twin(cuda, cpu, {128, 16, 1, 4, {.rank = 24, .outlier_chunks = 9, .local_chunks = 3, .reuse = false}}, 160, 30);
  check_twin(cuda, cpu, {80, 2, 2, 16, {.rank = 16, .outlier_chunks = 2, .local_chunks = 1}}, 200, 40);
  check_twin(cuda, cpu, {96, 3, 1, 32, {.rank = 96, .outlier_chunks = 3, .local_chunks = 1}}, 333, 40);
}

void check_conformance(Backend& cuda) {
  constexpr double kAnything = 100.0;  // outliers and rounded factors of a rewound prompt are those of the whole
  const auto check = [&](int dim, const ShadowKvOptions& shadow) {
    const auto make = [&](StoreOptions options) {
      options.shadow_kv = shadow;
      return cuda.make_store(options);
    };
    const testing::StoreSubject subject{.make = make,
                                        .make_scheduler = [&](const SchedulerOptions& options) { return cuda.make_scheduler(options); },
                                        .workplace = testing::workplace_of(cuda),
                                        .kind = StoreKind::shadow_kv,
                                        .kv_type = DataType::bf16,
                                        .head_dim = dim,
                                        .estimates = false,
                                        .truncate_tolerance = kAnything};
    const std::vector<std::string> findings = testing::check_kv_store(subject);
    for (const std::string& finding : findings) DUALDECODER_EXPECT(false, "head_dim %d: %s", dim, finding.c_str());
    if (findings.empty()) std::printf("head_dim %d, rank %d: KvStore as promised\n", dim, shadow.rank);
  };
  // the rank is that of all directions, so a budget that covers the context must be dense attention
  check(64, {.rank = 128, .outlier_chunks = 3, .local_chunks = 1});
  check(128, {.rank = 256, .outlier_chunks = 0, .local_chunks = 2, .reuse = false});
}

std::vector<float> logits_of(const std::shared_ptr<Backend>& cuda, const std::shared_ptr<const ModelWeights>& weights,
                             const SessionOptions& options, const std::vector<Token>& prompt, int count, std::vector<Token>& tokens) {
  auto session = make_session(cuda, weights, options);
  std::vector<float> all;
  AddOptions add;
  add.max_new_tokens = count;
  add.on_logits = [&](std::span<const float> logits) { all.insert(all.end(), logits.begin(), logits.end()); };
  session.add(prompt, add);
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) tokens.push_back(event.token);
  }
  return all;
}

/// A model of made-up weights through DecodeSession: at full rank with a budget of the whole context it is dense attention, and recorded
/// passes choose what plain ones do.
void check_session(const std::shared_ptr<Backend>& cuda) {
  constexpr int kCount = 40;
  constexpr double kLogitBound = 0.1;  // logits of about 3 after two layers of bf16 roundings
  const auto weights = make_synthetic_weights(small_config(), 7, *cuda);
  std::vector<Token> prompt;
  for (int i = 0; i < 700; ++i) prompt.push_back((i * 7919 + 13) % small_config().vocabulary);
  SessionOptions options;
  options.max_context = 1024;
  options.predictor = PredictorKind::none;
  options.miss_policy = MissPolicy::wait;
  options.chunk_tokens = 8;
  options.store = StoreKind::full;
  std::vector<Token> ignored;
  const std::vector<float> want = logits_of(cuda, weights, options, prompt, 2, ignored);
  options.store = StoreKind::shadow_kv;
  options.shadow_kv = {.rank = 128, .outlier_chunks = 8, .local_chunks = 4};
  options.budget_tokens = 1024;
  const std::vector<float> got = logits_of(cuda, weights, options, prompt, 2, ignored);
  const double apart = testing::detail::largest_difference(want, got);
  std::printf("session: a budget of the whole context at full rank: logits within %.4f of full attention's\n", apart);
  DUALDECODER_EXPECT(apart <= kLogitBound, "a logit is %g from full attention's", apart);

  options.budget_tokens = 128;
  options.shadow_kv.rank = 64;
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::previous_step, PredictorKind::front_runner}) {
    options.predictor = predictor;
    std::vector<Token> plain;
    logits_of(cuda, weights, options, prompt, kCount, plain);
    auto session = make_session(cuda, weights, options);
    session.add(prompt, {.max_new_tokens = kCount});
    std::vector<Token> recorded;
    while (session.active() > 0) {
      for (const TokenEvent& event : session.step().tokens) recorded.push_back(event.token);
    }
    DUALDECODER_EXPECT(recorded == plain && recorded.size() == kCount, "recorded passes choose other tokens than plain ones, predictor %d",
                       static_cast<int>(predictor));
    const StoreStatistics statistics = session.store_statistics();
    std::printf("session: predictor %d: of %llu needed %llu were there\n", static_cast<int>(predictor),
                static_cast<unsigned long long>(statistics.needed), static_cast<unsigned long long>(statistics.resident_hit));
  }
}

/// The plan is what the resources are asked for.
void check_plan(Backend& cuda) {
  StoreOptions options = options_of({128, 8, 2, 8, {.rank = 160}});
  options.max_sequences = 2;
  testing::CountingResource device(cuda.memory(MemoryKind::device));
  testing::CountingResource host(cuda.memory(MemoryKind::pinned));
  const MemoryPlan plan = cuda::cuda_store_plan(options);
  const auto bytes_of = [&](const std::string& what) {
    const auto found = std::find_if(plan.items.begin(), plan.items.end(), [&](const MemoryPlan::Item& item) { return item.what == what; });
    DUALDECODER_EXPECT(found != plan.items.end(), "no part of the plan is called %s", what.c_str());
    return found == plan.items.end() ? std::size_t{0} : found->bytes;
  };
  {
    const std::unique_ptr<KvStore> store = cuda::make_cuda_store(options, {&device, &host, cuda.stream()});
    store->open(0, options.max_context, cuda.stream());
    store->open(1, options.max_context, cuda.stream());
    const std::size_t work = bytes_of("factorisation of one prompt");
    const std::size_t keys = bytes_of("keys of one prompt");
    DUALDECODER_EXPECT(device.live_bytes() == plan.device_bytes() + work, "%zu, planned %zu", device.live_bytes(), plan.device_bytes());
    DUALDECODER_EXPECT(host.live_bytes() == plan.pinned_bytes() + keys, "%zu, planned %zu", host.live_bytes(), plan.pinned_bytes());
    // from the paper's shapes: 160 coefficients a token and layer, and 160 directions of a layer's 256 columns, 16 bits each
    const std::size_t factors = 2 * 2 * (at(432) * 160 + 160 * 256) * 2;  // 420 tokens are 54 chunks of 8 in whole tiles of 16 chunks
    DUALDECODER_EXPECT(bytes_of("low-rank keys") >= factors && bytes_of("low-rank keys") <= factors * 5 / 4, "%zu bytes of factors",
                       bytes_of("low-rank keys"));
  }
  cuda.synchronize(cuda.stream());
  DUALDECODER_EXPECT(device.live_bytes() == 0 && host.live_bytes() == 0, "%zu and %zu bytes left", device.live_bytes(), host.live_bytes());
}

void check_refusals() {
  const auto refused = [](auto change, const char* word) {
    StoreOptions options = options_of({128, 8, 2, 8, {.rank = 160}});
    change(options);
    const std::string message = thrown<InvalidArgument>(word, [&] { cuda::cuda_store_plan(options); });
    DUALDECODER_EXPECT(message.find(word) == 0, "%s: %s", word, message.c_str());
  };
  refused([](StoreOptions& o) { o.kv_type = DataType::f32; }, "kv_type = f32");
  refused([](StoreOptions& o) { o.miss_policy = MissPolicy::estimate; }, "miss_policy = estimate");
  refused([](StoreOptions& o) { o.shadow_kv.rank = 12; }, "shadow_kv.rank = 12");
  refused([](StoreOptions& o) { o.rope.theta = 0.5F; }, "rope.theta = 0.5");
}

/// What sealing and a step cost at the shape of an 8B model; four layers of 131,072 tokens with the paper's parameters.
void measure(Backend& cuda) {
  constexpr int kTokens = 130975;  // the next one completes a chunk
  constexpr int kBlock = 4096;
  for (const bool reuse : {true, false}) {
    StoreOptions options;
    options.kind = StoreKind::shadow_kv;
    options.layers = 4;
    options.heads = 32;
    options.kv_heads = 8;
    options.head_dim = 128;
    options.max_context = 131072;
    options.selection.chunk_tokens = 8;
    options.selection.budget_tokens = 2048;
    options.shadow_kv.reuse = reuse;
    const StreamRef stream = cuda.stream();
    auto store = cuda.make_store(options);
    auto scheduler = cuda.make_scheduler({.layers = 4, .max_items_per_submit = store->capacities().urgent});
    std::vector<float> numbers;
    for (int t = 0; t < kBlock; ++t) {
      testing::Story(1).append(numbers, testing::Story::Part::key, 0, t, options.kv_heads * options.head_dim);
    }
    const DeviceArray<float> rows(numbers);
    const ConstTensor one(rows.data(), DataType::f32, {1, options.kv_heads, options.head_dim});
    const auto seconds = [&](auto&& work) {
      cuda.synchronize(stream);
      const auto begin = std::chrono::steady_clock::now();
      work();
      cuda.synchronize(stream);
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const double opening = seconds([&] { store->open(0, options.max_context, stream); });
    const double append = seconds([&] {
      for (int first = 0; first < kTokens; first += kBlock) {
        const ConstTensor block(rows.data(), DataType::f32, {std::min(kBlock, kTokens - first), options.kv_heads, options.head_dim});
        for (Layer layer = 0; layer < options.layers; ++layer) store->append(layer, 0, {block, block}, {}, stream);
      }
    });
    const double seal = seconds([&] { store->seal(0, stream); });
    std::printf("%d tokens, %d layers: open %.0f ms, append %.0f ms, seal %.0f ms\n", kTokens, options.layers, opening * 1e3, append * 1e3,
                seal * 1e3);

    const testing::Workplace workplace = testing::workplace_of(cuda);
    testing::Mirror<int> slot_of(workplace, 1);
    testing::Mirror<int> position(workplace, 1, kTokens);
    testing::Mirror<RowMode> mode(workplace, 1, RowMode::single);
    const StepView view{1, 1, slot_of.data(), position.data(), mode.data()};
    testing::SelectionMirror chosen(workplace, 1, options.kv_heads, store->capacities().selection);
    testing::Mirror<TransferItem> items(workplace, at(store->capacities().urgent));
    testing::Mirror<int> count(workplace, 1);
    const TransferList list{items.data(), count.data(), store->capacities().urgent};
    const DeviceArray<float> out(at(options.heads * options.head_dim));
    const Tensor output(out.data(), DataType::f32, {1, options.heads, options.head_dim});
    const auto queries = [&](Layer layer) {
      return ConstTensor(rows.data() + layer * 4096, DataType::f32, {1, options.heads, options.head_dim});
    };
    const auto measured = [&](const char* what, auto&& step) {
      const auto graph = cuda.record([&] { step(); }, stream);
      graph->launch(stream);
      const double took = seconds([&] {
        for (int i = 0; i < 50; ++i) graph->launch(stream);
      });
      std::printf("  %-44s %7.1f us a layer\n", what, took / 50 / options.layers * 1e6);
    };
    const auto each_layer = [&](auto&& work) {
      return [&, work] {
        for (Layer layer = 0; layer < options.layers; ++layer) work(layer);
      };
    };
    const auto select = [&](Layer layer) { store->select(layer, view, queries(layer), chosen.view, stream); };
    const auto resolve = [&](Layer layer) {
      store->resolve_needed(layer, view, chosen.view, list, stream);
      scheduler->submit(Lane::urgent, layer, list, stream);
      scheduler->wait(Lane::urgent, layer, stream);
    };
    const auto attend = [&](Layer layer) {
      store->attend(layer, view, {queries(layer), one, one}, chosen.view, output, stream);
      store->resolve_predicted(layer, view, {.layer = layer, .this_step = false, .chunks = {}}, list, stream);
    };
    measured("select", each_layer(select));
    measured("select, resolve, fetch", each_layer([&](Layer layer) {
               select(layer);
               resolve(layer);
             }));
    measured(reuse ? "all, everything chosen before" : "all, everything fetched and rebuilt", each_layer([&](Layer layer) {
               select(layer);
               resolve(layer);
               attend(layer);
             }));
    measured("commit that completes a chunk", [&] { store->commit(view, list, stream); });
  }
}

}  // namespace
}  // namespace dualdecoder::test

/// With an argument it only measures.
int main(int argc, char**) {
  using namespace dualdecoder;
  if (!cuda::has_cusolver()) {
    const std::string message = test::thrown<InvalidArgument>("cuSOLVER", [] {
      cuda::cuda_store_plan(test::options_of({128, 8, 2, 8, {}}));
    });
    DUALDECODER_EXPECT(message.find("DUALDECODER_CUSOLVER") != std::string::npos, "%s", message.c_str());
    return test::failures > 0 ? 1 : (std::printf("SKIPPED: a build without cuSOLVER, which refuses the store\n"), 77);
  }
  return test::run_on_device([=] {
    const std::shared_ptr<Backend> cuda = cuda::make_cuda_backend();
    if (argc > 1) return test::measure(*cuda);
    const std::shared_ptr<Backend> cpu = cpu::has_lapack() ? cpu::make_cpu_backend({.threads = 2}) : nullptr;
    test::check_refusals();
    test::check_plan(*cuda);
    test::check_twins(*cuda, cpu.get());
    test::check_session(cuda);
    if (test::small_run()) return;
    test::measure(*cuda);
    test::check_conformance(*cuda);
  });
}
