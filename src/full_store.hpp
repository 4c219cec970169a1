// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "src/attention.hpp"
#include "src/chunk_geometry.hpp"
#include "src/sequence_book.hpp"
#include "src/store.hpp"

namespace dualdecoder::cpu {

/// The whole context on the device and dense attention over it: what sparse decoding is compared with. Selects and transfers nothing.
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
  std::size_t device_bytes() const noexcept { return device_bytes_; }
  /// Bytes of one sequence of `tokens`, the rows of a pass included.
  static std::size_t sequence_bytes(const StoreOptions& options, int tokens);

 private:
  static constexpr int kBlock = 64;

  static int blocks_of(int tokens) { return (tokens + 1 + kBlock - 1) / kBlock; }  // a guess stands behind the last token
  std::byte* block_of(int slot, Layer layer, int kv_head, int block) const noexcept;
  void write(int slot, Layer layer, int kv_head, int position, const ConstTensor& keys, const ConstTensor& values, std::size_t first) const;
  void carve(Carver& carver);

  StoreOptions options_;
  StoreResources resources_;
  SegmentLayout layout_;
  int group_;
  AttentionRunner runner_;
  detail::SequenceBook book_;
  std::vector<Buffer> data_;  // [sequences] of [layers, kv_heads, blocks] blocks of keys [kBlock, dim], then values
  std::vector<AttentionJob> jobs_;
  Buffer device_;
  std::size_t device_bytes_ = 0;
  float* queries_ = nullptr;     // [rows, heads, head_dim] scaled
  Segment* segments_ = nullptr;  // [rows, kv_heads, blocks of the longest sequence]
};

}  // namespace dualdecoder::cpu
