// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// DecodeSession::enqueue: prompts that are prefilled between the passes of a running batch. What comes out is compared bit for bit with
// what add() gives, whose values decode_session_test and golden_test check.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "tests/catch.hpp"
#include "tests/unit/counted_backend.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::test;

namespace {

SessionOptions queue_options(int sequences, int tokens_per_step) {
  SessionOptions options = tiny_options();  // blocks of 64
  options.max_sequences = sequences;
  options.prefill_tokens_per_step = tokens_per_step;
  return options;
}

std::vector<Token> alone(const std::vector<Token>& prompt, int count, SessionOptions options) {
  options.max_sequences = 1;
  return generate(tiny(), options, {prompt}, tokens_wanted(count))[0].tokens;
}

/// The events of a session, gathered by sequence.
struct Gathered {
  std::map<SequenceId, std::vector<Token>> tokens;
  std::map<SequenceId, TokenEvent> last;

  void take(const StepResult& result) {
    for (const TokenEvent& event : result.tokens) {
      if (event.reason != FinishReason::failed) tokens[event.sequence].push_back(event.token);
      if (event.finished) last[event.sequence] = event;
    }
  }
};

}  // namespace

TEST_CASE("A batch goes on between the parts of a prefill, and everybody has the text of running alone", "[session]") {
  const std::vector<Token> running = random_tokens(120, 1);
  const std::vector<Token> late = random_tokens(200, 2);  // blocks of 64, 64, 64 and 8 in each of three layers
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::front_runner, PredictorKind::layer_ahead}) {
    SessionOptions options = queue_options(2, 64);
    options.predictor = predictor;
    auto session = make_session(tiny().backend, tiny().weights, options);
    const SequenceId first = session.add(running, tokens_wanted(50));
    Gathered got;
    got.take(session.step());
    const SequenceId second = session.enqueue(late, tokens_wanted(20));
    CHECK(session.active() == 2);
    CHECK(session.length(second) == 0);
    for (int step = 1; step <= 12; ++step) {
      const std::uint64_t passes = session.statistics().passes;
      CHECK(got.tokens.count(second) == 0);
      got.take(session.step());
      CHECK(session.statistics().passes == passes + 1);
    }
    CHECK(got.tokens.at(second).size() == 1);  // with the step that ended its prefill
    CHECK(session.length(second) == 200);
    CHECK(session.statistics().prompt_tokens == 120 + 200);
    while (session.active() > 0) got.take(session.step());
    CHECK(got.tokens.at(first) == alone(running, 50, options));
    CHECK(got.tokens.at(second) == alone(late, 20, options));
    CHECK(got.last.at(second).reason == FinishReason::max_tokens);
    CHECK(session.statistics().generated_tokens == 70);
  }
}

TEST_CASE("Every store takes a prompt between the steps of others", "[session]") {
  const std::vector<Token> running = random_tokens(120, 1);
  const std::vector<Token> late = random_tokens(200, 2);
  for (const StoreKind store : {StoreKind::ping_pong, StoreKind::full, StoreKind::shadow_kv, StoreKind::specache}) {
    INFO("store " << static_cast<int>(store));
    SessionOptions options = queue_options(2, 150);
    options.store = store;
    options.predictor = PredictorKind::none;
    options.shadow_kv = {.rank = 16, .outlier_chunks = 3, .local_chunks = 2};
    try {
      memory_plan(*tiny().backend, tiny().weights->config(), options);
    } catch (const InvalidArgument&) {
      CHECK(store == StoreKind::shadow_kv);  // a build without LAPACK
      continue;
    }
    auto session = make_session(tiny().backend, tiny().weights, options);
    const SequenceId first = session.add(running, tokens_wanted(40));
    Gathered got;
    got.take(session.step());
    const SequenceId second = session.enqueue(late, tokens_wanted(20));
    while (session.active() > 0) got.take(session.step());
    CHECK(got.tokens.at(first) == alone(running, 40, options));
    CHECK(got.tokens.at(second) == alone(late, 20, options));
  }
}

