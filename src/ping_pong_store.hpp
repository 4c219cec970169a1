// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/chunk_store.hpp"

namespace dualdecoder::cpu {

/// Two buffers of one layer's budget that swap, as DualDecoder publishes it (arXiv 2607.26475): when attention of a layer ends, its buffer
/// is free and the predicted chunks of the layer after the next are loaded into it. Nothing survives a step, so every selected byte crosses
/// the bus; the smallest device memory. The last two layers load for the first two of the next step.
class PingPongStore final : public ChunkStore {
 public:
  /// Throws InvalidArgument when the model has fewer than two layers.
  PingPongStore(const StoreOptions& options, const StoreResources& resources);

  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  Capacities capacities() const noexcept override;

 protected:
  const std::byte* resident(const Head& head, int chunk) const override;
  void warm(const Head&, std::span<const int>) override {}
  void leave_window(const Head&, int, const std::byte*) override {}
  void forget(int slot, int first_chunk) override;
  void end_pass() override { ++pass_; }

 private:
  /// One KV head's part of a buffer.
  struct Part {
    int* slot_of;   // [max_chunks], -1: not here
    int* chunk_of;  // [selected_chunks], -1: empty
    std::byte* data;
  };

  struct Wish {
    float score;
    int slot;
    int kv_head;
    int chunk;
  };

  /// Layers alternate over the buffers, across steps too.
  int buffer_of(std::uint64_t run) const noexcept { return static_cast<int>(run % 2); }
  std::uint64_t run_of(Layer layer) const noexcept { return pass_ * index(options_.layers) + index(layer); }
  Part part_of(int buffer, int slot, int kv_head) const noexcept;
  void clear(const Part& part) const;
  void load(std::uint64_t run, const StepView& view, Layer target, const TransferList& prefetch);
  std::size_t list_of(const Head& head) const noexcept { return head_index(head) * index(geometry_.selected_chunks); }

  std::uint64_t pass_ = 0;
  std::uint64_t holds_[2] = {~std::uint64_t{0}, ~std::uint64_t{0}};  // the run that a buffer was loaded for
  int* slot_of_ = nullptr;                                           // [2, sequences, kv_heads, max_chunks]
  int* chunk_of_ = nullptr;                                          // [2, sequences, kv_heads, selected_chunks]
  std::byte* data_ = nullptr;                                        // [2, sequences, kv_heads, selected_chunks] chunk-heads
  int* pending_ = nullptr;          // [heads of all sequences, selected_chunks] predicted and not yet loaded
  float* pending_score_ = nullptr;  // likewise
  int* pending_count_ = nullptr;    // [heads of all sequences]
  std::vector<int> missing_;
  std::vector<Wish> wishes_;
};

}  // namespace dualdecoder::cpu
