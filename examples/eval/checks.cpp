// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/checks.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/load_weights.hpp"
#include "examples/common/setting.hpp"
#include "examples/common/terminal.hpp"
#include "examples/eval/prompt_tape.hpp"

namespace dualdecoder::examples {
namespace {

/// What load_weights takes with matrices in bf16, to within norms and biases.
std::size_t weight_bytes(const ModelConfig& config) {
  const auto hidden = static_cast<std::size_t>(config.hidden);
  const std::size_t attention = hidden * static_cast<std::size_t>(2 * config.q_width() + 2 * config.kv_width());
  const std::size_t mlp = 3 * hidden * static_cast<std::size_t>(config.intermediate);
  const std::size_t ends = hidden * static_cast<std::size_t>(config.vocabulary) * (config.tied_embeddings ? 1 : 2);
  return size_of(DataType::bf16) * (static_cast<std::size_t>(config.layers) * (attention + mlp) + ends);
}

/// Host memory that can still be had; 0: unknown.
std::size_t available_host_bytes() {
  std::ifstream file("/proc/meminfo");
  constexpr std::string_view kField = "MemAvailable:";
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(kField)) return std::stoull(line.substr(kField.size())) * 1024;
  }
  return 0;
}

/// What is wrong with one model's part of a plan.
class ModelChecks {
 public:
  ModelChecks(const ModelChoice& model, const std::shared_ptr<Backend>& backend, const Haystack& essay, std::size_t batch)
      : model_(model),
        backend_(backend),
        batch_(batch),
        config_(read_model_config(model.path, model.yarn)),
        prompts_(model.path, essay),
        on_host_(std::string_view(backend->name()) == "cpu"),
        host_bytes_(available_host_bytes()) {}

  void check_context(int context) const {
    if (config_.context <= 0 || context <= config_.context) return;
    throw InvalidArgument(fmt::format("context = {}: must be at most {}, the longest of {}", context, config_.context, model_.name));
  }
  void check_task(const CellGroup& group) const { prompts_.check(*group.task, group.context, group.seed); }
  void check_method(const Method& method, int context, int most_answer_tokens) const {
    SessionOptions options = session_options(method, context, config_);
    options.max_sequences = static_cast<int>(batch_);
    const MemoryPlan plan = memory_plan(*backend_of(*method.policy, backend_), config_, options);
    const std::size_t reference =
        batch_ * sizeof(float) * static_cast<std::size_t>(most_answer_tokens) * static_cast<std::size_t>(config_.vocabulary);
    const std::size_t device = weight_bytes(config_) + batch_ * PromptTape::bytes(*backend_, config_, context) + plan.device_bytes();
    const std::size_t host = reference + plan.pinned_bytes() + plan.pageable_bytes() + (on_host_ ? device : 0);
    if (host_bytes_ > 0 && host > host_bytes_) {
      throw InvalidArgument(fmt::format("takes {} of host memory: must fit into the {} that are free", in_bytes(static_cast<double>(host)),
                                        in_bytes(static_cast<double>(host_bytes_))));
    }
    if (!on_host_) const Buffer probe(backend_->memory(MemoryKind::device), device, backend_->stream());
  }
  const std::string& name() const { return model_.name; }

 private:
  const ModelChoice& model_;
  std::shared_ptr<Backend> backend_;
  std::size_t batch_;
  ModelConfig config_;
  PromptMaker prompts_;
  bool on_host_;
  std::size_t host_bytes_;
};

class Problems {
 public:
  /// `where` is a problem, but for what `check` throws, which is put behind its sentence.
  template <class Check>
  bool none(Problem where, const Check& check) {
    try {
      check();
      return true;
    } catch (const Error& error) {
      where.sentence += error.what();
      if (seen_.insert(where.sentence).second) problems_.push_back(std::move(where));
      return false;
    }
  }
  std::vector<Problem> all() && { return std::move(problems_); }

 private:
  std::set<std::string> seen_;
  std::vector<Problem> problems_;
};

}  // namespace

SessionOptions session_options(const Method& method, int context, const ModelConfig& model) {
  SessionOptions base;
  base.max_context = context;
  base.budget_tokens = 0;  // the policy's own
  return with_setting(options_of(*method.policy, base, model), method.setting, model.vocabulary);
}

std::vector<Problem> problems_of(const Plan& plan, const std::shared_ptr<Backend>& backend, const Haystack& essay, std::size_t batch) {
  Problems problems;
  for (std::size_t m = 0; m < plan.models.size(); ++m) {
    std::optional<ModelChecks> model;
    const bool readable = problems.none({.sentence = {}, .model = m}, [&] { model.emplace(plan.models[m], backend, essay, batch); });
    if (!readable) continue;
    std::map<int, int> answer_tokens_of;  // by context, the longest
    for (const CellGroup& group : plan.groups) {
      if (group.model != m) continue;
      const auto check_context = [&] { model->check_context(group.context); };
      if (!problems.none({.sentence = {}, .model = m, .context = group.context}, check_context)) continue;
      problems.none({.sentence = model->name() + ": ", .model = m, .context = group.context, .task = group.task},
                    [&] { model->check_task(group); });
      int& longest = answer_tokens_of[group.context];
      longest = std::max(longest, answer_tokens(*group.task, group.context));
    }
    for (const auto& [context, answer] : answer_tokens_of) {
      for (const Method& method : plan.methods) {
        problems.none({.sentence = fmt::format("{}, context {}, policy {}: ", model->name(), context, method.name()),
                       .model = m,
                       .context = context,
                       .method = method.name()},
                      [&, context = context, answer = answer] { model->check_method(method, context, answer); });
      }
    }
  }
  return std::move(problems).all();
}

std::string memory_table(const Plan& plan, const std::vector<Problem>& problems, const std::shared_ptr<Backend>& backend) {
  std::string out = fmt::format("{:<36} {:>7} {:<40} {:>12} {:>12}\n", "model", "context", "method", "device MiB", "host MiB");
  std::set<std::pair<std::size_t, int>> seen;
  for (const CellGroup& group : plan.groups) {
    if (!seen.emplace(group.model, group.context).second) continue;
    const ModelChoice& model = plan.models[group.model];
    for (const Method& method : plan.methods) {
      const auto bars = [&](const Problem& problem) { return problem.task == nullptr && problem.bars(group, method); };
      if (std::any_of(problems.begin(), problems.end(), bars)) continue;
      const ModelConfig config = read_model_config(model.path, model.yarn);
      const MemoryPlan memory = memory_plan(*backend_of(*method.policy, backend), config, session_options(method, group.context, config));
      const auto mib = [](std::size_t bytes) { return static_cast<double>(bytes) / (1U << 20U); };
      out += fmt::format("{:<36} {:>7} {:<40} {:>12.1f} {:>12.1f}\n", model.name, group.context, method.name(), mib(memory.device_bytes()),
                         mib(memory.pinned_bytes() + memory.pageable_bytes()));
    }
  }
  return out;
}

}  // namespace dualdecoder::examples
