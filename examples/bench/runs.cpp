// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/runs.hpp"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "examples/bench/machine.hpp"
#include "examples/common/policies.hpp"
#include "examples/common/setting.hpp"

namespace dualdecoder::examples {
namespace {

double seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

SessionOptions sized(SessionOptions options, std::size_t prompt, int count) {
  options.max_context = static_cast<int>(prompt) + count + 1;
  return options;
}

}  // namespace

Reference make_reference(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                         std::span<const Token> prompt, int count) {
  return make_reference(backend, weights, sized({}, prompt.size(), count), prompt, {.max_new_tokens = count});
}

double bytes_of_step(const ModelWeights& weights, const SessionOptions& options, double tokens, double moved_bytes) {
  const ModelConfig& config = weights.config();
  auto bytes = static_cast<double>(weights.memory().total_bytes());
  // an embedding that is not the head as well is read one row a token
  const ConstTensor embedding = weights.tensor(TensorRole::embedding, 0);
  if (!config.tied_embeddings) bytes -= static_cast<double>(embedding.count()) * static_cast<double>(size_of(embedding.type));
  const double heads = static_cast<double>(config.layers) * config.kv_heads;
  const double token = 2.0 * config.head_dim * static_cast<double>(size_of(options.kv_type));
  if (options.store == StoreKind::full) return bytes + heads * tokens * token;
  if (options.store == StoreKind::specache) {
    const SpeCacheOptions& copy = options.specache;
    const double copied = 2.0 * config.head_dim * (copy.bits / 8.0 + 4.0 / copy.group);  // codes, zero points and scales
    return bytes + heads * (tokens * copied + (copy.exact_tokens + copy.fetched_tokens) * token) + 2.0 * moved_bytes;
  }
  const double chunks = tokens / options.chunk_tokens;
  const double summary = 1.5 * config.head_dim + 2 * sizeof(float);  // int8 keys, int4 values, a scale each
  const double exact = std::min(tokens, static_cast<double>(options.sink_tokens + options.budget_tokens + options.local_tokens));
  return bytes + heads * (chunks * summary + exact * token) + 2.0 * moved_bytes;
}

Run::Run(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, std::span<const Token> prompt,
         const SessionOptions& options, int count, const Reference* reference)
    : weights_(weights),
      options_(sized(options, prompt.size(), count)),
      tokens_(static_cast<double>(prompt.size()) + 0.5 * count),
      reference_(reference) {
  reset_peak();
  measured_.program_bytes = resident_bytes();
  const MemoryPlan plan = memory_plan(*backend, weights->config(), options_);
  measured_.plan_device_bytes = plan.device_bytes();
  measured_.plan_host_bytes = plan.pinned_bytes() + plan.pageable_bytes();
  steps_.reserve(static_cast<std::size_t>(2 * count));
  session_.emplace(make_session(backend, weights, options_));
  AddOptions add;
  add.max_new_tokens = count;
  if (reference != nullptr) {
    add.forced = reference->tokens;
    add.on_logits = [this](std::span<const float> logits) { compare(logits); };
  }
  session_->add(prompt, add);
}

void Run::compare(std::span<const float> logits) {
  meter_.add(reference_->log_probabilities.row(meter_.size()), log_probabilities(logits));
}

bool Run::step() {
  if (session_->active() == 0) return false;
  const auto begin = std::chrono::steady_clock::now();
  measured_.generated += static_cast<int>(session_->step().tokens.size());
  steps_.push_back(seconds(std::chrono::steady_clock::now() - begin));
  if (steps_.size() == 1) {
    measured_.peak_bytes = peak_bytes();
    measured_.decode_bytes = resident_bytes();
  }
  return true;
}

Measured Run::finish() {
  std::sort(steps_.begin(), steps_.end());
  measured_.median_step_seconds = steps_[steps_.size() / 2];
  measured_.fast_step_seconds = steps_[steps_.size() / 10];
  measured_.session = session_->statistics();
  measured_.store = session_->store_statistics();
  measured_.prefill_seconds = seconds(measured_.session.prefill);
  measured_.decode_seconds = seconds(measured_.session.decode);
  for (Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) {
    measured_.stall_seconds += seconds(session_->lane_statistics(lane).stalled);
  }
  const auto moved = static_cast<double>(measured_.store.urgent_bytes + measured_.store.prefetch_bytes + measured_.store.write_back_bytes);
  measured_.step_bytes =
      bytes_of_step(*weights_, options_, tokens_, moved / static_cast<double>(std::max<std::uint64_t>(measured_.session.passes, 1)));
  const Fidelity fidelity = meter_.over(1, meter_.size());  // the first token comes from the prefill, which is dense for every setting
  measured_.agreement = fidelity.agreement;
  measured_.kl = fidelity.mean_kl;
  measured_.kl95 = fidelity.kl95;
  return measured_;
}

Setting setting_named(const std::string& name, int vocabulary) {
  const std::size_t blank = std::min(name.find(' '), name.size());
  for (const Policy& policy : policies()) {
    if (policy.name != name.substr(0, blank)) continue;
    return {name, with_setting(options_of(policy, {}), name.substr(std::min(blank + 1, name.size())), vocabulary), &policy};
  }
  SessionOptions options = options_of(find_policy("dualdecoder"), {});
  std::vector<std::string> fields;
  std::istringstream in(name);
  for (std::string field; std::getline(in, field, ':');) fields.push_back(field);
  const bool tail = fields.size() >= 4 && (fields[2] == "drop" || fields[2] == "plain" || fields[2] == "calibrated");
  const bool policy = fields.size() >= 4 && (fields[3] == "wait" || fields[3] == "estimate");
  if (fields.size() < 4 || fields.size() > 5 || !tail || !policy) {
    throw InvalidArgument("--setting = " + name +
                          ": must be POLICY, POLICY KEY=VALUE,... or CHUNK:BUDGET:drop|plain|calibrated:wait|estimate[:BIAS_SCALE]");
  }
  options.chunk_tokens = std::stoi(fields[0]);
  options.budget_tokens = std::stoi(fields[1]);
  options.tail_estimate = fields[2] != "drop";
  options.calibrate_tail = fields[2] == "calibrated";
  options.miss_policy = fields[3] == "wait" ? MissPolicy::wait : MissPolicy::estimate;
  options.resync = Resync::always;
  options.bias_scale = fields.size() == 5 ? std::stof(fields[4]) : 1.0F;
  return {name, options};
}

std::vector<Setting> decode_settings() {
  SessionOptions full;
  full.store = StoreKind::full;
  full.predictor = PredictorKind::none;
  SessionOptions resident = options_of(find_policy("dualdecoder"), {});
  resident.budget_tokens = 256;
  resident.predictor = PredictorKind::none;
  SessionOptions fine = resident;
  fine.chunk_tokens = 4;
  SessionOptions dual = resident;
  dual.predictor = PredictorKind::front_runner;
  SessionOptions estimate = dual;
  estimate.miss_policy = MissPolicy::estimate;
  SessionOptions previous = resident;
  previous.predictor = PredictorKind::previous_step;
  previous.miss_policy = MissPolicy::estimate;
  SessionOptions ping_pong = dual;
  ping_pong.store = StoreKind::ping_pong;
  ping_pong.predictor = PredictorKind::published_dual_row;
  return {{"full", full},
          {"resident, no prediction, chunk 8", resident},
          {"resident, no prediction, chunk 4", fine},
          {"resident + previous step, estimate", previous},
          {"resident + front runner, wait", dual},
          {"resident + front runner, estimate", estimate},
          {"ping-pong + published dual row", ping_pong}};
}

std::vector<Setting> prediction_settings(int vocabulary) {
  SessionOptions base = options_of(find_policy("dualdecoder"), {});
  base.budget_tokens = 256;
  base.resync = Resync::always;
  SessionOptions published = base;
  published.predictor = PredictorKind::published_dual_row;
  published.resync = Resync::never;
  SessionOptions random_own = base;
  random_own.resync = Resync::never;
  random_own.random_guess_below = vocabulary;
  SessionOptions random_published = published;
  random_published.random_guess_below = vocabulary;
  SessionOptions previous = base;
  previous.predictor = PredictorKind::previous_step;
  SessionOptions ahead = base;
  ahead.predictor = PredictorKind::layer_ahead;
  SessionOptions automatic = base;
  automatic.resync = Resync::automatic;
  return {{"front-runner, resync always", base},
          {"front-runner, resync automatic", automatic},
          {"front-runner, random first guess", random_own},
          {"published dual row", published},
          {"published dual row, random first guess", random_published},
          {"previous step", previous},
          {"layer ahead", ahead}};
}

std::vector<Setting> fidelity_settings() {
  std::vector<Setting> settings;
  for (int chunk : {8, 4}) {
    SessionOptions base = options_of(find_policy("dualdecoder"), {});
    base.chunk_tokens = chunk;
    base.budget_tokens = 256;
    base.resync = Resync::always;
    SessionOptions uncalibrated = base;
    uncalibrated.calibrate_tail = false;
    SessionOptions dropped = base;
    dropped.tail_estimate = false;
    SessionOptions estimate = base;
    estimate.miss_policy = MissPolicy::estimate;
    SessionOptions alone = estimate;
    alone.predictor = PredictorKind::none;
    const std::string of = ", chunk " + std::to_string(chunk);
    settings.push_back({"wait, calibrated tail" + of, base});
    settings.push_back({"wait, plain tail" + of, uncalibrated});
    settings.push_back({"wait, tail dropped" + of, dropped});
    settings.push_back({"estimate, front runner" + of, estimate});
    settings.push_back({"estimate, no prediction" + of, alone});
  }
  return settings;
}

}  // namespace dualdecoder::examples
