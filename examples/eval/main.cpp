// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// dualdecoder-eval: policies beside each other on long-context tasks. Scores, fidelity to full attention, prediction and memory, one JSON
// line a cell.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/version.hpp"
#include "examples/common/backend_choice.hpp"
#include "examples/common/terminal.hpp"
#include "examples/eval/cell.hpp"
#include "examples/eval/checks.hpp"
#include "examples/eval/plan.hpp"
#include "examples/eval/progress.hpp"
#include "examples/eval/report.hpp"
#include "examples/eval/result_file.hpp"
#include "examples/eval/setting.hpp"

namespace dualdecoder::examples {
namespace {

using Json = ResultFile::Json;

constexpr int kExitFailed = 1;         // a cell failed or a bound broke
constexpr int kExitBadInput = 2;       // nothing was run
constexpr int kExitInterrupted = 130;  // as a shell reports Ctrl-C

struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

struct Options {
  std::filesystem::path plan;
  std::vector<std::string> models;
  PlanLists lists;
  std::vector<std::filesystem::path> texts;
  std::filesystem::path out = "quality.jsonl";
  std::string device = "auto";
  int threads = 0;
  float yarn = 0.0F;
  bool check_only = false;
  bool quiet = false;
  std::string commit = "unknown";
  std::string command;
};

/// What the plan file says, with the command line's lists in place of those that it gives.
Plan choose_plan(const Options& options) {
  PlanLists lists = options.plan.empty() ? PlanLists{} : read_plan(options.plan);
  if (!options.models.empty()) lists.models.clear();
  for (const std::string& model : options.models) lists.models.push_back({.path = model, .name = {}, .yarn = options.yarn});
  const auto override_with = [](auto& list, const auto& own) {
    if (!own.empty()) list = own;
  };
  override_with(lists.contexts, options.lists.contexts);
  override_with(lists.tasks, options.lists.tasks);
  override_with(lists.seeds, options.lists.seeds);
  override_with(lists.policies, options.lists.policies);
  override_with(lists.settings, options.lists.settings);
  if (lists.seeds.empty()) lists.seeds = {1};
  return make_plan(lists);
}

/// Runs what is not in the result file yet.
class Evaluation {
 public:
  Evaluation(const Options& options, const Plan& plan, std::shared_ptr<Backend> backend, const Haystack& essay,
             const testing::CountingResource& device_memory)
      : options_(options), plan_(plan), essay_(essay), results_(options.out), progress_(!options.quiet) {
    laboratory_ = {.backend = std::move(backend),
                   .weights = nullptr,
                   .tokenizer = nullptr,
                   .device_memory = &device_memory,
                   .on_progress = [this](double share) {
                     if (InterruptGuard::interrupted()) throw Interrupted();
                     progress_.update(share);
                   }};
  }

  /// The exit code.
  int run() {
    if (results_.set_aside() > 0) {
      fmt::print(stderr, "{}: {} lines were torn or no results; they are in {} now, and their cells are run again\n", options_.out.string(),
                 results_.set_aside(), results_.corrupt_path().string());
    }
    for (const CellGroup& group : plan_.groups) progress_.plan(group.context, missing(group).size());
    for (const CellGroup& group : plan_.groups) {
      const auto methods = missing(group);
      if (!methods.empty()) run_group(group, methods);
    }
    progress_.finish();
    return conclude();
  }
  const ResultFile& results() const { return results_; }

 private:
  Json head_of(const CellGroup& group, const Method& method) const {
    return line_head({.model = plan_.models[group.model].name,
                      .context = group.context,
                      .task = group.task->name,
                      .seed = group.seed,
                      .policy = method.policy->name,
                      .setting = method.setting,
                      .text = essay_.name()});
  }

  std::vector<const Method*> missing(const CellGroup& group) const {
    std::vector<const Method*> methods;
    for (const Method& method : plan_.methods) {
      if (!results_.holds(ResultFile::key_of(head_of(group, method)))) methods.push_back(&method);
    }
    return methods;
  }

  void load(std::size_t model) {
    if (loaded_ == model) return;
    const ModelChoice& choice = plan_.models[model];
    laboratory_.weights = nullptr;  // one model at a time
    prompts_.reset();
    loaded_.reset();
    LoadOptions load{.threads = options_.threads, .yarn_factor = choice.yarn};
    load.on_progress = [](const LoadProgress&) {
      if (InterruptGuard::interrupted()) throw Interrupted();
    };
    laboratory_.weights = load_weights(choice.path, *laboratory_.backend, load);
    prompts_.emplace(choice.path, essay_);
    laboratory_.tokenizer = &prompts_->tokenizer();
    loaded_ = model;
  }

  void run_group(const CellGroup& group, const std::vector<const Method*>& methods) {
    load(group.model);
    QuestionRun question(laboratory_, prompts_->make(*group.task, group.context, group.seed), group.task->match, group.context);
    for (const Method* method : methods) {
      Json line = head_of(group, *method);
      const std::string label =
          fmt::format("{} {} {} seed {}, {}", plan_.models[group.model].name, group.context, group.task->name, group.seed, method->name());
      progress_.begin(label, group.context);
      try {
        run_cell(question, *method, group.context, line);
        progress_.end(label + ": " + in_short(line));
      } catch (const Error& error) {
        ++failed_;
        progress_.end(fmt::format("{}: failed: {}", label, error.what()));
      }
    }
  }

