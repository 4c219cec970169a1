// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/plan.hpp"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "dualdecoder/error.hpp"
#include "examples/common/setting.hpp"
#include "examples/eval/checks.hpp"
#include "examples/eval/report.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder::examples {
namespace {

PlanLists small() {
  return {.models = {{.path = "folder/tiny.Q4_1.gguf", .name = {}}},
          .contexts = {4096, 8192},
          .tasks = {"qa_1", "vt"},
          .seeds = {1, 2, 3},
          .policies = {"dualdecoder", "full"},
          .settings = {"", "chunk=4,budget=256"},
          .bounds = {}};
}

struct TemporaryFile {
  std::filesystem::path path = std::filesystem::temp_directory_path() / "dualdecoder-eval-plan-test.json";
  explicit TemporaryFile(const std::string& text) { std::ofstream(path) << text; }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path); }
};

}  // namespace

TEST_CASE("a plan is the product of its lists, full attention first and once") {
  const Plan plan = make_plan(small());
  CHECK(plan.models.front().name == "tiny.Q4_1");
  CHECK(plan.groups.size() == 2 * 2 * 3);
  CHECK(plan.groups[0].context == 4096);
  CHECK(plan.groups[0].task == find_task("qa_1"));
  CHECK(plan.groups[1].seed == 2);
  CHECK(plan.groups[3].task == find_task("vt"));
  CHECK(plan.groups[6].context == 8192);
  CHECK(plan.methods.size() == 3);
  CHECK(plan.methods[0].name() == "full");
  CHECK(plan.methods[1].name() == "dualdecoder");
  CHECK(plan.methods[2].name() == "dualdecoder budget=256,chunk=4");
}

TEST_CASE("a policy may bring its own setting") {
  PlanLists lists = small();
  lists.policies = {"full", "dualdecoder", "dualdecoder tail=plain,chunk=4", "quest budget=64"};
  std::vector<std::string> names;
  for (const Method& method : make_plan(lists).methods) names.push_back(method.name());
  CHECK(names == std::vector<std::string>{"full", "dualdecoder", "dualdecoder budget=256,chunk=4", "dualdecoder chunk=4,tail=plain",
                                          "quest budget=64"});
}

TEST_CASE("all and ruler stand for their tasks") {
  PlanLists lists = small();
  lists.settings.clear();
  lists.contexts = {4096};
  lists.seeds = {1};
  lists.tasks = {"all"};
  CHECK(make_plan(lists).groups.size() == task_kinds().size());
  lists.tasks = {"ruler"};
  CHECK(make_plan(lists).groups.size() == 13);
  lists.tasks = {"robustness"};
  CHECK(make_plan(lists).groups.size() == 5);
  CHECK(make_plan(lists).groups.front().task == find_task("languages"));
}

TEST_CASE("what a plan cannot be made of is named") {
  const auto refused = [](auto change, const char* words) {
    PlanLists lists = small();
    lists.settings.clear();
    change(lists);
    test::expect_error<InvalidArgument>([&] { make_plan(lists); }, {words});
  };
  refused([](PlanLists& lists) { lists.tasks = {"niah"}; }, "task = niah");
  refused([](PlanLists& lists) { lists.policies = {"best"}; }, "policy = best");
  refused([](PlanLists& lists) { lists.settings = {"speed=9"}; }, "speed=9");
  refused([](PlanLists& lists) { lists.settings = {"chunk=4,chunk=8"}; }, "twice");
  refused([](PlanLists& lists) { lists.contexts.clear(); }, "contexts");
  refused([](PlanLists& lists) { lists.contexts = {4096, -5}; }, "context = -5");
  refused([](PlanLists& lists) { lists.bounds = {{.method = "quest"}}; }, "bounds");
}

