// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// DecodeSession on a tiny random model. The invariants are those of docs/concepts.md: what a run gives is compared bit for bit with what
// another configuration of the same run gives, and with the full store, whose values golden_test compares with another library.
#include "dualdecoder/decode_session.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dualdecoder/predictors/oracle.hpp"
#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

using namespace dualdecoder;
using namespace dualdecoder::test;

namespace {

const SessionModel& model_of(DataType type) {
  static const SessionModel bf16(DataType::bf16);
  return type == DataType::f32 ? tiny() : bf16;
}

void check_same_bits(const std::vector<Text>& got, const std::vector<Text>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("sequence " << i);
    CHECK(got[i].tokens == want[i].tokens);
    CHECK(got[i].logits == want[i].logits);
    CHECK(got[i].reason == want[i].reason);
  }
}

double largest_difference(const Text& a, const Text& b) {
  REQUIRE(a.logits.size() == b.logits.size());
  double largest = 0.0;
  for (std::size_t t = 0; t < a.logits.size(); ++t) {
    for (std::size_t i = 0; i < a.logits[t].size(); ++i) largest = std::max(largest, std::fabs(double(a.logits[t][i]) - b.logits[t][i]));
  }
  return largest;
}

struct Variant {
  std::string name;
  std::function<void(SessionOptions&)> change;
};

/// What must not change a run under `wait`.
std::vector<Variant> machines() {
  return {
      {"resident, m = 1", [](SessionOptions& o) { o.slots_per_budget = 1.0F; }},
      {"resident, m = 4", [](SessionOptions& o) { o.slots_per_budget = 4.0F; }},
      {"resident, m = 16", [](SessionOptions& o) { o.slots_per_budget = 16.0F; }},
      {"ping-pong", [](SessionOptions& o) { o.store = StoreKind::ping_pong; }},
      {"throttled link", [](SessionOptions& o) { o.link_bytes_per_second = 5e6; }},
      {"slow link, ping-pong",
       [](SessionOptions& o) {
         o.store = StoreKind::ping_pong;
         o.link_bytes_per_second = 2e7;
         o.link_latency = std::chrono::microseconds(2);
       }},
      {"single lane",
       [](SessionOptions& o) {
         o.single_lane = true;
         o.link_bytes_per_second = 2e7;
       }},
      {"bounded prefetch", [](SessionOptions& o) { o.prefetch_bytes_per_step = 8192; }},
  };
}

std::vector<std::pair<std::string, std::unique_ptr<RetrievalPredictor>>> dual_predictors() {
  std::vector<std::pair<std::string, std::unique_ptr<RetrievalPredictor>>> list;
  for (const Resync resync : {Resync::never, Resync::always, Resync::automatic}) {
    const std::string suffix = ", resync " + std::to_string(static_cast<int>(resync));
    list.emplace_back("front runner" + suffix, std::make_unique<FrontRunner>(DualRowOptions{resync, 0, 0}));
    list.emplace_back("front runner, random guesses" + suffix, std::make_unique<FrontRunner>(DualRowOptions{resync, 128, 3}));
    list.emplace_back("published" + suffix, std::make_unique<PublishedDualRow>(DualRowOptions{resync, 0, 0}));
    list.emplace_back("published, random guesses" + suffix, std::make_unique<PublishedDualRow>(DualRowOptions{resync, 128, 9}));
  }
  return list;
}

void check_wait_invariant(DataType type, const std::vector<std::vector<Token>>& prompts, int wanted) {
  const SessionModel& model = model_of(type);
  SessionOptions options = tiny_options();
  options.kv_type = type;
  options.max_sequences = static_cast<int>(prompts.size());
  const AddOptions add = tokens_wanted(wanted);
  const std::vector<Text> want = generate(model, options, prompts, add);
  REQUIRE(want[0].tokens.size() == static_cast<std::size_t>(wanted));
  REQUIRE(want[0].logits.size() == static_cast<std::size_t>(wanted));
  for (auto& [name, predictor] : dual_predictors()) {
    INFO(name);
    check_same_bits(generate(model, options, std::move(predictor), prompts, add), want);
  }
  for (const Variant& machine : machines()) {
    INFO(machine.name);
    SessionOptions changed = options;
    machine.change(changed);
    check_same_bits(generate(model, changed, prompts, add), want);
    check_same_bits(generate(model, changed, std::make_unique<PublishedDualRow>(), prompts, add), want);
  }
}

}  // namespace

