// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Decoding measured on a real model: speed against full attention in one run, prediction, fidelity. One JSON object a line on stdout, a
// table on stderr.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "dualdecoder/dualdecoder.hpp"
#include "examples/bench/batch_table.hpp"
#include "examples/bench/command_line.hpp"
#include "examples/bench/counted_backend.hpp"
#include "examples/bench/machine.hpp"
#include "examples/bench/plan_table.hpp"
#include "examples/bench/prompts.hpp"
#include "examples/bench/runs.hpp"
#include "examples/bench/serve_table.hpp"
#include "examples/bench/statistics.hpp"
#include "examples/common/backend_choice.hpp"

namespace dualdecoder::examples {
namespace {

struct Options {
  std::string mode;
  std::string model;
  std::vector<std::string> texts;
  std::vector<int> contexts{2048, 4096, 8064};
  std::vector<std::string> settings;
  std::vector<std::string> own;
  int tokens = 6000;
  int generate = 64;
  int repeat = 3;
  int threads = 0;
  bool f32 = false;
  std::string device = "auto";
  float yarn = 0.0F;
  std::string machine = "unnamed";
  std::string commit = "unknown";
  std::string command;
  std::vector<int> batches{28, 16};
  std::string name;
  int steps = 48;
};

/// What every row of a run shares.
struct Machine {
  std::string model;
  std::size_t weight_bytes = 0;
  double stream_bytes_per_second = 0.0;
  int threads = 1;

