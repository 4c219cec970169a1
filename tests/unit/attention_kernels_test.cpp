// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "src/simd/attention_simd.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernel_fixture.hpp"

// Expected values are the kernels' definitions in attention_simd.hpp, summed in double precision.

namespace dualdecoder::cpu {
namespace {

using test::Bf16;
using test::instruction_sets;
using test::normal;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

double dot(const float* a, const float* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += double(a[i]) * double(b[i]);
  return sum;
}

/// Chunk-heads one behind the other, of which the last is not full.
struct Chunks {
  static constexpr int kChunk = 8;
  static constexpr int kSegments = 5;
  static constexpr int kTokens = (kSegments - 1) * kChunk + 3;

  Chunks(int dim_, bool bf16_) : dim(dim_), bf16(bf16_), elements(normal(at(kSegments * 2 * kChunk * dim), 3)) {
    const std::size_t element = bf16 ? sizeof(std::uint16_t) : sizeof(float);
    const auto* memory = bf16 ? reinterpret_cast<const std::byte*>(elements.bits.data())  //
                              : reinterpret_cast<const std::byte*>(elements.values.data());
    for (int s = 0; s < kSegments; ++s) {
      segments.push_back({memory + at(s * 2 * kChunk * dim) * element, std::min(kChunk, kTokens - s * kChunk)});
    }
  }
  SegmentLayout layout() const { return {at(kChunk), at(dim), bf16}; }
  const float* key(int t) const { return elements.values.data() + at((t / kChunk * 2 * kChunk + t % kChunk) * dim); }
  const float* value(int t) const { return key(t) + at(kChunk * dim); }

  int dim;
  bool bf16;
  Bf16 elements;
  std::vector<Segment> segments;
};

}  // namespace

TEST_CASE("scores of keys and sums of values equal double precision, for any group, shape and instruction set", "[attention_kernels]") {
  for (const Isa isa : instruction_sets()) {
    const AttentionKernels& kernels = attention_kernels(isa);
    for (const int dim : {8, 24, 64, 72, 128}) {
      for (const bool bf16 : {false, true}) {
        const Chunks chunks(dim, bf16);
        for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
          INFO(name_of(isa) << ", dim " << dim << ", group " << group << ", bf16 " << bf16);
          constexpr int kTokens = Chunks::kTokens;
          const std::vector<float> queries = normal(at(group * dim), 4);
          std::vector<float> scores(at(group * kTokens));
          kernels.key_scores(queries.data(), group, chunks.segments.data(), Chunks::kSegments, chunks.layout(), scores.data(), kTokens);
          std::vector<float> out(at(group * dim), 0.5F);
          kernels.add_values(scores.data(), kTokens, group, chunks.segments.data(), Chunks::kSegments, chunks.layout(), out.data());
          double worst = 0.0;
          for (int g = 0; g < group; ++g) {
            for (int t = 0; t < kTokens; ++t) {
              worst = std::max(worst, std::fabs(scores[at(g * kTokens + t)] - dot(&queries[at(g * dim)], chunks.key(t), dim)));
            }
            for (int d = 0; d < dim; ++d) {
              double sum = 0.5;
              for (int t = 0; t < kTokens; ++t) sum += double(scores[at(g * kTokens + t)]) * double(chunks.value(t)[d]);
              worst = std::max(worst, std::fabs(out[at(g * dim + d)] - sum) / (1.0 + std::fabs(sum)));
            }
          }
          CHECK(worst < 2e-5);
        }
      }
    }
  }
}

TEST_CASE("scores and sums of summaries equal double precision, for any group, shape and instruction set", "[attention_kernels]") {
  constexpr int kCount = 531;  // more than a block of add_summaries, and no multiple of any vector
  for (const Isa isa : instruction_sets()) {
    const AttentionKernels& kernels = attention_kernels(isa);
    for (const int dim : {8, 24, 64, 128}) {
      for (const int group : {1, 2, 3, 4, 6}) {
        INFO(name_of(isa) << ", dim " << dim << ", group " << group);
        testing::Random random(7);
        std::vector<std::int8_t> keys(at(kCount * dim));
        for (auto& key : keys) key = static_cast<std::int8_t>(random.below(255) - 127);
        std::vector<std::uint8_t> values(at(kCount * dim / 2));
        for (auto& value : values) value = static_cast<std::uint8_t>(random.below(256));
        const std::vector<float> scales = normal(kCount, 8);
        const std::vector<float> queries = normal(at(group * dim), 9);
        std::vector<float> scores(at(group * kCount));
        kernels.summary_scores(queries.data(), group, keys.data(), scales.data(), kCount, at(dim), scores.data(), kCount);
        std::vector<float> weights = normal(at(group * kCount), 10);
        for (int i = 0; i < group * kCount; ++i) weights[at(i)] = i % kCount % 3 == 0 ? 1e-12F : std::fabs(weights[at(i)]);
        std::vector<float> out(at(group * dim), 0.0F);
        kernels.add_summaries(weights.data(), kCount, group, values.data(), scales.data(), kCount, at(dim), 1e-9F, out.data());
        double worst = 0.0;
        for (int g = 0; g < group; ++g) {
          for (int c = 0; c < kCount; ++c) {
            double sum = 0.0;
            for (int d = 0; d < dim; ++d) sum += double(queries[at(g * dim + d)]) * keys[at(c * dim + d)];
            sum *= double(scales[at(c)]);
            worst = std::max(worst, std::fabs(scores[at(g * kCount + c)] - sum) / (1.0 + std::fabs(sum)));
          }
          for (int d = 0; d < dim; ++d) {
            double sum = 0.0;
            for (int c = 0; c < kCount; ++c) {
              if (c % 3 == 0) continue;  // negligible for every head, so left out
              const int byte = values[at(c * (dim / 2) + d % (dim / 2))];
              sum += double(weights[at(g * kCount + c)]) * double(scales[at(c)]) * ((d < dim / 2 ? byte & 15 : byte >> 4) - 8);
            }
            worst = std::max(worst, std::fabs(out[at(g * dim + d)] - sum) / (1.0 + std::fabs(sum)));
          }
        }
        CHECK(worst < 5e-4);
      }
    }
  }
}

