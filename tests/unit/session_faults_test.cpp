// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// DecodeSession under bad input, callbacks that throw, memory that runs out at each allocation in turn (SQLite's method) and a transfer
// that is lost: a clear error, nothing leaked, and other sequences as if nothing had happened.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/forwarding.hpp"
#include "src/low_rank.hpp"
#include "tests/catch.hpp"
#include "tests/unit/counted_backend.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::test;

namespace {

DecodeSession make(const SessionOptions& options) { return make_session(tiny().backend, tiny().weights, options); }

std::vector<Token> rest_of(DecodeSession& session, SequenceId id) {
  std::vector<Token> tokens;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) {
      if (event.sequence == id) tokens.push_back(event.token);
    }
  }
  return tokens;
}

std::vector<Token> expected(const std::vector<Token>& prompt, int count, SessionOptions options = tiny_options()) {
  return generate(tiny(), options, {prompt}, tokens_wanted(count))[0].tokens;
}

std::vector<SessionOptions> configurations() {
  std::vector<SessionOptions> list;
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full, StoreKind::shadow_kv, StoreKind::specache}) {
    if (store == StoreKind::shadow_kv && !cpu::has_lapack()) continue;
    for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::layer_ahead, PredictorKind::front_runner}) {
      SessionOptions options = tiny_options();
      options.store = store;
      options.predictor = predictor;
      options.max_sequences = 2;
      list.push_back(options);
    }
  }
  return list;
}

}  // namespace

TEST_CASE("Options that no session can run are refused by name", "[session]") {
  const auto refused = [](auto change, std::initializer_list<const char*> parts) {
    SessionOptions options = tiny_options();
    change(options);
    expect_error<InvalidArgument>([&] { make(options); }, parts);
    expect_error<InvalidArgument>([&] { memory_plan(*tiny().backend, tiny().weights->config(), options); }, parts);
  };
  refused([](SessionOptions& o) { o.budget_tokens = 0; }, {"budget_tokens = 0", "at least chunk_tokens"});
  refused([](SessionOptions& o) { o.budget_tokens = 3; }, {"budget_tokens = 3", "at least chunk_tokens"});
  refused([](SessionOptions& o) { o.budget_tokens = -8; }, {"budget_tokens = -8"});
  refused([](SessionOptions& o) { o.chunk_tokens = 5; }, {"chunk_tokens = 5", "2, 4, 8, 16 or 32"});
  refused([](SessionOptions& o) { o.chunk_tokens = 0; }, {"chunk_tokens = 0", "2, 4, 8, 16 or 32"});
  refused([](SessionOptions& o) { o.max_context = 4096; }, {"max_context = 4096", "2048"});
  refused([](SessionOptions& o) { o.max_context = 0; }, {"max_context = 0"});
  refused([](SessionOptions& o) { o.max_sequences = 0; }, {"max_sequences = 0"});
  refused([](SessionOptions& o) { o.sink_tokens = -1; }, {"sink_tokens = -1"});
  refused([](SessionOptions& o) { o.local_tokens = 0; }, {"local_tokens = 0"});
  refused([](SessionOptions& o) { o.bias_scale = 3.0F; }, {"bias_scale = 3"});
  refused([](SessionOptions& o) { o.value_group_chunks = 3; }, {"value_group_chunks = 3", "1, 2 or 4"});
  refused([](SessionOptions& o) { o.slots_per_budget = 0.5F; }, {"slots_per_budget = 0.5"});
  refused([](SessionOptions& o) { o.kv_type = DataType::i8; }, {"kv_type = i8", "f32 or bf16"});
  refused([](SessionOptions& o) { o.prefill_block = -1; }, {"prefill_block = -1", "or more"});
  refused([](SessionOptions& o) { o.prefill_tokens_per_step = -1; }, {"prefill_tokens_per_step = -1", "or more"});
  refused([](SessionOptions& o) { o.link_bytes_per_second = -1.0; }, {"link_bytes_per_second = -1"});
  refused([](SessionOptions& o) { o.link_latency = std::chrono::nanoseconds(-5); }, {"link_latency = -5"});
  expect_error<InvalidArgument>([] { DecodeSession(nullptr, tiny().weights, tiny_options(), std::make_unique<NoPrediction>()); },
                                {"backend", "must all be given"});
  expect_error<InvalidArgument>([] { DecodeSession(tiny().backend, nullptr, tiny_options(), std::make_unique<NoPrediction>()); },
                                {"weights", "must all be given"});
  expect_error<InvalidArgument>([] { DecodeSession(tiny().backend, tiny().weights, tiny_options(), nullptr); },
                                {"predictor", "must all be given"});
}