TEST_CASE("Under wait two-row passes give the same bits with every predictor, store and link", "[session]") {
  check_wait_invariant(DataType::f32, {random_tokens(301, 1)}, 40);
}

TEST_CASE("Under wait the bits also hold in bf16 and in a batch of two", "[session][slow]") {
  check_wait_invariant(DataType::bf16, {random_tokens(270, 2), random_tokens(133, 3)}, 25);
}

TEST_CASE("Under wait one-row passes give the same bits, and the values of two-row passes within rounding", "[session]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(301, 1)};
  const AddOptions add = tokens_wanted(40);
  const SessionOptions options = tiny_options();
  SelectionTrace trace;
  const std::vector<Text> want =
      generate(tiny(), options, std::make_unique<SelectionRecorder>(std::make_unique<NoPrediction>(), trace), prompts, add);
  CHECK(trace.size() == 39 * 3 * 2);  // steps, layers, KV heads
  for (const Variant& machine : machines()) {
    INFO(machine.name);
    SessionOptions changed = options;
    machine.change(changed);
    check_same_bits(generate(tiny(), changed, std::make_unique<NoPrediction>(), prompts, add), want);
    check_same_bits(generate(tiny(), changed, std::make_unique<PreviousStep>(), prompts, add), want);
    check_same_bits(generate(tiny(), changed, std::make_unique<LayerAhead>(), prompts, add), want);
    check_same_bits(generate(tiny(), changed, std::make_unique<Oracle>(trace), prompts, add), want);
  }
  const std::vector<Text> dual = generate(tiny(), options, prompts, add);
  CHECK(dual[0].tokens == want[0].tokens);
  CHECK(largest_difference(dual[0], want[0]) < 1e-4);
}

TEST_CASE("An oracle's every prediction is right", "[session]") {
  const std::vector<Token> prompt = random_tokens(301, 1);
  SelectionTrace trace;
  generate(tiny(), tiny_options(), std::make_unique<SelectionRecorder>(std::make_unique<NoPrediction>(), trace), {prompt},
           tokens_wanted(40));
  DecodeSession session(tiny().backend, tiny().weights, tiny_options(), std::make_unique<Oracle>(trace));
  generate(session, {prompt}, tokens_wanted(40));
  const StoreStatistics statistics = session.store_statistics();
  // steps with a step before them, layers, KV heads, chunks of the budget; less the few that lay in the window when they were predicted
  CHECK(statistics.predictable <= 38 * 3 * 2 * 12);
  CHECK(statistics.predictable >= 38 * 3 * 2 * 12 * 98 / 100);
  CHECK(statistics.predicted_hit == statistics.predictable);
}

TEST_CASE("Under estimate the same run gives the same bits whatever the link's speed", "[session]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(301, 4), random_tokens(150, 5)};
  const AddOptions add = tokens_wanted(30);
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong}) {
    for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::previous_step, PredictorKind::layer_ahead,
                                          PredictorKind::published_dual_row, PredictorKind::front_runner}) {
      INFO("store " << static_cast<int>(store) << ", predictor " << static_cast<int>(predictor));
      SessionOptions options = tiny_options();
      options.max_sequences = 2;
      options.miss_policy = MissPolicy::estimate;
      options.store = store;
      options.predictor = predictor;
      options.resync = Resync::always;  // automatic lets a lone sequence wait in the step after a wrong guess
      options.slots_per_budget = 2.0F;
      DecodeSession session(tiny().backend, tiny().weights, options, make_predictor(options));
      const std::vector<Text> want = generate(session, prompts, add);
      CHECK(session.lane_statistics(Lane::urgent).moved_items == 0);
      CHECK(session.store_statistics().urgent_bytes == 0);
      options.link_bytes_per_second = 1e8;
      check_same_bits(generate(tiny(), options, prompts, add), want);
      options.link_latency = std::chrono::microseconds(1);
      check_same_bits(generate(tiny(), options, prompts, add), want);
    }
  }
}

