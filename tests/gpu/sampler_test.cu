// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// launch_sample against its twin cpu::sample_row, row by row.
#include "cuda/sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "dualdecoder/counter_random.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "src/sampler.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// A batch of sequences whose rows share one vocabulary.
struct Batch {
  int vocabulary = 0;
  int rows_per_sequence = 1;
  std::vector<float> logits;  // [rows, vocabulary]
  std::vector<SamplingOptions> options;
  std::vector<int> position;
  std::vector<RowMode> mode;
  std::vector<Token> tokens;                     // [rows]
  std::vector<std::vector<std::uint64_t>> seen;  // [sequences], empty: null

  int sequences() const { return static_cast<int>(mode.size()); }
  int rows() const { return sequences() * rows_per_sequence; }
};

std::vector<Token> on_device(const Batch& batch) {
  const DeviceArray<float> logits(batch.logits);
  const DeviceArray<SamplingOptions> options(batch.options);
  const DeviceArray<int> position(batch.position);
  const DeviceArray<RowMode> mode(batch.mode);
  const DeviceArray<Token> tokens(batch.tokens);
  const DeviceArray<Token> sampled(at(batch.rows()));
  std::vector<DeviceArray<std::uint64_t>> bits;
  std::vector<std::uint64_t*> pointers;
  for (const auto& words : batch.seen) {
    bits.emplace_back(words);
    pointers.push_back(words.empty() ? nullptr : bits.back().data());
  }
  const DeviceArray<std::uint64_t*> seen(pointers);
  const SamplingView view{.step = {.sequences = batch.sequences(),
                                   .rows_per_sequence = batch.rows_per_sequence,
                                   .position = position.data(),
                                   .mode = mode.data()},
                          .options = options.data(),
                          .tokens = tokens.data(),
                          .seen = batch.seen.empty() ? nullptr : seen.data()};
  cuda::check(cuda::launch_sample(logits.data(), batch.vocabulary, view, sampled.data(), nullptr), "launch_sample");
  return sampled.download();
}

std::vector<Token> on_host(const Batch& batch) {
  std::vector<Token> sampled;
  std::vector<float> logits = batch.logits;
  std::vector<cpu::Candidate> scratch(at(batch.vocabulary));
  for (int row = 0; row < batch.rows(); ++row) {
    const int place = row / batch.rows_per_sequence;
    const int of_place = row % batch.rows_per_sequence;
    const RowMode mode = batch.mode[at(place)];
    if (!row_is_live(mode, of_place)) {
      sampled.push_back(-1);
      continue;
    }
    const bool bits = !batch.seen.empty() && !batch.seen[at(place)].empty();
    const cpu::RowHistory history{bits ? batch.seen[at(place)].data() : nullptr,
                                  {batch.tokens.data() + place * batch.rows_per_sequence, at(of_place) + 1}};
    sampled.push_back(cpu::sample_row({logits.data() + at(row) * at(batch.vocabulary), at(batch.vocabulary)}, batch.options[at(place)],
                                      row_position(mode, of_place, batch.position[at(place)]), history, scratch));
  }
  return sampled;
}

/// One sequence a row, all with these logits and options, at positions 0, 1, ...
Batch draws(const std::vector<float>& logits, const SamplingOptions& options, int count) {
  Batch batch{.vocabulary = static_cast<int>(logits.size())};
  for (int i = 0; i < count; ++i) {
    batch.logits.insert(batch.logits.end(), logits.begin(), logits.end());
    batch.options.push_back(options);
    batch.position.push_back(i);
    batch.mode.push_back(RowMode::single);
    batch.tokens.push_back(0);
  }
  return batch;
}

/// Whether a draw of `token` is what rounding can make of `uniform`: the share of probability before and after it, over the kept tokens by
/// their definition in double precision, spans the number within 1e-5.
bool explained(const std::vector<float>& logits, const SamplingOptions& options, double uniform, Token token) {
  std::vector<std::pair<double, Token>> order;
  double top = -kInfinity;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double value = std::isnan(logits[i]) ? -kInfinity : logits[i];
    order.emplace_back(value, static_cast<Token>(i));
    top = std::max(top, value);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  if (options.top_k > 0) order.resize(std::min(order.size(), at(options.top_k)));
  double all = 0;
  for (auto& [value, index] : order) all += value = std::exp((value - top) / options.temperature);
  double sum = 0;
  double kept_sum = 0;
  std::vector<double> kept(logits.size(), 0.0);
  for (const auto& [value, index] : order) {
    if (sum < options.top_p * all * (1 + 1e-6) && value >= options.min_p * (1 - 1e-6)) kept_sum += kept[at(index)] = value;
    sum += value;
  }
  double before = 0;
  for (Token i = 0; i < token; ++i) before += kept[at(i)];
  return before / kept_sum - 1e-5 <= uniform && uniform <= (before + kept[at(token)]) / kept_sum + 1e-5;
}

