// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/testing/store_driver.hpp"
#include "src/summary.hpp"

namespace dualdecoder::test {

using testing::Story;

/// How far ranks that compare the other way may lie apart: the device scores queries of 15 bits (2e-4), and keeps each of the two scores
/// to half a step of 1 / 4,096.
inline constexpr double kRankBound = 2e-4 + 1.0 / 4096;

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

/// One KV head of one layer of a story of `tokens` tokens: chunk-heads as the stores keep them, summaries by the CPU store's function, and
/// the formulas in double precision.
class Reference {
 public:
  Reference(const StoreOptions& options, const Story& story, Layer layer, int kv_head, int tokens)
      : options_(options), story_(story), layer_(layer), kv_head_(kv_head), chunk_(options.selection.chunk_tokens) {
    const std::size_t dim = at(options.head_dim);
    const std::size_t part = at(chunk_) * dim;
    chunks_.resize(at((tokens + chunk_ - 1) / chunk_), std::vector<std::uint16_t>(2 * part));
    for (int t = 0; t < tokens; ++t) {
      std::vector<float> row[2];
      story.append(row[0], Story::Part::key, layer, t, options.kv_heads * options.head_dim);
      story.append(row[1], Story::Part::value, layer, t, options.kv_heads * options.head_dim);
      for (std::size_t half = 0; half < 2; ++half) {
        cpu::write_elements(row[half].data() + at(kv_head) * dim, dim, chunks_[at(t / chunk_)].data(), half * part + at(t % chunk_) * dim,
                            true);
      }
    }
    for (const auto& chunk : chunks_) {
      KeyMean mean{std::vector<std::int8_t>(dim), 0.0F};
      std::vector<float> work(dim);
      cpu::summarise_keys(chunk.data(), {at(chunk_), dim, true}, work.data(), {mean.levels.data(), &mean.scale});
      key_means_.push_back(std::move(mean));
    }
  }

  struct KeyMean {
    std::vector<std::int8_t> levels;
    float scale;
  };
  const KeyMean& key_mean(int chunk) const { return key_means_[at(chunk)]; }
  struct ValueMean {
    std::vector<std::uint8_t> levels;  // as the CPU store packs them
    float scale;
    int level(int d) const {
      const int half = static_cast<int>(levels.size());
      return d < half ? levels[at(d)] & 15 : levels[at(d - half)] >> 4;
    }
  };
  /// Of chunks first .. first+count-1 together.
  ValueMean value_mean(int first, int count) const {
    const std::size_t dim = at(options_.head_dim);
    ValueMean mean{std::vector<std::uint8_t>(dim / 2), 0.0F};
    std::vector<float> work(dim);
    std::vector<const void*> chunks;
    for (int j = first; j < first + count; ++j) chunks.push_back(chunks_[at(j)].data());
    cpu::summarise_values(chunks, {at(chunk_), dim, true}, work.data(), {mean.levels.data(), &mean.scale});
    return mean;
  }
  const std::vector<std::uint16_t>& chunk_head(int chunk) const { return chunks_[at(chunk)]; }

  int begin() const { return (options_.selection.sink_tokens + chunk_ - 1) / chunk_; }
  int end(int length) const { return std::max(begin(), (length - options_.selection.local_tokens) / chunk_); }