TEST_CASE("Under estimate a link of a megabyte a second changes no bit either", "[session][slow]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(301, 4)};
  SessionOptions options = tiny_options();
  options.miss_policy = MissPolicy::estimate;
  options.slots_per_budget = 2.0F;  // with resync automatic, so that some steps wait
  const std::vector<Text> want = generate(tiny(), options, prompts, tokens_wanted(12));
  options.link_bytes_per_second = 1e6;
  check_same_bits(generate(tiny(), options, prompts, tokens_wanted(12)), want);
}

TEST_CASE("A budget of the whole context gives what full attention gives", "[session]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(301, 6)};
  const AddOptions add = tokens_wanted(30);
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::front_runner}) {
    SessionOptions options = tiny_options();
    options.predictor = predictor;
    options.store = StoreKind::full;
    const std::vector<Text> full = generate(tiny(), options, prompts, add);
    for (const MissPolicy policy : {MissPolicy::wait, MissPolicy::estimate}) {
      for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong}) {
        if (policy == MissPolicy::estimate && store == StoreKind::ping_pong) continue;  // a wrong guess leaves misses to estimate
        options.miss_policy = policy;
        options.store = store;
        options.budget_tokens = options.max_context;
        const std::vector<Text> sparse = generate(tiny(), options, prompts, add);
        INFO("predictor " << static_cast<int>(predictor) << ", policy " << static_cast<int>(policy) << ", store "
                          << static_cast<int>(store));
        CHECK(sparse[0].tokens == full[0].tokens);
        CHECK(largest_difference(sparse[0], full[0]) < 1e-4);
      }
    }
  }
}

TEST_CASE("Sequences that come and go between steps get the text of running alone", "[session]") {
  struct Planned {
    int length;
    int wanted;
    int at_step;
  };
  const std::vector<Planned> plan{{301, 20, 0}, {17, 33, 0}, {1, 12, 3}, {222, 9, 5}, {90, 25, 14}, {64, 6, 26}};
  for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::front_runner, PredictorKind::layer_ahead}) {
    SessionOptions options = tiny_options();
    options.predictor = predictor;
    options.max_sequences = 5;
    std::vector<std::vector<Token>> alone;
    for (std::size_t i = 0; i < plan.size(); ++i) {
      SessionOptions one = options;
      one.max_sequences = 1;
      alone.push_back(generate(tiny(), one, {random_tokens(plan[i].length, 20 + i)}, tokens_wanted(plan[i].wanted))[0].tokens);
    }
    auto session = make_session(tiny().backend, tiny().weights, options);
    std::map<SequenceId, std::size_t> index;
    std::vector<std::vector<Token>> together(plan.size());
    SequenceId removed{};
    for (int step = 0; step < 200; ++step) {
      if (step == 2) removed = session.add(random_tokens(40, 99), tokens_wanted(50));
      if (step == 4) session.remove(removed);
      for (std::size_t i = 0; i < plan.size(); ++i) {
        if (plan[i].at_step == step) {
          index[session.add(random_tokens(plan[i].length, 20 + i), tokens_wanted(plan[i].wanted))] = i;
        }
      }
      for (const TokenEvent& event : session.step().tokens) {
        if (event.sequence != removed) together[index.at(event.sequence)].push_back(event.token);
      }
    }
    CHECK(session.active() == 0);
    for (std::size_t i = 0; i < plan.size(); ++i) {
      INFO("predictor " << static_cast<int>(predictor) << ", sequence " << i);
      CHECK(together[i] == alone[i]);
    }
  }
}

