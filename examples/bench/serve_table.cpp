// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/serve_table.hpp"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/dualdecoder.hpp"
#include "examples/bench/command_line.hpp"
#include "examples/bench/runs.hpp"
#include "examples/bench/serve_run.hpp"
#include "examples/common/backend_choice.hpp"

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model;
  std::vector<std::string> texts;
  std::vector<std::string> settings{"full", "dualdecoder"};
  std::string steps;
  std::vector<std::string> rows;
  std::vector<double> rates{1.0};
  Arrivals arrivals;
  ServedRequest request;
  int places = 8;
  bool prefill_elsewhere = false;
  std::string device = "auto";
  int threads = 0;
  float yarn = 0.0F;
  std::string machine = "unnamed";
  std::string commit = "unknown";
  std::string command;
};

/// `row` says what served; a line for each rate.
void print_rates(const Options& options, Server& server, const Json& row) {
  for (double rate : options.rates) {
    Arrivals arrivals = options.arrivals;
    arrivals.per_second = rate;
    const Served served = serve(server, arrivals);
    Json line = row;
    line.update({{"places", server.places()},
                 {"rate", rate},
                 {"requests", arrivals.count},
                 {"seed", arrivals.seed},
                 {"limit_s", arrivals.limit_seconds},
                 {"answer_tokens", options.request.answer_tokens},
                 {"seconds", served.seconds},
                 {"requests_s", arrivals.count / served.seconds},
                 {"in_limit_s", served.in_limit / served.seconds},
                 {"in_limit", static_cast<double>(served.in_limit) / arrivals.count},
                 {"seconds_50", served.seconds_50},
                 {"seconds_99", served.seconds_99},
                 {"tok_s", arrivals.count * static_cast<double>(options.request.answer_tokens) / served.seconds},
                 {"machine", options.machine},
                 {"commit", options.commit},
                 {"command", options.command}});
    fmt::print("{}\n", line.dump());
    std::fflush(stdout);
    fmt::print(stderr, "{:44} {:7.2f} req/s offered, {:7.2f} served, {:7.2f} within {} s; half within {:.2f} s, 99 % within {:.2f} s\n",
               line["policy"].get<std::string>(), rate, arrivals.count / served.seconds, served.in_limit / served.seconds,
               arrivals.limit_seconds, served.seconds_50, served.seconds_99);
  }
}

void serve_sessions(const Options& options) {
  const std::vector<Text> texts = read_texts(options.model, options.texts);
  auto backend = choose_backend({.device = options.device, .threads = options.threads});
  const auto weights = load_weights(options.model, *backend, {.threads = options.threads, .yarn_factor = options.yarn});
  for (const std::string& name : options.settings) {
    Setting setting = setting_named(name, weights->config().vocabulary);
    setting.options.max_sequences = options.places;
    SessionServer server(setting.backend(backend), weights, texts, setting.options, options.request, !options.prefill_elsewhere);
    print_rates(options, server,
                {{"row", "serve"},
                 {"model", weights->config().name},
                 {"weights", "real"},
                 {"policy", name},
                 {"prefill", options.prefill_elsewhere ? "elsewhere" : "counted"},
                 {"context", options.request.prompt_tokens}});
  }
}

/// Rows of measured steps whose name is `pattern` with a batch in place of its star. Of a name that is there twice the last counts.
std::map<int, MeasuredServer::Point> points_of(const std::vector<Json>& rows, const std::string& pattern, Json& about) {
  const std::size_t star = pattern.find('*');
  if (star == std::string::npos) throw InvalidArgument("--rows = " + pattern + ": must have a * in the place of the batch");
  const std::string_view begin = std::string_view(pattern).substr(0, star);
  const std::string_view end = std::string_view(pattern).substr(star + 1);
  std::map<int, MeasuredServer::Point> points;
  for (const Json& row : rows) {
    const auto name = row.at("row").get<std::string>();
    if (name.size() <= begin.size() + end.size() || !name.starts_with(begin) || !name.ends_with(end)) continue;
    const char* const last = name.data() + name.size() - end.size();
    int batch = 0;
    const auto [stop, error] = std::from_chars(name.data() + begin.size(), last, batch);
    if (error != std::errc() || stop != last || batch < 1) continue;
    points[batch] = {.seconds = 1e-3 * row.at("ms_step").get<double>(), .tokens_per_step = row.at("tokens_per_step").get<double>()};
    about = row;
  }
  if (points.empty()) throw InvalidArgument("--rows = " + pattern + ": no such row in --steps");
  return points;
}

