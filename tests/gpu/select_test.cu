// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Selection against brute force on the host: the stored maxima and levels bit for bit against the same fixed-point sums, and these within
// the rounding of fixed point against double precision; the choice against the ranks of the stored scores, which are the defined ones:
// chunks whose scores differ by less than a level can change places. `--bench` prints times of one layer.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "cuda/select.hpp"
#include "cuda/store_kernels.hpp"
#include "tests/gpu/bf16.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/replay.hpp"
#include "tests/gpu/store_arrays.hpp"

namespace dualdecoder {
namespace {

using test::StoreArrays;

enum class Keys { random, equal, zero, extreme, few };

struct Case {
  const char* name;
  test::StoreShape shape;
  std::vector<int> positions;
  std::vector<RowMode> modes;
  Keys keys = Keys::random;
  int capacity = 0;  // of the selection, 0: what the store selects
  bool bf16 = false;
};

struct Data {
  std::vector<std::int8_t> means;
  std::vector<float> scales;
  std::vector<float> queries;  // [rows, heads, dim]
};

Data make_data(const Case& test, const cuda::StoreLayout& layout, std::size_t lists, std::mt19937& random) {
  const auto dim = static_cast<std::size_t>(layout.dim);
  const auto chunks = static_cast<std::size_t>(layout.max_chunks);
  std::uniform_int_distribution<int> level(-127, 127);
  std::uniform_real_distribution<float> scale(0.001F, 0.02F);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  Data data;
  data.means.resize(lists * chunks * dim);
  data.scales.resize(lists * chunks);
  // a pool of random bytes, from another place of it for each list, since generators are slow
  std::vector<std::int8_t> pool(3 * chunks * dim / 2);
  for (auto& byte : pool) byte = static_cast<std::int8_t>(level(random));
  for (std::size_t list = 0; list < lists; ++list) {
    const std::size_t from = random() % (pool.size() - chunks * dim + 1);
    std::copy_n(pool.data() + from, chunks * dim, data.means.data() + list * chunks * dim);
  }
  for (auto& s : data.scales) s = scale(random);
  for (std::size_t c = 0; c < lists * chunks; ++c) {
    std::int8_t* const row = data.means.data() + c * dim;
    switch (test.keys) {
      case Keys::random: break;
      case Keys::equal:
        std::copy_n(data.means.data(), dim, row);
        data.scales[c] = data.scales[0];
        break;
      case Keys::zero:
        std::fill_n(row, dim, std::int8_t{0});
        data.scales[c] = 0.0F;
        break;
      case Keys::extreme:
        for (std::size_t d = 0; d < dim; ++d) row[d] = static_cast<std::int8_t>((random() & 1U) != 0 ? 127 : -127);
        data.scales[c] = (random() & 1U) != 0 ? 3.0e4F : 1.0e-30F;
        break;
      case Keys::few: {  // a few values, so that most chunks tie with others
        const std::size_t like = random() % 7;
        if (like < c) {
          std::copy_n(data.means.data() + like * dim, dim, row);
          data.scales[c] = data.scales[like];
        }
        break;
      }
    }
  }
  data.queries.resize(static_cast<std::size_t>(layout.rows()) * static_cast<std::size_t>(layout.heads) * dim);
  for (auto& q : data.queries) q = normal(random);
  if (test.keys == Keys::extreme) {
    for (std::size_t q = 0; q < data.queries.size(); ++q) data.queries[q] *= q / dim % 3 == 0 ? 1.0e-35F : q / dim % 3 == 1 ? 0.0F : 100.0F;
  }
  if (test.bf16) {
    for (auto& q : data.queries) q = test::rounded_to_bf16(q);
  }
  return data;
}

/// A query as the kernel keeps it: levels of 1 / 16319 of its largest element.
struct FixedQuery {
  std::vector<int> levels;
  float scale;
  FixedQuery(const float* query, int dim) : levels(static_cast<std::size_t>(dim)) {
    float largest = 0.0F;
    for (int d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(query[d]));
    const float per_unit = largest > 1e-30F ? 16319.0F / largest : 0.0F;
    for (int d = 0; d < dim; ++d) levels[static_cast<std::size_t>(d)] = static_cast<int>(std::nearbyint(query[d] * per_unit));
    scale = (per_unit > 0.0F ? largest / 16319.0F : 0.0F) * (1.0F / std::sqrt(static_cast<float>(dim)));
  }
};

class Checker {
 public:
  Checker(const Case& test, std::mt19937& random) : case_(test), arrays_(test.shape) {
    arrays_.take_selection();
    data_ = make_data(test, arrays_.layout, arrays_.lists(), random);
    StoreArrays::put(arrays_.layout.key_means, data_.means);
    StoreArrays::put(arrays_.layout.key_scales, data_.scales);
    const auto places = static_cast<int>(test.positions.size());
    for (int p = 0; p < places; ++p) slots_.push_back((p * 5 + 3) % places);  // places and storage slots are not the same
    if (places % 5 == 0) std::reverse_copy(slots_.begin(), slots_.end(), slots_.begin());
    view_.sequences = places;
    view_.rows_per_sequence = test.shape.rows_per_sequence;
    view_.slot_of = arrays_.take(slots_);
    view_.position = arrays_.take(test.positions);
    view_.mode = arrays_.take(test.modes);
  }