TEST_CASE("Logits are those of a session that adds the prompt where its prefill ended", "[session]") {
  const std::vector<Token> running = random_tokens(120, 1);
  const std::vector<Token> late = random_tokens(200, 2);
  using Logits = std::vector<std::vector<float>>;
  const auto logits_of = [&](bool queued) {
    auto session = make_session(tiny().backend, tiny().weights, queue_options(2, 128));
    std::vector<Logits> logits(2);
    const auto wanting = [&](std::size_t which, int count) {
      AddOptions add = tokens_wanted(count);
      add.on_logits = [&logits, which](std::span<const float> row) { logits[which].emplace_back(row.begin(), row.end()); };
      return add;
    };
    session.add(running, wanting(0, 40));
    session.step();
    if (queued) session.enqueue(late, wanting(1, 15));
    while (logits[1].empty() && session.active() > 0) {
      session.step();
      // the prefill of 600 takes five steps
      if (!queued && session.statistics().passes == 6) session.add(late, wanting(1, 15));
    }
    while (session.active() > 0) session.step();
    return logits;
  };
  const std::vector<Logits> got = logits_of(true);
  REQUIRE(got[0].size() == 40);
  REQUIRE(got[1].size() == 15);
  CHECK(got == logits_of(false));
}

TEST_CASE("A step prefills the whole blocks that fit, and at least one", "[session]") {
  const std::vector<Token> prompt = random_tokens(200, 3);
  const auto done_after_steps = [&](int tokens_per_step) {
    auto session = make_session(tiny().backend, tiny().weights, queue_options(1, tokens_per_step));
    std::vector<std::size_t> done{0};
    AddOptions add = tokens_wanted(2);
    add.on_prefill = [&](std::size_t now, std::size_t total) {
      CHECK(total == 600);
      CHECK(now > done.back());
      done.back() = now;
    };
    session.enqueue(prompt, add);
    while (session.step().tokens.empty()) done.push_back(done.back());
    return done;
  };
  using Counts = std::vector<std::size_t>;
  CHECK(done_after_steps(0) == Counts{600});
  CHECK(done_after_steps(1'000'000) == Counts{600});
  CHECK(done_after_steps(600) == Counts{600});
  CHECK(done_after_steps(150) == Counts{128, 264, 400, 528, 600});  // 64+64, 64+8+64, 64+64+8, 64+64, 64+8
  CHECK(done_after_steps(1) == Counts{64, 128, 192, 200, 264, 328, 392, 400, 464, 528, 592, 600});
}

TEST_CASE("Prompts are prefilled one at a time, the oldest first", "[session]") {
  auto session = make_session(tiny().backend, tiny().weights, queue_options(3, 64));
  Gathered got;
  std::vector<SequenceId> ids;
  std::vector<SequenceId> order;
  std::vector<std::vector<Token>> prompts{random_tokens(150, 1), random_tokens(10, 2), random_tokens(70, 3)};
  const auto wanting = [&](std::size_t which) {
    AddOptions add = tokens_wanted(30);
    add.on_prefill = [&order, &ids, which](std::size_t, std::size_t) {
      if (order.empty() || order.back() != ids[which]) order.push_back(ids[which]);
    };
    return add;
  };
  for (std::size_t i = 0; i < prompts.size(); ++i) ids.push_back(session.enqueue(prompts[i], wanting(i)));
  expect_error<InvalidArgument>([&] { session.enqueue(prompts[0], {}); }, {"all 3", "max_sequences"});
  expect_error<InvalidArgument>([&] { session.add(prompts[0], {}); }, {"all 3", "max_sequences"});
  expect_error<InvalidArgument>([&] { session.enqueue({}, {}); }, {"prompt", "at least one token"});
  CHECK(session.active() == 3);
  while (session.active() > 0) got.take(session.step());
  CHECK(order == ids);
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(got.tokens.at(ids[i]) == alone(prompts[i], 30, queue_options(1, 0)));
}