  /// Of the CPU backend alone: the host cannot read another device's memory.
  void measure(Backend& backend) {
    if (std::string_view(backend.name()) != "cpu") return;
    const double now = streaming_bandwidth(backend.memory(MemoryKind::device), backend.stream(), threads);
    stream_bytes_per_second = std::max(stream_bytes_per_second, now);
  }
};

nlohmann::ordered_json row_of(const Options& options, const Machine& machine, const std::string& text, std::size_t context,
                              const Setting& setting, const Measured& m) {
  const bool bounded = machine.stream_bytes_per_second > 0.0;
  const double bound_seconds = bounded ? m.step_bytes / machine.stream_bytes_per_second : 0.0;
  const auto if_bounded = [&](double value) { return bounded ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr); };
  // beside the weights, what the session added to what the process held before it was made
  const std::size_t planned = machine.weight_bytes + m.plan_device_bytes + m.plan_host_bytes;
  const std::size_t used = machine.weight_bytes + m.peak_bytes - std::min(m.peak_bytes, m.program_bytes);
  const double set_bytes = static_cast<double>(m.store.needed);
  return {{"row", options.mode},
          {"model", machine.model},
          {"weights", "real"},
          {"text", text},
          {"context", context},
          {"batch", 1},
          {"policy", setting.name},
          {"chunk", setting.options.chunk_tokens},
          {"budget", setting.options.budget_tokens},
          {"slots", setting.options.slots_per_budget},
          {"generated", m.generated},
          {"prefill_tok_s", static_cast<double>(context) / m.prefill_seconds},
          {"tok_s", m.generated / m.decode_seconds},
          {"ms_pass", 1e3 * m.decode_seconds / static_cast<double>(m.session.passes)},
          {"ms_pass_median", 1e3 * m.median_step_seconds},
          {"ms_pass_p10", 1e3 * m.fast_step_seconds},
          {"step_mib", m.step_bytes / (1 << 20)},
          {"stream_gb_s", if_bounded(1e-9 * machine.stream_bytes_per_second)},
          {"ms_bound", if_bounded(1e3 * bound_seconds)},
          {"of_bound", if_bounded(bound_seconds / m.median_step_seconds)},
          {"hit", share_of(m.store.predicted_hit, m.store.predictable)},
          {"resident", share_of(m.store.resident_hit, m.store.needed)},
          {"estimated", share_of(m.store.estimated, m.store.needed)},
          {"guesses_right", share_of(m.session.right_guesses, m.session.guesses)},
          {"resyncs", share_of(m.session.resyncs, m.session.passes)},
          {"urgent_mib", static_cast<double>(m.store.urgent_bytes) / (1 << 20)},
          {"prefetch_mib", static_cast<double>(m.store.prefetch_bytes) / (1 << 20)},
          {"needed_chunks", set_bytes},
          {"stall_s", m.stall_seconds},
          {"agreement", m.agreement},
          {"kl", m.kl},
          {"kl95", m.kl95},
          {"plan_device_bytes", m.plan_device_bytes},
          {"plan_host_bytes", m.plan_host_bytes},
          {"weight_bytes", machine.weight_bytes},
          {"bytes_before_session", m.program_bytes},
          {"peak_process_bytes", m.peak_bytes},
          {"decode_process_bytes", m.decode_bytes},
          {"peak_of_plan", static_cast<double>(used) / static_cast<double>(planned)},
          {"threads", machine.threads},
          {"machine", options.machine},
          {"commit", options.commit},
          {"command", options.command}};
}

void print(const nlohmann::ordered_json& row) {
  fmt::print("{}\n", row.dump());
  std::fflush(stdout);
  const auto number = [&](const char* key) { return row[key].get<double>(); };
  fmt::print(stderr, "{:10} {:>6} {:36} {:7.1f} tok/s  pass {:6.2f} ms (fastest tenth {:6.2f})", row["text"].get<std::string>(),
             row["context"].get<int>(), row["policy"].get<std::string>(), number("tok_s"), number("ms_pass_median"), number("ms_pass_p10"));
  if (!row["ms_bound"].is_null()) fmt::print(stderr, ", bound {:5.2f} ms ({:.2f})", number("ms_bound"), number("of_bound"));
  fmt::print(stderr, "  hit {:.3f}  guesses {:.3f}  resident {:.3f}  peak/plan {:.3f}  agree {:.3f}  KL {:.4f}\n", number("hit"),
             number("guesses_right"), number("resident"), number("peak_of_plan"), number("agreement"), number("kl"));
}

bool wanted(const Options& options, const Setting& setting) {
  return options.settings.empty() || std::any_of(options.settings.begin(), options.settings.end(),
                                                 [&](const std::string& part) { return setting.name.find(part) != std::string::npos; });
}

/// All settings are prefilled and then take turns, one pass each, so that whatever disturbs the machine disturbs all of them alike. A pass
/// reads far more than the caches hold, so it finds nothing of the pass before it either way.
void run_decode(const Options& options, const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                Machine& machine, const Text& text) {
  for (int context : options.contexts) {
    const std::vector<Token> prompt = exactly(text.tokens, static_cast<std::size_t>(context));
    std::vector<Setting> settings = decode_settings();
    std::erase_if(settings, [&](const Setting& setting) { return !wanted(options, setting); });
    std::vector<std::vector<Measured>> measured(settings.size());
    for (int i = 0; i < options.repeat; ++i) {
      std::vector<std::unique_ptr<Run>> runs;
      for (const Setting& setting : settings) {
        runs.push_back(std::make_unique<Run>(backend, weights, prompt, setting.options, options.generate, nullptr));
        runs.back()->step();  // the first pass allocates, and shows what the session holds
      }
      for (bool going = true; going;) {
        going = false;
        for (const auto& run : runs) going = run->step() || going;
      }
      for (std::size_t s = 0; s < runs.size(); ++s) measured[s].push_back(runs[s]->finish());
    }
    machine.measure(*backend);  // the bound is what the machine can do, so the best counts
    for (std::size_t s = 0; s < settings.size(); ++s) {
      std::sort(measured[s].begin(), measured[s].end(),
                [](const Measured& a, const Measured& b) { return a.median_step_seconds < b.median_step_seconds; });
      print(row_of(options, machine, text.name, prompt.size(), settings[s], measured[s][measured[s].size() / 2]));
    }
  }
}

/// One batch after the other, each with text of its own in every sequence.
void run_batch(const Options& options, const std::vector<Text>& texts) {
  const CountedBackend counted({.device = options.device, .threads = options.threads});
  const auto weights = load_weights(options.model, *counted.backend(), {.threads = options.threads, .yarn_factor = options.yarn});
  BatchTable table;
  table.name = options.name.empty() ? std::filesystem::path(options.model).stem().string() : options.name;
  table.settings = options.own.empty() ? std::vector<std::string>{"8:1024:calibrated:estimate"} : options.own;
  table.batches = options.batches;
  table.context = options.tokens;
  table.steps = options.steps;
  table.fidelity_tokens = options.generate;
  run_batches(counted, weights, texts, table, [&](nlohmann::ordered_json row) {
    row["machine"] = options.machine;
    row["commit"] = options.commit;
    row["command"] = options.command;
    fmt::print("{}\n", row.dump());
    std::fflush(stdout);
    fmt::print(stderr, "{:36} {:8.1f} tok/s  {:7.3f} ms  link {:6.3f} ms  hit {:.3f}  resident {:.3f}  estimated {:.4f}\n",
               row["row"].get<std::string>(), row["tok_s"].get<double>(), row["ms_step"].get<double>(), row["ms_link"].get<double>(),
               row["hit"].get<double>(), row["resident"].get<double>(), row["estimated"].get<double>());
  });
}

int run(const Options& options) {
  const std::vector<Text> texts = read_texts(options.model, options.texts);
  if (options.mode == "batch") {
    run_batch(options, texts);
    return 0;
  }
  auto backend = choose_backend({.device = options.device, .threads = options.threads});
  const auto weights =
      load_weights(options.model, *backend,
                   {.matrix_type = options.f32 ? DataType::f32 : DataType::bf16, .threads = options.threads, .yarn_factor = options.yarn});
  Machine machine{.model = weights->config().name, .weight_bytes = weights->memory().total_bytes()};
  machine.threads = options.threads > 0 ? options.threads : static_cast<int>(std::thread::hardware_concurrency());
  machine.measure(*backend);
  for (const Text& text : texts) {
    if (options.mode == "decode") {
      run_decode(options, backend, weights, machine, text);
      continue;
    }
    const std::vector<Token> prompt = exactly(text.tokens, static_cast<std::size_t>(options.tokens));
    const Reference reference = make_reference(backend, weights, prompt, options.generate);
    const bool prediction = options.mode == "prediction";
    std::vector<Setting> table = prediction ? prediction_settings(weights->config().vocabulary) : fidelity_settings();
    if (!options.own.empty()) table.clear();
    for (const std::string& name : options.own) table.push_back(setting_named(name, weights->config().vocabulary));
    for (const Setting& setting : table) {
      if (!wanted(options, setting)) continue;
      Run run(setting.backend(backend), weights, prompt, setting.options, options.generate, &reference);
      while (run.step()) {
      }
      print(row_of(options, machine, text.name, prompt.size(), setting, run.finish()));
    }
  }
  return 0;
}

}  // namespace
}  // namespace dualdecoder::examples

