// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The time of a decode step on a model's shape with made-up weights, keys and values, where what a real model chose (a recorded trace)
// stands in place of this model's own choices, which would have no locality. One JSON object a line on stdout, a table on stderr.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "dualdecoder/dualdecoder.hpp"
#include "examples/bench/command_line.hpp"
#include "examples/bench/counted_backend.hpp"
#include "examples/bench/prefill_run.hpp"
#include "examples/bench/shapes.hpp"
#include "examples/bench/statistics.hpp"
#include "examples/bench/step_runner.hpp"
#include "examples/common/backend_choice.hpp"
#include "examples/common/policies.hpp"
#include "examples/common/tokenizer.hpp"

namespace dualdecoder::examples {
namespace {

struct Options {
  std::string device = "auto";
  std::string shape = "8b";
  std::vector<std::string> rows;
  std::vector<double> miss_rates{0.0};
  std::string trace;
  std::string published_trace;
  std::string model;
  std::string text;
  std::string out;
  std::string machine = "unnamed";
  std::string commit = "unknown";
  std::string command;
  float yarn = 0.0F;
  int context = 122880;
  int steps = 48;
  int layers = 0;
  int chunk = 8;
  int budget = 1024;
  int value_group = 1;
  float slots = 4.0F;
  int threads = 0;
  int repeat = 2;
  bool list = false;
};

struct Row {
  std::string name;
  std::string shape;
  StepSetting setting;
};

/// What a row's name may end with: how a store, a predictor and a miss policy do.
std::map<std::string, StepSetting, std::less<>> variants_of(const Options& options) {
  SessionOptions base = options_of(find_policy("dualdecoder"), {});
  base.chunk_tokens = options.chunk;
  base.budget_tokens = options.budget;
  base.value_group_chunks = options.value_group;
  base.slots_per_budget = options.slots;
  base.miss_policy = MissPolicy::estimate;
  base.resync = Resync::always;
  const auto with = [&](auto change) {
    SessionOptions changed = base;
    change(changed);
    return changed;
  };
  const auto waiting = [&](StoreKind store, PredictorKind predictor, float slots) {
    return with([&](SessionOptions& o) {
      o.miss_policy = MissPolicy::wait;
      o.store = store;
      o.predictor = predictor;
      o.slots_per_budget = slots;
    });
  };
  const auto throttled = [&](double bytes_per_second, MissPolicy policy) {
    return with([&](SessionOptions& o) {
      o.miss_policy = policy;
      o.link_bytes_per_second = bytes_per_second;
      o.prefetch_bytes_per_step = static_cast<std::size_t>(7e-3 * bytes_per_second);  // what moves while a step computes
    });
  };
  const auto slots = [&](float multiple) { return with([&](SessionOptions& o) { o.slots_per_budget = multiple; }); };
  const SessionOptions wait = waiting(StoreKind::resident, PredictorKind::front_runner, options.slots);
  std::map<std::string, StepSetting, std::less<>> variants;
  const auto add = [&](const std::string& name, const SessionOptions& chosen, std::size_t device_kv_limit = 0) {
    StepSetting& setting = variants[name];
    setting.options = chosen;
    setting.steps = options.steps;
    setting.device_kv_limit = device_kv_limit;
    setting.injected_misses = options.miss_rates;
  };
  add("", base);
  add("-wait", wait);
  add("-oracle", base);  // see ms_compute: the same steps without loads
  add("-pingpong", waiting(StoreKind::ping_pong, PredictorKind::published_dual_row, 1.0F));
  add("-previous", waiting(StoreKind::resident, PredictorKind::previous_step, 1.0F));
  add("-resident", waiting(StoreKind::resident, PredictorKind::none, options.slots));
  add("-published", waiting(StoreKind::resident, PredictorKind::published_dual_row, options.slots));
  add("-frontrunner", wait);
  add("-slots2", slots(2.0F));
  add("-pcie4", throttled(25e9, MissPolicy::estimate));
  add("-pcie4-wait", throttled(25e9, MissPolicy::wait));
  add("-pcie3", throttled(12e9, MissPolicy::estimate));
  add("-pcie3-wait", throttled(12e9, MissPolicy::wait));
  add("-full", with([](SessionOptions& o) {
        o.store = StoreKind::full;
        o.predictor = PredictorKind::none;
      }));
  // all KV state on the device under a cap: as many slots as fit with ease
  add("-cap24", slots(8.0F), 24'000'000'000);
  add("-cap12", slots(2.0F), 12'000'000'000);
  for (const char* rival : {"shadowkv", "specache-1bit", "specache-2bit"}) {
    add(std::string("-") + rival, options_of(find_policy(rival), {.budget_tokens = options.budget}));
  }
  return variants;
}

/// The names of a run that asks for none.
std::vector<std::string> usual_rows(const std::string& shape) {
  std::vector<std::string> names;
  for (const char* variant : {"", "-wait", "-oracle", "-pingpong", "-previous", "-resident", "-published", "-frontrunner", "-slots2",
                              "-pcie4", "-pcie4-wait", "-pcie3", "-pcie3-wait", "-full", "-cap24", "-cap12"}) {
    names.push_back(shape + "-128k-b7" + variant);
  }
  for (const char* size : {"64k-b14", "256k-b3", "512k-b1", "128k-b1", "128k-b2", "128k-b4", "2k-b1", "4k-b1"}) {
    names.push_back(fmt::format("{}-{}", shape, size));
    names.push_back(fmt::format("{}-{}-full", shape, size));
  }
  if (shape == "1.5b") {
    for (const char* size : {"120k-b16", "120k-b28"}) {
      names.push_back(fmt::format("{}-{}", shape, size));
      names.push_back(fmt::format("{}-{}-full", shape, size));
    }
  }
  return names;
}

/// SHAPE-KIBITOKENSk-bBATCH[VARIANT][-onelane][-inorder]. Throws InvalidArgument naming --row.
Row row_named(const std::string& name, const std::map<std::string, StepSetting, std::less<>>& variants) {
  static const std::regex form("([0-9.a-z]+)-([1-9][0-9]{0,3})k-b([1-9][0-9]{0,3})((?:-[0-9a-z]+)*?)(-onelane)?(-inorder)?");
  std::smatch parts;
  if (!std::regex_match(name, parts, form) || !variants.contains(parts[4].str())) {
    std::string known;
    for (const auto& [variant, setting] : variants) known += " " + variant;
    throw InvalidArgument("--row = " + name + ": must be SHAPE-CONTEXTk-bBATCH, CONTEXT in units of 1,024 tokens, and none or one of" +
                          known + ", then none or some of -onelane -inorder");
  }
  Row row{.name = name, .shape = parts[1], .setting = variants.find(parts[4].str())->second};
  const ModelConfig config = shape_named(row.shape);
  int& rank = row.setting.options.shadow_kv.rank;
  rank = std::min(rank, config.kv_heads * config.head_dim / 8 * 8);
  row.setting.context = 1024 * std::stoi(parts[2]);
  row.setting.batch = std::stoi(parts[3]);
  row.setting.options.single_lane = parts[5].matched;
  row.setting.loads_in_order = parts[6].matched;
  return row;
}

const char* selection_of(StoreKind store, const StepTrace& trace) {
  if (store == StoreKind::full) return "none";
  if (store == StoreKind::specache) return "live";
  return trace.recorded ? "replayed" : "random";
}

nlohmann::ordered_json json_of(const Options& options, const Row& row, const StepTrace& trace, double injected, const StepMeasured& m) {
  const SessionOptions& o = row.setting.options;
  const double needed = static_cast<double>(m.store.needed);
  const auto share = [&](std::uint64_t part) { return needed == 0.0 ? 0.0 : static_cast<double>(part) / needed; };
  const bool oracle = row.name.ends_with("-oracle");
  const std::string suffix = options.miss_rates.size() > 1 ? fmt::format("-miss{:02.0f}", 1e2 * injected) : "";
  const double ms = oracle ? m.ms_compute : m.ms_step;
  nlohmann::ordered_json json = {
      {"row", row.name + suffix},
      {"model", row.shape},
      {"weights", "synthetic"},
      {"selection", selection_of(o.store, trace)},
      {"context", row.setting.context},
      {"batch", row.setting.batch},
      {"policy", o.store == StoreKind::full ? "full" : (o.miss_policy == MissPolicy::wait ? "wait" : "estimate")},
      {"chunk", o.chunk_tokens},
      {"value_group", o.value_group_chunks},
      {"budget", o.budget_tokens},
      {"slots", o.slots_per_budget},
      {"tok_s", 1e3 * m.tokens_per_step / ms},
      {"ms_step", ms},
      {"ms_step_95", m.ms_step_95},
      {"ms_compute", m.ms_compute},
      {"ms_link", m.ms_link},
      {"tokens_per_step", m.tokens_per_step},
      {"hit", m.store.predictable == 0 ? 0.0 : static_cast<double>(m.store.predicted_hit) / static_cast<double>(m.store.predictable)},
      {"resident", share(m.store.resident_hit)},
      {"estimated", share(m.store.estimated)},
      {"injected_misses", injected},
      {"urgent", m.store.urgent_bytes / static_cast<std::uint64_t>(row.setting.steps)},
      {"prefetch", m.store.prefetch_bytes / static_cast<std::uint64_t>(row.setting.steps)},
      {"link_gb_s", m.ms_link == 0.0 ? 0.0 : static_cast<double>(m.moved_bytes) / row.setting.steps / (1e6 * m.ms_link)},
      {"device_kv_bytes_per_sequence", m.device_kv_bytes / static_cast<std::size_t>(row.setting.batch)},
      {"pinned_bytes", m.pinned_bytes},
      {"fill_s", m.fill_seconds},
      {"agreement", nullptr},
      {"kl", nullptr},
      {"machine", options.machine},
      {"commit", options.commit},
      {"command", options.command}};
  return json;
}

int run_rows(const Options& options) {
  const auto variants = variants_of(options);
  std::vector<Row> rows;
  for (const std::string& name : options.rows.empty() ? usual_rows(options.shape) : options.rows) rows.push_back(row_named(name, variants));
  if (options.list) {
    for (const Row& row : rows) fmt::print("{}\n", row.name);
    return 0;
  }
  auto backend = choose_backend({.device = options.device, .threads = options.threads});
  const int needed = static_cast<int>(options.miss_rates.size() + 1) * (options.steps + 8) + 16;
  const auto trace_of = [&](const std::string& path) {
    if (!path.empty()) return StepTrace::load(path);
    return StepTrace::random(4, 2, options.budget / options.chunk, options.chunk, 122880, needed, 0.75, 0.96);
  };
  const StepTrace trace = trace_of(options.trace);
  const StepTrace published = options.published_trace.empty() ? trace : StepTrace::load(options.published_trace);
  std::ofstream out;
  if (!options.out.empty()) out.open(options.out, std::ios::app);
  bool failed = false;
  std::string shape;
  std::shared_ptr<const ModelWeights> weights;
  for (const Row& row : rows) {
    try {
      if (row.shape != shape) {
        weights.reset();  // before the next ones: both may not fit
        ModelConfig config = shape_named(row.shape);
        if (options.layers > 0) config.layers = options.layers;
        weights = make_synthetic_weights(config, 1, *backend, {.threads = options.threads});
        shape = row.shape;
      }
      const bool as_published = row.setting.options.predictor == PredictorKind::published_dual_row;
      const StepTrace& own = as_published ? published : trace;
      const std::vector<StepMeasured> measured = run_steps(backend, weights, own, row.setting);
      for (std::size_t i = 0; i < measured.size(); ++i) {
        auto json = json_of(options, row, own, row.setting.injected_misses[i], measured[i]);
        if (options.layers > 0) json["layers"] = options.layers;
        fmt::print("{}\n", json.dump());
        std::fflush(stdout);
        if (out.is_open()) out << json.dump() << '\n' << std::flush;
        const auto number = [&](const char* key) { return json[key].get<double>(); };
        fmt::print(stderr,
                   "{:28} {:8.1f} tok/s  {:7.3f} ms  compute {:7.3f}  link {:6.3f}  hit {:.3f}  resident {:.3f}  estimated {:.4f}\n",
                   json["row"].get<std::string>(), number("tok_s"), number("ms_step"), number("ms_compute"), number("ms_link"),
                   number("hit"), number("resident"), number("estimated"));
      }
    } catch (const Error& error) {
      failed = true;
      fmt::print(stderr, "{:28} {}\n", row.name, error.what());
    }
  }
  return failed ? 1 : 0;
}

/// The time until a prompt's first token, and the memory that it takes.
int prefill(const Options& options) {
  const CountedBackend counted({.device = options.device, .threads = options.threads});
  const auto weights = make_synthetic_weights(shape_named(options.shape), 1, *counted.backend(), {.threads = options.threads});
  SessionOptions session = options_of(find_policy("dualdecoder"), {});
  session.chunk_tokens = options.chunk;
  session.budget_tokens = options.budget;
  session.value_group_chunks = options.value_group;
  session.slots_per_budget = options.slots;
  const PrefillMeasured m = time_prefill(counted.backend(), weights, session, options.context, options.repeat);
  const double seconds = quantile(m.seconds, 0.5);
  const std::size_t weight_bytes = weights->memory().total_bytes();
  const nlohmann::ordered_json json = {{"row", fmt::format("{}-{}k-prefill", options.shape, options.context / 1024)},
                                       {"model", options.shape},
                                       {"weights", "synthetic"},
                                       {"context", options.context},
                                       {"batch", 1},
                                       {"chunk", options.chunk},
                                       {"budget", options.budget},
                                       {"tok_s", options.context / seconds},
                                       {"seconds", seconds},
                                       {"first_seconds", m.first_seconds},
                                       {"runs", m.seconds.size()},
                                       {"peak_device_bytes", counted.peak_device_bytes()},
                                       {"weight_bytes", weight_bytes},
                                       {"plan_device_bytes", m.plan_bytes},
                                       {"pinned_bytes", m.pinned_bytes},
                                       {"machine", options.machine},
                                       {"commit", options.commit},
                                       {"command", options.command}};
  fmt::print("{}\n", json.dump());
  if (!options.out.empty()) std::ofstream(options.out, std::ios::app) << json.dump() << '\n';
  fmt::print(stderr, "{:24} {:8.1f} tok/s  {:.3f} s (first {:.3f} s)  {:.2f} GB on the device beside weights, plan {:.2f} GB\n",
             json["row"].get<std::string>(), options.context / seconds, seconds, m.first_seconds,
             1e-9 * static_cast<double>(counted.peak_device_bytes() - weight_bytes), 1e-9 * static_cast<double>(m.plan_bytes));
  return 0;
}

int record(const Options& options) {
  auto backend = choose_backend({.device = options.device, .threads = options.threads});
  const auto weights = load_weights(options.model, *backend, {.threads = options.threads, .yarn_factor = options.yarn});
  const Tokenizer tokenizer = Tokenizer::load(options.model);
  std::ifstream in(options.text, std::ios::binary);
  if (!in) throw IoError(options.text + ": cannot be read");
  std::vector<Token> tokens = tokenizer.encode(std::string(std::istreambuf_iterator<char>(in), {}), ControlTokens::parse);
  if (tokens.size() < static_cast<std::size_t>(options.context)) {
    throw InvalidArgument(options.text + ": holds " + std::to_string(tokens.size()) + " tokens, fewer than --context");
  }
  tokens.resize(static_cast<std::size_t>(options.context));
  SessionOptions session = options_of(find_policy("dualdecoder"), {});
  session.chunk_tokens = options.chunk;
  session.budget_tokens = options.budget;
  session.value_group_chunks = options.value_group;
  session.slots_per_budget = options.slots;
  session.miss_policy = MissPolicy::estimate;
  session.resync = Resync::always;
  record_steps(backend, weights, session, tokens, options.steps).save(options.trace);
  if (!options.published_trace.empty()) {
    session.predictor = PredictorKind::published_dual_row;
    session.resync = Resync::never;
    session.miss_policy = MissPolicy::wait;
    record_steps(backend, weights, session, tokens, options.steps).save(options.published_trace);
  }
  return 0;
}

}  // namespace
}  // namespace dualdecoder::examples

int main(int argc, char** argv) {
  dualdecoder::examples::Options options;
  options.command = dualdecoder::examples::command_line({argv, static_cast<std::size_t>(argc)});
  CLI::App app("Measures decode steps on a shape with recorded choices, and records them.");
  app.require_subcommand(1);
  const auto common = [&](CLI::App* command) {
    command->add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
    command->add_option("--trace", options.trace, "choices of a real model");
    command->add_option("--published-trace", options.published_trace, "the same under the published predictor");
    command->add_option("--steps", options.steps, "passes")->capture_default_str()->check(CLI::Range(2, 100000));
    command->add_option("--chunk", options.chunk, "tokens of a chunk")->capture_default_str();
    command->add_option("--budget", options.budget, "tokens of a selected set")->capture_default_str();
    command->add_option("--value-group", options.value_group, "chunks whose values share a mean, 1, 2 or 4")->capture_default_str();
    command->add_option("--slots", options.slots, "slots as a multiple of the budget")->capture_default_str();
    command->add_option("--threads", options.threads, "of the host; 0: all")->capture_default_str();
  };
  CLI::App* rows = app.add_subcommand("run", "time rows");
  common(rows);
  rows->add_option("--row", options.rows, "names, SHAPE-CONTEXTk-bBATCH and what sets it apart; without, the usual ones of --shape");
  rows->add_flag("--list", options.list, "print the names");
  rows->add_option("--shape", options.shape, "1.5b, 8b, 14b, 32b or tiny")->capture_default_str();
  rows->add_option("--layers", options.layers, "of the shape, for profiles of one layer; 0: all")->capture_default_str();
  rows->add_option("--miss-rate", options.miss_rates, "shares of the recorded chunks that unpredicted ones replace, a measurement for each")
      ->check(CLI::Range(0.0, 1.0));
  rows->add_option("-o,--out", options.out, "file to which JSON lines are appended");
  rows->add_option("--machine", options.machine, "name of the machine in the results");
  rows->add_option("--commit", options.commit, "commit in the results");
  CLI::App* filling = app.add_subcommand("prefill", "time prompts of random tokens");
  common(filling);
  filling->add_option("--shape", options.shape, "1.5b, 8b, 14b, 32b or tiny")->capture_default_str();
  filling->add_option("--context", options.context, "tokens of the prompt")->capture_default_str();
  filling->add_option("--repeat", options.repeat, "timed prompts behind the first")->capture_default_str()->check(CLI::Range(1, 1000));
  filling->add_option("-o,--out", options.out, "file to which a JSON line is appended");
  filling->add_option("--machine", options.machine, "name of the machine in the results");
  filling->add_option("--commit", options.commit, "commit in the results");
  CLI::App* recording = app.add_subcommand("record", "record the choices of a real model");
  common(recording);
  recording->add_option("-m,--model", options.model, "GGUF file, or folder")->required();
  recording->add_option("-t,--text", options.text, "text file")->required();
  recording->add_option("--context", options.context, "tokens of the prompt")->capture_default_str();
  recording->add_option("--yarn", options.yarn, "stretches the model's context by this factor");
  CLI11_PARSE(app, argc, argv);
  try {
    if (filling->parsed()) return dualdecoder::examples::prefill(options);
    return recording->parsed() ? dualdecoder::examples::record(options) : dualdecoder::examples::run_rows(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-bench-steps: {}\n", error.what());
    return 1;
  }
}