  void run() {
    const cuda::StoreLayout& layout = arrays_.layout;
    const int capacity = case_.capacity > 0 ? case_.capacity : layout.selected;
    Selection by_row = test::device_selection(arrays_, layout.rows(), capacity);
    const std::vector<__nv_bfloat16> narrow = test::converted<__nv_bfloat16>(data_.queries);
    const void* const queries =
        case_.bf16 ? static_cast<const void*>(arrays_.take(narrow)) : static_cast<const void*>(arrays_.take(data_.queries));
    const Layer layer = 1;
    cuda::score_summaries(layout, layer, view_, {queries, case_.bf16}, nullptr);
    cuda::choose_chunks(layout, layer, view_, by_row, nullptr);
    cuda::check(cudaDeviceSynchronize(), case_.name);
    const auto lists = static_cast<std::size_t>(layout.rows()) * static_cast<std::size_t>(layout.kv_heads);
    const std::vector<int> chunks = StoreArrays::get(by_row.chunks, lists * static_cast<std::size_t>(capacity));
    const std::vector<float> shares = StoreArrays::get(by_row.scores, lists * static_cast<std::size_t>(capacity));
    const std::vector<int> counts = StoreArrays::get(by_row.count, lists);
    for (int row = 0; row < view_.sequences * view_.rows_per_sequence; ++row) {
      for (int kv_head = 0; kv_head < layout.kv_heads; ++kv_head) {
        const std::size_t list = layout.row_list(row, kv_head);
        check_list(layer, row, kv_head, counts[list], chunks.data() + list * static_cast<std::size_t>(capacity),
                   shares.data() + list * static_cast<std::size_t>(capacity), capacity);
      }
    }
  }

