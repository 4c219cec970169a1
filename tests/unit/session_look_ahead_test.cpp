// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// SessionOptions::look_ahead: a session that launches the next pass before it reads this one's tokens gives, step by step, what a session
// gives that waits. The backend is a CPU backend whose outcomes arrive when they are waited for and not before.
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "tests/catch.hpp"
#include "tests/unit/asynchronous_backend.hpp"
#include "tests/unit/counted_backend.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::test {
namespace {

using Event = std::vector<std::uint64_t>;
using Steps = std::vector<std::vector<Event>>;  // events of each step: sequence, token, reason

std::vector<Event> events_of(const StepResult& result) {
  std::vector<Event> events;
  for (const TokenEvent& event : result.tokens) {
    events.push_back({event.sequence.value, static_cast<std::uint64_t>(event.token), static_cast<std::uint64_t>(event.reason)});
  }
  return events;
}

/// What a session did.
struct Ran {
  Steps steps;
  SessionStatistics statistics;
  Seen seen;

  std::map<std::uint64_t, std::vector<std::uint64_t>> texts() const {
    std::map<std::uint64_t, std::vector<std::uint64_t>> texts;
    for (const std::vector<Event>& step : steps) {
      for (const Event& event : step) texts[event[0]].push_back(event[1]);
    }
    return texts;
  }
};

using Act = std::function<void(DecodeSession&, int step)>;

Ran run(SessionOptions options, bool look_ahead, const Act& before_step) {
  Ran ran;
  options.look_ahead = look_ahead;
  {
    const auto backend = std::make_shared<AsynchronousBackend>(tiny().backend, ran.seen);
    auto session = make_session(backend, tiny().weights, options);
    for (int step = 0;; ++step) {
      before_step(session, step);
      if (session.active() == 0) break;
      ran.steps.push_back(events_of(session.step()));
    }
    ran.statistics = session.statistics();
  }
  CHECK(ran.seen.outstanding == 0);
  CHECK(ran.seen.misused == 0);
  CHECK(ran.seen.most_outstanding <= (look_ahead ? 2 : 1));
  return ran;
}

void check_same(const Ran& got, const Ran& want) {
  CHECK(got.steps == want.steps);
  CHECK(got.statistics.passes == want.statistics.passes);
  CHECK(got.statistics.generated_tokens == want.statistics.generated_tokens);
  CHECK(got.statistics.resyncs == want.statistics.resyncs);
  CHECK(got.statistics.guesses == want.statistics.guesses);
  CHECK(got.statistics.right_guesses == want.statistics.right_guesses);
}

/// Runs both ways and compares every step.
Ran check_both(const SessionOptions& options, const Act& before_step) {
  Ran ahead = run(options, true, before_step);
  check_same(ahead, run(options, false, before_step));
  return ahead;
}

Act adding(const std::vector<std::pair<std::vector<Token>, AddOptions>>& sequences) {
  return [sequences](DecodeSession& session, int step) {
    if (step > 0) return;
    for (const auto& [prompt, add] : sequences) session.add(prompt, add);
  };
}

TEST_CASE("Looking ahead changes no step of a lone sequence", "[session]") {
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::layer_ahead, PredictorKind::front_runner}) {
    for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
      for (const MissPolicy policy : {MissPolicy::wait, MissPolicy::estimate}) {
        SessionOptions options = tiny_options();
        options.predictor = predictor;
        options.resync = resync;
        options.miss_policy = policy;
        INFO("predictor " << int(predictor) << ", resync " << int(resync) << ", policy " << int(policy));
        const Ran ahead = check_both(options, adding({{random_tokens(301, 1), tokens_wanted(40)}}));
        CHECK(ahead.seen.most_outstanding == 2);
        CHECK(ahead.statistics.generated_tokens == 40);
        CHECK(ahead.seen.launches > 20);
      }
    }
  }
}

TEST_CASE("Looking ahead changes no step of a batch whose ends are known", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 4;
  options.miss_policy = MissPolicy::estimate;  // so that each step's set of sequences matters
  AddOptions forced;
  forced.forced = random_tokens(30, 5);
  AddOptions drawn = tokens_wanted(45);
  drawn.sampling.temperature = 0.9F;
  drawn.sampling.repetition_penalty = 1.2F;
  for (const Resync resync : {Resync::always, Resync::automatic}) {
    options.resync = resync;
    check_both(options, adding({{random_tokens(200, 1), tokens_wanted(17)},
                                {random_tokens(150, 2), drawn},
                                {random_tokens(80, 3), forced},
                                {random_tokens(500, 4), tokens_wanted(1000)}}));  // ends where the context is full
  }
}

TEST_CASE("Forced tokens come out in their order while passes are launched ahead", "[session]") {
  AddOptions forced;
  forced.forced = random_tokens(40, 6);  // random text, so that most guesses are wrong
  SessionOptions options = tiny_options();
  options.resync = Resync::always;
  const Ran ahead = check_both(options, adding({{random_tokens(120, 7), forced}}));
  CHECK(ahead.texts().at(1) == std::vector<std::uint64_t>(forced.forced.begin(), forced.forced.end()));
  CHECK(ahead.statistics.resyncs > 20);
}

