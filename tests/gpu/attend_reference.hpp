// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "replay.hpp"

/// What the tests of both attention kernels share: softmax attention in double precision by its definition, and how far bf16 weights may be
/// from it.
namespace dualdecoder::test {

inline float widen(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
inline std::uint16_t narrow(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}
inline constexpr std::uint16_t kNanBits = 0x7FC0;  // what nobody may read

/// One head's attention: terms are added with their scores, then read out.
class Attention {
 public:
  explicit Attention(int dim) : dim_(static_cast<std::size_t>(dim)) {}

  /// A token: score q.k * scale. key(d) and value(d) are floats.
  template <class Key, class Value>
  void add_token(const std::vector<float>& query, double scale, Key key, Value value) {
    double score = 0.0;
    double magnitude = 0.0;
    for (std::size_t d = 0; d < dim_; ++d) {
      const double product = static_cast<double>(query[d]) * static_cast<double>(key(d));
      score += product;
      magnitude += std::fabs(product);
    }
    // queries arrive as two bf16 (2^-18 lost at most) and products are added in f32, truncated by the instruction
    score_error_ = std::max(score_error_, magnitude * scale * (0x1p-18 + 0x1p-19) + std::fabs(score) * scale * 0x1p-22);
    add(score * scale, value);
  }
  /// A summary, whose score says how many tokens it stands for.
  template <class Value>
  void add_summary(double score, Value value) {
    score_error_ = std::max(score_error_, std::fabs(score) * 0x1p-21);
    add(score, value);
  }

  struct Result {
    std::vector<double> value;
    std::vector<double> tolerance;
  };
  /// Weights are rounded to bf16 (2^-9) in both sums, those of the tail to f16 (2^-12) in one of them, and the levels of the tail have an
  /// offset of 8 taken off again in f32.
  Result result(double largest_value, bool bf16_out) const {
    double largest = -INFINITY;
    for (const double score : scores_) largest = std::max(largest, score);
    double sum = 0.0;
    Result result{std::vector<double>(dim_, 0.0), std::vector<double>(dim_, 0.0)};
    std::vector<double> magnitude(dim_, 0.0);
    for (std::size_t i = 0; i < scores_.size(); ++i) {
      const double weight = std::exp(scores_[i] - largest);
      sum += weight;
      for (std::size_t d = 0; d < dim_; ++d) {
        const double value = static_cast<double>(values_[i * dim_ + d]);
        result.value[d] += weight * value;
        magnitude[d] += weight * std::fabs(value);
      }
    }
    for (std::size_t d = 0; d < dim_; ++d) {
      result.value[d] /= sum;
      const double of_terms = magnitude[d] / sum + std::fabs(result.value[d]);
      result.tolerance[d] = of_terms * (0x1p-9 + 0x1p-12 + 2.0 * score_error_) + largest_value * 0x1p-17;
      if (bf16_out) result.tolerance[d] += std::fabs(result.value[d]) * 0x1p-8;
    }
    return result;
  }

 private:
  template <class Value>
  void add(double score, Value value) {
    scores_.push_back(score);
    for (std::size_t d = 0; d < dim_; ++d) values_.push_back(value(d));
  }

  std::size_t dim_;
  std::vector<double> scores_;
  std::vector<float> values_;
  double score_error_ = 0.0;
};

/// Rows in f32 or bf16, as the kernels take them; `values` are exactly what they hold.
struct Rows {
  std::vector<float> values;
  bool bf16 = false;

  std::vector<std::byte> bytes() const {
    std::vector<std::byte> out(values.size() * (bf16 ? 2 : 4));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (bf16) {
        reinterpret_cast<std::uint16_t*>(out.data())[i] = narrow(values[i]);
      } else {
        reinterpret_cast<float*>(out.data())[i] = values[i];
      }
    }
    return out;
  }
};

/// Normally distributed rows, each from a generator of its own, so that a row does not depend on those beside it; those of dead rows, whose
/// seed is 0, are NaN.
template <class Seed>
Rows random_rows(int rows, int width, float deviation, bool bf16, Seed seed) {
  Rows out{std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(width)), bf16};
  for (int row = 0; row < rows; ++row) {
    const unsigned own = seed(row);
    std::mt19937 random(own);
    std::normal_distribution<float> normal(0.0F, deviation);
    for (int i = 0; i < width; ++i) {
      const float value = own != 0 ? normal(random) : NAN;
      out.values[static_cast<std::size_t>(row) * static_cast<std::size_t>(width) + static_cast<std::size_t>(i)] =
          bf16 ? widen(own != 0 ? narrow(value) : kNanBits) : value;
    }
  }
  return out;
}

inline std::vector<float> as_floats(const std::vector<std::byte>& bytes, bool bf16) {
  std::vector<float> out(bytes.size() / (bf16 ? 2 : 4));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = bf16 ? widen(reinterpret_cast<const std::uint16_t*>(bytes.data())[i]) : reinterpret_cast<const float*>(bytes.data())[i];
  }
  return out;
}

/// Launches what `enqueue` puts on a stream twice, directly and from a graph, whose results must have the same bits.
template <class Enqueue>
std::vector<std::byte> run_and_replay(const DeviceArray<std::byte>& out, const char* name, Enqueue enqueue) {
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  cuda::check(cudaMemset(out.data(), 0xFF, out.size()), "cudaMemset");
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  enqueue(stream);
  cuda::check(cudaStreamSynchronize(stream), name);
  std::vector<std::byte> result = out.download();
  const Replay replay(stream, [&] { enqueue(stream); });
  cuda::check(cudaMemset(out.data(), 0xFF, out.size()), "cudaMemset");
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  replay.launch(stream);
  cuda::check(cudaStreamSynchronize(stream), name);
  DUALDECODER_EXPECT(out.download() == result, "%s: a replayed graph computes other bits", name);
  cudaStreamDestroy(stream);
  return result;
}

}  // namespace dualdecoder::test
