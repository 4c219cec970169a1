// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/store.hpp"
#include "cuda/store_layout.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/sequence_book.hpp"

namespace dualdecoder::cuda {

/// The resident store (docs/concepts.md, "Resident set") and the ping-pong store, two buffers of one layer's budget that swap: the host
/// side of the kernels in store_kernels.hpp, which tell the two apart by their layout. It owns the memory and checks calls; contexts, slots
/// and counts live on the device. select, resolve_needed, attend, resolve_predicted and commit only enqueue, so they may be recorded.
/// truncate waits for `stream`, statistics for the store's.
class ChunkStore final : public KvStore {
 public:
  ChunkStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  bool waits_for_loads(const StepView& view) const noexcept override { return layout_.wait_policy || view.waits != nullptr; }
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  Capacities capacities() const noexcept override;
  StoreStatistics statistics() const override;

  /// Where everything lies, for the kernels and for tests.
  const StoreLayout& layout() const noexcept { return layout_; }

  /// Bytes on the device that do not depend on the sequences.
  static std::size_t device_bytes(const StoreOptions& options);
  /// Bytes of the host tier of a sequence of `tokens`.
  static std::size_t sequence_bytes(const StoreOptions& options, int tokens);
  /// Bytes on the device of the queries that a sequence keeps until it is sealed.
  static std::size_t calibration_bytes(const StoreOptions& options);

 private:
  struct Sequence {
    Buffer host;                    // [layers, kv_heads, chunks] chunk-heads
    Buffer calibration;             // [layers, kCalibrationQueries, heads, head_dim] f32, until sealed
    std::vector<int> kept_queries;  // [layers] in the ring of calibration queries
  };
  /// Device memory beside the layout's.
  struct Extras {
    int* lengths = nullptr;    // [max_sequences] committed tokens
    float* queries = nullptr;  // [kCalibrationQueries, heads, head_dim] of one layer, in order
    std::byte* resolve_work = nullptr;
    std::byte* calibration_work = nullptr;
  };

  static void carve(StoreLayout& layout, Extras& extras, Carver& carver);
  std::size_t query_row() const noexcept { return static_cast<std::size_t>(layout_.heads) * static_cast<std::size_t>(layout_.dim); }
  float* ring_of(int slot, Layer layer) noexcept;
  void keep_queries(Layer layer, int slot, const ConstTensor& queries, StreamRef stream);
  void calibrate(Layer layer, int slot, int length, StreamRef stream);

  StoreOptions options_;
  StoreResources resources_;
  dualdecoder::detail::SequenceBook book_;
  std::vector<Sequence> sequences_;
  Buffer device_;
  Buffer readout_;  // pinned: counters, then a length
  StoreLayout layout_;
  Extras extras_;
  Selection needed_;         // what resolve_needed was last given
  Layer needed_layer_ = -1;  // and for which layer
  TransferList urgent_;      // and where to
  bool deferred_ = false;    // its work is left to resolve_predicted
};

}  // namespace dualdecoder::cuda
