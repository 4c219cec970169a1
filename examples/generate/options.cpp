// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/generate/options.hpp"

#include <CLI/CLI.hpp>
#include <map>
#include <vector>

#include "dualdecoder/version.hpp"

namespace dualdecoder::examples {
namespace {

const std::map<std::string, StoreKind> kStores = {{"automatic", StoreKind::automatic}, {"resident", StoreKind::resident},
                                                  {"ping-pong", StoreKind::ping_pong}, {"full", StoreKind::full},
                                                  {"shadow-kv", StoreKind::shadow_kv}, {"specache", StoreKind::specache}};
const std::map<std::string, PredictorKind> kPredictors = {{"none", PredictorKind::none},
                                                          {"previous-step", PredictorKind::previous_step},
                                                          {"layer-ahead", PredictorKind::layer_ahead},
                                                          {"published", PredictorKind::published_dual_row},
                                                          {"front-runner", PredictorKind::front_runner}};
const std::map<std::string, MissPolicy> kMissPolicies = {{"wait", MissPolicy::wait}, {"estimate", MissPolicy::estimate}};
const std::map<std::string, Resync> kResyncs = {{"never", Resync::never}, {"always", Resync::always}, {"automatic", Resync::automatic}};
const std::map<std::string, DataType> kTypes = {{"bf16", DataType::bf16}, {"f32", DataType::f32}};

/// "a, b or c" of a map's names.
template <class Value>
std::string names_of(const std::map<std::string, Value>& map) {
  std::string names;
  for (const auto& [name, value] : map) names += (names.empty() ? "" : "|") + name;
  return names;
}

/// An option whose values are the names of `map`.
template <class Value>
void add_choice(CLI::App& app, const std::string& name, Value& target, const std::map<std::string, Value>& map, const std::string& help) {
  app.add_option_function<std::string>(
         name,
         [&target, &map, name](const std::string& text) {
           const auto found = map.find(text);
           if (found == map.end()) throw CLI::ValidationError(name, "'" + text + "' is not one of " + names_of(map));
           target = found->second;
         },
         help)
      ->type_name(names_of(map));
}

void apply_policy(const std::string& text, GenerateOptions& options) {
  const std::size_t equals = text.find('=');
  const std::string key = text.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : text.substr(equals + 1);
  if (key == "store" && kStores.contains(value)) {
    options.session.store = kStores.at(value);
  } else if (key == "predictor" && (kPredictors.contains(value) || value == "oracle")) {
    options.oracle = value == "oracle";
    if (!options.oracle) options.session.predictor = kPredictors.at(value);
    if (options.session.store == StoreKind::automatic) options.session.store = StoreKind::resident;  // there is something to predict
  } else {
    throw CLI::ValidationError(
        "--policy", "'" + text + "' is not one of store=" + names_of(kStores) + ", predictor=" + names_of(kPredictors) + "|oracle");
  }
}

void add_prompt_options(CLI::App& app, GenerateOptions& options) {
  app.add_option("-m,--model", options.model, "GGUF file, or folder with config.json and *.safetensors")->required();
  app.add_option("-p,--prompt", options.prompt, "prompt; stands behind that of --prompt-file when both are given");
  app.add_option("-f,--prompt-file", options.prompt_file, "file with the prompt; without either, stdin is read");
  app.add_flag("--chat", options.chat, "ask as a user, in the form that the model's chat template wants");
  app.add_option("--system", options.system, "system message for --chat");
  app.add_flag("--parse-control", options.parse_control, "names of control tokens in a prompt without --chat become those tokens");
}

void add_generation_options(CLI::App& app, GenerateOptions& options) {
  auto& sampling = options.sampling;
  app.add_option("-n,--max-new-tokens", options.max_new_tokens, "tokens to generate at most");
  app.add_flag("--ignore-end", options.ignore_end, "go on after an end token");
  app.add_option("--temperature", sampling.temperature, "0: the likeliest token");
  app.add_option("--top-k", sampling.top_k, "keep the k likeliest tokens; 0: all");
  app.add_option("--top-p", sampling.top_p, "keep the smallest set with this probability");
  app.add_option("--min-p", sampling.min_p, "drop tokens below this share of the likeliest one's probability");
  app.add_option("--repetition-penalty", sampling.repetition_penalty, "of tokens seen before; 1: none");
  app.add_option("--seed", sampling.seed, "of sampling");
}

void add_selection_options(CLI::App& app, GenerateOptions& options) {
  auto& session = options.session;
  app.add_option("-c,--max-context,--context", options.max_context, "tokens, prompt and generated; 0: as many as needed");
  app.add_option("-b,--budget-tokens,--budget", session.budget_tokens, "selected tokens per KV head");
  app.add_option("--chunk-tokens,--chunk", session.chunk_tokens, "2, 4, 8, 16 or 32");
  app.add_option("--sink-tokens", session.sink_tokens, "first tokens, always resident");
  app.add_option("--local-tokens", session.local_tokens, "last tokens, always resident");
  app.add_flag("--tail-estimate,!--no-tail-estimate", session.tail_estimate, "unselected chunks count by their summaries (default)");
  app.add_flag("--calibrate-tail,!--no-calibrate-tail", session.calibrate_tail, "calibrate that estimate on the prompt (default)");
  app.add_option("--bias-scale", session.bias_scale, "times the calibrated bias");
  app.add_option("--value-group-chunks,--value-group", session.value_group_chunks,
                 "chunks whose values share a mean in that estimate: 1, 2 or 4");
}

void add_memory_options(CLI::App& app, GenerateOptions& options) {
  auto& session = options.session;
  app.add_option_function<std::vector<std::string>>(
         "--policy",
         [&options](const std::vector<std::string>& all) {
           for (const std::string& text : all) apply_policy(text, options);
         },
         "store=" + names_of(kStores) + " and predictor=" + names_of(kPredictors) +
             "|oracle; default automatic; a predictor that is named goes with resident")
      ->delimiter(',')
      ->type_name("KEY=NAME,...");
  add_choice(app, "--miss-policy", session.miss_policy, kMissPolicies, "what happens to a needed chunk that is not there");
  add_choice(app, "--resync", session.resync, kResyncs, "what follows a wrong guess");
  app.add_option("--random-guess-below", session.random_guess_below, "> 0: first guesses are random tokens below this");
  app.add_option("--slots-per-budget", session.slots_per_budget, "resident slots as a multiple of the budget");
  app.add_option("--shadow-kv-rank", session.shadow_kv.rank, "of the factored keys of store=shadow-kv");
  app.add_option("--shadow-kv-outlier-chunks", session.shadow_kv.outlier_chunks, "of a KV head that store=shadow-kv keeps whole");
  app.add_flag("--shadow-kv-reuse,!--no-shadow-kv-reuse", session.shadow_kv.reuse,
               "store=shadow-kv keeps what the last step chose (default)");
  app.add_option("--specache-bits", session.specache.bits, "of an element in the copy of store=specache, 1 or 2");
  app.add_option("--specache-fetched-tokens", session.specache.fetched_tokens, "of a KV head that store=specache lays over its copy");
  app.add_option("--prefetch-bytes-per-step", session.prefetch_bytes_per_step, "bound on prefetch; 0: none");
  app.add_option("--link-bytes-per-second", session.link_bytes_per_second, "throttle that plays the bus; 0: none");
  app.add_option_function<std::int64_t>(
      "--link-latency-us", [&session](std::int64_t us) { session.link_latency = std::chrono::microseconds(us); },
      "latency of every item on the throttled link");
  app.add_flag("--single-lane", session.single_lane, "urgent loads queue behind prefetch");
  app.add_option("--prefill-block", session.prefill_block, "prompt tokens of one dense call; 0: the backend's choice");
  app.add_option("--record-selection", options.record_selection, "write the selected chunks to this file");
  app.add_option("--replay-selection", options.replay_selection, "read them from this file, for --policy predictor=oracle");
  add_choice(app, "--kv-type", session.kv_type, kTypes, "keys and values");
  add_choice(app, "--weights-type", options.weights_type, kTypes, "what matrices are dequantised to");
  app.add_option("--device", options.device, "auto (CUDA when there is a device), cpu or cuda");
  app.add_option("--yarn", options.yarn, "> 1: stretches the model's context by YaRN");
  app.add_option("--threads", options.threads, "of the CPU backend and of loading; 0: as many as the machine has");
}

void add_output_options(CLI::App& app, GenerateOptions& options) {
  app.add_option("--trace", options.trace, "write a Chrome trace (chrome://tracing, Perfetto) to this file");
  app.add_flag("--json", options.json, "stdout holds one JSON object a line: tokens as they come, then the report");
  app.add_flag("--compare-full", options.compare_full, "then run full attention over the same tokens and compare");
  app.add_flag("--memory-plan", options.memory_plan, "print what would be allocated, and stop");
  app.add_flag("-q,--quiet", options.quiet, "no progress and no report");
}

void check(const GenerateOptions& options) {
  const auto refuse = [](bool wrong, const char* name, const char* why) {
    if (wrong) throw CLI::ValidationError(name, why);
  };
  refuse(!options.system.empty() && !options.chat, "--system", "needs --chat");
  refuse(options.parse_control && options.chat, "--parse-control", "is not for --chat");
  refuse(options.oracle && options.replay_selection.empty(), "--policy", "predictor=oracle needs --replay-selection");
  refuse(!options.oracle && !options.replay_selection.empty(), "--replay-selection", "needs --policy predictor=oracle");
  refuse(options.max_new_tokens < 1, "--max-new-tokens", "must be at least 1");
  refuse(options.max_context < 0, "--max-context", "must be 0 or more");
  refuse(options.threads < 0, "--threads", "must be 0 or more");
  refuse(options.session.link_latency.count() < 0, "--link-latency-us", "must be 0 or more");
}

}  // namespace

std::optional<int> parse_options(int argc, char** argv, GenerateOptions& options) {
  CLI::App app("Generates text with a long context whose keys and values stay in host memory.", "dualdecoder-generate");
  app.set_version_flag("--version", std::string(kVersion));
  app.get_formatter()->column_width(40);
  app.option_defaults()->always_capture_default();
  add_prompt_options(app, options);
  add_generation_options(app, options);
  add_selection_options(app, options);
  add_memory_options(app, options);
  add_output_options(app, options);
  try {
    app.parse(argc, argv);
    check(options);
    const bool selects = !options.record_selection.empty();
    if (selects && options.session.store == StoreKind::automatic) options.session.store = StoreKind::resident;
  } catch (const CLI::Error& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace dualdecoder::examples
