// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/trace.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder {

/// Sizes of the lists that SparseAttention keeps for its parts.
struct SparseAttentionShape {
  int layers = 0;
  int kv_heads = 0;
  int max_sequences = 1;
};

/// The parts that SparseAttention drives; all are required but the trace.
struct SparseAttentionParts {
  std::unique_ptr<KvStore> store;
  std::unique_ptr<RetrievalPredictor> predictor;
  std::unique_ptr<TransferScheduler> scheduler;
  StepKernels* kernels = nullptr;           ///< outlives the object
  MemoryResource* device_memory = nullptr;  ///< for the lists; outlives the object
  TraceSink* trace = nullptr;               ///< may be null; outlives the object
};

/// The attention of an engine that keeps its own weights, products and sampler: prefill through append and seal, then per step begin_step,
/// attend for every layer in order, end_step. With one row per sequence it gets the resident set, with two it gets prediction. Nothing in
/// a step allocates or makes the host wait on a device. Threading: one thread at a time.
class SparseAttention {
 public:
  SparseAttention(SparseAttentionParts parts, const SparseAttentionShape& shape, StreamRef stream)
      : parts_(std::move(parts)), shape_(shape), traits_(checked(parts_).predictor->traits()) {
    detail::require(shape.layers >= 1, "layers", shape.layers, "at least 1");
    detail::require(shape.kv_heads >= 1, "kv_heads", shape.kv_heads, "at least 1");
    detail::require(shape.max_sequences >= 1, "max_sequences", shape.max_sequences, "at least 1");
    const KvStore::Capacities capacities = parts_.store->capacities();
    Carver counting;
    carve(counting, capacities);
    lists_ = Buffer(*parts_.device_memory, counting.bytes(), stream);
    Carver carving(lists_.data());
    carve(carving, capacities);
    free_slots_.reserve(static_cast<std::size_t>(shape.max_sequences));
    for (int slot = shape.max_sequences; slot-- > 0;) free_slots_.push_back(slot);
  }

