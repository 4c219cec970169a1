// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/device_of.hpp"
#include "cuda/predicted.hpp"
#include "cuda/store.hpp"
#include "dualdecoder/cuda/rivals.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/testing/forwarding.hpp"
#include "src/chunk_geometry.hpp"

namespace dualdecoder::cuda {
namespace {

using cpu::index;

PredictedLayout layout_of(const StoreOptions& options, int selection, float correct_below) {
  dualdecoder::detail::require(options.rows_per_sequence == 1, "rows_per_sequence", options.rows_per_sequence,
                               "1 where a row attends to what was predicted");
  PredictedLayout layout{};
  layout.layers = options.layers;
  layout.kv_heads = options.kv_heads;
  layout.group = options.heads / options.kv_heads;
  layout.dim = options.head_dim;
  layout.max_sequences = options.max_sequences;
  layout.selected = selection;
  layout.correct_below = correct_below;
  return layout;
}

/// The arrays, and for each layer what its row 0 attends to: the side stream may still read what the layer before was given.
void carve(PredictedLayout& layout, std::vector<Selection>& used, Carver& carver) {
  const std::size_t lists = layout.list(layout.max_sequences, 0, 0);
  const std::size_t of_layer = index(layout.max_sequences) * index(layout.kv_heads);
  layout.predicted = carver.take<int>(lists * index(layout.selected));
  layout.predicted_count = carver.take<int>(lists);
  layout.queries = carver.take<float>(layout.correct_below > 0.0F ? lists * index(layout.group) * index(layout.dim) : 0);
  layout.seen = carver.take<int>(lists);
  layout.turned = carver.take<int>(lists);
  layout.counters = carver.take<std::uint64_t>(PredictedLayout::count);
  used.clear();
  for (Layer layer = 0; layer < layout.layers; ++layer) {
    used.push_back({.chunks = carver.take<int>(of_layer * index(layout.selected)),
                    .scores = carver.take<float>(of_layer * index(layout.selected)),
                    .count = carver.take<int>(of_layer),
                    .capacity = layout.selected,
                    .kv_heads = layout.kv_heads});
  }
}

class PredictedStore final : public testing::ForwardingStore {
 public:
  PredictedStore(std::unique_ptr<KvStore> inner, const StoreOptions& options, float correct_below, MemoryResource& memory, StreamRef stream)
      : ForwardingStore(std::move(inner)),
        stream_(stream),
        layout_(layout_of(options, ForwardingStore::capacities().selection, correct_below)) {
    Carver counting;
    carve(layout_, used_, counting);
    device_ = Buffer(memory, counting.bytes(), stream);
    ordinal_ = device_of(device_.data());
    Carver placing(device_.data());
    carve(layout_, used_, placing);
    const DeviceGuard guard(ordinal_);
    check(cudaMemsetAsync(device_.data(), 0, device_.bytes(), stream.get()), "cudaMemsetAsync");
  }

  void open(int slot, int capacity_tokens, StreamRef stream) override {
    ForwardingStore::open(slot, capacity_tokens, stream);
    forget(slot, stream);
  }
  void truncate(int slot, int tokens, StreamRef stream) override {
    ForwardingStore::truncate(slot, tokens, stream);
    forget(slot, stream);
  }
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override {
    ForwardingStore::select(layer, view, queries, by_row, stream);
    if (layout_.correct_below <= 0.0F) return;
    const DeviceGuard guard(ordinal_);
    compare_queries(layout_, layer, view, rows_in(queries), stream.get());
  }
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override {
    {
      const DeviceGuard guard(ordinal_);
      use_predicted(layout_, layer, view, by_row, used_[index(layer)], stream.get());
    }
    ForwardingStore::resolve_needed(layer, view, used_[index(layer)], urgent, stream);
  }
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef stream) override {
    ForwardingStore::attend(layer, view, rows, used_[index(layer)], out, stream);
  }
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override {
    {
      const DeviceGuard guard(ordinal_);
      keep_predicted(layout_, prediction.layer, view, prediction.chunks, stream.get());
    }
    return ForwardingStore::resolve_predicted(layer, view, prediction, prefetch, stream);
  }
  StoreStatistics statistics() const override {
    StoreStatistics statistics = ForwardingStore::statistics();
    const DeviceGuard guard(ordinal_);
    std::array<std::uint64_t, PredictedLayout::count> counts{};
    check(cudaMemcpyAsync(counts.data(), layout_.counters, sizeof counts, cudaMemcpyDeviceToHost, stream_.get()), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
    statistics.needed = counts[PredictedLayout::needed];
    statistics.predictable = counts[PredictedLayout::predictable];
    statistics.predicted_hit = counts[PredictedLayout::predicted_hit];
    return statistics;
  }

 private:
  void forget(int slot, StreamRef stream) const {
    const DeviceGuard guard(ordinal_);
    forget_predicted(layout_, slot, stream.get());
  }

  StreamRef stream_;
  int ordinal_ = 0;
  Buffer device_;
  PredictedLayout layout_;
  std::vector<Selection> used_;  // [layers], rows are places
};

}  // namespace

std::unique_ptr<KvStore> attend_predicted(std::unique_ptr<KvStore> inner, const StoreOptions& options, float correct_below,
                                          MemoryResource& memory, StreamRef stream) {
  return std::make_unique<PredictedStore>(std::move(inner), options, correct_below, memory, stream);
}

void plan_predicted(const StoreOptions& options, float correct_below, MemoryPlan& plan) {
  PredictedLayout layout = layout_of(options, cpu::ChunkGeometry(options).selected_chunks, correct_below);
  std::vector<Selection> used;
  Carver counting;
  carve(layout, used, counting);
  plan.add("predicted sets", MemoryKind::device, counting.bytes());
}

}  // namespace dualdecoder::cuda
