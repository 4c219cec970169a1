// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/chunk_store.hpp"

namespace dualdecoder::cpu {

/// Slots keep the chunks of earlier steps, least recently used out first, per layer, sequence and KV head
/// (docs/concepts.md, "Resident set"). Needed chunks are used at time 2 * pass + 1, predicted ones at 2 * pass + 2, so what the next step
/// needs outlives what this one needed.
class ResidentStore final : public ChunkStore {
 public:
  ResidentStore(const StoreOptions& options, const StoreResources& resources);

  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  Capacities capacities() const noexcept override;

 protected:
  const std::byte* resident(const Head& head, int chunk) const override;
  void warm(const Head& head, std::span<const int> chunks) override;
  void leave_window(const Head& head, int chunk, const std::byte* data) override;
  void forget(int slot, int first_chunk) override;
  void end_pass() override { ++pass_; }

 private:
  struct Slots {
    int* slot_of;         // [max_chunks], -1: in none
    int* chunk_of;        // [slots], -1: empty
    std::uint32_t* used;  // [slots] time of last use
    std::byte* data;      // [slots] chunk-heads
  };
  struct Candidate {
    bool missed;  // row 0 needed it in this step and had to estimate it; behind everything predicted
    float score;
    int slot;
    int kv_head;
    int chunk;
  };

  Slots slots_of(const Head& head) const noexcept;
  std::uint32_t needed_time() const noexcept { return 2 * pass_ + 1; }
  std::uint32_t predicted_time() const noexcept { return 2 * pass_ + 2; }
  /// Slots last used before `before`, least recently used first, at most `wanted`.
  std::span<const int> victims(const Slots& slots, std::uint32_t before, int wanted);
  void place(const Slots& slots, int slot, int chunk, std::uint32_t time) const;
  void add_candidates(const Head& head, std::span<const int> predicted, const float* scores);

  std::uint32_t pass_ = 1;
  int* slot_of_ = nullptr;         // [heads of all sequences, max_chunks]
  int* chunk_of_ = nullptr;        // [heads of all sequences, slots]
  std::uint32_t* used_ = nullptr;  // [heads of all sequences, slots]
  std::byte* data_ = nullptr;      // [heads of all sequences, slots] chunk-heads
  std::vector<int> missing_;
  std::vector<int> victims_;
  std::vector<Candidate> candidates_;
  std::vector<Candidate> missed_;  // of the layer resolved last
};

}  // namespace dualdecoder::cpu
