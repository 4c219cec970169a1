// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "src/attention.hpp"
#include "src/chunk_geometry.hpp"
#include "src/low_rank_keys.hpp"
#include "src/prediction_record.hpp"
#include "src/sequence_book.hpp"
#include "src/store.hpp"

namespace dualdecoder::cpu {

/// ShadowKV (arXiv 2410.21465): keys stay on the device as low-rank factors of what they were before RoPE, values go to the host, and a
/// step fetches the values of the chosen chunks alone.
///
/// As published: the rank counts over all KV heads of a layer; chunks are ranked by 16-bit means of their keys after RoPE, a softmax over
/// them per query head, the largest share of the query group; the chunks whose worst token has the lowest cosine to that mean are kept
/// whole, per KV head; the last chunks and the unfinished one are on the device; what was chosen in the last step is neither fetched nor
/// rebuilt again; what is not attended to is dropped. Sinks are not held apart.
///
/// Otherwise: tokens that are generated become chunks too, whose keys are projected on the directions of the prompt (ShadowKV leaves them
/// outside of its index), and the local window moves with them, so nothing is lost however long the text gets; outliers are those of the
/// prompt. Keys come after RoPE in the type of the store and are turned back, so the factored keys carry that rounding. Any prompt length
/// will do. Predictions, of which ShadowKV has none, bring values ahead. Rebuilding keys does not overlap the fetch.
class ShadowKvStore final : public KvStore {
 public:
  /// Throws InvalidArgument naming the option, also where the build has no LAPACK.
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
  StoreStatistics statistics() const override { return statistics_; }

  /// What the store and max_sequences sequences of max_context tokens take.
  MemoryPlan plan() const;

 private:
  /// A KV head of one layer and sequence.
  struct Head {
    int slot;
    Layer layer;
    int kv_head;
  };
  /// Chunks of the budget of one KV head on the device.
  struct Slots {
    int* slot_of;            // [max_chunks], -1: not here
    int* chunk_of;           // [selected_chunks], -1: empty
    std::uint8_t* has_keys;  // [selected_chunks] the keys were rebuilt
    std::byte* data;         // [selected_chunks] chunk-heads
  };
  struct Rebuild {
    Head head;
    int chunk;
    std::byte* keys;
  };
  struct Wish {
    float score;
    int slot;
    int kv_head;
    int chunk;
    std::span<const int> predicted;  // all of the head, ascending
  };
  struct Host {
    Buffer values;        // [layers, kv_heads, chunks] values [chunk, dim]
    Buffer prompt_keys;   // likewise keys after RoPE, until sealed
    Buffer prefill_work;  // until sealed
  };

  void carve(Carver& carver, MemoryPlan& plan);
  std::size_t half_bytes() const noexcept { return geometry_.chunk_bytes / 2; }  // keys or values of a chunk-head
  std::size_t head_count() const noexcept { return index(options_.max_sequences) * index(options_.layers) * index(options_.kv_heads); }
  std::size_t list_of(const Head& head) const noexcept {
    return (index(head.slot) * index(options_.layers) + index(head.layer)) * index(options_.kv_heads) + index(head.kv_head);
  }
  std::size_t host_bytes(int tokens) const noexcept;
  std::size_t host_offset(const Head& head, int chunk) const noexcept;
  std::byte* host_values(const Head& head, int chunk) const noexcept;
  std::byte* window_chunk(const Head& head, int chunk) const noexcept;
  std::byte* landmark(const Head& head, int chunk) const noexcept;
  std::byte* outlier(const Head& head, int number) const noexcept;
  std::span<int> outliers_of(const Head& head) const noexcept;
  Slots slots_of(const Head& head) const noexcept;
  LowRankKeys::Source window_keys(int slot, Layer layer, int chunk) const noexcept;
  /// Chunks before it can be chosen or are outliers; it and those behind it are in the window.
  int window_begin(int length) const noexcept;
  float* scores_of(int row, int kv_head) const noexcept;

  void factor_prompt(int slot, int length);
  void summarise(const Head& head, int chunk, const std::byte* keys, int worker);
  float worst_cosine(const std::byte* keys, int worker) const;
  void find_outliers(const Head& head, int chunks, int worker);
  int choose(const Head& head, int row, int count, const Selection& by_row, int worker) const;
  void evict(const Slots& slots, int slot) const;
  void place(const Slots& slots, int slot, int chunk) const;
  void forget(int slot, int first_chunk);
  void fetch_missing(const Head& head, std::span<const int> needed, const TransferList& urgent);
  void prefetch_wishes(Layer target, const TransferList& prefetch);
  void write_row(const Head& head, int position, const RowBlock& rows, int row);
  void rebuild_chosen(Layer layer, const StepView& view, const Selection& by_row);
  int chooser_of(const StepView& view, int row) const noexcept;
  int gather_segments(const Head& head, int length, int end, std::span<const int> chosen, Segment* segments) const;

  StoreOptions options_;
  StoreResources resources_;
  ChunkGeometry geometry_;
  int window_chunks_;
  int outlier_slots_;
  const AttentionKernels& kernels_;
  AttentionRunner runner_;
  LowRankKeys keys_;
  PredictionRecord predictions_;
  detail::SequenceBook book_;
  StoreStatistics statistics_;
  std::vector<Host> hosts_;  // [sequences]
  Buffer device_;
  MemoryPlan device_plan_;
  std::vector<AttentionJob> jobs_;
  std::vector<Rebuild> rebuilds_;
  std::vector<int> missing_;
  std::vector<Wish> wishes_;

  std::byte* landmarks_ = nullptr;    // [heads of all sequences, max_chunks, dim]
  std::byte* outliers_ = nullptr;     // [heads of all sequences, outlier_slots] chunk-heads
  int* outlier_chunks_ = nullptr;     // [heads of all sequences, outlier_slots] ascending
  int* outlier_count_ = nullptr;      // [heads of all sequences]
  std::byte* window_ = nullptr;       // [heads of all sequences, window_chunks] chunk-heads, chunk j at j % window_chunks
  std::byte* data_ = nullptr;         // see Slots
  int* slot_of_ = nullptr;            // see Slots
  int* chunk_of_ = nullptr;           // see Slots
  std::uint8_t* has_keys_ = nullptr;  // see Slots
  float* scores_ = nullptr;           // [rows, kv_heads, group, max_chunks]
  float* queries_ = nullptr;          // [rows, heads, head_dim] scaled
  Segment* segments_ = nullptr;       // [rows, kv_heads, segment_capacity]
  float* worker_rank_ = nullptr;      // [threads, max_chunks]
  int* worker_keys_ = nullptr;        // [threads, padded_chunks]
  float* worker_row_ = nullptr;       // [threads, max(group, 2) * dim]
  int segment_capacity_ = 0;
};

}  // namespace dualdecoder::cpu