 private:
  void check_list(Layer layer, int row, int kv_head, int count, const int* chunks, const float* shares, int capacity) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const int place = row / view_.rows_per_sequence;
    const int begin = layout.range_begin();
    const int end = row_is_live(case_.modes[static_cast<std::size_t>(place)], row % view_.rows_per_sequence)
                        ? layout.range_end(case_.positions[static_cast<std::size_t>(place)])
                        : begin;
    const int wanted = std::min({capacity, layout.selected, end - begin});
    DUALDECODER_EXPECT(count == wanted, "%s: row %d head %d chose %d, not %d", case_.name, row, kv_head, count, wanted);
    if (wanted <= 0 || count != wanted) return;
    const std::size_t work = layout.work_list(layer, row, kv_head) * static_cast<std::size_t>(layout.group);
    std::vector<Scores> scores;
    std::vector<double> log_sums;
    for (int g = 0; g < layout.group; ++g) {
      const std::vector<float> exact = fixed_point_scores(layer, row, kv_head, g, begin, end);
      scores.push_back(stored_scores(layer, row, kv_head, g, begin, end, exact));
      log_sums.push_back(check_pieces(layer, row, kv_head, g, begin, end, exact));
    }
    std::vector<double> rank(static_cast<std::size_t>(end), -INFINITY);
    double magnitude = 1.0;
    for (int c = begin; c < end; ++c) {
      for (int g = 0; g < layout.group; ++g) {
        const double score = scores[static_cast<std::size_t>(g)].value(c);
        rank[static_cast<std::size_t>(c)] = std::max(rank[static_cast<std::size_t>(c)], score - log_sums[static_cast<std::size_t>(g)]);
        magnitude = std::max({magnitude, std::fabs(score), std::fabs(log_sums[static_cast<std::size_t>(g)])});
      }
    }
    check_choice(row, kv_head, begin, end, {chunks, static_cast<std::size_t>(count)}, shares, rank, magnitude * 4e-6, scores);
  }

  /// Scores of one query head as the store defines them: the largest of 16 chunks, and 16 bits of how far each lies below it.
  struct Scores {
    std::vector<float> tile_max;
    std::vector<std::uint16_t> levels;

    float top(int c) const { return tile_max[static_cast<std::size_t>(c / cuda::kTileChunks)]; }
    std::uint16_t level(int c) const { return levels[static_cast<std::size_t>(c)]; }
    double value(int c) const { return static_cast<double>(top(c)) - level(c) / 4096.0; }
  };

  /// Of the device's fixed-point queries, by chunk; checked against double precision.
  std::vector<float> fixed_point_scores(Layer layer, int row, int kv_head, int g, int begin, int end) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const int dim = layout.dim;
    const int slot = slots_[static_cast<std::size_t>(row / view_.rows_per_sequence)];
    const float* const query = data_.queries.data() + (static_cast<std::size_t>(row) * static_cast<std::size_t>(layout.heads) +
                                                       static_cast<std::size_t>(kv_head * layout.group + g)) *
                                                          static_cast<std::size_t>(dim);
    const FixedQuery fixed(query, dim);
    std::vector<float> scores(static_cast<std::size_t>(end));
    int far = 0;
    for (int c = begin; c < end; ++c) {
      const std::size_t at = layout.list(slot, layer, kv_head) * arrays_.chunks() + static_cast<std::size_t>(c);
      const std::int8_t* const mean = data_.means.data() + at * static_cast<std::size_t>(dim);
      int sum = 0;
      for (int d = 0; d < dim; ++d) sum += fixed.levels[static_cast<std::size_t>(d)] * mean[d];
      const double scale = data_.scales[at];
      const float score = static_cast<float>(sum) * (data_.scales[at] * fixed.scale);
      scores[static_cast<std::size_t>(c)] = score;
      if (end - begin > 4096 && c % 7 != 0) continue;  // the rest follows from what is compared bit for bit
      double exact = 0.0;
      double size = 0.0;
      for (int d = 0; d < dim; ++d) {
        exact += static_cast<double>(query[d]) * mean[d];
        size += std::abs(mean[d]);
      }
      exact *= scale / std::sqrt(static_cast<double>(dim));
      // half a level in each element, and a query below 1e-30 counts as zero
      const double bound = (0.51 * size * fixed.scale + 1e-30 * size) * scale + 1e-6 * std::fabs(exact);
      if (std::fabs(score - exact) > bound) ++far;
    }
    DUALDECODER_EXPECT(far == 0, "%s: row %d head %d query %d: %d scores are far from double precision", case_.name, row, kv_head, g, far);
    return scores;
  }

