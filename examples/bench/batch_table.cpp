// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/batch_table.hpp"

#include <algorithm>

#include "examples/bench/statistics.hpp"

namespace dualdecoder::examples {
namespace {

using Json = nlohmann::ordered_json;

/// How a setting compares with full attention's own greedy text, one sequence of every text.
struct Comparison {
  Json agreement;  // means over the texts, null without
  Json kl;
  Json by_text = Json::object();
};

Comparison compare(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                   const std::vector<Text>& texts, const BatchTable& table, const Setting& setting) {
  Comparison comparison;
  if (table.fidelity_tokens < 2 || setting.options.store == StoreKind::full) return comparison;
  double agreement = 0.0;
  double kl = 0.0;
  for (const Text& text : texts) {
    const std::vector<Token> prompt = exactly(text.tokens, static_cast<std::size_t>(table.context));
    const Reference reference = make_reference(backend, weights, prompt, table.fidelity_tokens);
    Run run(setting.backend(backend), weights, prompt, setting.options, table.fidelity_tokens, &reference);
    while (run.step()) {
    }
    const Measured measured = run.finish();
    agreement += measured.agreement / static_cast<double>(texts.size());
    kl += measured.kl / static_cast<double>(texts.size());
    comparison.by_text[text.name] = {{"agreement", measured.agreement}, {"kl", measured.kl}, {"kl95", measured.kl95}};
  }
  comparison.agreement = agreement;
  comparison.kl = kl;
  return comparison;
}

Json row_of(const BatchTable& table, const Setting& setting, const Comparison& comparison, const BatchRun& run, const BatchMeasured& m) {
  const SessionOptions& o = setting.options;
  const bool full = o.store == StoreKind::full;
  const auto steps = static_cast<std::uint64_t>(table.steps);
  const auto largest = static_cast<std::size_t>(*std::max_element(table.batches.begin(), table.batches.end()));
  std::string name = table.name + "-b" + std::to_string(m.batch);
  if (full) name += "-full";
  const auto sparse = std::count_if(table.settings.begin(), table.settings.end(), [](const std::string& other) { return other != "full"; });
  if (!full && sparse > 1) name += "-" + setting.name;
  return {{"row", name},
          {"weights", "real"},
          {"selection", full ? "none" : "live"},
          {"context", table.context},
          {"batch", m.batch},
          {"policy", full ? "full" : (o.miss_policy == MissPolicy::wait ? "wait" : "estimate")},
          {"setting", setting.name},
          {"chunk", o.chunk_tokens},
          {"budget", o.budget_tokens},
          {"slots", o.slots_per_budget},
          {"tok_s", 1e3 * m.tokens_per_step / m.ms_step},
          {"ms_step", m.ms_step},
          {"ms_step_95", m.ms_step_95},
          {"ms_compute", m.ms_compute ? Json(*m.ms_compute) : Json()},
          {"ms_link", m.ms_link},
          {"tokens_per_step", m.tokens_per_step},
          {"hit", share_of(m.store.predicted_hit, m.store.predictable)},
          {"resident", share_of(m.store.resident_hit, m.store.needed)},
          {"estimated", share_of(m.store.estimated, m.store.needed)},
          {"guesses_right", share_of(m.session.right_guesses, m.session.guesses)},
          {"urgent", m.store.urgent_bytes / steps},
          {"prefetch", m.store.prefetch_bytes / steps},
          {"write_back", m.store.write_back_bytes / steps},
          {"link_gb_s", m.ms_link == 0.0 ? 0.0 : static_cast<double>(m.moved_bytes) / table.steps / (1e6 * m.ms_link)},
          {"device_kv_bytes_per_sequence", run.store_plan().device_bytes() / largest},
          {"pinned_bytes", run.store_plan().pinned_bytes()},
          {"plan_device_bytes", run.plan().device_bytes()},
          {"prefill_tok_s", static_cast<double>(run.prompt_tokens()) / run.prefill_seconds()},
          {"agreement", comparison.agreement},
          {"kl", comparison.kl},
          {"by_text", comparison.by_text}};
}

void run_setting(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                 const std::vector<Text>& texts, const BatchTable& table, const Setting& setting,
                 const std::function<void(const Json&)>& emit) {
  const Comparison comparison = compare(backend, weights, texts, table, setting);
  BatchRun run(setting.backend(backend), weights, texts,
               {.options = setting.options, .batches = table.batches, .context = table.context, .steps = table.steps});
  std::vector<BatchMeasured> measured;
  for (int batch : table.batches) {
    measured.push_back(run.with_loads(batch));
    if (setting.options.store == StoreKind::full) emit(row_of(table, setting, comparison, run, measured.back()));
  }
  if (setting.options.store == StoreKind::full) return;
  for (auto m = measured.rbegin(); m != measured.rend(); ++m) {
    m->ms_compute = run.without_loads(m->batch);
    emit(row_of(table, setting, comparison, run, *m));
  }
}

}  // namespace

void run_batches(const CountedBackend& counted, const std::shared_ptr<const ModelWeights>& weights, const std::vector<Text>& texts,
                 const BatchTable& table, const std::function<void(const nlohmann::ordered_json&)>& emit) {
  BatchTable ascending = table;
  std::sort(ascending.batches.begin(), ascending.batches.end());
  const std::string model = weights->config().name;
  const std::size_t weight_bytes = weights->memory().total_bytes();
  for (const std::string& name : table.settings) {
    run_setting(counted.backend(), weights, texts, ascending, setting_named(name, weights->config().vocabulary), [&](const Json& row) {
      Json whole = row;
      whole["model"] = model;
      whole["weight_bytes"] = weight_bytes;
      whole["peak_device_bytes"] = counted.peak_device_bytes();
      emit(whole);
    });
  }
}

}  // namespace dualdecoder::examples
