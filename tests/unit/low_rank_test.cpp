// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Against closed forms: a matrix made of known singular vectors, and the theorem of Eckart and Young.
#include <cmath>
#include <random>
#include <vector>

#include "src/low_rank.hpp"
#include "src/simd/dispatch.hpp"
#include "tests/catch.hpp"

using namespace dualdecoder;
using namespace dualdecoder::cpu;

namespace {

constexpr int kWidth = 24;

/// A factor with memory of its own.
struct Factor {
  explicit Factor(int block) : factor({.width = kWidth, .block = block}, attention_kernels(detected_isa())) {
    Carver counting;
    factor.carve(counting);
    memory.resize(counting.bytes() + 64);
    const auto base = reinterpret_cast<std::uintptr_t>(memory.data());
    Carver placing(memory.data() + (64 - base % 64));
    factor.carve(placing);
    factor.clear();
  }
  std::vector<std::byte> memory;
  LowRankFactor factor;
};

/// Orthonormal vectors by Gram and Schmidt.
std::vector<std::vector<double>> orthonormal(int count, int length, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> made;
  for (int i = 0; i < count; ++i) {
    std::vector<double> v(static_cast<std::size_t>(length));
    for (double& x : v) x = normal(random);
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& u : made) {
        double dot = 0.0;
        for (std::size_t k = 0; k < v.size(); ++k) dot += u[k] * v[k];
        for (std::size_t k = 0; k < v.size(); ++k) v[k] -= dot * u[k];
      }
    }
    double norm = 0.0;
    for (double x : v) norm += x * x;
    for (double& x : v) x /= std::sqrt(norm);
    made.push_back(v);
  }
  return made;
}

}  // namespace

TEST_CASE("the leading right singular vectors are those that the matrix was made of", "[low_rank]") {
  if (!has_lapack()) DUALDECODER_SKIP("a build without LAPACK");
  constexpr int kRows = 300;
  constexpr int kRank = 10;
  const auto left = orthonormal(kRank, kRows, 1);
  const auto right = orthonormal(kRank, kWidth, 2);
  std::vector<float> rows(static_cast<std::size_t>(kRows * kWidth));
  for (int r = 0; r < kRank; ++r) {
    const double strength = 50.0 / (1 + r);
    for (std::size_t t = 0; t < kRows; ++t) {
      for (std::size_t d = 0; d < kWidth; ++d) {
        rows[t * kWidth + d] += static_cast<float>(strength * left[static_cast<std::size_t>(r)][t] * right[static_cast<std::size_t>(r)][d]);
      }
    }
  }
  Factor whole(128);
  for (int first = 0; first < kRows; first += 128) whole.factor.add(rows.data() + first * kWidth, std::min(128, kRows - first));
  std::vector<float> vectors(kWidth * kWidth);
  whole.factor.solve(kWidth, vectors.data());
  for (std::size_t r = 0; r < kRank; ++r) {
    double dot = 0.0;
    for (std::size_t d = 0; d < kWidth; ++d) dot += static_cast<double>(vectors[r * kWidth + d]) * right[r][d];
    CHECK(std::fabs(dot) == Approx(1.0).margin(1e-5));  // a singular vector has no sign
  }
  // those behind the rank of the matrix complete the basis
  for (std::size_t a = 0; a < kWidth; ++a) {
    for (std::size_t b = 0; b <= a; ++b) {
      double dot = 0.0;
      for (std::size_t d = 0; d < kWidth; ++d)
        dot += static_cast<double>(vectors[a * kWidth + d]) * static_cast<double>(vectors[b * kWidth + d]);
      CHECK(dot == Approx(a == b ? 1.0 : 0.0).margin(1e-5));
    }
  }
  // and the object begins anew
  std::vector<float> again(kWidth * kWidth);
  for (int first = 0; first < kRows; first += 128) whole.factor.add(rows.data() + first * kWidth, std::min(128, kRows - first));
  whole.factor.solve(kWidth, again.data());
  CHECK(again == vectors);
}
