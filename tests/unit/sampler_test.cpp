// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "dualdecoder/counter_random.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder::cpu {
namespace {

Token choose(std::vector<float> logits, const SamplingOptions& options, int position = 0, const RowHistory& history = {}) {
  std::vector<Candidate> scratch(logits.size());
  return sample_row(logits, options, position, history, scratch);
}

/// Probabilities after all filters, straight from their definitions, in double precision: the brute-force twin.
std::vector<double> probabilities(std::vector<double> logits, const SamplingOptions& options, const std::set<Token>& seen = {}) {
  for (const Token token : seen) {
    double& logit = logits[static_cast<std::size_t>(token)];
    logit = logit > 0 ? logit / static_cast<double>(options.repetition_penalty) : logit * static_cast<double>(options.repetition_penalty);
  }
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  std::vector<double> kept(logits.size(), 0.0);
  const auto normalise = [&] {
    double sum = 0;
    for (const std::size_t token : order) sum += kept[token];
    for (double& p : kept) p /= sum;
  };
  for (const std::size_t token : order)
    kept[token] = std::exp((logits[token] - logits[order[0]]) / static_cast<double>(options.temperature));
  normalise();
  double sum = 0;
  for (const std::size_t token : order) {
    const double p = kept[token];
    if (sum >= static_cast<double>(options.top_p) || p < static_cast<double>(options.min_p) * kept[order[0]]) kept[token] = 0;
    sum += p;
  }
  normalise();
  return kept;
}

std::vector<float> random_logits(std::size_t count, std::uint64_t seed, float spread) {
  testing::Random random(seed);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = spread * random.normal();
  return logits;
}

/// Pearson's chi-square of draws at positions 0 .. draws-1 against the twin, over tokens that are expected at least five times; every other
/// draw counts as one more class. Returns the statistic in standard deviations above its mean (degrees k: mean k, variance 2k).
double chi_square_excess(const std::vector<float>& logits, const SamplingOptions& options, int draws) {
  const std::vector<double> expected = probabilities({logits.begin(), logits.end()}, options);
  std::vector<int> seen(logits.size(), 0);
  for (int position = 0; position < draws; ++position) ++seen[static_cast<std::size_t>(choose(logits, options, position))];
  double statistic = 0;
  double rest_expected = 0;
  double rest_seen = 0;
  int classes = 0;
  for (std::size_t token = 0; token < logits.size(); ++token) {
    const double mean = expected[token] * draws;
    if (expected[token] == 0.0) CHECK(seen[token] == 0);
    if (mean < 5) {
      rest_expected += mean;
      rest_seen += seen[token];
      continue;
    }
    statistic += (seen[token] - mean) * (seen[token] - mean) / mean;
    ++classes;
  }
  if (rest_expected >= 5) {
    statistic += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
    ++classes;
  }
  const double degrees = std::max(classes - 1, 1);
  return (statistic - degrees) / std::sqrt(2 * degrees);
}

}  // namespace

TEST_CASE("greedy takes the largest logit, the lowest token of equals", "[sampler]") {
  CHECK(choose({1.0F, 3.0F, 3.0F, 2.0F}, {}) == 1);
  CHECK(choose({-5.0F, -4.0F}, {.seed = 9}) == 1);
  CHECK(choose({std::numeric_limits<float>::quiet_NaN(), -1.0F}, {}) == 1);
  CHECK(choose({-1.0F, std::numeric_limits<float>::infinity()}, {.temperature = 1.0F}) == 1);
  CHECK(choose({2.0F, 2.0F, 1.0F}, {.temperature = 5.0F, .top_k = 1}) == 0);
}

TEST_CASE("draws follow the brute-force distribution under every filter", "[sampler]") {
  const std::vector<SamplingOptions> variants{
      {.temperature = 1.0F},
      {.temperature = 0.5F, .seed = 1},
      {.temperature = 2.0F, .top_k = 5, .seed = 2},
      {.temperature = 1.0F, .top_p = 0.7F, .seed = 3},
      {.temperature = 1.0F, .min_p = 0.2F, .seed = 4},
      {.temperature = 1.3F, .top_k = 20, .top_p = 0.9F, .min_p = 0.05F, .seed = 5},
      {.temperature = 1.0F, .top_p = 1e-6F, .seed = 6},
  };
  for (const SamplingOptions& options : variants) {
    INFO("temperature " << options.temperature << ", top_k " << options.top_k << ", top_p " << options.top_p << ", min_p "
                        << options.min_p);
    CHECK(chi_square_excess(random_logits(40, 11, 2.0F), options, 20000) < 5.0);
  }
  // A vocabulary of which the nucleus needs several rounds of sorting.
  CHECK(chi_square_excess(random_logits(2000, 12, 1.0F), {.temperature = 1.0F, .top_p = 0.8F}, 20000) < 5.0);
}

