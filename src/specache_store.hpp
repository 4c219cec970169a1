// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/attention.hpp"
#include "src/fetched_tokens.hpp"
#include "src/low_bit.hpp"
#include "src/prediction_record.hpp"
#include "src/sequence_book.hpp"
#include "src/store.hpp"

namespace dualdecoder::cpu {

/// A low-bit copy of all tokens on the device and the 16-bit ones of a few laid over it, as SpeCache publishes it (arXiv 2503.16163). A
/// selection lists single tokens; the dual row is PublishedDualRow's.
///
/// As published: the 16-bit cache on the host; the copy's groups, zero points and scales (see quantise()); the last tokens and those of
/// the unfinished group unquantised; both rows attend to the copy with what was fetched laid over it; the tokens that row 1's attention,
/// averaged over the query group, names are fetched for the next step, those that it no longer names are released, and nothing is waited
/// for.
/// Otherwise: a row's shares are those of the context alone, since the keys of the pass are not known when a store selects; a value enters
/// the copy with its group's keys instead of token by token, and the host tier likewise; row 0 selects too, for the statistics alone.
/// A layer that is rehearsed selects by the bare copy.
/// MissPolicy::estimate is the published form; it gives the same bits whatever the speed of the link, as a layer waits for the last step's
/// prefetch. Under `wait` row 0's own tokens are fetched and waited for, chosen by the copy alone: what perfect prediction would give.
class SpeCacheStore final : public KvStore {
 public:
  SpeCacheStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  bool waits_for_loads(const StepView& view) const noexcept override {
    return options_.miss_policy == MissPolicy::wait || view.waits != nullptr;
  }
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  Capacities capacities() const noexcept override;
  StoreStatistics statistics() const override { return statistics_; }

  /// Adds what max_sequences sequences of max_context tokens take, work space included, to `plan`.
  void plan(MemoryPlan& plan) const;

 private:
  /// Sizes that follow from the options. A token is its key [dim], then its value [dim], wherever it lies in full.
  struct Shape {
    LowBitLayout layout;
    int tokens;   ///< of a group
    int exact;    ///< last tokens that stay out of the copy
    int heads;    ///< query heads of a KV head
    int ring;     ///< tokens that the window has room for, whole groups
    int fetched;  ///< slots of a list
    std::size_t dim;
    std::size_t token_bytes;
    bool bf16;

    explicit Shape(const StoreOptions& options);
    /// Tokens of the copy when a sequence has `length`.
    int copied(int length) const noexcept { return length < exact ? 0 : (length - exact) / tokens * tokens; }
    SegmentLayout token_layout() const noexcept { return {1, dim, bf16}; }
    SegmentLayout group_layout() const noexcept { return {layout.tokens, dim, false}; }
  };
  /// One sequence's memory. A list is a KV head of a layer.
  struct Sequence {
    Buffer host;    // [lists, groups of the capacity] groups of tokens
    Buffer copy;    // [lists, copied groups of the capacity] low-bit groups
    Buffer window;  // [lists, ring] tokens, position p at p % ring
    Buffer slots;   // fetched tokens [lists, fetched], then `fetched`'s own memory
    FetchedTokens fetched;
    std::byte* fetched_data = nullptr;
  };
  /// Tokens first .. end - 1 of a sequence, all of the copy or all of the window. Tiles cut a context in the same way for every pass.
  struct Tile {
    int first;
    int end;
    bool copied;
  };
  struct Candidate {
    float score;
    int slot;
    int kv_head;
    int token;
  };

  std::size_t lists() const noexcept;
  std::size_t list_of(Layer layer, int kv_head) const noexcept;
  std::size_t sequence_lists(int slot) const noexcept;
  std::size_t host_bytes(int capacity) const noexcept;
  std::size_t copy_bytes(int capacity) const noexcept;
  std::size_t window_bytes() const noexcept;
  void carve_slots(Carver& carver, Sequence& sequence) const;
  void carve(Carver& carver);

  std::byte* host_token(int slot, std::size_t list, int position) const noexcept;
  std::byte* copied_group(int slot, std::size_t list, int position) const noexcept;
  std::byte* window_token(int slot, std::size_t list, int position) const noexcept;
  std::byte* fetched_token(int slot, std::size_t list, int number) const noexcept;
  /// Quantises the group that begins at `position` from its tokens, which lie one behind the other.
  void copy_group(int slot, std::size_t list, int position, const std::byte* tokens, int worker);

  bool waits(const StepView& view, int place) const noexcept {
    return options_.miss_policy == MissPolicy::wait || (view.waits != nullptr && view.waits[place] != 0);
  }
  Tile tile_of(int copied, int end, int number) const noexcept;
  int tile_count(int copied, int end) const noexcept;
  float* scores_of(Layer layer, int row, int kv_head) const noexcept;
  float* queries_of(int row, int kv_head) const noexcept;
  float* results_of(int row, int kv_head, int tile) const noexcept;
  void scale_queries(const StepView& view, const ConstTensor& queries) const;
  int window_segments(int slot, std::size_t list, int first, int end, Segment* segments) const noexcept;
  /// Replaces rows of a group's keys or values in full by those of the tokens that were fetched.
  void lay_over(int slot, std::size_t list, int position, std::size_t part, float* rows) const;
  void score_tile(Layer layer, const StepView& view, int place, int kv_head, const Tile& tile, bool laid, int worker) const;
  void choose(Layer layer, const StepView& view, int place, int kv_head, const Selection& by_row, int worker) const;
  void begin_rows(Layer layer, const StepView& view, const RowBlock& rows, int place, int kv_head, int worker) const;
  void attend_tile(Layer layer, const StepView& view, int place, int kv_head, int number, int worker) const;

  static constexpr int kTile = 512;  // tokens, whole groups

  StoreOptions options_;
  StoreResources resources_;
  Shape shape_;
  const AttentionKernels& attention_;
  const DenseKernels& dense_;
  const LowBitKernels& low_bit_;
  detail::SequenceBook book_;
  PredictionRecord predicted_;
  StoreStatistics statistics_;
  std::vector<Sequence> sequences_;
  std::vector<Candidate> candidates_;
  Layer selecting_ = -1;                            // selected and not yet attended to
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // [sequences, kv_heads] tiles
  Buffer work_;
  std::size_t work_bytes_ = 0;
  std::size_t stride_;  // scores of a query head

  float* scores_ = nullptr;             // [2 where select may come ahead, rows, kv_heads, heads, stride]
  float* queries_ = nullptr;            // [rows, kv_heads, heads, dim] scaled
  float* results_ = nullptr;            // [rows, kv_heads, tiles, heads * (dim + 2)], see join_parts()
  float* worker_group_ = nullptr;       // [threads, 2, tokens, dim] keys and values of a group
  float* worker_weights_ = nullptr;     // [threads, rows of a sequence, heads, kTile]
  float* worker_row_ = nullptr;         // [threads, 2, stride] a head's scores, and ranks
  int* worker_keys_ = nullptr;          // [threads, stride]
  Segment* worker_segments_ = nullptr;  // [threads, max(kTile, fetched)]
};

}  // namespace dualdecoder::cpu