TEST_CASE("A sequence ends for the reason that is named", "[session]") {
  const std::vector<Token> prompt = random_tokens(60, 8);
  SessionOptions options = tiny_options();
  options.max_context = 80;
  const std::vector<Token> free_run = generate(tiny(), options, {prompt}, tokens_wanted(20))[0].tokens;

  SECTION("max_new_tokens") {
    const Text text = generate(tiny(), options, {prompt}, tokens_wanted(7))[0];
    CHECK(text.reason == FinishReason::max_tokens);
    CHECK(text.tokens == std::vector<Token>(free_run.begin(), free_run.begin() + 7));
  }
  SECTION("one token needs no pass") {
    auto session = make_session(tiny().backend, tiny().weights, options);
    const SequenceId id = session.add(prompt, tokens_wanted(1));
    CHECK(session.active() == 1);
    CHECK(session.length(id) == 60);
    const StepResult& result = session.step();
    REQUIRE(result.tokens.size() == 1);
    CHECK(result.tokens[0].sequence == id);
    CHECK(result.tokens[0].token == free_run[0]);
    CHECK(result.tokens[0].finished);
    CHECK(result.tokens[0].reason == FinishReason::max_tokens);
    CHECK(session.active() == 0);
    CHECK(session.statistics().passes == 0);
  }
  SECTION("a stop token is the last one") {
    AddOptions add = tokens_wanted(20);
    add.stop_tokens = {free_run[11]};
    const auto first = std::find(free_run.begin(), free_run.end(), free_run[11]);
    const Text text = generate(tiny(), options, {prompt}, add)[0];
    CHECK(text.reason == FinishReason::stop_token);
    CHECK(text.tokens == std::vector<Token>(free_run.begin(), first + 1));
  }
  SECTION("the first token may be the stop token") {
    AddOptions add = tokens_wanted(20);
    add.stop_tokens = {free_run[0]};
    const Text text = generate(tiny(), options, {prompt}, add)[0];
    CHECK(text.reason == FinishReason::stop_token);
    CHECK(text.tokens.size() == 1);
  }
  SECTION("the context is full when max_context tokens are committed and one more is known") {
    const Text text = generate(tiny(), options, {prompt}, tokens_wanted(1000))[0];
    CHECK(text.reason == FinishReason::context_full);
    CHECK(text.tokens.size() == 80 - 60 + 1);
    CHECK(std::equal(free_run.begin(), free_run.end(), text.tokens.begin()));
  }
  SECTION("a prompt of max_context tokens gives one more") {
    const Text text = generate(tiny(), options, {random_tokens(80, 8)}, tokens_wanted(5))[0];
    CHECK(text.reason == FinishReason::context_full);
    CHECK(text.tokens.size() == 1);
  }
  SECTION("forced tokens come out, and the logits are those of that text") {
    AddOptions forced = tokens_wanted(3);
    forced.forced = random_tokens(15, 77);
    forced.stop_tokens = {forced.forced[4]};  // has no say
    const Text text = generate(tiny(), options, {prompt}, forced)[0];
    CHECK(text.tokens == forced.forced);
    CHECK(text.reason == FinishReason::max_tokens);
    REQUIRE(text.logits.size() == 15);
    // an independent way to the tenth logits: prefill of the text so far, with the whole context as the budget
    options.budget_tokens = 80;
    const Text exact = generate(tiny(), options, {prompt}, forced)[0];
    std::vector<Token> longer = prompt;
    longer.insert(longer.end(), forced.forced.begin(), forced.forced.begin() + 9);
    const Text prefilled = generate(tiny(), options, {longer}, tokens_wanted(1))[0];
    double largest = 0.0;
    for (std::size_t i = 0; i < 128; ++i) largest = std::max(largest, std::fabs(double(exact.logits[9][i]) - prefilled.logits[0][i]));
    CHECK(largest < 1e-4);
  }
}

