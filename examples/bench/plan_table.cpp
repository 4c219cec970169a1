// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/plan_table.hpp"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "dualdecoder/dualdecoder.hpp"
#include "examples/bench/command_line.hpp"
#include "examples/bench/shapes.hpp"
#include "examples/common/policies.hpp"

namespace dualdecoder::examples {
namespace {

struct Options {
  std::vector<std::string> shapes{"8b"};
  std::vector<int> contexts{131072};
  std::vector<int> batches{1};
  std::vector<std::string> policies{"full", "dualdecoder", "dualdecoder-published", "shadowkv", "specache-1bit", "specache-2bit"};
  double fit_gb = 0.0;
  int prefill_block = 4096;
  std::string commit = "unknown";
  std::string command;
};

/// What an item of a plan is for. What a prefill takes is free again when it ends; all else stays as long as the session. Summaries,
/// low-rank keys, low-bit copies and tables are helper state: what is kept on the device only to find or to stand for keys and values that
/// are elsewhere.
struct Kind {
  const char* name;
  bool helper;
  std::vector<std::string_view> items;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kKinds{
      {"weights", false, {"weights"}},
      {"exact",
       false,
       {"keys and values", "sinks and local window", "slots", "two layers' slots", "outlier chunks", "local window",
        "buffers of chosen chunks", "exact last tokens", "fetched tokens"}},
      {"summaries", true, {"summaries", "landmarks", "bounds of chunks"}},
      {"low_rank", true, {"low-rank keys"}},
      {"low_bit", true, {"low-bit copy"}},
      {"tables", true, {"tables of chunks", "tables of slots", "predictions"}},
      {"activations",
       false,
       {"attention work space", "rotations and work space", "work space of the dense part", "activations",
        "chosen chunks and transfer lists"}},
      {"prefill", false, {"prefill work space", "factorisation of one prompt", "calibration queries of one prefill"}}};
  return kKinds;
}

const Kind& kind_of(std::string_view item) {
  for (const Kind& kind : kinds()) {
    if (std::find(kind.items.begin(), kind.items.end(), item) != kind.items.end()) return kind;
  }
  throw Error("the plan's item \"" + std::string(item) + "\" is of no kind that this table knows");
}

/// Of a model whose tensors are those of ModelWeights.
std::size_t parameter_count(const ModelConfig& config) {
  const auto n = [](int count) { return static_cast<std::size_t>(count); };
  const std::size_t hidden = n(config.hidden);
  const std::size_t q = n(config.q_width());
  const std::size_t kv = n(config.kv_width());
  const std::size_t layer = hidden * (2 * q + 2 * kv + 3 * n(config.intermediate)) + 2 * hidden + (config.attention_bias ? q + 2 * kv : 0) +
                            (config.qk_norm ? 2 * n(config.head_dim) : 0);
  return n(config.layers) * layer + hidden + (config.tied_embeddings ? 1 : 2) * n(config.vocabulary) * hidden;
}

/// One cell of the table.
struct Cell {
  const Policy* policy;
  ModelConfig model;
  int context;
  int batch;
};

SessionOptions options_of(const Cell& cell, int prefill_block) {
  SessionOptions base;
  base.max_context = cell.context;
  base.max_sequences = cell.batch;
  base.prefill_block = prefill_block;
  base.budget_tokens = 0;
  return options_of(*cell.policy, base, cell.model);
}

class Table {
 public:
  explicit Table(const Options& options) : options_(options), backend_(cpu::make_cpu_backend({.threads = 1})) {}

  /// A plan with the weights, in bf16.
  MemoryPlan plan(const Cell& cell) const {
    MemoryPlan plan;
    plan.add("weights", MemoryKind::device, 2 * parameter_count(cell.model));
    plan.add(memory_plan(*backend_of(*cell.policy, backend_), cell.model, options_of(cell, options_.prefill_block)));
    return plan;
  }