  void run_cell(QuestionRun& question, const Method& method, int context, Json& line) {
    const ModelConfig& config = laboratory_.weights->config();
    const SessionOptions options = session_options(method, context, config);
    const CellResult result = options.store == StoreKind::full ? question.run_full(options)
                                                               : question.run(options, backend_of(*method.policy, laboratory_.backend));
    line["prompt_tokens"] = question.prompt_tokens();
    line["score"] = result.score;
    line["full_score"] = question.full_score();
    add_result(line, result, options, config);
    line["answer"] = result.answer.substr(0, kAnswerBytes);
    line["device"] = laboratory_.backend->name();
    line["commit"] = options_.commit;
    line["command"] = options_.command;
    results_.append(line);
  }

  /// Of the plan alone: the file may hold more.
  std::vector<Json> planned_lines() const {
    std::set<std::string> planned;
    for (const CellGroup& group : plan_.groups) {
      for (const Method& method : plan_.methods) planned.insert(ResultFile::key_of(head_of(group, method)));
    }
    std::vector<Json> lines;
    for (const Json& line : results_.lines()) {
      if (planned.contains(ResultFile::key_of(line))) lines.push_back(line);
    }
    return lines;
  }

  int conclude() const {
    const std::vector<Json> lines = planned_lines();
    if (!options_.quiet) fmt::print("{}", to_table(summarize(lines)));
    if (failed_ > 0) fmt::print(stderr, "dualdecoder-eval: {} cells failed; the same command runs them again\n", failed_);
    const auto sentences = broken(plan_.bounds, lines);
    for (const std::string& sentence : sentences) fmt::print(stderr, "dualdecoder-eval: {}\n", sentence);
    return failed_ > 0 || !sentences.empty() ? kExitFailed : 0;
  }

  static constexpr std::size_t kAnswerBytes = 240;

  const Options& options_;
  const Plan& plan_;
  const Haystack& essay_;
  ResultFile results_;
  Progress progress_;
  Laboratory laboratory_;
  std::optional<std::size_t> loaded_;
  std::optional<PromptMaker> prompts_;
  int failed_ = 0;
};

int run(const Options& options) {
  const Plan plan = choose_plan(options);
  const Haystack essay = Haystack::essay(options.texts);
  const auto plain = choose_backend({.device = options.device, .threads = options.threads});
  testing::CountingResource device_memory(plain->memory(MemoryKind::device));
  const auto backend = choose_backend({.device = options.device, .threads = options.threads, .device_memory = &device_memory});
  const auto problems = problems_of(plan, *backend, essay);
  for (const std::string& problem : problems) fmt::print(stderr, "dualdecoder-eval: {}\n", problem);
  if (!problems.empty()) return kExitBadInput;
  if (options.check_only) {
    fmt::print("{} cells: {} questions, {} methods each\n", plan.groups.size() * plan.methods.size(), plan.groups.size(),
               plan.methods.size());
    return 0;
  }
  const InterruptGuard guard;
  Evaluation evaluation(options, plan, backend, essay, device_memory);
  try {
    return evaluation.run();
  } catch (const Interrupted&) {
    fmt::print(stderr, "\ndualdecoder-eval: interrupted; what was computed is in {}, the same command goes on from there\n",
               options.out.string());
    return kExitInterrupted;
  }
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--plan", options.plan,
                 "JSON file with lists of models, contexts, tasks, seeds, policies, settings; the options below override it");
  app.add_option("-m,--model", options.models, "GGUF files, or folders with config.json and *.safetensors");
  app.add_option("-c,--context", options.lists.contexts, "lengths in tokens, answer included")->delimiter(',');
  app.add_option("-t,--task", options.lists.tasks, "all, ruler (its thirteen) or some of " + task_names())->delimiter(',');
  app.add_option("-s,--seed", options.lists.seeds, "seeds of the questions; default 1")->delimiter(',');
  app.add_option("-p,--policy", options.lists.policies, "some of " + policy_names())->delimiter(',');
  app.add_option("--set", options.lists.settings,
                 "changes of every policy but full: KEY=VALUE,... of " + setting_keys() + "; several times: one after the other");
  app.add_option("--text", options.texts, "files whose text facts are hidden in; default: made-up prose");
  app.add_option("-o,--out", options.out, "JSON lines; cells that are in it already are not run again")->capture_default_str();
  app.add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--threads", options.threads, "of the CPU backend; 0: as many as the machine has")->capture_default_str();
  app.add_option("--yarn", options.yarn, "stretches the context of the models of --model by this factor");
  app.add_option("--commit", options.commit, "commit in the results");
  app.add_flag("--check", options.check_only, "check all cells and stop");
  app.add_flag("-q,--quiet", options.quiet, "say only what went wrong");
  app.set_version_flag("--version", std::string(kVersion));
}

}  // namespace
}  // namespace dualdecoder::examples

int main(int argc, char** argv) {
  using namespace dualdecoder::examples;
  Options options;
  CLI::App app("Compares policies on long-context tasks: score, fidelity to full attention, prediction, memory.");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  options.command = "dualdecoder-eval";
  for (int i = 1; i < argc; ++i) options.command += std::string(" ") + argv[i];
  try {
    return run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-eval: {}\n", error.what());
    return 2;
  }
}