void compare_draws(const char* name, const std::vector<float>& logits, const SamplingOptions& options, int count, int& drawn,
                   int& different) {
  const Batch batch = draws(logits, options, count);
  const std::vector<Token> device = on_device(batch);
  const std::vector<Token> host = on_host(batch);
  for (int i = 0; i < count; ++i) {
    ++drawn;
    if (device[at(i)] == host[at(i)]) continue;
    ++different;
    const double uniform = detail::counter_uniform(options.seed, static_cast<std::uint64_t>(i));
    const bool token = device[at(i)] >= 0 && device[at(i)] < batch.vocabulary;
    DUALDECODER_EXPECT(token && explained(logits, options, uniform, device[at(i)]),
                       "%s, V %d, T %g, top_k %d, top_p %g, min_p %g, draw %d: %d, the CPU draws %d", name, batch.vocabulary,
                       static_cast<double>(options.temperature), options.top_k, static_cast<double>(options.top_p),
                       static_cast<double>(options.min_p), i, device[at(i)], host[at(i)]);
  }
}

struct Logits {
  const char* name;
  std::vector<float> values;
};

std::vector<Logits> shapes(int vocabulary) {
  testing::Random random(static_cast<std::uint64_t>(vocabulary) + 7);
  const auto make = [&](auto&& value) {
    std::vector<float> logits(at(vocabulary));
    for (int i = 0; i < vocabulary; ++i) logits[at(i)] = value(i);
    return logits;
  };
  return {{"normal", make([&](int) { return 4.0F * random.normal(); })},
          {"flat", make([&](int) { return 0.1F * random.normal(); })},
          {"equal", make([&](int) { return 1.5F; })},
          {"ties", make([&](int) { return static_cast<float>(random.below(5)); })},
          {"mostly -inf", make([&](int) { return random.chance(0.01) ? random.normal() : -kInfinity; })},
          {"some NaN", make([&](int) { return random.chance(0.3) ? kNan : 2.0F * random.normal(); })},
          {"first NaN", make([&](int i) { return i == 0 ? kNan : random.normal(); })},
          {"only NaN and -inf", make([&](int i) { return i % 2 == 0 ? kNan : -kInfinity; })},
          {"huge", make([&](int) { return 3e38F * std::clamp(random.normal(), -1.0F, 1.0F); })},
          {"one +inf", make([&](int i) { return i == vocabulary / 2 ? kInfinity : random.normal(); })},
          {"zeros of both signs", make([&](int i) { return i % 3 == 0 ? -0.0F : 0.0F; })},
          {"tiny", make([&](int) { return 1e-40F * random.normal(); })},
          {"steps of one bit", make([&](int i) { return std::nextafter(1.0F, static_cast<float>(i % 3)); })}};
}

void test_greedy() {
  for (const int vocabulary : {1, 2, 31, 203, 1024, 1025, 49152, 151936, 262144}) {
    for (const Logits& logits : shapes(vocabulary)) {
      for (const SamplingOptions& options : {SamplingOptions{}, SamplingOptions{.temperature = 1.0F, .top_k = 1}}) {
        const Batch batch = draws(logits.values, options, 1);
        const Token device = on_device(batch)[0];
        const Token host = on_host(batch)[0];
        DUALDECODER_EXPECT(device == host, "%s, V %d: %d, the CPU takes %d", logits.name, vocabulary, device, host);
      }
    }
  }
}

void test_draws() {
  const std::vector<SamplingOptions> variants{
      {.temperature = 1.0F, .seed = 1},
      {.temperature = 0.3F, .seed = 2},
      {.temperature = 30.0F, .seed = 3},
      {.temperature = 1.0F, .top_k = 2, .seed = 4},
      {.temperature = 1.0F, .top_k = 50, .seed = 5},
      {.temperature = 1.0F, .top_p = 0.5F, .seed = 6},
      {.temperature = 1.0F, .top_p = 0.999F, .seed = 7},
      {.temperature = 1.0F, .top_p = 1e-6F, .seed = 8},
      {.temperature = 1.0F, .min_p = 0.05F, .seed = 9},
      {.temperature = 1.0F, .min_p = 1.0F, .seed = 10},
      {.temperature = 0.7F, .top_k = 40, .top_p = 0.9F, .min_p = 0.02F, .seed = 11},
      {.temperature = 1e-3F, .top_p = 0.9F, .seed = 12},
  };
  int drawn = 0;
  int different = 0;
  for (const int vocabulary : {2, 203, 1024, 5003, 151936}) {
    const int count = vocabulary > 10000 ? 8 : 64;
    for (const Logits& logits : shapes(vocabulary)) {
      for (const SamplingOptions& options : variants) compare_draws(logits.name, logits.values, options, count, drawn, different);
    }
  }
  std::printf("%d of %d draws differ from the CPU's\n", different, drawn);
  DUALDECODER_EXPECT(different * 1000 < drawn, "%d of %d draws differ", different, drawn);
}

