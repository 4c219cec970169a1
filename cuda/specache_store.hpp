// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/specache_layout.hpp"
#include "cuda/store.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/sequence_book.hpp"

namespace dualdecoder::cuda {

/// The twin of cpu::SpeCacheStore: a low-bit copy of all tokens but the last ones on the device, and those that a guess looked at fetched
/// at 16 bits to lie over it. Passes only enqueue, so they may be recorded; truncate and statistics wait.
///
/// Otherwise than the twin it weighs tokens in bf16, and attends to the copy by the scores that select left, so that its keys are read once
/// in a pass.
class SpeCacheStore final : public KvStore {
 public:
  SpeCacheStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  bool waits_for_loads(const StepView& view) const noexcept override { return layout_.wait_policy || view.waits != nullptr; }
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  Capacities capacities() const noexcept override;
  StoreStatistics statistics() const override;

  /// Where everything lies, for tests.
  const SpeCacheLayout& layout() const noexcept { return layout_; }

  /// Adds what max_sequences sequences of max_context tokens take, work space included, to `plan`.
  static void plan(const StoreOptions& options, MemoryPlan& plan);

 private:
  struct Sequence {
    Buffer host;  // [layers, kv_heads, host tokens] tokens
    Buffer copy;  // [layers, kv_heads, groups] low-bit groups
  };
  /// Device memory beside the layout's.
  struct Extras {
    int* lengths = nullptr;  // [max_sequences] committed tokens
    std::byte* fetch_work = nullptr;
  };

  static void carve(SpeCacheLayout& layout, Extras& extras, Carver& carver);

  StoreOptions options_;
  StoreResources resources_;
  dualdecoder::detail::SequenceBook book_;
  std::vector<Sequence> sequences_;
  Buffer device_;
  Buffer readout_;  // pinned: counters, then a length
  SpeCacheLayout layout_;
  Extras extras_;
  Layer selecting_ = -1;     // selected and not yet attended to
  Selection needed_;         // what resolve_needed was last given
  Layer needed_layer_ = -1;  // and for which layer
  TransferList urgent_;      // and where to
  bool deferred_ = false;    // its work is left to resolve_predicted
};

}  // namespace dualdecoder::cuda
