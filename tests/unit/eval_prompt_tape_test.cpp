// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The independent source is a session without a tape: the same prompts on the backend itself.
#include "examples/eval/prompt_tape.hpp"

#include <stdexcept>

#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::examples {
namespace {

using test::SessionModel;
using test::Text;

Text taped(TapedBackend& backend, PromptTape& tape, DecodeSession& session, const std::vector<Token>& prompt, int count) {
  Text text;
  AddOptions add = test::tokens_wanted(count);
  add.on_logits = [&text](std::span<const float> logits) { text.logits.emplace_back(logits.begin(), logits.end()); };
  backend.with(tape, [&] { session.add(prompt, add); });
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) text.tokens.push_back(event.token);
  }
  return text;
}

}  // namespace

TEST_CASE("a prompt replayed for another store gives the bits of its own prefill") {
  const SessionModel& model = test::tiny();
  const auto backend = std::make_shared<TapedBackend>(model.backend);
  for (const int length : {40, 64, 150, 200}) {  // blocks of 64; fewer and more tokens than calibration looks at
    INFO(length);
    const auto prompt = test::random_tokens(length, 3);
    PromptTape tape(*backend, test::tiny_config(), length);
    for (const StoreKind store : {StoreKind::full, StoreKind::resident, StoreKind::ping_pong, StoreKind::resident}) {
      SessionOptions options = test::tiny_options();
      options.store = store;
      if (store == StoreKind::full) options.predictor = PredictorKind::none;
      DecodeSession session = make_session(backend, model.weights, options);
      const Text text = taped(*backend, tape, session, prompt, 12);
      const Text expected = test::generate(model, options, {prompt}, test::tokens_wanted(12)).front();
      CHECK(text.tokens == expected.tokens);
      CHECK(text.logits == expected.logits);
    }
  }
}

TEST_CASE("a replay computes nothing of its prompt: another prompt gives the recorded one's first logits") {
  const SessionModel& model = test::tiny();
  const auto backend = std::make_shared<TapedBackend>(model.backend);
  PromptTape tape(*backend, test::tiny_config(), 100);
  DecodeSession session = make_session(backend, model.weights, test::tiny_options());
  const Text first = taped(*backend, tape, session, test::random_tokens(100, 1), 1);
  const Text second = taped(*backend, tape, session, test::random_tokens(100, 2), 1);
  CHECK(second.logits == first.logits);
}

TEST_CASE("a recording that is broken off is made anew") {
  const SessionModel& model = test::tiny();
  const auto backend = std::make_shared<TapedBackend>(model.backend);
  const auto prompt = test::random_tokens(150, 3);
  PromptTape tape(*backend, test::tiny_config(), 150);
  DecodeSession session = make_session(backend, model.weights, test::tiny_options());
  AddOptions add = test::tokens_wanted(4);
  add.on_prefill = [](std::size_t done, std::size_t) {
    if (done > 200) throw std::runtime_error("enough");
  };
  CHECK_THROWS_AS(backend->with(tape, [&] { session.add(prompt, add); }), std::runtime_error);
  const Text text = taped(*backend, tape, session, prompt, 4);
  CHECK(text.logits == test::generate(model, test::tiny_options(), {prompt}, test::tokens_wanted(4)).front().logits);
}

}  // namespace dualdecoder::examples