TEST_CASE("ranks are the largest log softmax of the group", "[attention_kernels]") {
  constexpr int kGroup = 3;
  for (const Isa isa : instruction_sets()) {
    for (const int count : {1, 5, 16, 33, 257}) {
      INFO(name_of(isa) << ", count " << count);
      std::vector<float> scores = normal(at(kGroup * count), 11);
      for (float& score : scores) score *= 6.0F;
      std::vector<float> rank(at(count));
      attention_kernels(isa).rank(scores.data(), at(count), kGroup, at(count), rank.data());
      for (int c = 0; c < count; ++c) {
        double best = -std::numeric_limits<double>::infinity();
        for (int g = 0; g < kGroup; ++g) {
          double sum = 0.0;
          for (int i = 0; i < count; ++i) sum += std::exp(double(scores[at(g * count + i)]));
          best = std::max(best, double(scores[at(g * count + c)]) - std::log(sum));
        }
        REQUIRE(rank[at(c)] == Approx(best).margin(1e-5));
      }
    }
  }
}

TEST_CASE("chosen are the largest, in order, and of equal ones the first", "[attention_kernels]") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  testing::Random random(12);
  for (const Isa isa : instruction_sets()) {
    for (int round = 0; round < 400; ++round) {
      const int count = 1 + random.below(round % 2 == 0 ? 40 : 1200);
      std::vector<float> rank(at(count));
      const int kind = random.below(4);
      for (float& value : rank) {
        value = random.normal() * 8.0F;
        if (kind == 1) value = static_cast<float>(random.below(5)) - 2.0F;  // many ties, zero among them
        if (kind == 2) value = -3.5F;                                       // nothing but ties
        if (kind == 3 && random.below(4) == 0) value = -kInfinity;
      }
      const int wanted = random.below(count + 3);
      INFO(name_of(isa) << ", count " << count << ", wanted " << wanted << ", kind " << kind);
      std::vector<int> expected(at(count));
      std::iota(expected.begin(), expected.end(), 0);
      std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return rank[at(a)] > rank[at(b)]; });
      expected.resize(at(std::min(count, wanted)));
      std::sort(expected.begin(), expected.end());
      std::vector<std::int32_t> keys(at((count + 15) / 16 * 16));
      std::vector<std::int32_t> chosen(at(std::min(count, std::max(wanted, 1))));
      const std::size_t found = attention_kernels(isa).choose(rank.data(), at(count), at(wanted), keys.data(), chosen.data());
      chosen.resize(found);
      REQUIRE(chosen == std::vector<std::int32_t>(expected.begin(), expected.end()));
    }
  }
}

TEST_CASE("numbers that are none do not lead a choice astray", "[attention_kernels]") {
  for (const Isa isa : instruction_sets()) {
    std::vector<float> rank(50, std::numeric_limits<float>::quiet_NaN());
    for (std::size_t i = 0; i < rank.size(); i += 2) rank[i] = -rank[i];
    std::memset(&rank[7], 0xFF, sizeof(float));  // the key of padding
    std::vector<std::int32_t> keys(64);
    std::vector<std::int32_t> chosen(50);
    for (std::size_t wanted = 0; wanted <= 50; ++wanted) {
      REQUIRE(attention_kernels(isa).choose(rank.data(), 50, wanted, keys.data(), chosen.data()) == wanted);
      for (std::size_t i = 0; i < wanted; ++i) REQUIRE((chosen[i] >= 0 && chosen[i] < 50));
    }
  }
}

}  // namespace dualdecoder::cpu
