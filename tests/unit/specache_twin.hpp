// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "dualdecoder/store_options.hpp"
#include "dualdecoder/testing/store_driver.hpp"

namespace dualdecoder::test {

/// Nearest IEEE binary16 of a number in its normal range.
inline double half(double x) {
  if (x == 0) return 0;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(x, 11 - exponent)), exponent - 11);
}

inline double bf16(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7FFFU + (bits >> 16U & 1U)) & 0xFFFF0000U;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

using Vectors = std::vector<std::vector<double>>;  // [tokens][dim]

/// What the publication (SpeCache, arXiv 2503.16163; KIVI, arXiv 2402.02750, for the groups) says of one sequence, from scratch, token by
/// token and without any structure of a store.
class SpeCacheTwin {
 public:
  SpeCacheTwin(const StoreOptions& options, testing::Story story, int length)
      : options_(options), story_(std::move(story)), length_(length) {}

  int length() const { return length_; }
  int copied() const {
    const int old = length_ - options_.specache.exact_tokens;
    return old < 0 ? 0 : old / options_.specache.group * options_.specache.group;
  }
  const std::set<int>& fetched(Layer layer, int head) { return fetched_[{layer, head}]; }
  void fetch(Layer layer, int head, const std::vector<int>& tokens) { fetched_[{layer, head}] = {tokens.begin(), tokens.end()}; }
  void commit() { ++length_; }
  void truncate(int tokens, const testing::Story& next) {
    length_ = tokens;
    story_ = next;
    known_.clear();
    for (auto& [list, tokens_of] : fetched_) tokens_of.erase(tokens_of.lower_bound(copied()), tokens_of.end());
  }

  /// Mean over the query group of a row's shares of the copied tokens.
  std::vector<double> shares(Layer layer, int head, const testing::Story& row, int position, bool laid) {
    const Vectors keys = context(layer, head, testing::Story::Part::key, laid);
    std::vector<double> mean(static_cast<std::size_t>(copied()), 0.0);
    for (int g = 0; g < group(); ++g) {
      const std::vector<double> weights = softmax(keys, query(layer, head, g, row, position));
      for (std::size_t t = 0; t < mean.size(); ++t) mean[t] += weights[t] / group();
    }
    return mean;
  }
  /// Attention of a row that sees the context and `rows`, itself the last of them. [group * dim]
  std::vector<double> attend(Layer layer, int head, const std::vector<std::pair<testing::Story, int>>& rows) {
    Vectors keys = context(layer, head, testing::Story::Part::key, true);
    Vectors values = context(layer, head, testing::Story::Part::value, true);
    for (const auto& [story, position] : rows) {
      keys.push_back(exact(layer, head, testing::Story::Part::key, story, position));
      values.push_back(exact(layer, head, testing::Story::Part::value, story, position));
    }
    std::vector<double> out;
    for (int g = 0; g < group(); ++g) {
      const std::vector<double> weights = softmax(keys, query(layer, head, g, rows.back().first, rows.back().second));
      std::vector<double> sum(dim(), 0.0);
      for (std::size_t t = 0; t < values.size(); ++t) {
        for (std::size_t d = 0; d < dim(); ++d) sum[d] += weights[t] * values[t][d];
      }
      out.insert(out.end(), sum.begin(), sum.end());
    }
    return out;
  }

 private:
  /// Rows of the story so far, of which the first `copied` are coarse.
  struct Known {
    Vectors exact;
    Vectors coarse;
    std::size_t copied = 0;
  };

  std::size_t dim() const { return static_cast<std::size_t>(options_.head_dim); }
  int group() const { return options_.heads / options_.kv_heads; }

  std::vector<double> exact(Layer layer, int head, testing::Story::Part part, const testing::Story& story, int position) const {
    std::vector<float> all;
    story.append(all, part, layer, position, options_.kv_heads * options_.head_dim);
    std::vector<double> own;
    for (std::size_t d = 0; d < dim(); ++d) {
      const float x = all[static_cast<std::size_t>(head) * dim() + d];
      own.push_back(options_.kv_type == DataType::bf16 ? bf16(x) : x);
    }
    return own;
  }
  std::vector<double> query(Layer layer, int head, int g, const testing::Story& story, int position) const {
    std::vector<float> all;
    story.append(all, testing::Story::Part::query, layer, position, options_.heads * options_.head_dim);
    const auto first = all.begin() + (head * group() + g) * options_.head_dim;
    return {first, first + options_.head_dim};
  }
  std::vector<double> softmax(const Vectors& keys, const std::vector<double>& query) const {
    std::vector<double> weights;
    double sum = 0;
    for (const std::vector<double>& key : keys) {
      double dot = 0;
      for (std::size_t d = 0; d < dim(); ++d) dot += query[d] * key[d];
      weights.push_back(std::exp(dot / std::sqrt(double(options_.head_dim))));
      sum += weights.back();
    }
    for (double& w : weights) w /= sum;
    return weights;
  }
  /// Replaces elements by the nearest level of their range.
  void coarsen(const std::vector<double*>& elements) const {
    double least = HUGE_VAL;
    double most = -HUGE_VAL;
    for (const double* x : elements) {
      least = std::min(least, *x);
      most = std::max(most, *x);
    }
    const bool one = options_.specache.bits == 1;
    const double zero = half(one ? (3 * least + most) / 4 : least);
    const double scale = half(one ? (most - least) / 2 : (most - least) / 3);
    for (double* x : elements) *x = zero + scale * std::clamp(std::nearbyint((*x - zero) / scale), 0.0, one ? 1.0 : 3.0);
  }
  /// Keys or values of the context as the copy has them, the last ones exact.
  const Vectors& coarse(Layer layer, int head, testing::Story::Part part) {
    Known& known = known_[{layer, head, part}];
    while (static_cast<int>(known.exact.size()) < length_) {
      known.exact.push_back(exact(layer, head, part, story_, static_cast<int>(known.exact.size())));
      known.coarse.push_back(known.exact.back());
    }
    const auto size = static_cast<std::size_t>(options_.specache.group);
    const auto end = static_cast<std::size_t>(copied());
    for (; known.copied < end; known.copied += size) {
      const std::size_t first = known.copied;
      for (std::size_t d = 0; part == testing::Story::Part::key && d < dim(); ++d) {
        std::vector<double*> channel;
        for (std::size_t t = first; t < first + size; ++t) channel.push_back(&known.coarse[t][d]);
        coarsen(channel);
      }
      for (std::size_t t = first; part == testing::Story::Part::value && t < first + size; ++t) {
        for (std::size_t begin = 0; begin < dim(); begin += size) {
          std::vector<double*> channels;
          for (std::size_t d = begin; d < std::min(dim(), begin + size); ++d) channels.push_back(&known.coarse[t][d]);
          coarsen(channels);
        }
      }
    }
    return known.coarse;
  }
  /// Keys or values of the context as the device has them.
  Vectors context(Layer layer, int head, testing::Story::Part part, bool laid) {
    Vectors rows = coarse(layer, head, part);
    const Vectors& all = known_[{layer, head, part}].exact;
    for (int token : laid ? fetched(layer, head) : std::set<int>())
      rows[static_cast<std::size_t>(token)] = all[static_cast<std::size_t>(token)];
    return rows;
  }

  StoreOptions options_;
  testing::Story story_;
  int length_;
  std::map<std::pair<Layer, int>, std::set<int>> fetched_;
  std::map<std::tuple<Layer, int, testing::Story::Part>, Known> known_;
};

}  // namespace dualdecoder::test
