// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "dualdecoder/store_options.hpp"
#include "tests/gpu/bf16.hpp"

namespace dualdecoder::test {

constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }

using Row = std::vector<double>;

inline double dot(const Row& a, const Row& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

/// Turns a head at a position, or back, by RoPE's definition: pair (i, i + dim/2) by position * theta^(-2i/dim).
inline void turn(double* head, int dim, double theta, int position, bool back) {
  for (int i = 0; i < dim / 2; ++i) {
    const double angle = (back ? -1.0 : 1.0) * position * std::pow(theta, -2.0 * i / dim);
    const double low = head[i];
    const double high = head[i + dim / 2];
    head[i] = low * std::cos(angle) - high * std::sin(angle);
    head[i + dim / 2] = high * std::cos(angle) + low * std::sin(angle);
  }
}

inline double from_bf16(std::uint16_t bits) { return double(std::bit_cast<float>(std::uint32_t{bits} << 16)); }

/// Queries, keys and values of one sequence in all layers, exact in bf16. Keys before RoPE have twelve strong directions and weak ones
/// beside them, and some tokens stand apart from their neighbours.
struct KeyText {
  int tokens;
  std::vector<float> queries, keys, values;  // [layers, tokens, heads or kv_heads, dim], keys after RoPE

  KeyText(const StoreOptions& o, int count, unsigned seed) : tokens(count) {
    constexpr int kStrong = 12;
    const int width = o.kv_heads * o.head_dim;
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto numbers = [&](int n) {
      Row made(at(n));
      for (double& x : made) x = normal(random);
      return made;
    };
    queries.resize(at(o.layers) * at(count) * at(o.heads * o.head_dim));
    values.resize(at(o.layers) * at(count) * at(width));
    for (float& x : queries) x = rounded_to_bf16(float(1.5 * normal(random)));
    for (float& x : values) x = rounded_to_bf16(float(normal(random)));
    for (Layer layer = 0; layer < o.layers; ++layer) {
      const Row directions = numbers(kStrong * width);
      for (int t = 0; t < count; ++t) {
        Row row(at(width));
        const Row weights = numbers(kStrong);
        for (int r = 0; r < kStrong; ++r) {
          const double weight = (t % 23 == 5 ? 3.0 : 1.0) * (0.6 + 0.4 * weights[at(r)]) / std::sqrt(double(kStrong));
          for (int d = 0; d < width; ++d) row[at(d)] += weight * directions[at(r * width + d)];
        }
        for (double& x : row) x += 0.1 * normal(random);
        for (int head = 0; head < o.kv_heads; ++head) turn(row.data() + head * o.head_dim, o.head_dim, double(o.rope.theta), t, false);
        for (const double x : row) keys.push_back(rounded_to_bf16(float(x)));
      }
    }
  }
};

/// Eigenvectors of a symmetric matrix, the strongest first, by cyclic Jacobi rotations (Golub and Van Loan, 8.5).
inline std::vector<Row> eigenvectors(std::vector<Row> a) {
  const std::size_t n = a.size();
  std::vector<Row> v(n, Row(n));  // rows are the vectors
  for (std::size_t i = 0; i < n; ++i) v[i][i] = 1.0;
  for (int sweep = 0; sweep < 30; ++sweep) {
    double off = 0.0;
    double all = 0.0;
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = 0; q < n; ++q) (p == q ? all : off) += a[p][q] * a[p][q];
    }
    if (off <= 1e-24 * all) break;
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) {
        if (a[p][q] == 0.0) continue;
        const double tau = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
        const double t = (tau >= 0.0 ? 1.0 : -1.0) / (std::fabs(tau) + std::sqrt(1.0 + tau * tau));
        const double c = 1.0 / std::sqrt(1.0 + t * t);
        const double s = t * c;
        const auto mix = [&](double& x, double& y) {
          const double before = x;
          x = c * before - s * y;
          y = s * before + c * y;
        };
        for (std::size_t k = 0; k < n; ++k) mix(a[k][p], a[k][q]);
        for (std::size_t k = 0; k < n; ++k) mix(a[p][k], a[q][k]);
        for (std::size_t k = 0; k < n; ++k) mix(v[p][k], v[q][k]);
      }
    }
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return a[x][x] > a[y][y]; });
  std::vector<Row> sorted;
  for (const std::size_t i : order) sorted.push_back(v[i]);
  return sorted;
}

}  // namespace dualdecoder::test
