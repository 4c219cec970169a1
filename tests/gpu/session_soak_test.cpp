// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A session on the device over ten thousand steps in which sequences of many lengths come and go: nothing grows, and every sequence has the
// tokens of a session that runs it alone, up to what rounding decides. The model is made up.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

/// Logits of about 3 after three layers of bf16 roundings of 2^-8.
constexpr double kNearTie = 0.1;

constexpr int kWave = 500;  ///< steps from one time without sequences to the next, which no life's 120 outlast

ModelConfig small_model() {
  ModelConfig config;
  config.architecture = "llama";
  config.layers = 3;
  config.hidden = 256;
  config.intermediate = 512;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.vocabulary = 512;
  config.context = 4096;
  return config;
}

SessionOptions small_options(MissPolicy policy) {
  SessionOptions options;
  options.store = StoreKind::resident;
  options.max_context = 1024;
  options.budget_tokens = 64;
  options.chunk_tokens = 8;
  options.local_tokens = 32;
  options.slots_per_budget = 2.0F;
  options.miss_policy = policy;
  options.resync = Resync::always;
  options.prefill_tokens_per_step = 1000;  // one to three steps for a prompt in three layers
  return options;
}

struct Life {
  std::vector<Token> prompt;
  int count = 0;
  std::vector<Token> tokens;
};

Life random_life(std::mt19937_64& random) {
  Life life;
  life.prompt.resize(std::uniform_int_distribution<std::size_t>(1, 900)(random));
  std::uniform_int_distribution<Token> token(0, small_model().vocabulary - 1);
  for (Token& t : life.prompt) t = token(random);
  life.count = std::uniform_int_distribution<int>(1, 120)(random);
  return life;
}

void soak(const std::shared_ptr<Backend>& backend, testing::CountingResource& device, testing::CountingResource& pinned,
          const std::shared_ptr<const ModelWeights>& weights, MissPolicy policy, int steps) {
  std::mt19937_64 random(policy == MissPolicy::wait ? 1 : 2);
  SessionOptions options = small_options(policy);
  options.max_sequences = 5;
  std::map<std::uint64_t, Life> lives;
  std::vector<Life> finished;
  int empty = 0;  // times that nothing ran
  {
    auto session = make_session(backend, weights, options);
    const std::size_t device_bytes = device.live_bytes();
    const std::size_t pinned_bytes = pinned.live_bytes();
    const auto check_empty = [&](int step) {
      ++empty;
      DUALDECODER_EXPECT(device.live_bytes() == device_bytes && pinned.live_bytes() == pinned_bytes,
                         "step %d: without a sequence %zu device and %zu pinned bytes are held, not %zu and %zu", step, device.live_bytes(),
                         pinned.live_bytes(), device_bytes, pinned_bytes);
    };
    for (int step = 0; step < steps; ++step) {
      const bool room = session.active() < options.max_sequences;
      const bool filling = step % kWave < kWave / 2;  // in the other half sequences only end
      if (filling && (session.active() == 0 || (room && random() % 16 == 0))) {
        Life life = random_life(random);
        const AddOptions add{.max_new_tokens = life.count};
        const SequenceId id = random() % 2 == 0 ? session.add(life.prompt, add) : session.enqueue(life.prompt, add);
        lives.emplace(id.value, std::move(life));
      }
      if (random() % 256 == 0 && session.active() > 1) {
        const std::uint64_t removed = lives.begin()->first;
        session.remove(SequenceId{removed});
        lives.erase(removed);
      }
      for (const TokenEvent& event : session.step().tokens) {
        Life& life = lives.at(event.sequence.value);
        life.tokens.push_back(event.token);
        if (!event.finished) continue;
        finished.push_back(std::move(life));
        lives.erase(event.sequence.value);
      }
      if (session.active() == 0) check_empty(step);
    }
    while (session.active() > 0) session.step();
    check_empty(steps);
  }
  DUALDECODER_EXPECT(empty > steps / kWave, "the session was empty %d times", empty);

  // every tenth life again, alone. Another number of rows rounds the products differently, so tokens may part at a near tie, and only there
  int compared = 0;
  int same = 0;
  double largest_gap = 0.0;
  for (std::size_t i = 0; i < finished.size(); i += 10) {
    const Life& life = finished[i];
    auto session = make_session(backend, weights, small_options(policy));
    std::vector<Token> alone;
    double gap = 0.0;
    AddOptions add;
    add.max_new_tokens = life.count;
    add.on_logits = [&](std::span<const float> logits) {
      const std::size_t step = alone.size();
      const auto best = static_cast<Token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      const bool until_now = std::equal(alone.begin(), alone.end(), life.tokens.begin());
      if (until_now && best != life.tokens[step]) {
        gap = static_cast<double>(logits[static_cast<std::size_t>(best)] - logits[static_cast<std::size_t>(life.tokens[step])]);
      }
      alone.push_back(best);
    };
    session.add(life.prompt, add);
    while (session.active() > 0) session.step();
    ++compared;
    same += alone == life.tokens ? 1 : 0;
    largest_gap = std::max(largest_gap, gap);
    DUALDECODER_EXPECT(alone.size() == life.tokens.size(), "life %zu: %zu tokens beside others, %zu alone", i, life.tokens.size(),
                       alone.size());
    DUALDECODER_EXPECT(gap < kNearTie, "life %zu: parts from the run alone where logits differ by %f", i, gap);
  }
  std::printf("%s: %zu lives in %d steps; %d of %d have the same tokens alone, the others part at logits within %.4f\n",
              policy == MissPolicy::wait ? "wait" : "estimate", finished.size(), steps, same, compared, largest_gap);
}