TEST_CASE("A step with nothing to do is empty", "[session]") {
  auto session = make_session(tiny().backend, tiny().weights, tiny_options());
  CHECK(session.step().tokens.empty());
  CHECK(session.active() == 0);
  const SequenceId id = session.add(random_tokens(40, 1), tokens_wanted(10));
  session.remove(id);
  CHECK(session.active() == 0);
  CHECK(session.step().tokens.empty());
  CHECK(session.statistics().passes == 0);
  const SequenceId next = session.add(random_tokens(40, 1), tokens_wanted(10));
  CHECK(next != id);
  int tokens = 0;
  while (session.active() > 0) tokens += static_cast<int>(session.step().tokens.size());
  CHECK(tokens == 10);
  CHECK(session.step().tokens.empty());
}

TEST_CASE("Statistics count what happened", "[session]") {
  auto session = make_session(tiny().backend, tiny().weights, tiny_options());
  generate(session, {random_tokens(200, 1)}, tokens_wanted(20));
  const SessionStatistics statistics = session.statistics();
  CHECK(statistics.prompt_tokens == 200);
  CHECK(statistics.generated_tokens == 20);
  CHECK(statistics.passes == 19 + statistics.resyncs);
  CHECK(statistics.resyncs >= 1);
  CHECK(statistics.right_guesses <= statistics.guesses);
  CHECK(statistics.guesses <= 19);
  CHECK(statistics.decode.count() > 0);
  CHECK(statistics.prefill.count() > 0);
}

TEST_CASE("Sampled text depends on the seed alone", "[session]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(120, 31)};
  const SessionOptions options = tiny_options();
  AddOptions add = tokens_wanted(40);
  add.sampling = {.temperature = 0.9F, .top_k = 40, .top_p = 0.95F, .min_p = 0.01F, .repetition_penalty = 1.0F, .seed = 5};
  const std::vector<Token> text = generate(tiny(), options, prompts, add)[0].tokens;
  CHECK(generate(tiny(), options, prompts, add)[0].tokens == text);
  // a guess draws the number that the true row will draw, so guessing changes nothing
  CHECK(generate(tiny(), options, std::make_unique<NoPrediction>(), prompts, add)[0].tokens == text);
  CHECK(generate(tiny(), options, std::make_unique<FrontRunner>(DualRowOptions{Resync::never, 128, 1}), prompts, add)[0].tokens == text);
  AddOptions other = add;
  other.sampling.seed = 6;
  CHECK(generate(tiny(), options, prompts, other)[0].tokens != text);
  CHECK(generate(tiny(), options, prompts, tokens_wanted(40))[0].tokens != text);
}

TEST_CASE("A repetition penalty keeps seen tokens away", "[session]") {
  const std::vector<std::vector<Token>> prompts{random_tokens(30, 31)};
  const SessionOptions options = tiny_options();
  const Text plain = generate(tiny(), options, prompts, tokens_wanted(40))[0];
  AddOptions add = tokens_wanted(40);
  add.sampling.repetition_penalty = 100.0F;
  const Text dual = generate(tiny(), options, prompts, add)[0];
  CHECK(dual.tokens != plain.tokens);
  CHECK(generate(tiny(), options, std::make_unique<NoPrediction>(), prompts, add)[0].tokens == dual.tokens);
  // the choice from the reported logits, by the formula of CTRL section 4.1
  std::vector<bool> seen(128);
  for (Token token : prompts[0]) seen[static_cast<std::size_t>(token)] = true;
  for (std::size_t t = 0; t < dual.tokens.size(); ++t) {
    std::size_t best = 0;
    float best_logit = -1e30F;
    for (std::size_t i = 0; i < 128; ++i) {
      float logit = dual.logits[t][i];
      if (seen[i]) logit = logit > 0.0F ? logit / 100.0F : logit * 100.0F;
      if (logit > best_logit) {
        best_logit = logit;
        best = i;
      }
    }
    INFO("token " << t);
    CHECK(dual.tokens[t] == static_cast<Token>(best));
    seen[best] = true;
  }
}