  /// What the device keeps of these scores, bit for bit.
  Scores stored_scores(Layer layer, int row, int kv_head, int g, int begin, int end, const std::vector<float>& exact) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const std::size_t list = layout.score_list(layer, row / view_.rows_per_sequence, kv_head);
    const auto columns = static_cast<std::size_t>(layout.columns());
    const auto column = static_cast<std::size_t>(row % view_.rows_per_sequence * layout.group + g);
    const std::size_t tiles = arrays_.chunks() / cuda::kTileChunks;
    const std::vector<float> tops = StoreArrays::get(layout.tile_max_of(list), tiles * columns);
    const std::vector<std::uint16_t> levels = StoreArrays::get(layout.score_levels_of(list), arrays_.chunks() * columns);
    Scores stored;
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::size_t at = tile * columns + column;
      stored.tile_max.push_back(tops[at]);
      for (int c = 0; c < cuda::kTileChunks; ++c) {
        stored.levels.push_back(levels[at * cuda::kTileChunks + static_cast<std::size_t>(cuda::score_place(c))]);
      }
    }
    int wrong_tops = 0;
    int wrong_levels = 0;
    for (int tile = begin / cuda::kTileChunks; tile * cuda::kTileChunks < end; ++tile) {
      const int from = std::max(begin, tile * cuda::kTileChunks);
      const int to = std::min(end, (tile + 1) * cuda::kTileChunks);
      float top = -INFINITY;
      for (int c = from; c < to; ++c) top = std::max(top, exact[static_cast<std::size_t>(c)]);
      if (stored.top(from) != top) ++wrong_tops;
      for (int c = from; c < to; ++c) {
        const float below = std::min((top - exact[static_cast<std::size_t>(c)]) * 4096.0F, 65535.0F);
        if (static_cast<float>(stored.level(c)) != std::nearbyint(below)) ++wrong_levels;
      }
    }
    DUALDECODER_EXPECT(wrong_tops == 0, "%s: row %d head %d query %d: %d maxima are not those of the fixed-point scores", case_.name, row,
                       kv_head, g, wrong_tops);
    DUALDECODER_EXPECT(wrong_levels == 0, "%s: row %d head %d query %d: %d levels are not those of the fixed-point scores", case_.name, row,
                       kv_head, g, wrong_levels);
    return stored;
  }

  double check_pieces(Layer layer, int row, int kv_head, int g, int begin, int end, const std::vector<float>& scores) const {
    const cuda::StoreLayout& layout = arrays_.layout;
    const std::size_t first = layout.work_list(layer, row, kv_head) * static_cast<std::size_t>(layout.score_pieces() * layout.group);
    const std::vector<float> largest =
        StoreArrays::get(layout.score_max + first, static_cast<std::size_t>(layout.score_pieces() * layout.group));
    const std::vector<float> sums =
        StoreArrays::get(layout.score_sum + first, static_cast<std::size_t>(layout.score_pieces() * layout.group));
    double top = -INFINITY;
    for (int c = begin; c < end; ++c) top = std::max(top, static_cast<double>(scores[static_cast<std::size_t>(c)]));
    double total = 0.0;
    const cuda::ScoreCut cut = cuda::score_cut(layout, view_.sequences);
    DUALDECODER_EXPECT(cut.pieces <= layout.score_pieces() && cut.begin(cut.pieces) * cuda::kTileChunks >= layout.max_chunks,
                       "%s: %d pieces end at %d", case_.name, cut.pieces, cut.begin(cut.pieces));
    for (int piece = 0; piece < cut.pieces; ++piece) {
      const int from = std::max(begin, cut.begin(piece) * cuda::kTileChunks);
      const int to = std::min(end, cut.begin(piece + 1) * cuda::kTileChunks);
      float expected = -INFINITY;
      for (int c = from; c < to; ++c) expected = std::max(expected, scores[static_cast<std::size_t>(c)]);
      double sum = 0.0;
      for (int c = from; c < to; ++c) {
        const double score = scores[static_cast<std::size_t>(c)];
        sum += std::exp(score - expected);
        total += std::exp(score - top);
      }
      const auto at = static_cast<std::size_t>(piece * layout.group + g);
      DUALDECODER_EXPECT(largest[at] == expected, "%s: row %d head %d query %d piece %d: largest %g, not %g", case_.name, row, kv_head, g,
                         piece, largest[at], expected);
      DUALDECODER_EXPECT(std::fabs(sums[at] - sum) <= 1e-4 * sum, "%s: row %d head %d query %d piece %d: sum %g, not %g", case_.name, row,
                         kv_head, g, piece, sums[at], sum);
    }
    return top + std::log(total);
  }

  void check_choice(int row, int kv_head, int begin, int end, std::span<const int> chosen, const float* shares,
                    const std::vector<double>& rank, double slack, const std::vector<Scores>& scores) const {
    std::vector<char> is_chosen(static_cast<std::size_t>(end), 0);
    double worst = INFINITY;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const int c = chosen[i];
      const bool ascending = c >= begin && c < end && (i == 0 || c > chosen[i - 1]);
      DUALDECODER_EXPECT(ascending, "%s: row %d head %d: chunk %d at %zu is out of order or range", case_.name, row, kv_head, c, i);
      if (!ascending) return;
      is_chosen[static_cast<std::size_t>(c)] = 1;
      worst = std::min(worst, rank[static_cast<std::size_t>(c)]);
      const double share = std::exp(rank[static_cast<std::size_t>(c)]);
      DUALDECODER_EXPECT(std::fabs(shares[i] - share) <= (slack + 1e-5) * share + 1e-37,
                         "%s: row %d head %d: chunk %d has share %g, not %g", case_.name, row, kv_head, c, shares[i], share);
    }
    for (int c = begin; c < end; ++c) {
      if (is_chosen[static_cast<std::size_t>(c)] != 0) continue;
      DUALDECODER_EXPECT(rank[static_cast<std::size_t>(c)] <= worst + slack, "%s: row %d head %d: chunk %d of rank %g is not chosen, %g is",
                         case_.name, row, kv_head, c, rank[static_cast<std::size_t>(c)], worst);
    }
    // among chunks of equal scores the lower ones come first
    std::map<std::vector<float>, bool> left_out;
    for (int c = begin; c < end; ++c) {
      std::vector<float> of;
      for (const auto& query : scores) {
        of.push_back(query.top(c));
        of.push_back(static_cast<float>(query.level(c)));
      }
      bool& out = left_out[of];
      const bool taken = is_chosen[static_cast<std::size_t>(c)] != 0;
      DUALDECODER_EXPECT(!(taken && out), "%s: row %d head %d: chunk %d is chosen before a lower equal", case_.name, row, kv_head, c);
      out = out || !taken;
    }
  }

  Case case_;
  StoreArrays arrays_;
  Data data_;
  std::vector<int> slots_;
  StepView view_;
};

