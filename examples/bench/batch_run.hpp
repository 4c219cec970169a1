// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "examples/bench/prompts.hpp"
#include "examples/bench/switched_loads.hpp"

namespace dualdecoder::examples {

/// What batches are measured on: one session that grows from the smallest batch to the largest.
struct BatchSetting {
  SessionOptions options;    ///< max_context and max_sequences are set from the rest
  std::vector<int> batches;  ///< ascending
  int context = 122880;      ///< tokens of every prompt
  int steps = 48;            ///< that are timed
  int warm_up = 8;           ///< that are not
};

/// One batch's steps.
struct BatchMeasured {
  int batch = 0;
  double ms_step = 0.0;              ///< median
  double ms_step_95 = 0.0;           ///< 95th percentile
  std::optional<double> ms_compute;  ///< median of the same steps without any load; none where nothing is loaded
  double ms_link = 0.0;              ///< that the lanes were busy, a step
  double tokens_per_step = 0.0;
  std::uint64_t moved_bytes = 0;
  StoreStatistics store;      ///< of the timed steps
  SessionStatistics session;  ///< of the timed steps
};

/// Real prompts in one session, windows of the texts in turn, decoded greedily. Batches are timed with their loads while the session grows;
/// without_loads() comes last, since what the slots hold from then on is not what their tables say.
class BatchRun {
 public:
  /// Throws as the session would. `texts` must outlive the run.
  BatchRun(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights, const std::vector<Text>& texts,
           const BatchSetting& setting);

  /// Adds sequences up to `batch` and times its steps.
  BatchMeasured with_loads(int batch);
  /// Removes sequences down to `batch` and times its steps with nothing moved: milliseconds, median.
  double without_loads(int batch);

  double prefill_seconds() const;
  std::uint64_t prompt_tokens() const { return session_->statistics().prompt_tokens; }
  const MemoryPlan& plan() const noexcept { return plan_; }
  const MemoryPlan& store_plan() const noexcept { return store_plan_; }

 private:
  std::vector<double> time_steps(BatchMeasured& measured);
  std::uint64_t lane_bytes() const;
  double lane_busy_ms() const;

  std::shared_ptr<SwitchedBackend> backend_;
  const std::vector<Text>& texts_;
  BatchSetting setting_;
  MemoryPlan plan_;
  MemoryPlan store_plan_;
  int tokens_each_ = 0;  // that a sequence may generate
  std::vector<SequenceId> sequences_;
  std::optional<DecodeSession> session_;
};

}  // namespace dualdecoder::examples
