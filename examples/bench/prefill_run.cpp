// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/prefill_run.hpp"

#include <chrono>
#include <random>

namespace dualdecoder::examples {

PrefillMeasured time_prefill(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             SessionOptions options, int context, int repeat) {
  options.max_context = context + 8;
  options.max_sequences = 1;
  PrefillMeasured measured;
  const MemoryPlan plan = memory_plan(*backend, weights->config(), options);
  measured.plan_bytes = plan.device_bytes();
  measured.pinned_bytes = plan.pinned_bytes();
  std::mt19937 random(1);
  std::uniform_int_distribution<Token> token(0, weights->config().vocabulary - 1);
  std::vector<Token> prompt(static_cast<std::size_t>(context));
  for (Token& each : prompt) each = token(random);
  auto session = make_session(backend, weights, options);
  for (int run = 0; run <= repeat; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    const SequenceId id = session.add(prompt, {.max_new_tokens = 8});
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (run == 0) measured.first_seconds = seconds;
    if (run > 0) measured.seconds.push_back(seconds);
    session.remove(id);
  }
  return measured;
}

}  // namespace dualdecoder::examples