TEST_CASE("add() goes behind the prompts that wait", "[session]") {
  auto session = make_session(tiny().backend, tiny().weights, queue_options(3, 64));
  const std::vector<Token> waiting = random_tokens(150, 1);
  const std::vector<Token> added = random_tokens(30, 2);
  const SequenceId running = session.add(random_tokens(50, 3), tokens_wanted(30));
  const SequenceId first = session.enqueue(waiting, tokens_wanted(10));
  for (int step = 0; step < 3; ++step) session.step();
  const SequenceId second = session.add(added, tokens_wanted(10));
  CHECK(session.length(first) == 150);
  CHECK(session.length(second) == 30);
  CHECK(session.active() == 3);
  Gathered got;
  while (session.active() > 0) got.take(session.step());
  CHECK(got.tokens.at(first) == alone(waiting, 10, queue_options(1, 0)));
  CHECK(got.tokens.at(second) == alone(added, 10, queue_options(1, 0)));
  CHECK(got.last.count(running) == 1);
}

TEST_CASE("A prompt that is removed before its prefill has ended leaves nothing behind", "[session]") {
  const std::vector<Token> running = random_tokens(120, 4);
  const std::vector<Token> removed = random_tokens(200, 5);
  const std::vector<Token> other = random_tokens(77, 6);
  for (int steps = 0; steps <= 13; ++steps) {  // waiting, after each of the 12 blocks, and decoding
    INFO("removed after " << steps << " steps");
    Counted counted;
    SessionOptions options = queue_options(3, 64);
    auto session = make_session(counted.backend, tiny().weights, options);
    Gathered got;
    const SequenceId first = session.add(running, tokens_wanted(40));
    got.take(session.step());
    const std::size_t bytes = counted.live_bytes();
    const SequenceId gone = session.enqueue(removed, tokens_wanted(20));
    const SequenceId stays = session.enqueue(other, tokens_wanted(8));
    for (int step = 0; step < steps; ++step) got.take(session.step());
    session.remove(gone);
    CHECK(session.active() == 2);
    if (steps <= 12) CHECK(counted.live_bytes() == bytes);  // after that the other's prefill has begun
    expect_error<InvalidArgument>([&] { session.remove(gone); }, {"active"});
    while (session.active() > 0) got.take(session.step());
    CHECK(got.tokens.at(first) == alone(running, 40, options));
    CHECK(got.tokens.at(stays) == alone(other, 8, options));
    CHECK(got.tokens.count(gone) == (steps >= 12 ? 1U : 0U));
  }
}

TEST_CASE("Memory that runs out at each allocation in turn of an enqueued prefill ends that sequence alone", "[session]") {
  const std::vector<Token> running = random_tokens(120, 7);
  const std::vector<Token> late = random_tokens(90, 8);
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    INFO("store " << static_cast<int>(store));
    Counted counted;
    SessionOptions options = queue_options(2, 64);
    options.store = store;
    auto session = make_session(counted.backend, tiny().weights, options);
    Gathered got;
    const SequenceId first = session.add(running, tokens_wanted(300));
    got.take(session.step());
    const std::size_t bytes = counted.live_bytes();
    int failures = 0;
    for (testing::CountingResource* resource : {&counted.device, &counted.pinned}) {
      for (std::uint64_t n = 0;; ++n) {
        REQUIRE(n < 100);
        const SequenceId id = session.enqueue(late, tokens_wanted(3));
        resource->fail_at(n);
        while (got.last.count(id) == 0) got.take(session.step());
        resource->fail_at(testing::CountingResource::kNever);
        CHECK(counted.live_bytes() == bytes);
        CHECK(session.active() == 1);
        CHECK_FALSE(session.failed());
        const TokenEvent& last = got.last.at(id);
        if (last.reason == FinishReason::max_tokens) break;
        ++failures;
        CHECK(last.reason == FinishReason::failed);
        CHECK(last.token == -1);
        CHECK(got.tokens.count(id) == 0);
        REQUIRE(last.error);
        CHECK_THROWS_AS(std::rethrow_exception(last.error), OutOfMemory);
        expect_error<InvalidArgument>([&] { session.length(id); }, {"active"});
      }
    }
    CHECK(failures >= 2);
    const SequenceId second = session.enqueue(late, tokens_wanted(9));
    while (got.last.count(second) == 0) got.take(session.step());
    CHECK(got.tokens.at(second) == alone(late, 9, options));
    while (session.active() > 0) got.take(session.step());
    CHECK(got.tokens.at(first) == alone(running, 300, options));
  }
}

