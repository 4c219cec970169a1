// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/batch_run.hpp"

#include <algorithm>
#include <chrono>

#include "examples/bench/statistics.hpp"

namespace dualdecoder::examples {
namespace {

constexpr Lane kLanes[] = {Lane::urgent, Lane::prefetch, Lane::write_back};

}  // namespace

BatchRun::BatchRun(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                   const std::vector<Text>& texts, const BatchSetting& setting)
    : backend_(std::make_shared<SwitchedBackend>(backend)), texts_(texts), setting_(setting) {
  // a step yields one token a sequence at most, but for the first, which hands out the prefill's too
  tokens_each_ = 2 * static_cast<int>(setting.batches.size()) * (setting.warm_up + setting.steps) + 2;
  SessionOptions& options = setting_.options;
  options.max_context = setting.context + tokens_each_;
  options.max_sequences = setting.batches.back();
  plan_ = memory_plan(*backend, weights->config(), options);
  store_plan_ = backend->store_plan(make_store_options(weights->config(), options, make_predictor(options)->traits()));
  session_.emplace(make_session(backend_, weights, options));
}

BatchMeasured BatchRun::with_loads(int batch) {
  const int texts = static_cast<int>(texts_.size());
  const int windows = (setting_.batches.back() + texts - 1) / texts;
  while (static_cast<int>(sequences_.size()) < batch) {
    const int index = static_cast<int>(sequences_.size());
    const Text& text = texts_[static_cast<std::size_t>(index % texts)];
    const auto prompt = window(text.tokens, static_cast<std::size_t>(setting_.context), index / texts, windows);
    sequences_.push_back(session_->add(prompt, {.max_new_tokens = tokens_each_}));
  }
  BatchMeasured measured;
  measured.batch = batch;
  const std::vector<double> times = time_steps(measured);
  measured.ms_step = quantile(times, 0.5);
  measured.ms_step_95 = quantile(times, 0.95);
  return measured;
}

double BatchRun::without_loads(int batch) {
  backend_->set_moves(false);
  while (static_cast<int>(sequences_.size()) > batch) {
    session_->remove(sequences_.back());
    sequences_.pop_back();
  }
  BatchMeasured ignored;
  return quantile(time_steps(ignored), 0.5);
}

std::vector<double> BatchRun::time_steps(BatchMeasured& measured) {
  std::vector<double> times;
  StoreStatistics store;
  SessionStatistics session;
  std::uint64_t moved = 0;
  double busy_ms = 0.0;
  for (int step = 0; step < setting_.warm_up + setting_.steps; ++step) {
    if (step == setting_.warm_up) {
      store = session_->store_statistics();
      session = session_->statistics();
      moved = lane_bytes();
      busy_ms = lane_busy_ms();
    }
    const auto begin = std::chrono::steady_clock::now();
    session_->step();
    if (step >= setting_.warm_up) {
      times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
  }
  measured.store = difference(session_->store_statistics(), store);
  measured.session = difference(session_->statistics(), session);
  measured.moved_bytes = lane_bytes() - moved;
  measured.ms_link = (lane_busy_ms() - busy_ms) / setting_.steps;
  measured.tokens_per_step = static_cast<double>(measured.session.generated_tokens) / setting_.steps;
  return times;
}

std::uint64_t BatchRun::lane_bytes() const {
  std::uint64_t sum = 0;
  for (Lane lane : kLanes) sum += session_->lane_statistics(lane).moved_bytes;
  return sum;
}

double BatchRun::lane_busy_ms() const {
  double sum = 0.0;
  for (Lane lane : kLanes) sum += std::chrono::duration<double, std::milli>(session_->lane_statistics(lane).busy).count();
  return sum;
}

double BatchRun::prefill_seconds() const { return std::chrono::duration<double>(session_->statistics().prefill).count(); }

}  // namespace dualdecoder::examples
