// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
// dualdecoder-generate: a long prompt in, text and a report out.
#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "dualdecoder/chrome_trace.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/log.hpp"
#include "dualdecoder/predictors/oracle.hpp"
#include "examples/common/backend_choice.hpp"
#include "examples/common/chat.hpp"
#include "examples/common/terminal.hpp"
#include "examples/common/tokenizer.hpp"
#include "examples/generate/compare.hpp"
#include "examples/generate/options.hpp"
#include "examples/generate/report.hpp"

namespace dualdecoder::examples {
namespace {

constexpr int kExitInterrupted = 130;  // as a shell reports Ctrl-C

struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

void stop_if_interrupted() {
  if (InterruptGuard::interrupted()) throw Interrupted();
}

class StderrLog final : public LogSink {
 public:
  void log(LogLevel level, std::string_view message) override {
    if (level == LogLevel::warning) fmt::print(stderr, "warning: {}\n", message);
    if (level == LogLevel::error) fmt::print(stderr, "error: {}\n", message);
  }
};

std::string read_all(std::istream& in) { return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()}; }

/// The prompt's text: the file's, then that of --prompt; stdin's when neither is given. A last line break is not part of it.
std::string read_prompt(const GenerateOptions& options) {
  std::string text;
  if (!options.prompt_file.empty()) {
    std::ifstream in(options.prompt_file, std::ios::binary);
    if (!in) throw IoError("cannot open " + options.prompt_file.string());
    text = read_all(in);
    if (in.bad() || std::filesystem::is_directory(options.prompt_file)) throw IoError("cannot read " + options.prompt_file.string());
  } else if (options.prompt.empty()) {
    if (isatty(STDIN_FILENO) == 1) fmt::print(stderr, "prompt, ended by Ctrl-D: ");
    text = read_all(std::cin);
  }
  if (text.ends_with('\n')) text.pop_back();
  if (!options.prompt.empty()) text += (text.empty() ? "" : "\n\n") + options.prompt;
  if (text.empty()) throw InvalidArgument("prompt is empty: must have at least one character");
  return text;
}

std::vector<Token> encode_prompt(const GenerateOptions& options, const Tokenizer& tokenizer) {
  const std::string text = read_prompt(options);
  if (options.chat) {
    std::vector<ChatMessage> messages;
    if (!options.system.empty()) messages.push_back({"system", options.system});
    messages.push_back({"user", text});
    return ChatTemplate::load(options.model).encode(tokenizer, messages);
  }
  auto tokens = tokenizer.encode(text, options.parse_control ? ControlTokens::parse : ControlTokens::as_text);
  if (const auto bos = tokenizer.bos(); bos && (tokens.empty() || tokens.front() != *bos)) tokens.insert(tokens.begin(), *bos);
  return tokens;
}

/// The smallest context that holds prompt and answer, unless the user chose one or the model has less.
int choose_context(const GenerateOptions& options, const ModelConfig& config, std::size_t prompt_tokens) {
  if (options.max_context > 0) return options.max_context;
  const std::size_t wanted = prompt_tokens + static_cast<std::size_t>(options.max_new_tokens);
  const auto most = static_cast<std::size_t>(config.context > 0 ? config.context : 1 << 26);
  return static_cast<int>(prompt_tokens < most ? std::min(wanted, most) : wanted);
}

int print_memory_plan(const GenerateOptions& options, Backend& backend) {
  const ModelConfig config = read_model_config(options.model, options.yarn);
  SessionOptions session = options.session;
  if (options.oracle) session.predictor = PredictorKind::none;  // as many rows
  const bool has_prompt = !options.prompt.empty() || !options.prompt_file.empty();
  if (options.max_context > 0) {
    session.max_context = options.max_context;
  } else if (has_prompt) {
    session.max_context = choose_context(options, config, encode_prompt(options, Tokenizer::load(options.model)).size());
  } else {
    session.max_context = config.context;
  }
  const MemoryPlan plan = memory_plan(backend, config, session);
  fmt::print("{}", options.json ? to_json(plan) + "\n" : to_text(plan));
  return 0;
}

/// Puts generated text on stdout as it comes.
class Output {
 public:
  Output(const Tokenizer& tokenizer, bool json) : stream_(tokenizer), json_(json) {}

