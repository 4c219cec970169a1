// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "cuda/key_factors.hpp"
#include "cuda/shadow_kv_kernels.hpp"
#include "cuda/store.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/sequence_book.hpp"

namespace dualdecoder::cuda {

/// ShadowKV (arXiv 2410.21465) on the device, as the twin of src/shadow_kv_store.hpp documents it: the host side of the kernels in
/// shadow_kv_kernels.hpp, and for slots and loads those of a resident store with one budget of slots. Otherwise than the twin: landmarks
/// and factors are bf16, products are summed in f32; slots go by last use, so that a chunk of an older step stays while there is room.
///
/// select, resolve_needed, attend, resolve_predicted and commit only enqueue, so they may be recorded. seal and truncate wait for `stream`,
/// statistics for the store's.
class ShadowKvStore final : public KvStore {
 public:
  /// Throws InvalidArgument naming the option, also where the build has no cuSOLVER.
  ShadowKvStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  Capacities capacities() const noexcept override;
  StoreStatistics statistics() const override;

  /// Where everything lies, for the kernels and for tests.
  const ShadowLayout& layout() const noexcept { return layout_; }

  /// What the store and max_sequences sequences of max_context tokens take, one prompt being sealed. Throws like the constructor.
  static MemoryPlan plan(const StoreOptions& options);

 private:
  struct Sequence {
    Buffer values;        // [layers, kv_heads, chunks] values [chunk, dim]
    Buffer prompt_keys;   // see PromptKeys, until sealed
    Buffer prefill_work;  // of KeyFactors, until sealed
  };
  /// Device memory beside the layout's.
  struct Extras {
    int* lengths = nullptr;  // [max_sequences] committed tokens
    std::byte* resolve_work = nullptr;
  };

  static void carve(ShadowLayout& layout, Extras& extras, Carver& carver, MemoryPlan& plan);
  PromptKeys prompt_of(int slot) const noexcept;
  void factor(Layer layer, int slot, int length, const KeyFactors::Work& work, StreamRef stream);

  StoreOptions options_;
  StoreResources resources_;
  dualdecoder::detail::SequenceBook book_;
  std::vector<Sequence> sequences_;
  Buffer device_;
  Buffer readout_;  // pinned: counters, then a length
  ShadowLayout layout_;
  Extras extras_;
  std::optional<KeyFactors> factors_;
};

}  // namespace dualdecoder::cuda