  /// Storage for one sequence of up to `capacity_tokens`. Throws InvalidArgument when max_sequences are open, OutOfMemory.
  int open(int capacity_tokens, StreamRef stream) {
    if (free_slots_.empty()) {
      throw InvalidArgument("sequences: all " + std::to_string(shape_.max_sequences) + " planned by max_sequences are in use");
    }
    const int slot = free_slots_.back();
    parts_.store->open(slot, capacity_tokens, stream);
    free_slots_.pop_back();
    return slot;
  }
  /// Prefill of one layer; see KvStore::append.
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) {
    parts_.store->append(layer, slot, block, last_queries, stream);
  }
  /// End of prefill; see KvStore::seal.
  void seal(int slot, StreamRef stream) { parts_.store->seal(slot, stream); }
  /// Forgets everything behind the first `tokens` tokens; see KvStore::truncate. Where a transfer failed its exception is thrown and
  /// nothing is forgotten.
  void truncate(int slot, int tokens, StreamRef stream) {
    parts_.scheduler->drain(stream);
    parts_.store->truncate(slot, tokens, stream);
  }
  /// Gives the storage back after its transfers have ended. Where a transfer failed, whichever sequence it was for, the storage is given
  /// back all the same and then the transfer's exception is thrown.
  void close(int slot, StreamRef stream) {
    std::exception_ptr lost;
    try {
      parts_.scheduler->drain(stream);
    } catch (...) {
      lost = std::current_exception();
    }
    parts_.store->close(slot, stream);
    free_slots_.push_back(slot);
    if (lost) std::rethrow_exception(lost);
  }

  /// `view`'s arrays stay as they are until end_step. Throws InvalidArgument when its shape is not the planned one.
  void begin_step(const StepView& view, StreamRef) {
    detail::require(view.sequences >= 1 && view.sequences <= shape_.max_sequences, "sequences", view.sequences, "in 1 .. max_sequences");
    detail::require(view.rows_per_sequence == traits_.rows_per_sequence, "rows_per_sequence", view.rows_per_sequence,
                    "what the predictor runs");
    view_ = view;
    side_.reset();
  }
  /// Attention of all rows of the pass. `ahead` holds the next layer's rehearsed queries [rows, heads, head_dim] where the predictor asks
  /// for them, else it is empty. out: [rows, heads, head_dim] f32.
  void attend(Layer layer, const RowBlock& rows, ConstTensor ahead, Tensor out, StreamRef stream) {
    KvStore& store = *parts_.store;
    TransferScheduler& scheduler = *parts_.scheduler;
    const TraceSpan span(parts_.trace, "compute", "attend");
    scheduler.wait(Lane::prefetch, layer, stream);
    // work on the side stream may still read the lists of the layer before
    const Selection& by_row = by_row_[static_cast<std::size_t>(layer)];
    Selection next{};
    store.select(layer, view_, rows.queries, by_row, stream);
    if (ahead && traits_.layer_ahead && layer + 1 < shape_.layers) {
      next = ahead_[static_cast<std::size_t>(layer)];
      store.select(layer + 1, view_, ahead, next, stream);
    }
    store.resolve_needed(layer, view_, by_row, urgent_, stream);
    if (store.waits_for_loads(view_)) {
      scheduler.submit(Lane::urgent, layer, urgent_, stream);
      scheduler.wait(Lane::urgent, layer, stream);
    }
    store.attend(layer, view_, rows, by_row, out, stream);
    const StreamRef side = scheduler.side_stream(stream);
    side_ = side;
    Prediction prediction{.layer = layer, .this_step = false, .chunks = predicted_};
    parts_.predictor->predict(layer, view_, by_row, next, prediction, *parts_.kernels, side);
    const Layer target = store.resolve_predicted(layer, view_, prediction, prefetch_, side);
    scheduler.submit(Lane::prefetch, target, prefetch_, side);
  }
  /// Makes row 0 of every single and dual place part of its context. This goes on beside what was enqueued since the last attend, on the
  /// stream that prefetches, and has ended with it when `stream` goes on.
  void end_step(StreamRef stream) {
    const StreamRef side = std::exchange(side_, std::nullopt).value_or(stream);
    parts_.scheduler->wait(Lane::write_back, 0, side);
    parts_.store->commit(view_, write_back_, side);
    parts_.scheduler->submit(Lane::write_back, 0, write_back_, side);
    parts_.scheduler->rejoin(stream);
  }
  /// Writes what the next pass runs from what this one sampled; see RetrievalPredictor::observe.
  void observe(const StepState& state, const Outcome& outcome, int active, StreamRef stream) {
    parts_.predictor->observe(state, outcome, active, *parts_.kernels, stream);
  }
  /// `stream` goes on when what runs beside it has ended; see TransferScheduler::rejoin.
  void rejoin(StreamRef stream) { parts_.scheduler->rejoin(stream); }
  /// Waits for every transfer.
  void drain(StreamRef stream) { parts_.scheduler->drain(stream); }

  const PredictorTraits& traits() const noexcept { return traits_; }
  RowMode first_mode() const noexcept { return parts_.predictor->first_mode(); }
  StoreStatistics store_statistics() const { return parts_.store->statistics(); }
  LaneStatistics lane_statistics(Lane lane) const { return parts_.scheduler->statistics(lane); }

  /// Bytes of the lists, for memory plans.
  static std::size_t list_bytes(const SparseAttentionShape& shape, const PredictorTraits& traits, const KvStore::Capacities& capacities) {
    SparseAttention counter(shape, traits);
    Carver counting;
    counter.carve(counting, capacities);
    return counting.bytes();
  }

 private:
  SparseAttention(const SparseAttentionShape& shape, const PredictorTraits& traits) : shape_(shape), traits_(traits) {}

  static const SparseAttentionParts& checked(const SparseAttentionParts& parts) {
    if (!parts.store || !parts.predictor || !parts.scheduler || parts.kernels == nullptr || parts.device_memory == nullptr) {
      throw InvalidArgument("SparseAttentionParts: store, predictor, scheduler, kernels and device_memory must all be given");
    }
    return parts;
  }
  Selection carve_selection(Carver& carver, int lists, int capacity) const {
    const auto count = static_cast<std::size_t>(lists) * static_cast<std::size_t>(shape_.kv_heads);
    Selection selection;
    selection.chunks = carver.take<int>(count * static_cast<std::size_t>(capacity));
    selection.scores = carver.take<float>(count * static_cast<std::size_t>(capacity));
    selection.count = carver.take<int>(count);
    selection.capacity = capacity;
    selection.kv_heads = shape_.kv_heads;
    return selection;
  }
  static TransferList carve_list(Carver& carver, int capacity) {
    TransferList list;
    list.items = carver.take<TransferItem>(static_cast<std::size_t>(capacity));
    list.count = carver.take<int>(1);
    list.capacity = capacity;
    return list;
  }
  void carve(Carver& carver, const KvStore::Capacities& capacities) {
    const int rows = shape_.max_sequences * traits_.rows_per_sequence;
    by_row_.clear();
    ahead_.clear();
    for (Layer layer = 0; layer < shape_.layers; ++layer) by_row_.push_back(carve_selection(carver, rows, capacities.selection));
    for (Layer layer = 0; traits_.layer_ahead && layer + 1 < shape_.layers; ++layer) {
      ahead_.push_back(carve_selection(carver, rows, capacities.selection));
    }
    predicted_ = carve_selection(carver, shape_.max_sequences, capacities.selection);
    urgent_ = carve_list(carver, capacities.urgent);
    prefetch_ = carve_list(carver, capacities.prefetch);
    write_back_ = carve_list(carver, capacities.write_back);
  }

  SparseAttentionParts parts_;
  SparseAttentionShape shape_;
  PredictorTraits traits_;
  Buffer lists_;
  std::vector<Selection> by_row_;  // [layers]
  std::vector<Selection> ahead_;   // [layers - 1] where the predictor looks a layer ahead
  Selection predicted_;
  TransferList urgent_, prefetch_, write_back_;
  std::vector<int> free_slots_;
  StepView view_;
  std::optional<StreamRef> side_;  // of the last attend in this step
};

}  // namespace dualdecoder