  void token(Token token) {
    const std::string text = stream_.push(token);
    if (json_) {
      fmt::print("{}\n", nlohmann::ordered_json{{"event", "token"}, {"token", token}, {"text", text}}.dump());
    } else {
      fmt::print("{}", text);
    }
    std::fflush(stdout);
  }
  void finish() {
    if (!json_) fmt::print("{}\n", stream_.finish());
    std::fflush(stdout);
    if (std::ferror(stdout) != 0) throw IoError("cannot write to stdout");
  }

 private:
  TextStream stream_;
  bool json_;
};

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::none: return "interrupted";
    case FinishReason::stop_token: return "stop_token";
    case FinishReason::max_tokens: return "max_tokens";
    case FinishReason::context_full: return "context_full";
    case FinishReason::failed: return "failed";
  }
  return "";
}

/// One run from prompt to report.
class Generation {
 public:
  Generation(const GenerateOptions& options, std::shared_ptr<Backend> backend) : options_(options), backend_(std::move(backend)) {}

  int run() {
    const Tokenizer tokenizer = Tokenizer::load(options_.model);
    prompt_ = encode_prompt(options_, tokenizer);
    const ModelConfig config = read_model_config(options_.model, options_.yarn);
    report_.options = options_.session;
    report_.options.max_context = choose_context(options_, config, prompt_.size());
    report_.options = choose_store(*backend_, config, report_.options);
    std::unique_ptr<RetrievalPredictor> predictor = make_predictor_for_run();
    report_.predictor = predictor->traits().name;
    report_.plan = DecodeSession::memory_plan(*backend_, config, report_.options, predictor->traits());  // refuses options before the load
    if (options_.compare_full) logits_.emplace(options_.max_new_tokens, config.vocabulary);
    load();
    DecodeSession session(backend_, weights_, report_.options, std::move(predictor));
    prefill(session, tokenizer);
    generate(session, tokenizer);
    collect(session);
    if (options_.compare_full && !generated_.empty() && report_.finish != std::string("interrupted")) compare();
    finish();
    return report_.finish == std::string("interrupted") ? kExitInterrupted : 0;
  }

 private:
  std::unique_ptr<RetrievalPredictor> make_predictor_for_run() {
    std::unique_ptr<RetrievalPredictor> predictor;
    if (options_.oracle) {
      std::ifstream in(options_.replay_selection, std::ios::binary);
      if (!in) throw IoError("cannot open " + options_.replay_selection.string());
      replayed_ = SelectionTrace::load(in);
      predictor = std::make_unique<Oracle>(replayed_);
    } else {
      predictor = make_predictor(report_.options);
    }
    if (options_.record_selection.empty()) return predictor;
    return std::make_unique<SelectionRecorder>(std::move(predictor), recorded_);
  }

  void load() {
    const auto begin = std::chrono::steady_clock::now();
    ProgressBar bar("load", !options_.quiet);
    LoadOptions load;
    load.matrix_type = options_.weights_type;
    load.threads = options_.threads;
    load.yarn_factor = options_.yarn;
    load.on_progress = [&bar](const LoadProgress& progress) {
      stop_if_interrupted();
      bar.update(progress.done_bytes, progress.total_bytes, in_bytes(static_cast<double>(progress.done_bytes)));
    };
    weights_ = load_weights(options_.model, *backend_, load);
    report_.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    report_.weights = weights_->memory();
    report_.model = weights_->config().name.empty() ? options_.model.filename().string() : weights_->config().name;
    bar.finish(fmt::format("{}, {}", report_.model, in_bytes(static_cast<double>(report_.weights.total_bytes()))));
  }

