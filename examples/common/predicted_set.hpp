// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "dualdecoder/testing/forwarding.hpp"

namespace dualdecoder::examples {

/// How PredictedSetStore deviates from what is selected.
struct PredictedSetOptions {
  /// KV heads whose queries turned since the last step, by a mean cosine over the query group below this, attend to what they select; 0:
  /// none do.
  float correct_below = 0.0F;
};

/// Row 0 attends to what was predicted for it in place of what its query selects, as FreeKV (with corrections) and InfiniGen (without) do;
/// where nothing was predicted yet, to what it selects. With a store that waits, heads that are corrected fetch what they lack on the spot.
/// `needed` and `predicted_hit` of the statistics count what the query selects, `resident_hit` what is attended to. For stores on the CPU
/// backend with one row a sequence. Threading: as the other store.
class PredictedSetStore final : public testing::ForwardingStore {
 public:
  PredictedSetStore(std::unique_ptr<KvStore> inner, const StoreOptions& store, const PredictedSetOptions& options);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  StoreStatistics statistics() const override;

 private:
  /// A KV head of one layer and sequence.
  struct Head {
    std::vector<int> predicted;  // ascending
    std::vector<float> queries;  // of the last step [group * head_dim]
    bool has_prediction = false;
    bool turned = false;
  };

  Head& head_of(int slot, Layer layer, int kv_head);
  void forget(int slot);

  StoreOptions store_;
  PredictedSetOptions options_;
  std::vector<Head> heads_;  // [sequences, layers, kv_heads]
  std::vector<int> chunks_, count_;
  std::vector<float> scores_;
  Selection used_;  // of the layer that runs, one row a place
  std::uint64_t needed_ = 0;
  std::uint64_t predictable_ = 0;
  std::uint64_t predicted_hit_ = 0;
};

/// A backend whose stores are PredictedSetStores, or on the CUDA backend their twins on the device.
class PredictedSetBackend final : public testing::ForwardingBackend {
 public:
  /// Throws InvalidArgument for another backend than these two.
  PredictedSetBackend(std::shared_ptr<Backend> inner, const PredictedSetOptions& options);
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override;
  MemoryPlan store_plan(const StoreOptions& options) const override;

 private:
  PredictedSetOptions options_;
  bool on_cuda_;
};

}  // namespace dualdecoder::examples
