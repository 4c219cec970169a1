// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/store.hpp"
#include "cuda/store_kernels.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/sequence_book.hpp"

namespace dualdecoder::cuda {

/// The whole context on the device and dense attention over it: what sparse decoding is compared with. Selects and transfers nothing.
/// Passes only enqueue, so they may be recorded; truncate waits for `stream`.
class FullStore final : public KvStore {
 public:
  FullStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  bool waits_for_loads(const StepView&) const noexcept override { return false; }
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  Capacities capacities() const noexcept override { return {.selection = 1}; }
  StoreStatistics statistics() const override { return {}; }

  /// Bytes on the device that do not depend on the sequences.
  static std::size_t device_bytes(const StoreOptions& options);
  /// Bytes on the device of one sequence of `tokens`, the rows of a pass included.
  static std::size_t sequence_bytes(const StoreOptions& options, int tokens);
  /// Pinned bytes through which the host reads a length.
  static constexpr std::size_t readout_bytes() noexcept { return sizeof(int); }

 private:
  static void carve(FullLayout& layout, int*& lengths, Carver& carver);

  StoreOptions options_;
  StoreResources resources_;
  dualdecoder::detail::SequenceBook book_;
  std::vector<Buffer> pages_;  // [max_sequences]
  Buffer device_;
  Buffer readout_;
  FullLayout layout_;
  int* lengths_ = nullptr;  // [max_sequences] committed tokens
};

}  // namespace dualdecoder::cuda
