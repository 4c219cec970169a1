// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/testing/forwarding.hpp"

namespace dualdecoder::examples {

/// Ranks chunks by the least and the largest element of their keys per channel instead of their means, as Quest (arXiv 2406.10774) and
/// ArkVale do: no token of a chunk scores more than sum over channels of max(q * least, q * largest). As everywhere in the library a
/// softmax over the chunks makes shares of a query head's bounds, and the largest share of the query group ranks the chunk. For stores of
/// chunks on the CPU backend without tail estimate. truncate leaves the bounds of the chunk that it cuts as wide as they were. Threading:
/// as the other store.
class PageBoundsStore final : public testing::ForwardingStore {
 public:
  /// `memory` holds the bounds, in the type of keys, and outlives the store.
  PageBoundsStore(std::unique_ptr<KvStore> inner, const StoreOptions& options, MemoryResource& memory);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;

  /// Bytes of the bounds of a sequence of `tokens`.
  static std::size_t sequence_bytes(const StoreOptions& options, int tokens);

 private:
  struct Sequence {
    int capacity = 0;
    std::vector<int> appended;  // [layers]
    Buffer bounds;              // [layers, kv_heads, chunks, 2, head_dim], the least elements first
    std::vector<float> row0;    // [layers, kv_heads, head_dim] keys that a commit keeps
  };

  std::byte* bounds_of(int slot, Layer layer, int kv_head, int chunk) const;
  void widen(int slot, Layer layer, int kv_head, int position, const float* key) const;
  double bound(const float* query, const std::byte* bounds) const;

  StoreOptions options_;
  MemoryResource& memory_;
  std::vector<Sequence> sequences_;
  std::vector<double> shares_;  // [2, chunks] of a query head, and the largest so far
  std::vector<int> order_;
};

/// A backend whose stores are PageBoundsStores, or on the CUDA backend their twins on the device.
class PageBoundsBackend final : public testing::ForwardingBackend {
 public:
  /// Throws InvalidArgument for another backend than these two.
  explicit PageBoundsBackend(std::shared_ptr<Backend> inner);
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override;
  MemoryPlan store_plan(const StoreOptions& options) const override;

 private:
  bool on_cuda_;
};

}  // namespace dualdecoder::examples