TEST_CASE("A sequence that cannot be added is refused by name and leaves the session as it was", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  auto session = make(options);
  const std::vector<Token> prompt = random_tokens(100, 1);
  const SequenceId first = session.add(prompt, tokens_wanted(20));
  const auto refused = [&](const std::vector<Token>& tokens, const AddOptions& add, std::initializer_list<const char*> parts) {
    expect_error<InvalidArgument>([&] { session.add(tokens, add); }, parts);
    CHECK(session.active() == 1);
    CHECK_FALSE(session.failed());
  };
  refused({}, {}, {"prompt", "at least one token"});
  refused({1, 2, 128}, {}, {"prompt token = 128", "0 .. 127"});
  refused({-1}, {}, {"prompt token = -1", "0 .. 127"});
  refused({2147483647}, {}, {"prompt token = 2147483647"});
  refused(random_tokens(513, 2), {}, {"prompt = 513 tokens", "max_context = 512"});
  refused({1}, tokens_wanted(0), {"max_new_tokens = 0", "at least 1"});
  AddOptions add;
  add.forced = {5, 400};
  refused({1}, add, {"forced token = 400", "0 .. 127"});
  add = {};
  add.sampling.temperature = -1.0F;
  refused({1}, add, {"temperature = -1"});
  add = {};
  add.sampling.top_p = 0.0F;
  refused({1}, add, {"top_p = 0"});
  add = {};
  add.sampling.repetition_penalty = 0.0F;
  refused({1}, add, {"repetition_penalty = 0"});
  expect_error<InvalidArgument>([&] { session.remove(SequenceId{77}); }, {"sequence = 77", "active"});
  expect_error<InvalidArgument>([&] { session.length(SequenceId{77}); }, {"sequence = 77", "active"});

  const SequenceId second = session.add(random_tokens(30, 3), tokens_wanted(5));
  expect_error<InvalidArgument>([&] { session.add(prompt, {}); }, {"all 2", "max_sequences"});
  session.remove(second);
  expect_error<InvalidArgument>([&] { session.remove(second); }, {"sequence = 2", "active"});
  CHECK(rest_of(session, first) == expected(prompt, 20, options));
  expect_error<InvalidArgument>([&] { session.remove(first); }, {"active"});
}

TEST_CASE("A callback that throws stops its own prefill and nothing else", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  const std::vector<Token> prompt = random_tokens(150, 4);
  auto session = make(options);
  const SequenceId other = session.add(prompt, tokens_wanted(25));
  for (int i = 0; i < 3; ++i) session.step();
  const std::vector<Token> refused = random_tokens(200, 5);
  for (int fail_at = 0; fail_at < 12; ++fail_at) {  // 3 layers of 4 blocks
    AddOptions add = tokens_wanted(5);
    int calls = 0;
    add.on_prefill = [&](std::size_t done, std::size_t total) {
      CHECK(total == 3 * 200);
      CHECK(done <= total);
      if (calls++ == fail_at) throw std::runtime_error("stop");
    };
    CHECK_THROWS_AS(session.add(refused, add), std::runtime_error);
    CHECK(calls == fail_at + 1);
    CHECK(session.active() == 1);
  }
  AddOptions add = tokens_wanted(5);
  add.on_logits = [](std::span<const float>) { throw std::runtime_error("stop"); };
  CHECK_THROWS_AS(session.add(refused, add), std::runtime_error);
  CHECK(session.active() == 1);
  std::size_t reported = 0;
  add = tokens_wanted(5);
  add.on_prefill = [&](std::size_t done, std::size_t) { reported = done; };
  const SequenceId late = session.add(refused, add);
  CHECK(reported == 600);
  std::vector<Token> tokens_of_late;
  std::vector<Token> tokens;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) (event.sequence == late ? tokens_of_late : tokens).push_back(event.token);
  }
  CHECK(tokens_of_late == expected(refused, 5));
  const std::vector<Token> whole = expected(prompt, 25);
  REQUIRE(tokens.size() < whole.size());
  CHECK(std::equal(tokens.rbegin(), tokens.rend(), whole.rbegin()));
  CHECK(other != late);
}