void serve_measured(const Options& options) {
  std::ifstream in(options.steps);
  if (!in) throw IoError(options.steps + ": cannot be read");
  std::vector<Json> rows;
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    try {
      rows.push_back(Json::parse(line));
    } catch (const Json::exception& error) {
      throw FormatError(options.steps + ": line " + std::to_string(rows.size() + 1) + ": " + error.what());
    }
  }
  for (const std::string& pattern : options.rows) {
    Json about;
    MeasuredServer server(points_of(rows, pattern, about), options.request.answer_tokens);
    print_rates(options, server,
                {{"row", "serve-measured"},
                 {"model", about.at("model")},
                 {"weights", about.at("weights")},
                 {"policy", pattern},
                 {"prefill", "elsewhere"},
                 {"context", about.at("context")}});
  }
}

}  // namespace

int run_serve(std::span<char* const> arguments) {
  Options options;
  options.command = command_line(arguments);
  CLI::App app(
      "Requests of one size arrive at random (Poisson) and are decoded side by side: how many end within the limit. Of a model, or of "
      "steps "
      "that were measured.",
      "dualdecoder-bench serve");
  CLI::Option* model = app.add_option("-m,--model", options.model, "GGUF file, or folder with config.json and *.safetensors");
  app.add_option("-t,--text", options.texts, "text files whose windows are the prompts")->needs(model);
  app.add_option("--setting", options.settings, "POLICY, or POLICY KEY=VALUE,...")->capture_default_str()->needs(model);
  CLI::Option* steps =
      app.add_option("--steps", options.steps, "instead of a model, a file of rows of dualdecoder-bench-steps")->excludes(model);
  app.add_option("--rows", options.rows, "names of its rows with a * for the batch: a server for each")->needs(steps);
  app.add_option("--rate", options.rates, "requests a second, a line for each")->capture_default_str()->check(CLI::Range(1e-6, 1e6));
  app.add_option("--requests", options.arrivals.count, "that arrive")->capture_default_str()->check(CLI::Range(1, 10000000));
  app.add_option("--seed", options.arrivals.seed, "of their times")->capture_default_str();
  app.add_option("--limit", options.arrivals.limit_seconds, "seconds from arrival to last token")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e6));
  app.add_option("--tokens", options.request.prompt_tokens, "of a prompt")->capture_default_str()->check(CLI::Range(1, 1 << 26));
  app.add_option("-n,--generate", options.request.answer_tokens, "of an answer")->capture_default_str()->check(CLI::Range(1, 1 << 20));
  app.add_option("--batch", options.places, "requests at once")->capture_default_str()->check(CLI::Range(1, 65536));
  app.add_flag("--prefill-elsewhere", options.prefill_elsewhere, "the time of prefills does not count");
  app.add_option("--device", options.device, "auto, cpu or cuda")->capture_default_str();
  app.add_option("--threads", options.threads, "0: as many as the machine has")->capture_default_str();
  app.add_option("--yarn", options.yarn, "stretches the model's context by this factor");
  app.add_option("--machine", options.machine, "name of the machine in the results");
  app.add_option("--commit", options.commit, "commit in the results");
  CLI11_PARSE(app, static_cast<int>(arguments.size()) - 1, arguments.data() + 1);
  try {
    if (options.steps.empty() && (options.model.empty() || options.texts.empty())) {
      throw InvalidArgument("--model and --text, or --steps and --rows, must be given");
    }
    if (!options.steps.empty() && options.rows.empty()) throw InvalidArgument("--rows: must be given with --steps");
    options.steps.empty() ? serve_sessions(options) : serve_measured(options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-bench serve: {}\n", error.what());
    return 1;
  }
}

}  // namespace dualdecoder::examples