  /// The largest batch whose plan stays within `bytes`; 0: not even one sequence fits.
  int fitting(Cell cell, double bytes) const {
    constexpr int kMost = 4096;
    const auto fits = [&](int batch) {
      cell.batch = batch;
      return static_cast<double>(plan(cell).device_bytes()) <= bytes;
    };
    int low = 0;
    int high = 1;
    while (high < kMost && fits(high)) {
      low = high;
      high *= 2;
    }
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    return low;
  }

  nlohmann::ordered_json row(const Cell& cell) const {
    const MemoryPlan plan = this->plan(cell);
    nlohmann::ordered_json by_kind = nlohmann::ordered_json::object();
    for (const Kind& kind : kinds()) by_kind[kind.name] = std::size_t{0};
    std::size_t helper = 0;
    for (const MemoryPlan::Item& item : plan.items) {
      if (item.kind != MemoryKind::device) continue;
      const Kind& kind = kind_of(item.what);
      by_kind[kind.name] = by_kind[kind.name].get<std::size_t>() + item.bytes;
      if (kind.helper) helper += item.bytes;
    }
    const SessionOptions chosen = options_of(cell, options_.prefill_block);
    return {{"row", fmt::format("{}-{}k-b{}-{}", cell.model.name, cell.context / 1024, cell.batch, cell.policy->name)},
            {"model", cell.model.name},
            {"parameters", parameter_count(cell.model)},
            {"context", cell.context},
            {"batch", cell.batch},
            {"policy", cell.policy->name},
            {"budget", chosen.budget_tokens},
            {"device_bytes", plan.device_bytes()},
            {"helper_bytes", helper},
            {"by_kind", by_kind},
            {"host_bytes", plan.pinned_bytes()},
            {"source", "memory plan of the CPU backend"}};
  }

  void print(const Cell& cell) const { print(row(cell)); }

  void print(nlohmann::ordered_json row) const {
    if (options_.fit_gb > 0.0) row["fit_gb"] = options_.fit_gb;
    row["commit"] = options_.commit;
    row["command"] = options_.command;
    fmt::print("{}\n", row.dump());
  }

 private:
  const Options& options_;
  std::shared_ptr<Backend> backend_;
};

void print_table(const Options& options) {
  const Table table(options);
  for (const std::string& shape : options.shapes) {
    for (const int context : options.contexts) {
      for (const std::string& name : options.policies) {
        Cell cell{&find_policy(name), shape_named(shape), context, 1};
        if (options.fit_gb <= 0.0) {
          for (const int batch : options.batches) {
            cell.batch = batch;
            table.print(cell);
          }
          continue;
        }
        cell.batch = table.fitting(cell, 1e9 * options.fit_gb);
        if (cell.batch > 0) {
          table.print(cell);
        } else {
          fmt::print(stderr, "{} {} {}: one sequence does not fit\n", shape, context, name);
        }
      }
    }
  }
}

}  // namespace

int run_plan(std::span<char* const> arguments) {
  Options options;
  options.command = command_line(arguments);
  CLI::App app("Prints what a model's shape takes, by context, batch, policy and kind of memory, as JSON lines. Nothing is allocated.",
               "dualdecoder-bench plan");
  app.add_option("--shape", options.shapes, "1.5b, 8b, 14b, 32b or tiny")->capture_default_str();
  app.add_option("--context", options.contexts, "tokens of every sequence")->capture_default_str()->check(CLI::Range(64, 1 << 20));
  CLI::Option* batch = app.add_option("--batch", options.batches, "sequences at once")->capture_default_str()->check(CLI::Range(1, 65536));
  app.add_option("--policy", options.policies, policy_names())->capture_default_str();
  app.add_option("--fit-gb", options.fit_gb, "instead of batches, the largest one whose plan fits in so many GB")
      ->check(CLI::Range(1.0, 1e6))
      ->excludes(batch);
  app.add_option("--prefill-block", options.prefill_block, "prompt tokens of one dense call; the CUDA backend's by default")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--commit", options.commit, "commit in the results");
  CLI11_PARSE(app, static_cast<int>(arguments.size()) - 1, arguments.data() + 1);
  try {
    print_table(options);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "dualdecoder-bench plan: {}\n", error.what());
    return 1;
  }
}

}  // namespace dualdecoder::examples