TEST_CASE("A callback that throws in a step loses no token", "[session]") {
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  const std::vector<std::vector<Token>> prompts{random_tokens(150, 4), random_tokens(80, 6)};
  auto session = make(options);
  int calls = 0;
  AddOptions add = tokens_wanted(12);
  add.on_logits = [&](std::span<const float>) {
    if (++calls % 3 == 0) throw std::runtime_error("stop");
  };
  const SequenceId throwing = session.add(prompts[0], add);
  const SequenceId other = session.add(prompts[1], tokens_wanted(12));
  std::vector<Token> got[2];
  int thrown = 0;
  for (int step = 0; step < 100; ++step) {
    try {
      for (const TokenEvent& event : session.step().tokens) got[event.sequence == other ? 1 : 0].push_back(event.token);
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()) == "stop");
      ++thrown;
    }
  }
  CHECK(thrown == 4);
  CHECK_FALSE(session.failed());
  CHECK(session.active() == 0);
  CHECK(throwing != other);
  CHECK(got[0] == expected(prompts[0], 12));
  CHECK(got[1] == expected(prompts[1], 12));
}

TEST_CASE("Memory that runs out at each allocation in turn of making a session leaks nothing", "[session]") {
  for (const SessionOptions& options : configurations()) {
    Counted counted;
    int failures = 0;
    for (testing::CountingResource* resource : {&counted.device, &counted.pinned}) {
      for (std::uint64_t n = 0;; ++n) {
        REQUIRE(n < 100);
        resource->fail_at(n);
        bool made = false;
        try {
          make_session(counted.backend, tiny().weights, options);
          made = true;
        } catch (const OutOfMemory& error) {
          ++failures;
          CHECK(std::string(error.what()).find("out of memory") != std::string::npos);
          CHECK(error.asked_bytes() > 0);
        }
        CHECK(counted.live_bytes() == 0);
        if (made) break;
      }
      resource->fail_at(testing::CountingResource::kNever);
    }
    CHECK(failures >= 4);  // the dense part, the store, the lists and the activations
  }
}

TEST_CASE("Memory that runs out at each allocation in turn of add leaves the session as it was", "[session]") {
  const std::vector<Token> prompt = random_tokens(120, 7);
  const std::vector<Token> late = random_tokens(90, 8);
  for (const SessionOptions& options : configurations()) {
    INFO("store " << static_cast<int>(options.store) << ", predictor " << static_cast<int>(options.predictor));
    Counted counted;
    {
      auto session = make_session(counted.backend, tiny().weights, options);
      const SequenceId first = session.add(prompt, tokens_wanted(15));
      const std::size_t bytes = counted.live_bytes();
      int failures = 0;
      for (testing::CountingResource* resource : {&counted.device, &counted.pinned}) {
        for (std::uint64_t n = 0;; ++n) {
          REQUIRE(n < 100);
          resource->fail_at(n);
          bool added = false;
          try {
            session.remove(session.add(late, tokens_wanted(9)));
            added = true;
          } catch (const OutOfMemory&) {
            ++failures;
          }
          CHECK(counted.live_bytes() == bytes);
          CHECK(session.active() == 1);
          CHECK_FALSE(session.failed());
          if (added) break;
        }
        resource->fail_at(testing::CountingResource::kNever);
      }
      CHECK(failures >= 2);
      const SequenceId second = session.add(late, tokens_wanted(9));
      std::vector<Token> got[2];
      while (session.active() > 0) {
        for (const TokenEvent& event : session.step().tokens) got[event.sequence == second ? 1 : 0].push_back(event.token);
      }
      CHECK(first != second);
      SessionOptions alone = options;
      CHECK(got[0] == expected(prompt, 15, alone));
      CHECK(got[1] == expected(late, 9, alone));
    }
    CHECK(counted.live_bytes() == 0);
  }
}

TEST_CASE("A step takes no memory after the first", "[session]") {
  for (const SessionOptions& options : configurations()) {
    Counted counted;
    auto session = make_session(counted.backend, tiny().weights, options);
    session.add(random_tokens(250, 7), tokens_wanted(60));
    session.add(random_tokens(31, 8), tokens_wanted(30));
    session.step();
    const std::uint64_t allocations = counted.allocations();
    while (session.active() > 0) session.step();
    CHECK(counted.allocations() == allocations);
  }
}

TEST_CASE("A session takes what its plan says", "[session]") {
  for (SessionOptions options : configurations()) {
    INFO("store " << static_cast<int>(options.store) << ", predictor " << static_cast<int>(options.predictor));
    Counted counted;
    const MemoryPlan plan = memory_plan(*counted.backend, tiny().weights->config(), options);
    CHECK(counted.allocations() == 0);
    auto session = make_session(counted.backend, tiny().weights, options);
    const std::size_t pinned = counted.pinned.live_bytes();
    for (int i = 0; i < options.max_sequences; ++i) session.add(random_tokens(options.max_context, 9), tokens_wanted(3));
    INFO("device: peak " << counted.device.peak_bytes() << ", plan " << plan.device_bytes());
    CHECK(counted.device.peak_bytes() <= plan.device_bytes());
    CHECK(double(counted.device.peak_bytes()) >= 0.95 * double(plan.device_bytes()));
    CHECK(counted.pinned.peak_bytes() == plan.pinned_bytes());
    CHECK(plan.pageable_bytes() == 0);
    while (session.active() > 0) session.step();
    CHECK(counted.device.peak_bytes() <= plan.device_bytes());
    CHECK(counted.pinned.live_bytes() == pinned);
  }
}