TEST_CASE("a plan file is read, and its faults are named with the file") {
  const TemporaryFile good(R"({"models": ["a.gguf", {"path": "b", "name": "B", "yarn": 4}], "contexts": [4096], "tasks": ["vt"],
                               "seeds": [1], "policies": ["full"], "settings": [{"chunk": 4, "miss": "wait"}, "budget=64"],
                               "bounds": {"full": {"kl": 0.1, "agreement": 0.9, "score_loss": 0.2}}})");
  const PlanLists lists = read_plan(good.path);
  CHECK(lists.models.size() == 2);
  CHECK(lists.models[1].name == "B");
  CHECK(lists.models[1].yarn == 4.0F);
  CHECK(lists.settings == std::vector<std::string>{"chunk=4,miss=wait", "budget=64"});
  CHECK(lists.bounds.front().least_agreement == 0.9);
  const std::map<std::string, const char*> faults = {{"{", "parse error"},
                                                     {"[]", "object"},
                                                     {R"({"task": []})", "\"task\""},
                                                     {R"({"contexts": ["long"]})", "\"contexts\""},
                                                     {R"({"models": [{"name": "x"}]})", "path"}};
  for (const auto& [text, words] : faults) {
    INFO(text);
    const TemporaryFile bad(text);
    test::expect_error<FormatError>([&] { read_plan(bad.path); }, {words});
  }
  test::expect_error<IoError>([] { read_plan("no-such-plan.json"); }, {"no-such-plan.json"});
}

TEST_CASE("a setting is written in one way and lies over its policy") {
  CHECK(canonical_setting("miss=wait,budget=64") == "budget=64,miss=wait");
  CHECK(canonical_setting("").empty());
  const SessionOptions options =
      with_setting({}, "chunk=4,tail=plain,miss=estimate,slots=2.5,first_guess=random,predictor=published", 1000);
  CHECK(options.chunk_tokens == 4);
  CHECK(options.tail_estimate);
  CHECK_FALSE(options.calibrate_tail);
  CHECK(options.miss_policy == MissPolicy::estimate);
  CHECK(options.slots_per_budget == 2.5F);
  CHECK(options.random_guess_below == 1000);
  CHECK(options.predictor == PredictorKind::published_dual_row);
  CHECK(options.budget_tokens == SessionOptions{}.budget_tokens);
  test::expect_error<InvalidArgument>([] { with_setting({}, "chunk=four", 1000); }, {"chunk=four"});
  test::expect_error<InvalidArgument>([] { with_setting({}, "tail=long", 1000); }, {"calibrated|drop|plain"});

  PlanLists lists = small();
  lists.settings = {"budget=96"};
  const Plan plan = make_plan(lists);
  CHECK(session_options(plan.methods[1], 4096, ModelConfig{}).budget_tokens == 96);
}

TEST_CASE("averages weigh scores by cell and fidelity by token, and bounds are held against them") {
  const auto line = [](int n, double score, double agreement, double kl) {
    return nlohmann::ordered_json{{"model", "m"}, {"context", 4096}, {"policy", "quest"}, {"setting", ""},
                                  {"n", n},       {"score", score},  {"full_score", 1.0}, {"agreement", agreement},
                                  {"kl", kl},     {"hit", 0.5},      {"traffic", 0.25}};
  };
  const std::vector lines{line(10, 1.0, 1.0, 0.0), line(30, 0.5, 0.8, 0.4)};
  const auto summaries = summarize(lines);
  CHECK(summaries.size() == 1);
  CHECK(summaries[0].score == 0.75);
  CHECK(std::abs(summaries[0].agreement - 0.85) < 1e-12);
  CHECK(std::abs(summaries[0].kl - 0.3) < 1e-12);
  const auto unscored = summarize({line(10, 1.0, 1.0, 0.0), line(10, std::nan(""), 1.0, 0.0)});
  CHECK(unscored[0].cells == 2);
  CHECK(unscored[0].score == 1.0);
  CHECK(broken({{.method = "quest", .most_kl = 0.31, .least_agreement = 0.84, .most_score_loss = 0.25}}, lines).empty());
  CHECK(broken({{.method = "quest", .most_kl = 0.29, .least_agreement = 0.86, .most_score_loss = 0.2}}, lines).size() == 3);
  CHECK(broken({{.method = "full", .most_kl = 1.0, .least_agreement = 0.0, .most_score_loss = 1.0}}, lines).size() >= 1);
}

}  // namespace dualdecoder::examples
