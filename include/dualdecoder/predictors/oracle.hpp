// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/selection_trace.hpp"

namespace dualdecoder {

namespace detail {

/// A pass as the host sees it, downloaded; for tools only.
struct HostView {
  std::vector<int> slot_of, position;
  std::vector<RowMode> mode;

  HostView(const StepView& view, StepKernels& kernels, StreamRef stream) {
    const auto places = static_cast<std::size_t>(view.sequences);
    slot_of.resize(places);
    position.resize(places);
    mode.resize(places);
    kernels.download(slot_of.data(), view.slot_of, places * sizeof(int), stream);
    kernels.download(position.data(), view.position, places * sizeof(int), stream);
    kernels.download(mode.data(), view.mode, places * sizeof(RowMode), stream);
  }
};

}  // namespace detail

/// Writes what row 0 chooses into a trace while another predictor does the work. Downloads every selection: a tool, not for speed.
class SelectionRecorder final : public RetrievalPredictor {
 public:
  /// `trace` must outlive the recorder.
  SelectionRecorder(std::unique_ptr<RetrievalPredictor> inner, SelectionTrace& trace) : inner_(std::move(inner)), trace_(trace) {}

  PredictorTraits traits() const noexcept override {
    PredictorTraits traits = inner_->traits();
    traits.reads_back = true;
    return traits;
  }
  RowMode first_mode() const noexcept override { return inner_->first_mode(); }
  void predict(Layer layer, const StepView& view, const Selection& by_row, const Selection& ahead, Prediction& prediction,
               StepKernels& kernels, StreamRef stream) override {
    inner_->predict(layer, view, by_row, ahead, prediction, kernels, stream);
    const detail::HostView host(view, kernels, stream);
    std::vector<int> chunks;
    for (int place = 0; place < view.sequences; ++place) {
      const auto at = static_cast<std::size_t>(place);
      if (!row_is_live(host.mode[at], 0)) continue;
      const int row = place * view.rows_per_sequence;
      for (int head = 0; head < by_row.kv_heads; ++head) {
        int count = 0;
        kernels.download(&count, &by_row.count_of(row, head), sizeof(int), stream);
        chunks.resize(static_cast<std::size_t>(count));
        kernels.download(chunks.data(), by_row.chunks_of(row, head), chunks.size() * sizeof(int), stream);
        trace_.record({host.slot_of[at], host.position[at], layer, head}, chunks);
      }
    }
  }
  void observe(const StepState& state, const Outcome& outcome, int active, StepKernels& kernels, StreamRef stream) override {
    inner_->observe(state, outcome, active, kernels, stream);
  }

 private:
  std::unique_ptr<RetrievalPredictor> inner_;
  SelectionTrace& trace_;
};

/// One row; replays a recorded trace of the same run, so every prediction is right. The upper bound of any predictor.
class Oracle final : public RetrievalPredictor {
 public:
  /// `trace` must outlive the oracle.
  explicit Oracle(const SelectionTrace& trace) : trace_(trace) {}

  PredictorTraits traits() const noexcept override { return {.name = "oracle", .rows_per_sequence = 1, .reads_back = true}; }
  RowMode first_mode() const noexcept override { return RowMode::single; }
  void predict(Layer layer, const StepView& view, const Selection&, const Selection&, Prediction& prediction, StepKernels& kernels,
               StreamRef stream) override {
    prediction.layer = layer;
    const detail::HostView host(view, kernels, stream);
    const Selection& to = prediction.chunks;
    const std::vector<float> scores(static_cast<std::size_t>(to.capacity), 1.0F);
    for (int place = 0; place < view.sequences; ++place) {
      const auto at = static_cast<std::size_t>(place);
      for (int head = 0; head < to.kv_heads; ++head) {
        std::span<const int> chunks;
        if (host.mode[at] != RowMode::idle) chunks = trace_.find({host.slot_of[at], host.position[at] + 1, layer, head});
        const int count = std::min(static_cast<int>(chunks.size()), to.capacity);
        kernels.upload(to.chunks_of(place, head), chunks.data(), static_cast<std::size_t>(count) * sizeof(int), stream);
        kernels.upload(to.scores_of(place, head), scores.data(), static_cast<std::size_t>(count) * sizeof(float), stream);
        kernels.upload(&to.count_of(place, head), &count, sizeof(int), stream);
      }
    }
  }
  void observe(const StepState& state, const Outcome& outcome, int, StepKernels& kernels, StreamRef stream) override {
    kernels.advance(state, outcome, AdvanceRule{}, stream);
  }

 private:
  const SelectionTrace& trace_;
};

}  // namespace dualdecoder