/// Rows of every mode, with penalties; tokens of the pass and of the history, in both and out of range of the other.
void test_modes_and_history() {
  testing::Random random(99);
  int drawn = 0;
  int different = 0;
  for (int trial = 0; trial < 40; ++trial) {
    Batch batch{.vocabulary = trial % 2 == 0 ? 203 : 4096, .rows_per_sequence = 2};
    for (const RowMode mode : {RowMode::idle, RowMode::single, RowMode::dual, RowMode::resync, RowMode::dual}) {
      batch.mode.push_back(mode);
      batch.position.push_back(random.below(100000));
      batch.options.push_back({.temperature = random.chance(0.5) ? 0.0F : 0.8F,
                               .top_k = random.chance(0.5) ? 0 : 20,
                               .top_p = random.chance(0.5) ? 1.0F : 0.9F,
                               .repetition_penalty = random.chance(0.3) ? 1.0F : 1.7F,
                               .seed = random.next()});
      std::vector<std::uint64_t> words;
      if (random.chance(0.7)) {
        for (int word = 0; word * 64 < batch.vocabulary; ++word) words.push_back(random.next() & random.next());
      }
      batch.seen.push_back(std::move(words));
      for (int row = 0; row < 2; ++row) {
        const bool live = row_is_live(mode, row);
        batch.tokens.push_back(live ? random.below(batch.vocabulary) : -1);
        for (int i = 0; i < batch.vocabulary; ++i) batch.logits.push_back(3.0F * random.normal());
      }
      if (mode == RowMode::dual && random.chance(0.3)) batch.tokens.back() = batch.tokens[batch.tokens.size() - 2];
    }
    const std::vector<Token> device = on_device(batch);
    const std::vector<Token> host = on_host(batch);
    for (int row = 0; row < batch.rows(); ++row) {
      ++drawn;
      const bool greedy = batch.options[at(row / 2)].temperature == 0.0F;
      if (device[at(row)] == host[at(row)]) continue;
      ++different;
      DUALDECODER_EXPECT(!greedy && host[at(row)] >= 0, "trial %d row %d: %d, the CPU draws %d", trial, row, device[at(row)],
                         host[at(row)]);
    }
  }
  DUALDECODER_EXPECT(different <= 1, "%d of %d draws differ", different, drawn);  // one in a thousand of 400
}

void print_speed() {
  constexpr int kRows = 16;
  for (const int vocabulary : {128256, 262144}) {
    testing::Random random(1);
    std::vector<float> logits(at(vocabulary));
    for (float& logit : logits) logit = 3.0F * random.normal();
    for (const SamplingOptions& options :
         {SamplingOptions{}, SamplingOptions{.temperature = 1.0F}, SamplingOptions{.temperature = 0.7F, .top_k = 40, .top_p = 0.9F}}) {
      const Batch batch = draws(logits, options, kRows);
      const DeviceArray<float> source(batch.logits);
      const DeviceArray<float> target(batch.logits.size());
      const DeviceArray<SamplingOptions> device_options(batch.options);
      const DeviceArray<int> position(batch.position);
      const DeviceArray<RowMode> mode(batch.mode);
      const DeviceArray<Token> tokens(batch.tokens);
      const DeviceArray<Token> sampled(at(kRows));
      const SamplingView view{.step = {.sequences = kRows, .rows_per_sequence = 1, .position = position.data(), .mode = mode.data()},
                              .options = device_options.data(),
                              .tokens = tokens.data()};
      const auto refill = [&] {
        cuda::check(cudaMemcpyAsync(target.data(), source.data(), target.size() * sizeof(float), cudaMemcpyDeviceToDevice, nullptr),
                    "copy");
      };
      const double copy = milliseconds(nullptr, 20, refill);
      const double both = milliseconds(nullptr, 20, [&] {
        refill();
        cuda::check(cuda::launch_sample(target.data(), vocabulary, view, sampled.data(), nullptr), "launch_sample");
      });
      std::printf("sample %d rows of %d, T %.1f, top_k %d, top_p %.1f: %.0f us\n", kRows, vocabulary,
                  static_cast<double>(options.temperature), options.top_k, static_cast<double>(options.top_p), (both - copy) * 1e3);
    }
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char**) {
  return dualdecoder::test::run_on_device([&] {
    if (argc > 1) return dualdecoder::test::print_speed();
    dualdecoder::test::test_greedy();
    dualdecoder::test::test_draws();
    dualdecoder::test::test_modes_and_history();
  });
}