TEST_CASE("A pass beyond a stop token is not seen", "[session]") {
  SessionOptions options = tiny_options();
  const std::vector<Token> prompt = random_tokens(120, 8);
  const std::vector<Token> text = generate(tiny(), options, {prompt}, tokens_wanted(40))[0].tokens;
  AddOptions stopping = tokens_wanted(40);
  stopping.stop_tokens = {text[12]};
  const auto again = [&](DecodeSession& session, int) {  // thrice, each after the one before has ended
    if (session.active() == 0 && session.statistics().prompt_tokens < 360) session.add(prompt, stopping);
  };
  const Ran ahead = check_both(options, again);
  std::vector<std::uint64_t> stopped;
  for (const Token token : text) {
    stopped.push_back(static_cast<std::uint64_t>(token));
    if (token == text[12]) break;
  }
  CHECK(ahead.texts().at(1) == stopped);
  CHECK(ahead.texts().at(3) == stopped);
}

TEST_CASE("A stop token leaves the texts of the others as they are", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 3;
  std::vector<std::vector<Token>> prompts{random_tokens(120, 9), random_tokens(90, 10), random_tokens(33, 11)};
  std::vector<std::pair<std::vector<Token>, AddOptions>> sequences;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    AddOptions add = tokens_wanted(50);
    add.stop_tokens = {generate(tiny(), options, {prompts[i]}, tokens_wanted(40))[0].tokens[10 + 9 * i]};
    sequences.emplace_back(prompts[i], add);
  }
  const Ran ahead = run(options, true, adding(sequences));
  const Ran waiting = run(options, false, adding(sequences));
  CHECK(ahead.texts() == waiting.texts());
  CHECK(ahead.statistics.generated_tokens == waiting.statistics.generated_tokens);
}

TEST_CASE("Sequences are added, enqueued and removed while a pass is in flight", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 3;
  options.prefill_tokens_per_step = 100;
  const std::vector<Token> stays = random_tokens(130, 12);
  const std::vector<Token> added = random_tokens(77, 13);
  const std::vector<Token> queued = random_tokens(160, 14);
  const auto alone = [&](const std::vector<Token>& prompt, int count) {
    const std::vector<Token> text = generate(tiny(), tiny_options(), {prompt}, tokens_wanted(count))[0].tokens;
    return std::vector<std::uint64_t>(text.begin(), text.end());
  };
  for (int removed_at = 4; removed_at <= 12; ++removed_at) {
    std::optional<SequenceId> removed;
    const auto act = [&](DecodeSession& session, int step) {
      if (step == 0) session.add(stays, tokens_wanted(60));
      if (step == 3) removed = session.add(random_tokens(50, 15), tokens_wanted(60));
      if (step == removed_at) session.remove(*removed);
      if (step == removed_at) session.add(added, tokens_wanted(20));  // into the same place
      if (step == removed_at + 1) session.enqueue(queued, tokens_wanted(15));
    };
    auto texts = run(options, true, act).texts();
    CHECK(texts.at(1) == alone(stays, 60));
    CHECK(texts.at(3) == alone(added, 20));
    CHECK(texts.at(4) == alone(queued, 15));
  }
}

TEST_CASE("Logits are those of the tokens they come with", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  const auto logits_of = [&](bool look_ahead) {
    std::vector<std::vector<float>> logits;
    const auto act = [&](DecodeSession& session, int step) {
      if (step == 0) session.add(random_tokens(140, 16), tokens_wanted(50));
      AddOptions watched = tokens_wanted(12);
      watched.on_logits = [&](std::span<const float> row) { logits.emplace_back(row.begin(), row.end()); };
      // a pass without the newcomer is in flight in one session and not in the other
      if (step == 5) session.add(random_tokens(60, 17), watched);
    };
    const Ran ran = run(options, look_ahead, act);
    CHECK(ran.statistics.generated_tokens == 62);
    return logits;
  };
  const auto logits = logits_of(true);
  REQUIRE(logits.size() == 12);
  CHECK(logits == logits_of(false));
}

TEST_CASE("A callback that throws while the session looked ahead loses no token", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  const std::vector<Token> plain = random_tokens(140, 18);
  const std::vector<Token> watched = random_tokens(60, 19);
  Seen seen;
  auto session = make_session(std::make_shared<AsynchronousBackend>(tiny().backend, seen), tiny().weights, options);
  session.add(plain, tokens_wanted(40));
  std::map<std::uint64_t, std::vector<Token>> got;
  int calls = 0;
  int thrown = 0;
  for (int step = 0; session.active() > 0; ++step) {
    if (step == 4) {
      AddOptions add = tokens_wanted(10);
      add.on_logits = [&](std::span<const float>) {
        if (++calls % 3 == 0) throw std::runtime_error("stop");
      };
      session.add(watched, add);
    }
    try {
      for (const TokenEvent& event : session.step().tokens) got[event.sequence.value].push_back(event.token);
    } catch (const std::runtime_error&) {
      ++thrown;
    }
  }
  CHECK(thrown == 3);
  CHECK(got.at(1) == generate(tiny(), tiny_options(), {plain}, tokens_wanted(40))[0].tokens);
  CHECK(got.at(2) == generate(tiny(), tiny_options(), {watched}, tokens_wanted(10))[0].tokens);
}

TEST_CASE("A session that goes with a pass in flight waits for it", "[session]") {
  Counted counted;
  Seen seen;
  {
    const auto backend = std::make_shared<AsynchronousBackend>(counted.backend, seen);
    auto session = make_session(backend, tiny().weights, tiny_options());
    session.add(random_tokens(60, 20), tokens_wanted(30));
    session.step();
    CHECK(seen.outstanding == 1);
    session = make_session(backend, tiny().weights, tiny_options());
    CHECK(seen.outstanding == 0);
    session.add(random_tokens(60, 20), tokens_wanted(30));
    session.step();
    CHECK(session.active() == 1);
    CHECK(seen.outstanding == 1);
  }
  CHECK(seen.outstanding == 0);
  CHECK(counted.live_bytes() == 0);
}

}  // namespace
}  // namespace dualdecoder::test
