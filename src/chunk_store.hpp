// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/store_options.hpp"
#include "src/attention.hpp"
#include "src/chunk_geometry.hpp"
#include "src/prediction_record.hpp"
#include "src/sequence_book.hpp"
#include "src/store.hpp"
#include "src/summary.hpp"

namespace dualdecoder::cpu {

/// What the sparse stores share: the host tier, sinks and window on the device, summaries, selection, the tail estimate and its
/// calibration, attention. What differs is where selected chunks lie: see the pure virtual members.
///
/// Sinks, window, slots and host tier all hold chunk-heads (keys [chunk, dim], then values [chunk, dim]), so every move is one copy.
class ChunkStore : public KvStore {
 public:
  ChunkStore(const StoreOptions& options, const StoreResources& resources);

  void open(int slot, int capacity_tokens, StreamRef stream) override;
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override;
  void seal(int slot, StreamRef stream) override;
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override;
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override;
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override;
  void truncate(int slot, int tokens, StreamRef stream) override;
  void close(int slot, StreamRef stream) noexcept override;
  bool waits_for_loads(const StepView& view) const noexcept override {
    return options_.miss_policy == MissPolicy::wait || view.waits != nullptr;
  }
  StoreStatistics statistics() const override { return statistics_; }

  /// Bytes of the host tier of a sequence of `tokens`.
  static std::size_t sequence_bytes(const StoreOptions& options, int tokens);
  /// Bytes of the queries that a sequence keeps until it is sealed.
  static std::size_t calibration_bytes(const StoreOptions& options);
  /// What the store takes when every place holds a sequence of the greatest length; one of them is being prefilled.
  MemoryPlan plan() const;

 protected:
  /// A KV head of one layer and sequence.
  struct Head {
    int slot;
    Layer layer;
    int kv_head;
  };
  /// Chunks first .. first+count-1 of a sequence can be chosen.
  struct Range {
    int first;
    int count;
  };
  struct Sequence {
    std::vector<int> kept_queries;  // [layers] in the ring of calibration queries
    Buffer host;                    // [layers, kv_heads, chunks] chunk-heads
    Buffer calibration;             // [layers, kCalibrationQueries, heads, head_dim] f32, until sealed
  };

  /// Device copy of a chunk that is no sink and not in the window, or null when it is not there.
  virtual const std::byte* resident(const Head& head, int chunk) const = 0;
  /// Takes the chunk-heads that the last prompt query would choose; they may be copied at once.
  virtual void warm(const Head& head, std::span<const int> chunks) = 0;
  /// A chunk leaves the window, whose copy is still at `data`; it may be kept.
  virtual void leave_window(const Head& head, int chunk, const std::byte* data) = 0;
  /// Chunks from `first_chunk` on hold something else from now on.
  virtual void forget(int slot, int first_chunk) = 0;
  virtual void end_pass() = 0;

  std::size_t head_index(const Head& head) const noexcept {
    return (index(head.slot) * index(options_.layers) + index(head.layer)) * index(options_.kv_heads) + index(head.kv_head);
  }
  std::size_t head_count() const noexcept { return index(options_.max_sequences) * index(options_.layers) * index(options_.kv_heads); }
  std::byte* host_chunk(const Head& head, int chunk) const noexcept;
  /// Sinks and window: where the chunk lies on the device while it is in either.
  std::byte* near_chunk(const Head& head, int chunk) const noexcept;
  Range range_of(int slot, int length) const noexcept;
  bool waits(const StepView& view, int place) const noexcept {
    return options_.miss_policy == MissPolicy::wait || (view.waits != nullptr && view.waits[place] != 0);
  }

  /// Counts how much of what row 0 needs was predicted, and remembers a new prediction.
  void count_predicted(const Head& head, std::span<const int> needed) { predictions_.count(head_index(head), needed, statistics_); }
  void remember_prediction(const Head& head, std::span<const int> predicted);