std::vector<Case> cases() {
  using enum RowMode;
  std::vector<Case> all;
  for (const int dim : {64, 80, 96, 128, 256}) {
    for (const int group : {1, 3, 4, 7, 8, 16}) {
      test::StoreShape shape{.kv_heads = 2, .group = group, .dim = dim, .max_sequences = 4, .rows_per_sequence = 2, .max_tokens = 12000};
      all.push_back({.name = "shapes",
                     .shape = shape,
                     .positions = {11999, 4131, 97, 40},
                     .modes = {dual, resync, single, dual},
                     .bf16 = group % 2 == 0});
    }
  }
  test::StoreShape ragged{.kv_heads = 1,
                          .group = 2,
                          .dim = 64,
                          .max_sequences = 16,
                          .rows_per_sequence = 1,
                          .chunk = 4,
                          .sink_chunks = 3,
                          .local_tokens = 5,
                          .max_tokens = 40000,
                          .selected = 32};
  std::vector<int> lengths = {1, 2, 12, 16, 17, 20, 21, 25, 29, 37, 133, 145, 1000, 4096 + 17, 4101 + 12, 39999};
  all.push_back({.name = "ragged", .shape = ragged, .positions = lengths, .modes = std::vector<RowMode>(16, single)});
  all.push_back(
      {.name = "small capacity", .shape = ragged, .positions = lengths, .modes = std::vector<RowMode>(16, single), .capacity = 3});
  all.push_back({.name = "resync without a second row", .shape = ragged, .positions = lengths, .modes = std::vector<RowMode>(16, resync)});
  if (test::small_run()) return all;
  test::StoreShape wide{.kv_heads = 2,
                        .group = 4,
                        .dim = 128,
                        .max_sequences = 3,
                        .rows_per_sequence = 2,
                        .chunk = 8,
                        .sink_chunks = 2,
                        .local_tokens = 128,
                        .max_tokens = 131072,
                        .selected = 128};
  for (const Keys keys : {Keys::random, Keys::equal, Keys::zero, Keys::extreme, Keys::few}) {
    all.push_back({.name = "128K", .shape = wide, .positions = {131071, 70001, 300}, .modes = {dual, single, idle}, .keys = keys});
  }
  for (const int selected : {1, 2, 1000, 1024, 1025, 3000, 16384}) {
    test::StoreShape shape = wide;
    shape.selected = selected;
    shape.kv_heads = 1;
    shape.group = 2;
    shape.dim = 64;
    for (const Keys keys : {Keys::random, Keys::few}) {
      all.push_back({.name = "budgets", .shape = shape, .positions = {131071, 33000, 2000}, .modes = {dual, resync, single}, .keys = keys});
    }
  }
  // enough for pieces of several sizes
  test::StoreShape large{.kv_heads = 8,
                         .group = 2,
                         .dim = 64,
                         .max_sequences = 7,
                         .rows_per_sequence = 2,
                         .sink_chunks = 2,
                         .local_tokens = 128,
                         .max_tokens = 65536,
                         .selected = 128};
  const std::vector<int> long_and_short = {65535, 30001, 47000, 300, 65535, 12, 65000};
  all.push_back({.name = "large", .shape = large, .positions = long_and_short, .modes = {dual, single, resync, dual, idle, dual, dual}});
  large.group = 4;
  large.dim = 128;
  all.push_back({.name = "large", .shape = large, .positions = long_and_short, .modes = {dual, idle, idle, idle, idle, idle, single}});
  large.kv_heads = 2;
  large.group = 6;
  large.max_sequences = 28;
  std::vector<RowMode> few(28, idle);
  few[3] = few[17] = dual;
  all.push_back({.name = "large", .shape = large, .positions = std::vector<int>(28, 61440), .modes = few, .bf16 = true});
  // ranks that do not fit shared memory
  test::StoreShape deep{.layers = 2,
                        .kv_heads = 1,
                        .group = 4,
                        .dim = 64,
                        .max_sequences = 1,
                        .rows_per_sequence = 2,
                        .chunk = 4,
                        .max_tokens = 1 << 20,
                        .selected = 512};
  for (const Keys keys : {Keys::random, Keys::few, Keys::equal}) {
    all.push_back({.name = "1M", .shape = deep, .positions = {(1 << 20) - 1}, .modes = {dual}, .keys = keys});
    test::StoreShape many = deep;
    many.selected = 5000;
    all.push_back({.name = "1M, a large budget", .shape = many, .positions = {(1 << 20) - 1}, .modes = {single}, .keys = keys});
  }
  return all;
}