TEST_CASE("filters keep exactly the brute-force set", "[sampler]") {
  testing::Random random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<float> logits = random_logits(30, random.next(), 3.0F);
    const SamplingOptions options{.temperature = 0.5F + static_cast<float>(random.uniform()),
                                  .top_k = random.below(31),
                                  .top_p = 0.3F + 0.7F * static_cast<float>(random.uniform()),
                                  .min_p = random.chance(0.5) ? 0.0F : 0.3F * static_cast<float>(random.uniform()),
                                  .seed = random.next()};
    const std::vector<double> expected = probabilities({logits.begin(), logits.end()}, options);
    for (int position = 0; position < 50; ++position) CHECK(expected[static_cast<std::size_t>(choose(logits, options, position))] > 0);
  }
}

TEST_CASE("equal logits are cut by top-k from the highest token down", "[sampler]") {
  std::set<Token> drawn;
  for (int position = 0; position < 200; ++position) {
    drawn.insert(choose({1.0F, 1.0F, 1.0F, 1.0F, 1.0F}, {.temperature = 1.0F, .top_k = 2}, position));
  }
  CHECK(drawn == std::set<Token>{0, 1});
}

TEST_CASE("the penalty divides positive and multiplies negative logits of seen tokens, once", "[sampler]") {
  // Tokens 0 and 2 are seen; 2 also stands in the pass, as does 3. CTRL (arXiv 1909.05858), section 4.1.
  const std::uint64_t seen = 0b101;
  const std::vector<Token> pass{2, -1, 3, 3};
  const RowHistory history{&seen, pass};
  std::vector<float> logits{4.0F, 1.9F, 3.9F, -1.0F, -2.5F};
  std::vector<Candidate> scratch(5);
  CHECK(sample_row(logits, {.repetition_penalty = 2.0F}, 0, history, scratch) == 0);
  CHECK(logits == std::vector<float>{2.0F, 1.9F, 1.95F, -2.0F, -2.5F});
  CHECK(choose({4.0F, 1.9F, 3.7F, -1.0F}, {.repetition_penalty = 2.2F}, 0, history) == 1);
  CHECK(choose({4.0F, 1.9F, 3.7F, -1.0F}, {.repetition_penalty = 1.0F}, 0, history) == 0);
  const RowHistory no_bits{nullptr, pass};
  CHECK(choose({1.0F, 1.9F, 3.7F, -1.0F}, {.repetition_penalty = 2.0F}, 0, no_bits) == 1);
}

TEST_CASE("one number per seed and position: a guess draws what the true row will draw", "[sampler]") {
  const std::vector<float> logits = random_logits(500, 3, 1.0F);
  const SamplingOptions options{.temperature = 1.0F, .seed = 42};
  int same_elsewhere = 0;
  int same_when_close = 0;
  for (int position = 0; position < 500; ++position) {
    const Token drawn = choose(logits, options, position);
    CHECK(choose(logits, options, position) == drawn);
    same_elsewhere += choose(logits, options, position + 1) == drawn ? 1 : 0;
    std::vector<float> close = logits;
    for (std::size_t i = 0; i < close.size(); ++i) close[i] += i % 2 == 0 ? 1e-4F : -1e-4F;
    same_when_close += choose(close, options, position) == drawn ? 1 : 0;
  }
  CHECK(same_elsewhere < 50);
  CHECK(same_when_close > 480);
  SamplingOptions reseeded = options;
  reseeded.seed = 43;
  int same_reseeded = 0;
  for (int position = 0; position < 500; ++position)
    same_reseeded += choose(logits, options, position) == choose(logits, reseeded, position) ? 1 : 0;
  CHECK(same_reseeded < 50);
}

TEST_CASE("numbers of neighbouring counters and seeds are uniform and unrelated", "[sampler]") {
  // Means and correlations of n uniform numbers lie within five standard errors of 1/2 and 0.
  constexpr int kCount = 20000;
  double mean = 0;
  double neighbours = 0;
  double seeds = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double a = detail::counter_uniform(7, i) - 0.5;
    mean += a;
    neighbours += a * (detail::counter_uniform(7, i + 1) - 0.5);
    seeds += a * (detail::counter_uniform(8, i) - 0.5);
  }
  const double error = std::sqrt(1.0 / kCount);
  CHECK(std::abs(mean / kCount) < 5 * error * std::sqrt(1.0 / 12));
  CHECK(std::abs(neighbours / kCount) < 5 * error / 12);
  CHECK(std::abs(seeds / kCount) < 5 * error / 12);
}

TEST_CASE("sampling options out of range are named", "[sampler]") {
  const auto refused = [](const SamplingOptions& options, const char* field) {
    test::expect_error<InvalidArgument>([&] { validate(options); }, {field, "must be"});
  };
  refused({.temperature = -1.0F}, "temperature");
  refused({.temperature = std::numeric_limits<float>::quiet_NaN()}, "temperature");
  refused({.top_k = -1}, "top_k");
  refused({.top_p = 0.0F}, "top_p");
  refused({.min_p = 1.5F}, "min_p");
  refused({.repetition_penalty = 0.0F}, "repetition_penalty");
}

}  // namespace dualdecoder::cpu