TEST_CASE("A callback that throws in an enqueued prefill ends that sequence alone", "[session]") {
  const std::vector<Token> running = random_tokens(120, 9);
  const std::vector<Token> late = random_tokens(200, 10);
  Counted counted;
  const SessionOptions options = queue_options(2, 100);
  auto session = make_session(counted.backend, tiny().weights, options);
  Gathered got;
  const SequenceId first = session.add(running, tokens_wanted(300));
  got.take(session.step());
  const std::size_t bytes = counted.live_bytes();
  for (int fail_at = 0; fail_at <= 12; ++fail_at) {  // the 12 blocks, then the first logits
    int calls = 0;
    AddOptions add = tokens_wanted(5);
    add.on_prefill = [&](std::size_t, std::size_t) {
      if (calls++ == fail_at) throw std::runtime_error("stop");
    };
    add.on_logits = [](std::span<const float>) { throw std::runtime_error("stop"); };
    const SequenceId id = session.enqueue(late, add);
    while (got.last.count(id) == 0) got.take(session.step());
    CHECK(got.last.at(id).reason == FinishReason::failed);
    REQUIRE(got.last.at(id).error);
    CHECK_THROWS_AS(std::rethrow_exception(got.last.at(id).error), std::runtime_error);
    CHECK(calls == std::min(fail_at + 1, 12));
    CHECK(counted.live_bytes() == bytes);
    CHECK(session.active() == 1);
  }
  while (session.active() > 0) got.take(session.step());
  CHECK(got.tokens.at(first) == alone(running, 300, options));
}

TEST_CASE("The failure of a prompt that add() had to prefill first is its own event", "[session]") {
  auto session = make_session(tiny().backend, tiny().weights, queue_options(3, 64));
  AddOptions throwing = tokens_wanted(5);
  throwing.on_prefill = [](std::size_t, std::size_t) { throw std::runtime_error("stop"); };
  const SequenceId failing = session.enqueue(random_tokens(30, 1), throwing);
  const std::vector<Token> prompt = random_tokens(40, 2);
  SECTION("add() itself succeeds") {
    const SequenceId added = session.add(prompt, tokens_wanted(6));
    CHECK(session.active() == 2);
    Gathered got;
    got.take(session.step());
    CHECK(session.active() == 1);
    CHECK(got.last.at(failing).reason == FinishReason::failed);
    while (session.active() > 0) got.take(session.step());
    CHECK(got.tokens.at(added) == alone(prompt, 6, queue_options(1, 0)));
  }
  SECTION("add() fails too") {
    CHECK_THROWS_AS(session.add(prompt, throwing), std::runtime_error);
    CHECK(session.active() == 1);
    const StepResult& result = session.step();
    REQUIRE(result.tokens.size() == 1);
    CHECK(result.tokens[0].sequence == failing);
    CHECK(result.tokens[0].reason == FinishReason::failed);
    CHECK(session.active() == 0);
  }
  SECTION("the sequence is removed before its event is handed out") {
    const SequenceId added = session.add(prompt, tokens_wanted(6));
    session.remove(failing);
    CHECK(session.active() == 1);
    for (const TokenEvent& event : session.step().tokens) CHECK(event.sequence == added);
  }
}

TEST_CASE("A prefill beside a full batch takes what the plan says", "[session]") {
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    Counted counted;
    SessionOptions options = queue_options(3, 200);
    options.store = store;
    const MemoryPlan plan = memory_plan(*counted.backend, tiny().weights->config(), options);
    auto session = make_session(counted.backend, tiny().weights, options);
    for (int i = 0; i < 2; ++i) session.add(random_tokens(options.max_context - 40, 9), tokens_wanted(40));
    session.enqueue(random_tokens(options.max_context, 9), tokens_wanted(1));
    while (session.active() > 0) session.step();
    INFO("store " << static_cast<int>(store) << ": peak " << counted.device.peak_bytes() << ", plan " << plan.device_bytes());
    CHECK(counted.device.peak_bytes() <= plan.device_bytes());
    CHECK(double(counted.device.peak_bytes()) >= 0.95 * double(plan.device_bytes()));
    CHECK(counted.pinned.peak_bytes() <= plan.pinned_bytes());
  }
}