  /// Takes memory for this class and enters it into the plan; derived stores carve behind it. Called once to count and once to place.
  void carve(Carver& carver, MemoryPlan& plan);
  /// Allocates the device buffer for `carve_all`, which carves everything of the most derived class. False: the store only counts.
  template <class F>
  bool allocate(F&& carve_all) {
    Carver counting;
    carve_all(counting, device_plan_);
    if (resources_.device == nullptr) return false;
    device_ = Buffer(*resources_.device, counting.bytes(), resources_.stream);
    Carver placing(device_.data());
    MemoryPlan again;
    carve_all(placing, again);
    initialise();
    return true;
  }

  StoreOptions options_;
  StoreResources resources_;
  ChunkGeometry geometry_;
  StoreStatistics statistics_;

 private:
  void initialise();
  void forget_predictions(int slot);
  /// Summarises a chunk that has become whole; at(j) is where chunk j of its group lies.
  template <class At>
  void summarise_chunk(const Head& head, int chunk, int worker, const At& at);
  /// The mean of values of a group up to its last whole chunk, `chunk`.
  template <class At>
  void summarise_group(const Head& head, int chunk, int worker, const At& at);
  float* worker_mean(int worker) const noexcept { return worker_row_ + index(worker) * index(geometry_.dim) * index(geometry_.group); }
  void keep_queries(Sequence& sequence, Layer layer, const ConstTensor& queries);
  void calibrate(const Head& head, int length, int worker);
  int choose(const float* scores, int count, int capacity, int worker, int* chunks, float* shares) const;
  std::size_t padded_chunks() const noexcept { return (index(geometry_.max_chunks) + 15) / 16 * 16; }
  void write_row(const Head& head, int position, const RowBlock& rows, int row);
  int gather_segments(const Head& head, int length, int end, std::span<const int> chosen, Segment* segments, int* exact,
                      int* exact_count) const;
  float* scores_of(Layer layer, int row, int kv_head) const noexcept;
  float* bias_of(int slot, Layer layer) const noexcept {
    return bias_ + (index(slot) * index(options_.layers) + index(layer)) * index(options_.heads);
  }

  static constexpr int kScorePart = 256;  // chunks whose keys' means stay in the first-level cache while every row reads them
  static constexpr int kQueryBlock = 4;   // calibration queries that share one read of the keys

  const AttentionKernels& kernels_;
  AttentionRunner runner_;
  PredictionRecord predictions_;
  detail::SequenceBook book_;
  std::vector<Sequence> sequences_;
  std::vector<AttentionJob> jobs_;
  std::unique_ptr<std::atomic<int>[]> unscored_;  // [sequences, kv_heads] parts of the list that select has not scored yet
  Buffer device_;
  MemoryPlan device_plan_;  // what does not depend on the sequences

  std::byte* sinks_ = nullptr;           // [heads of all sequences, sink_chunks] chunk-heads
  std::byte* window_ = nullptr;          // [heads of all sequences, window_chunks] chunk-heads, chunk j at j % window_chunks
  std::int8_t* key_means_ = nullptr;     // [heads of all sequences, max_chunks, dim]
  float* key_scales_ = nullptr;          // [heads of all sequences, max_chunks]
  std::uint8_t* value_means_ = nullptr;  // [heads of all sequences, value_groups, dim / 2]
  float* value_scales_ = nullptr;        // [heads of all sequences, value_groups]
  float* bias_ = nullptr;                // [sequences, layers, heads]
  float* scores_ = nullptr;              // [2 (parity of the layer), rows, kv_heads, group, max_chunks]
  float* queries_ = nullptr;             // [rows, heads, head_dim] scaled
  float* shifts_ = nullptr;              // [rows, heads]
  Segment* segments_ = nullptr;          // [rows, kv_heads, segment capacity]
  int* exact_ = nullptr;                 // [rows, kv_heads, selected_chunks]
  float* worker_rank_ = nullptr;         // [threads, max_chunks]
  int* worker_keys_ = nullptr;           // [threads, padded_chunks]
  float* worker_row_ = nullptr;          // [threads, max(dim * group, dim)]
  float* worker_scores_ = nullptr;       // [threads, kQueryBlock * group, max_chunks], calibration
  int segment_capacity_ = 0;
};

}  // namespace dualdecoder::cpu