int main(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "plan") return dualdecoder::examples::run_plan({argv, static_cast<std::size_t>(argc)});
  if (first == "serve") return dualdecoder::examples::run_serve({argv, static_cast<std::size_t>(argc)});
  dualdecoder::examples::Options options;
  options.command = dualdecoder::examples::command_line({argv, static_cast<std::size_t>(argc)});
  CLI::App app("Measures decoding on a real model.");
  app.footer(
      "dualdecoder-bench plan --help: the memory of a model's shape by kind and policy, without a model.\n"
      "dualdecoder-bench serve --help: requests that arrive at random and are to end within a limit.");
  app.add_option("mode", options.mode, "decode, prediction, fidelity or batch")
      ->required()
      ->check(CLI::IsMember({"decode", "prediction", "fidelity", "batch"}));
  app.add_option("-m,--model", options.model, "GGUF file, or folder with config.json and *.safetensors")->required();
  app.add_option("-t,--text", options.texts, "text files")->required();
  app.add_option("--contexts", options.contexts, "prompt tokens of the decode table");
  app.add_option("--settings", options.settings, "only settings whose names hold one of these");
  app.add_option(
      "--setting", options.own,
      "instead of the prediction and fidelity tables, and of batches: POLICY, POLICY KEY=VALUE,... (dualdecoder-eval --help lists both) or "
      "CHUNK:BUDGET:drop|plain|calibrated:wait|estimate[:BIAS_SCALE]");
  app.add_option("--tokens", options.tokens, "prompt tokens of the other tables")->capture_default_str();
  app.add_option("-n,--generate", options.generate, "tokens to generate; of batches: for agreement and kl, 0: leave them out")
      ->capture_default_str()
      ->check(CLI::Range(0, 100000));
  app.add_option("--batch", options.batches, "sequences that decode together, each number a row")->check(CLI::Range(1, 65536));
  app.add_option("--name", options.name, "of the rows of batches; default: the model file's");
  app.add_option("--steps", options.steps, "timed steps of a batch")->capture_default_str()->check(CLI::Range(1, 100000));
  app.add_option("--repeat", options.repeat, "runs of a decode row, of which the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 100));
  app.add_option("--threads", options.threads, "0: as many as the machine has")->capture_default_str();
  app.add_flag("--f32", options.f32, "weights in f32 instead of bf16");
  app.add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--yarn", options.yarn, "stretches the model's context by this factor");
  app.add_option("--machine", options.machine, "name of the machine in the results");
  app.add_option("--commit", options.commit, "commit in the results");
  CLI11_PARSE(app, argc, argv);
  try {
    return dualdecoder::examples::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-bench: {}\n", error.what());
    return 1;
  }
}