  void prefill(DecodeSession& session, const Tokenizer& tokenizer) {
    ProgressBar bar("prefill", !options_.quiet);
    AddOptions add{.max_new_tokens = options_.max_new_tokens, .sampling = options_.sampling};
    if (!options_.ignore_end) add.stop_tokens.assign(tokenizer.end_tokens().begin(), tokenizer.end_tokens().end());
    if (logits_) add.on_logits = [this](std::span<const float> logits) { logits_->add(logits); };
    add.on_prefill = [&bar](std::size_t done, std::size_t total) {
      stop_if_interrupted();
      bar.update(done, total);
    };
    session.add(prompt_, std::move(add));
    report_.prompt_tokens = static_cast<int>(prompt_.size());
    bar.finish(fmt::format("{} tokens", prompt_.size()));
  }

  void generate(DecodeSession& session, const Tokenizer& tokenizer) {
    Output output(tokenizer, options_.json);
    report_.finish = "interrupted";
    while (session.active() > 0 && !InterruptGuard::interrupted()) {
      for (const TokenEvent& event : session.step().tokens) {
        generated_.push_back(event.token);
        output.token(event.token);
        if (event.finished) report_.finish = name_of(event.reason);
      }
    }
    output.finish();
  }

  void collect(const DecodeSession& session) {
    report_.session = session.statistics();
    report_.store = session.store_statistics();
    report_.urgent = session.lane_statistics(Lane::urgent);
    report_.prefetch = session.lane_statistics(Lane::prefetch);
    report_.write_back = session.lane_statistics(Lane::write_back);
  }

  void compare() {
    ProgressBar bar("compare", !options_.quiet);
    report_.comparison = compare_with_full(backend_, weights_, report_.options, prompt_, generated_, *logits_, [&](std::size_t done) {
      stop_if_interrupted();
      bar.update(done, generated_.size());
    });
    bar.finish("full attention over the same tokens");
  }

  void finish() {
    if (!options_.record_selection.empty()) {
      std::ofstream out(options_.record_selection, std::ios::binary);
      if (!out) throw IoError("cannot write " + options_.record_selection.string());
      recorded_.save(out);
    }
    if (options_.json) {
      fmt::print("{}\n", to_json(report_));
    } else if (!options_.quiet) {
      fmt::print(stderr, "\n{}", to_text(report_));
    }
  }

  const GenerateOptions& options_;
  std::shared_ptr<Backend> backend_;
  std::shared_ptr<const ModelWeights> weights_;
  SelectionTrace recorded_, replayed_;
  std::optional<LogProbabilities> logits_;
  std::vector<Token> prompt_, generated_;
  Report report_;
};

int run(const GenerateOptions& options) {
  StderrLog log;
  std::ofstream trace_file;
  std::optional<ChromeTrace> trace;
  if (!options.trace.empty()) {
    trace_file.open(options.trace);
    if (!trace_file) throw IoError("cannot write " + options.trace.string());
    trace.emplace(trace_file, "dualdecoder-generate");
  }
  const auto backend =
      choose_backend({.device = options.device, .threads = options.threads, .log = &log, .trace = trace ? &*trace : nullptr});
  if (options.memory_plan) return print_memory_plan(options, *backend);
  const InterruptGuard guard;
  return Generation(options, backend).run();
}

}  // namespace
}  // namespace dualdecoder::examples

int main(int argc, char** argv) {
  using namespace dualdecoder::examples;
  try {
    GenerateOptions options;
    if (const auto exit_code = parse_options(argc, argv, options)) return *exit_code;
    return run(options);
  } catch (const Interrupted&) {
    fmt::print(stderr, "dualdecoder-generate: interrupted\n");
    return kExitInterrupted;
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-generate: {}\n", error.what());
    return 1;
  }
}
