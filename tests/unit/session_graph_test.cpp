// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A session on a backend that records passes: the same tokens as one that runs them, whatever comes and goes between the launches. The
// recording backend is a CPU backend whose graph calls what it was given again at every launch.
#include <memory>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "tests/catch.hpp"
#include "tests/unit/asynchronous_backend.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::test {
namespace {

/// Two sequences, a third after ten steps, one with forced tokens and one with a repetition penalty. All tokens in the order of the events.
std::vector<Token> tokens_of(const std::shared_ptr<Backend>& backend) {
  const auto weights = make_synthetic_weights(tiny_config(), 7, *backend, {.matrix_type = DataType::f32, .threads = 1});
  SessionOptions options = tiny_options();
  options.max_sequences = 3;
  options.miss_policy = MissPolicy::estimate;
  options.look_ahead = false;  // session_look_ahead_test
  auto session = make_session(backend, weights, options);
  session.add(random_tokens(200, 1), {.max_new_tokens = 30});
  AddOptions penalised;
  penalised.max_new_tokens = 50;
  penalised.sampling.temperature = 0.8F;
  penalised.sampling.repetition_penalty = 1.3F;
  session.add(random_tokens(150, 2), penalised);
  std::vector<Token> tokens;
  for (int step = 0; session.active() > 0; ++step) {
    if (step == 10) {
      AddOptions forced;
      forced.forced = random_tokens(20, 4);
      session.add(random_tokens(99, 3), forced);
    }
    for (const TokenEvent& event : session.step().tokens) {
      tokens.push_back(static_cast<Token>(event.sequence.value));
      tokens.push_back(event.token);
    }
  }
  return tokens;
}

TEST_CASE("Recorded passes give the tokens of passes that run at once", "[session]") {
  Seen recorded;
  const auto backend = std::make_shared<AsynchronousBackend>(cpu::make_cpu_backend({.threads = 2}), recorded);
  const std::vector<Token> with_graphs = tokens_of(backend);
  CHECK(with_graphs == tokens_of(cpu::make_cpu_backend({.threads = 2})));
  CHECK(with_graphs.size() == 2 * 100);
  CHECK(recorded.graphs >= 2);    // two and three places
  CHECK(recorded.graphs <= 4);    // and whether one sequence is alone
  CHECK(recorded.launches > 30);  // most of the passes
}

}  // namespace
}  // namespace dualdecoder::test