  /// Largest log share over the group, for each choosable chunk.
  std::vector<double> ranks(const std::vector<float>& queries, int length) const {
    std::vector<double> rank(at(end(length) - begin()), -HUGE_VAL);
    for (int g = 0; g < group(); ++g) {
      const std::vector<double> scores = estimates(queries, g, length);
      double sum = 0;
      for (const double score : scores) sum += std::exp(score);
      for (std::size_t c = 0; c < scores.size(); ++c) rank[c] = std::max(rank[c], scores[c] - std::log(sum));
    }
    return rank;
  }
  std::vector<int> choose(const std::vector<float>& queries, int length) const {
    const std::vector<double> rank = ranks(queries, length);
    std::vector<int> order(rank.size());
    for (std::size_t c = 0; c < order.size(); ++c) order[c] = static_cast<int>(c);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rank[at(a)] > rank[at(b)]; });
    order.resize(std::min(order.size(), at(options_.selection.budget_tokens / chunk_)));
    for (int& c : order) c += begin();
    std::sort(order.begin(), order.end());
    return order;
  }
  /// Whether these are the chunks with the best ranks, but for what differs by less than the bound.
  bool is_choice(const std::vector<int>& chosen, const std::vector<float>& queries, int length) const {
    const std::vector<double> rank = ranks(queries, length);
    if (chosen.size() != std::min(rank.size(), at(options_.selection.budget_tokens / chunk_))) return false;
    double worst_in = HUGE_VAL;
    double best_out = -HUGE_VAL;
    for (std::size_t c = 0; c < rank.size(); ++c) {
      const bool in = std::binary_search(chosen.begin(), chosen.end(), begin() + static_cast<int>(c));
      if (in) worst_in = std::min(worst_in, rank[c]);
      if (!in) best_out = std::max(best_out, rank[c]);
    }
    return worst_in >= best_out - kRankBound;
  }

  /// Where a choice may fall either way, as ranks differ by less than the bound: all sets that is_choice() takes.
  std::vector<std::vector<int>> choices(const std::vector<float>& queries, int length) const {
    const std::vector<int> chosen = choose(queries, length);
    const std::vector<double> rank = ranks(queries, length);
    if (chosen.size() == rank.size()) return {chosen};
    double worst_in = HUGE_VAL;
    for (const int c : chosen) worst_in = std::min(worst_in, rank[at(c - begin())]);
    double best_out = -HUGE_VAL;
    for (std::size_t c = 0; c < rank.size(); ++c) {
      if (!std::binary_search(chosen.begin(), chosen.end(), begin() + static_cast<int>(c))) best_out = std::max(best_out, rank[c]);
    }
    std::vector<int> sure;
    std::vector<int> open;
    for (std::size_t c = 0; c < rank.size(); ++c) {
      const int chunk = begin() + static_cast<int>(c);
      if (rank[c] > best_out + kRankBound) {
        sure.push_back(chunk);
      } else if (rank[c] >= worst_in - kRankBound) {
        open.push_back(chunk);
      }
    }
    std::vector<std::vector<int>> sets;
    std::vector<bool> taken(open.size());
    std::fill_n(taken.begin(), chosen.size() - sure.size(), true);
    do {
      std::vector<int> set = sure;
      for (std::size_t i = 0; i < open.size(); ++i) {
        if (taken[i]) set.push_back(open[i]);
      }
      std::sort(set.begin(), set.end());
      if (is_choice(set, queries, length)) sets.push_back(std::move(set));
    } while (std::prev_permutation(taken.begin(), taken.end()));
    return sets;
  }

  /// What the formula allows a head's bias to be.
  struct Bias {
    double least = 0.0;
    double most = 0.0;
  };
  struct Biases {
    std::vector<Bias> heads;  // [group]
    int queries = 0;          // that were compared
    int ties = 0;             // queries with more than one choice
  };
  /// docs/concepts.md, "Tail estimate" over the newest prompt queries that see every choosable chunk. A chunk that changes sides moves the
  /// ratio of its query by some hundredths, so that a query with a near tie gives a range.
  Biases biases(int length) const {
    Biases result;
    result.heads.resize(at(group()));
    for (int position = std::max(0, length - KvStore::kCalibrationQueries); position < length; ++position) {
      if (position < end(length) * chunk_ - 1) continue;
      const std::vector<float> query = queries(story_, position);
      const std::vector<std::vector<int>> sets = choices(query, length);
      if (static_cast<int>(sets.front().size()) == end(length) - begin()) return result;
      for (int g = 0; g < group(); ++g) {
        double least = HUGE_VAL;
        double most = -HUGE_VAL;
        for (const std::vector<int>& set : sets) {
          const double ratio = log_ratio(query, g, set, length);
          least = std::min(least, ratio);
          most = std::max(most, ratio);
        }
        result.heads[at(g)].least += least;
        result.heads[at(g)].most += most;
      }
      ++result.queries;
      result.ties += sets.size() > 1 ? 1 : 0;
    }
    for (Bias& bias : result.heads) {
      bias.least /= std::max(result.queries, 1);
      bias.most /= std::max(result.queries, 1);
    }
    return result;
  }

  /// [group, dim] of this KV head.
  std::vector<float> queries(const Story& story, int position) const {
    std::vector<float> all;
    story.append(all, Story::Part::query, layer_, position, options_.heads * options_.head_dim);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(kv_head_ * group() * options_.head_dim);
    return {first, first + static_cast<std::ptrdiff_t>(group() * options_.head_dim)};
  }

 private:
  int group() const { return options_.heads / options_.kv_heads; }
  std::vector<double> estimates(const std::vector<float>& queries, int g, int length) const {
    std::vector<double> scores;
    for (int c = begin(); c < end(length); ++c) {
      double dot = 0;
      for (int d = 0; d < options_.head_dim; ++d) {
        dot += static_cast<double>(queries[at(g * options_.head_dim + d)]) * key_means_[at(c)].levels[at(d)];
      }
      scores.push_back(dot * static_cast<double>(key_means_[at(c)].scale) / std::sqrt(options_.head_dim));
    }
    return scores;
  }
  /// log(true mass / estimated mass) of what is not chosen, as it counts.
  double log_ratio(const std::vector<float>& query, int g, const std::vector<int>& chosen, int length) const {
    const std::vector<double> scores = estimates(query, g, length);
    double exact = 0;
    double estimated = 0;
    for (int c = begin(); c < end(length); ++c) {
      if (std::binary_search(chosen.begin(), chosen.end(), c)) continue;
      estimated += chunk_ * std::exp(scores[at(c - begin())]);
      for (int t = 0; t < chunk_; ++t) exact += std::exp(key_score(query, g, c, t));
    }
    return std::clamp(std::log(exact / estimated), -3.0, 6.0);
  }
  double key_score(const std::vector<float>& queries, int g, int c, int t) const {
    double dot = 0;
    for (int d = 0; d < options_.head_dim; ++d) {
      dot += static_cast<double>(queries[at(g * options_.head_dim + d)]) *
             static_cast<double>(cpu::element(chunks_[at(c)].data(), at(t * options_.head_dim + d), true));
    }
    return dot / std::sqrt(options_.head_dim);
  }

  StoreOptions options_;
  Story story_;
  Layer layer_;
  int kv_head_;
  int chunk_;
  std::vector<std::vector<std::uint16_t>> chunks_;
  std::vector<KeyMean> key_means_;
};

}  // namespace dualdecoder::test