/// The tokens of every step of three sequences of known lengths, one with forced tokens.
std::vector<std::vector<Token>> steps_of(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                                         SessionOptions options, bool look_ahead) {
  options.max_sequences = 3;
  options.look_ahead = look_ahead;
  std::mt19937_64 random(3);
  auto session = make_session(backend, weights, options);
  for (const int count : {20, 60}) session.add(random_life(random).prompt, {.max_new_tokens = count});
  AddOptions forced;
  forced.forced = random_life(random).prompt;
  forced.forced.resize(40, 1);
  session.add(random_life(random).prompt, forced);
  std::vector<std::vector<Token>> steps;
  while (session.active() > 0) {
    std::vector<Token>& tokens = steps.emplace_back();
    for (const TokenEvent& event : session.step().tokens) {
      tokens.push_back(static_cast<Token>(event.sequence.value));
      tokens.push_back(event.token);
    }
  }
  return steps;
}

void looking_ahead_changes_nothing(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights) {
  for (const MissPolicy policy : {MissPolicy::wait, MissPolicy::estimate}) {
    for (const Resync resync : {Resync::always, Resync::automatic}) {
      SessionOptions options = small_options(policy);
      options.resync = resync;
      const auto ahead = steps_of(backend, weights, options, true);
      const auto waiting = steps_of(backend, weights, options, false);
      DUALDECODER_EXPECT(ahead == waiting, "policy %d, resync %d: %zu steps with look-ahead differ from %zu without", int(policy),
                         int(resync), ahead.size(), waiting.size());
    }
  }
}

/// The bound of CudaBackend::prefers_full: 64 MiB of one layer, 4 KiB a token in the 8B shape.
void short_contexts_are_full(const Backend& backend) {
  ModelConfig config = small_model();
  config.heads = 32;
  config.kv_heads = 8;
  config.head_dim = 128;
  config.context = 1 << 20;
  SessionOptions options;
  options.store = StoreKind::automatic;
  for (const int sequences : {1, 4}) {
    options.max_sequences = sequences;
    options.max_context = 16384 / sequences;
    DUALDECODER_EXPECT(choose_store(backend, config, options).store == StoreKind::full, "%d x %d tokens are not full", sequences,
                       options.max_context);
    ++options.max_context;
    DUALDECODER_EXPECT(choose_store(backend, config, options).store == StoreKind::resident, "%d x %d tokens are full", sequences,
                       options.max_context);
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  namespace test = dualdecoder::test;
  return test::run_on_device([&] {
    auto own = dualdecoder::cuda::make_cuda_backend();
    dualdecoder::testing::CountingResource device(own->memory(dualdecoder::MemoryKind::device));
    dualdecoder::testing::CountingResource pinned(own->memory(dualdecoder::MemoryKind::pinned));
    auto backend = dualdecoder::cuda::make_cuda_backend({.device_memory = &device, .pinned = &pinned});
    const auto weights = dualdecoder::make_synthetic_weights(test::small_model(), 5, *backend);
    test::short_contexts_are_full(*backend);
    test::looking_ahead_changes_nothing(backend, weights);
    const int steps = test::small_run() ? 40 : 10000;
    for (const auto policy : {dualdecoder::MissPolicy::estimate, dualdecoder::MissPolicy::wait}) {
      test::soak(backend, device, pinned, weights, policy, steps);
    }
  });
}
