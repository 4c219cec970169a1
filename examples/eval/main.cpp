// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// dualdecoder-eval: policies beside each other on long-context tasks. Scores, fidelity to full attention, prediction and memory, one JSON
// line a cell.
#include <fmt/core.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/version.hpp"
#include "examples/common/backend_choice.hpp"
#include "examples/common/setting.hpp"
#include "examples/common/terminal.hpp"
#include "examples/eval/cell.hpp"
#include "examples/eval/checks.hpp"
#include "examples/eval/plan.hpp"
#include "examples/eval/progress.hpp"
#include "examples/eval/report.hpp"
#include "examples/eval/result_file.hpp"

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
  std::size_t batch = 1;
  bool keep_going = false;
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
  Evaluation(const Options& options, const Plan& plan, const std::vector<Problem>& problems, std::shared_ptr<Backend> backend,
             const Haystack& essay, const testing::CountingResource& device_memory)
      : options_(options), plan_(plan), problems_(problems), essay_(essay), results_(options.out), progress_(!options.quiet) {
    laboratory_ = {.backend = std::make_shared<TapedBackend>(std::move(backend)),
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
    for (const std::vector<const CellGroup*>& batch : batches()) run_batch(batch);
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

  bool is_missing(const CellGroup& group, const Method& method) const {
    const bool barred =
        std::any_of(problems_.begin(), problems_.end(), [&](const Problem& problem) { return problem.bars(group, method); });
    return !barred && !results_.holds(ResultFile::key_of(head_of(group, method)));
  }
  std::vector<const Method*> missing(const CellGroup& group) const {
    std::vector<const Method*> methods;
    for (const Method& method : plan_.methods) {
      if (is_missing(group, method)) methods.push_back(&method);
    }
    return methods;
  }
  /// Questions with something missing, those that are answered side by side together.
  std::vector<std::vector<const CellGroup*>> batches() const {
    std::vector<std::vector<const CellGroup*>> batches;
    for (const CellGroup& group : plan_.groups) {
      if (missing(group).empty()) continue;
      const auto same_kind = [&](const CellGroup& other) {
        return other.model == group.model && other.context == group.context && other.task == group.task;
      };
      if (batches.empty() || batches.back().size() >= options_.batch || !same_kind(*batches.back().front())) batches.emplace_back();
      batches.back().push_back(&group);
    }
    return batches;
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

  void run_batch(const std::vector<const CellGroup*>& groups) {
    const CellGroup& first = *groups.front();
    load(first.model);
    std::vector<std::future<Prompt>> written;
    for (const CellGroup* group : groups) {
      written.push_back(std::async(std::launch::async, [&, group] { return prompts_->make(*group->task, group->context, group->seed); }));
    }
    std::vector<Prompt> prompts;
    for (std::future<Prompt>& prompt : written) prompts.push_back(prompt.get());
    std::optional<QuestionBatch> questions;
    for (const Method& method : plan_.methods) {
      std::vector<std::size_t> which;
      for (std::size_t i = 0; i < groups.size(); ++i) {
        if (is_missing(*groups[i], method)) which.push_back(i);
      }
      if (which.empty()) continue;
      const std::string label = fmt::format("{} {} {}, {}", plan_.models[first.model].name, first.context, first.task->name, method.name());
      progress_.begin(label, first.context, which.size());
      try {
        if (!questions) questions.emplace(laboratory_, std::move(prompts), first.task->match, first.context);
        progress_.end(run_cells(*questions, groups, method, which));
      } catch (const Error& error) {
        failed_ += which.size();
        progress_.end(std::vector<std::string>(which.size(), fmt::format("{}: failed: {}", label, error.what())));
      }
    }
  }

  /// One method on the questions of these numbers; what there is to say about each.
  std::vector<std::string> run_cells(QuestionBatch& questions, const std::vector<const CellGroup*>& groups, const Method& method,
                                     const std::vector<std::size_t>& which) {
    const ModelConfig& config = laboratory_.weights->config();
    const SessionOptions options = session_options(method, groups.front()->context, config);
    const bool is_full = options.store == StoreKind::full;
    const std::vector<CellResult> results =
        is_full ? questions.run_full(options) : questions.run(options, backend_of(*method.policy, laboratory_.backend), which);
    std::vector<std::string> lines;
    for (std::size_t i = 0; i < which.size(); ++i) {
      const CellGroup& group = *groups[which[i]];
      const CellResult& result = results[is_full ? which[i] : i];
      Json line = head_of(group, method);
      line["prompt_tokens"] = questions.prompt_tokens(which[i]);
      line["score"] = result.score;
      line["full_score"] = questions.full_score(which[i]);
      add_result(line, result, options, config);
      line["answer"] = result.answer.substr(0, kAnswerBytes);
      line["device"] = laboratory_.backend->name();
      line["commit"] = options_.commit;
      line["command"] = options_.command;
      results_.append(line);
      lines.push_back(fmt::format("{} {} {} seed {}, {}: {}", plan_.models[group.model].name, group.context, group.task->name, group.seed,
                                  method.name(), in_short(line)));
    }
    return lines;
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
    return failed_ > 0 || !sentences.empty() || !problems_.empty() ? kExitFailed : 0;
  }

  static constexpr std::size_t kAnswerBytes = 240;

  const Options& options_;
  const Plan& plan_;
  const std::vector<Problem>& problems_;  // what they bar is left out
  const Haystack& essay_;
  ResultFile results_;
  Progress progress_;
  Laboratory laboratory_;
  std::optional<std::size_t> loaded_;
  std::optional<PromptMaker> prompts_;
  std::size_t failed_ = 0;
};

int run(const Options& options) {
  const Plan plan = choose_plan(options);
  const Haystack essay = Haystack::essay(options.texts);
  const auto plain = choose_backend({.device = options.device, .threads = options.threads});
  testing::CountingResource device_memory(plain->memory(MemoryKind::device));
  const auto backend = choose_backend({.device = options.device, .threads = options.threads, .device_memory = &device_memory});
  const auto problems = problems_of(plan, backend, essay, options.batch);
  for (const Problem& problem : problems) fmt::print(stderr, "dualdecoder-eval: {}\n", problem.sentence);
  if (!problems.empty() && !options.keep_going) return kExitBadInput;
  if (options.check_only) {
    fmt::print("{} cells: {} questions, {} methods each\n", plan.groups.size() * plan.methods.size(), plan.groups.size(),
               plan.methods.size());
    fmt::print("{}", memory_table(plan, problems, backend));
    return problems.empty() ? 0 : kExitFailed;
  }
  const InterruptGuard guard;
  Evaluation evaluation(options, plan, problems, backend, essay, device_memory);
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
  app.add_option("-t,--task", options.lists.tasks, "all, ruler (its thirteen), robustness (its five) or some of " + task_names())
      ->delimiter(',');
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
  app.add_option("--batch", options.batch, "seeds of a task that are answered side by side")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--keep-going", options.keep_going, "leave out the cells that cannot run, and run the others");
  app.add_flag("--check", options.check_only, "check all cells, say what memory each method plans, and stop");
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
