// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Expected values: closed forms of the Kullback-Leibler divergence of two-valued distributions.
#include "examples/common/fidelity.hpp"

#include <array>
#include <cmath>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"

namespace dualdecoder::examples {
namespace {

/// Logits of a coin that shows heads with probability p.
std::array<float, 2> coin(double p) { return {static_cast<float>(std::log(p)) + 3.0F, static_cast<float>(std::log(1 - p)) + 3.0F}; }

double coin_kl(double p, double q) { return p * std::log(p / q) + (1 - p) * std::log((1 - p) / (1 - q)); }

}  // namespace

TEST_CASE("log-probabilities and divergence of two coins") {
  const auto p = log_probabilities(coin(0.8));
  const auto q = log_probabilities(coin(0.3));
  CHECK(std::exp(p[0]) == Approx(0.8));
  CHECK(std::exp(p[1]) == Approx(0.2));
  CHECK(kl_divergence(p, q) == Approx(coin_kl(0.8, 0.3)));
  CHECK(kl_divergence(p, p) == 0.0);
}

TEST_CASE("a record keeps rows of log-probabilities and refuses to outgrow memory") {
  LogProbabilities record(2, 2);
  record.add(coin(0.8));
  record.add(coin(0.5));
  CHECK(record.size() == 2);
  CHECK(std::exp(record.row(1)[0]) == Approx(0.5));
  CHECK_THROWS_AS(LogProbabilities(1 << 20, 150000), InvalidArgument);
}

TEST_CASE("fidelity over a range of tokens") {
  FidelityMeter meter;
  for (const auto& [p, q] : {std::pair{0.8, 0.8}, {0.8, 0.6}, {0.7, 0.4}, {0.2, 0.3}}) {
    meter.add(log_probabilities(coin(p)), log_probabilities(coin(q)));
  }
  const Fidelity all = meter.over(0, 4);
  CHECK(all.tokens == 4);
  CHECK(all.agreement == 0.75);
  CHECK(all.mean_kl == Approx((coin_kl(0.8, 0.6) + coin_kl(0.7, 0.4) + coin_kl(0.2, 0.3)) / 4).epsilon(1e-5));
  CHECK(all.max_kl == Approx(coin_kl(0.7, 0.4)).epsilon(1e-5));
  CHECK(all.kl95 == Approx(coin_kl(0.8, 0.6)).epsilon(1e-5));  // the third of four
  CHECK(meter.over(3, 4).agreement == 1.0);
  CHECK(meter.over(2, 2).tokens == 0);
  CHECK(meter.first_divergence(0) == 2);
  CHECK(meter.first_divergence(1) == 1);
  CHECK(meter.first_divergence(3) == 1);
}

}  // namespace dualdecoder::examples
