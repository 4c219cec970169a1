// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// StoreKind::automatic: which store a session gets where the caller leaves it to the backend, and that it is that store in every respect.
#include <memory>
#include <utility>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/testing/forwarding.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::test {
namespace {

SessionOptions automatic_options(int max_context) {
  SessionOptions options = tiny_options();  // a budget of 48
  options.max_context = max_context;
  options.store = StoreKind::automatic;
  return options;
}

/// A backend that does not answer the question.
class SilentBackend final : public testing::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  bool prefers_full(const StoreOptions& options) const noexcept override { return Backend::prefers_full(options); }
};

SessionOptions chosen(const Backend& backend, const SessionOptions& options) {
  return choose_store(backend, tiny().weights->config(), options);
}

TEST_CASE("Where the context is short the automatic store is full, without prediction", "[session]") {
  const Backend& backend = *tiny().backend;
  for (const int context : {1, 512, 1120}) {  // up to 1,024 and twice the budget
    INFO("max_context " << context);
    const SessionOptions options = chosen(backend, automatic_options(context));
    CHECK(options.store == StoreKind::full);
    CHECK(options.predictor == PredictorKind::none);
    CHECK(options.max_context == context);
  }
  const SessionOptions longer = chosen(backend, automatic_options(1121));
  CHECK(longer.store == StoreKind::resident);
  CHECK(longer.predictor == PredictorKind::front_runner);
  CHECK(chosen(SilentBackend(tiny().backend), automatic_options(512)).store == StoreKind::resident);
}

TEST_CASE("Kinds that are named stay", "[session]") {
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    SessionOptions options = automatic_options(64);
    options.store = store;
    CHECK(chosen(*tiny().backend, options).store == store);
    CHECK(chosen(*tiny().backend, options).predictor == PredictorKind::front_runner);
  }
}

TEST_CASE("An automatic session is the one that it chose, plan and tokens", "[session]") {
  const ModelConfig& config = tiny().weights->config();
  for (const int context : {512, 1600}) {
    INFO("max_context " << context);
    const SessionOptions options = automatic_options(context);
    SessionOptions named = options;
    named.store = context == 512 ? StoreKind::full : StoreKind::resident;
    named.predictor = context == 512 ? PredictorKind::none : PredictorKind::front_runner;
    const MemoryPlan plan = memory_plan(*tiny().backend, config, options);
    CHECK(plan.device_bytes() == memory_plan(*tiny().backend, config, named).device_bytes());
    CHECK(plan.pinned_bytes() == memory_plan(*tiny().backend, config, named).pinned_bytes());
    auto automatic = make_session(tiny().backend, tiny().weights, options);
    auto expected = make_session(tiny().backend, tiny().weights, named);
    AddOptions add;
    add.max_new_tokens = 20;
    const Text got = generate(automatic, {random_tokens(200, 1)}, add)[0];
    const Text want = generate(expected, {random_tokens(200, 1)}, add)[0];
    CHECK(got.tokens == want.tokens);
    CHECK(got.logits == want.logits);
    CHECK(automatic.store_statistics().needed == expected.store_statistics().needed);
    CHECK((automatic.store_statistics().needed == 0) == (context == 512));
  }
}

TEST_CASE("With a predictor of the caller's own the automatic store is one that can use it", "[session]") {
  DecodeSession session(tiny().backend, tiny().weights, automatic_options(512), std::make_unique<FrontRunner>());
  generate(session, {random_tokens(200, 1)}, {.max_new_tokens = 5});
  CHECK(session.store_statistics().needed > 0);
}

TEST_CASE("No store is of the automatic kind", "[session]") {
  const NoPrediction predictor;
  StoreOptions options = make_store_options(tiny().weights->config(), automatic_options(64), predictor.traits());
  CHECK(options.kind == StoreKind::resident);
  options.kind = StoreKind::automatic;
  expect_error<InvalidArgument>([&] { tiny().backend->make_store(options); }, {"kind = automatic", "definite"});
  expect_error<InvalidArgument>([&] { tiny().backend->store_plan(options); }, {"kind = automatic"});
}

}  // namespace
}  // namespace dualdecoder::test
