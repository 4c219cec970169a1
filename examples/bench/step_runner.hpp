// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/session_options.hpp"
#include "examples/bench/step_trace.hpp"

namespace dualdecoder::examples {

/// One row of the table of steps: a store, a predictor and a batch on a context of made-up keys and values.
struct StepSetting {
  SessionOptions options;  ///< max_context is set from `context`
  int context = 131072;    ///< tokens in every sequence
  int batch = 7;
  int steps = 48;                   ///< that are timed
  int warm_up = 8;                  ///< that are not
  std::size_t device_kv_limit = 0;  ///< all KV state on the device may take at most this, in bytes; 0: no limit
  bool loads_in_order = false;      ///< compute waits for a prefetch where it is submitted: what running beside compute is worth
  /// Shares of row 0's recorded chunks that give way to ones that nobody predicted, drawn from the whole context; a measurement for each
  std::vector<double> injected_misses{0.0};
};

struct StepMeasured {
  double ms_step = 0.0;          ///< median
  double ms_step_95 = 0.0;       ///< 95th percentile
  double ms_compute = 0.0;       ///< median of the same steps without any load
  double ms_link = 0.0;          ///< that the lanes were busy, a step
  double tokens_per_step = 0.0;  ///< committed by the whole batch
  StoreStatistics store;         ///< of the timed steps
  std::uint64_t moved_bytes = 0;
  std::size_t device_kv_bytes = 0;  ///< all KV state on the device, from the plan
  std::size_t pinned_bytes = 0;
  double fill_seconds = 0.0;
};

/// Runs passes of `weights` with the choices of `trace` in place of the model's own, one measurement for each of the injected shares.
/// Throws as the session would, and InvalidArgument where the plan is above the limit, the trace too short or a share not in 0 .. 1.
std::vector<StepMeasured> run_steps(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                                    const StepTrace& trace, const StepSetting& setting);

/// The choices of a real decode: runs a session over `prompt` for `steps` passes and records what every pass chose.
StepTrace record_steps(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                       const SessionOptions& options, std::span<const Token> prompt, int steps);

}  // namespace dualdecoder::examples
