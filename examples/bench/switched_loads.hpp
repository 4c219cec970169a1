// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "dualdecoder/testing/forwarding.hpp"

namespace dualdecoder::examples {

/// Another scheduler that can be told to move nothing: what a step takes without its loads.
class SwitchedScheduler final : public testing::ForwardingScheduler {
 public:
  /// `moves` must outlive the scheduler.
  SwitchedScheduler(std::unique_ptr<TransferScheduler> inner, const bool& moves) : ForwardingScheduler(std::move(inner)), moves_(moves) {}

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef after) override {
    if (moves_) ForwardingScheduler::submit(lane, layer, list, after);
  }

 private:
  const bool& moves_;
};

/// Another scheduler whose prefetches run where they are submitted, with compute standing still until they have arrived.
class InOrderScheduler final : public testing::ForwardingScheduler {
 public:
  using ForwardingScheduler::ForwardingScheduler;

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef after) override {
    ForwardingScheduler::submit(lane, layer, list, after);
    if (lane == Lane::prefetch) ForwardingScheduler::wait(lane, layer, after);
  }
  StreamRef side_stream(StreamRef after) override { return after; }
};

/// Another backend whose sessions can be told to move nothing. A pass is recorded both ways, so the switch may change between steps.
class SwitchedBackend final : public testing::ForwardingBackend {
 public:
  explicit SwitchedBackend(std::shared_ptr<Backend> inner) : ForwardingBackend(std::move(inner)) {}

  void set_moves(bool moves) noexcept { moves_ = moves; }

  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override {
    return std::make_unique<SwitchedScheduler>(ForwardingBackend::make_scheduler(options), moves_);
  }
  std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef stream) override {
    const bool moves = std::exchange(moves_, true);
    auto with = ForwardingBackend::record(work, stream);
    moves_ = false;
    auto without = with ? ForwardingBackend::record(work, stream) : nullptr;
    moves_ = moves;
    if (!with || !without) return nullptr;
    return std::make_unique<SwitchedGraph>(std::move(with), std::move(without), moves_);
  }

 private:
  class SwitchedGraph final : public StepGraph {
   public:
    SwitchedGraph(std::unique_ptr<StepGraph> with, std::unique_ptr<StepGraph> without, const bool& moves)
        : with_(std::move(with)), without_(std::move(without)), moves_(moves) {}

    void launch(StreamRef stream) override { (moves_ ? with_ : without_)->launch(stream); }

   private:
    std::unique_ptr<StepGraph> with_;
    std::unique_ptr<StepGraph> without_;
    const bool& moves_;
  };

  bool moves_ = true;
};

}  // namespace dualdecoder::examples