TEST_CASE("A thousand sequences come and go and leave memory flat", "[session]") {
  Counted counted;
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  auto session = make_session(counted.backend, tiny().weights, options);
  const std::vector<Token> stays = random_tokens(60, 11);
  const SequenceId id = session.add(stays, tokens_wanted(400));
  session.step();
  const std::size_t bytes = counted.live_bytes();
  const std::size_t allocations = counted.live_allocations();
  const std::size_t peak_before = counted.device.peak_bytes();
  std::size_t wrong = 0;
  for (int i = 0; i < 1000; ++i) {
    const SequenceId guest = session.add(random_tokens(1 + i % 50, 12), tokens_wanted(5));
    if (i % 4 == 0 && session.active() > 1) session.step();
    session.remove(guest);
    if (counted.live_bytes() != bytes || counted.live_allocations() != allocations) ++wrong;
  }
  CHECK(wrong == 0);
  CHECK(counted.device.peak_bytes() <= peak_before + 64 * 1024);
  CHECK(session.active() == 1);
  CHECK(session.length(id) > 60);
}

namespace {

/// Passes everything through but for one drain that reports a lost transfer.
class LossyScheduler final : public testing::ForwardingScheduler {
 public:
  LossyScheduler(std::unique_ptr<TransferScheduler> inner, const bool& lost) : ForwardingScheduler(std::move(inner)), lost_(lost) {}
  void drain(StreamRef stream) override {
    ForwardingScheduler::drain(stream);
    if (lost_) throw IoError("a transfer was lost");
  }

 private:
  const bool& lost_;
};

/// A CPU backend with that scheduler.
class LossyBackend final : public testing::ForwardingBackend {
 public:
  LossyBackend(std::shared_ptr<Backend> inner, const bool& lost) : ForwardingBackend(std::move(inner)), lost_(lost) {}
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override {
    return std::make_unique<LossyScheduler>(ForwardingBackend::make_scheduler(options), lost_);
  }

 private:
  const bool& lost_;
};

}  // namespace

TEST_CASE("A lost transfer frees the sequence's storage and fails the session", "[session]") {
  Counted counted;
  bool lost = false;
  SessionOptions options = tiny_options();
  options.max_sequences = 2;
  auto session = make_session(std::make_shared<LossyBackend>(counted.backend, lost), tiny().weights, options);
  const SequenceId first = session.add(random_tokens(60, 1), tokens_wanted(50));
  const std::size_t bytes = counted.live_bytes();
  const SequenceId second = session.add(random_tokens(60, 2), tokens_wanted(50));
  session.step();
  lost = true;
  expect_error<IoError>([&] { session.remove(second); }, {"lost"});
  CHECK(counted.live_bytes() == bytes);
  CHECK(session.active() == 1);
  CHECK(session.failed());
  lost = false;
  expect_error<Error>([&] { session.step(); }, {"failed", "destroyed"});
  expect_error<Error>([&] { session.remove(first); }, {"failed"});
  expect_error<Error>([&] { session.add(random_tokens(5, 1), {}); }, {"failed"});
}

TEST_CASE("SparseAttention gives a slot back although a transfer was lost", "[session]") {
  bool lost = false;
  LossyBackend backend(tiny().backend, lost);
  const ModelConfig& config = tiny().weights->config();
  const NoPrediction traits_of;
  SparseAttention attention({.store = backend.make_store(make_store_options(config, tiny_options(), traits_of.traits())),
                             .predictor = std::make_unique<NoPrediction>(),
                             .scheduler = backend.make_scheduler({.layers = config.layers, .max_items_per_submit = 1000}),
                             .kernels = &backend.kernels(),
                             .device_memory = &backend.memory(MemoryKind::device),
                             .trace = nullptr},
                            {.layers = config.layers, .kv_heads = config.kv_heads, .max_sequences = 1}, backend.stream());
  const int slot = attention.open(100, backend.stream());
  expect_error<InvalidArgument>([&] { attention.open(100, backend.stream()); }, {"all 1", "max_sequences"});
  lost = true;
  expect_error<IoError>([&] { attention.close(slot, backend.stream()); }, {"lost"});
  lost = false;
  CHECK(attention.open(100, backend.stream()) == slot);
}