/// Microseconds of one of many `enqueue`, as a step's graph runs them: without what the host takes for launches.
template <class F>
double microseconds(cudaStream_t stream, F&& enqueue) {
  constexpr int kCaptured = 40;
  constexpr int kReplays = 10;
  const test::Replay replay(stream, [&] {
    for (int round = 0; round < kCaptured; ++round) enqueue();
  });
  return 1e3 * test::milliseconds(stream, kReplays, [&] { replay.launch(stream); }) / kCaptured;
}

struct BenchShape {
  const char* name;
  int kv_heads;
  int group;
  int sequences;
  int tokens;
};

/// Times of one layer: chunks of 8, two rows, heads of 128.
void bench(const BenchShape& of) {
  constexpr double kBytesPerSecond = 4.47e12;  // what an H200 reads
  const test::StoreShape shape{.layers = 2,
                               .kv_heads = of.kv_heads,
                               .group = of.group,
                               .dim = 128,
                               .max_sequences = of.sequences,
                               .rows_per_sequence = 2,
                               .chunk = 8,
                               .sink_chunks = 2,
                               .local_tokens = 128,
                               .max_tokens = of.tokens,
                               .selected = 128};
  StoreArrays arrays(shape);
  arrays.take_selection();
  std::mt19937 random(1);
  const auto sequences = static_cast<std::size_t>(of.sequences);
  const Case test{.name = "bench",
                  .shape = shape,
                  .positions = std::vector<int>(sequences, of.tokens - 1),
                  .modes = std::vector<RowMode>(sequences, RowMode::dual),
                  .bf16 = true};
  const Data data = make_data(test, arrays.layout, arrays.lists(), random);
  StoreArrays::put(arrays.layout.key_means, data.means);
  StoreArrays::put(arrays.layout.key_scales, data.scales);
  std::vector<int> slots(sequences);
  std::iota(slots.begin(), slots.end(), 0);
  StepView view;
  view.sequences = of.sequences;
  view.rows_per_sequence = 2;
  view.slot_of = arrays.take(slots);
  view.position = arrays.take(test.positions);
  view.mode = arrays.take(test.modes);
  const cuda::RowsIn queries{arrays.take(test::converted<__nv_bfloat16>(data.queries)), true};
  const Selection by_row = test::device_selection(arrays, arrays.layout.rows(), shape.selected);
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  int layer = 0;  // two of them, since one may stay in L2
  const auto score = [&] { cuda::score_summaries(arrays.layout, layer++ & 1, view, queries, stream); };
  const auto choose = [&] { cuda::choose_chunks(arrays.layout, layer++ & 1, view, by_row, stream); };
  const auto both = [&] {
    cuda::score_summaries(arrays.layout, layer & 1, view, queries, stream);
    cuda::choose_chunks(arrays.layout, layer++ & 1, view, by_row, stream);
  };
  const double score_time = microseconds(stream, score);
  const double choose_time = microseconds(stream, choose);
  const double both_time = microseconds(stream, both);
  const double floor = 1e6 * static_cast<double>(arrays.lists()) / 2 * shape.max_tokens / 8 * (128 + 4) / kBytesPerSecond;
  std::printf("select, %s, %d x %d: floor %.1f us; score %.1f us, choose %.1f us, both %.1f us (%.2f floors)\n", of.name, of.sequences,
              of.tokens, floor, score_time, choose_time, both_time, both_time / floor);
  cudaStreamDestroy(stream);
}

void bench() {
  bench({"8B shape", 8, 4, 7, 131072});
  bench({"8B shape", 8, 4, 1, 131072});
  bench({"1.5B shape", 2, 6, 16, 122880});
  bench({"1.5B shape", 2, 6, 28, 122880});
}

}  // namespace
}  // namespace dualdecoder

int main(int argc, char** argv) {
  return dualdecoder::test::run_on_device([&] {
    if (argc > 1 && std::string_view(argv[1]) == "--bench") return dualdecoder::bench();
    std::mt19937 random(20261130);
    for (const auto& test : dualdecoder::cases()) dualdecoder::Checker(test, random).run();
  });
}
