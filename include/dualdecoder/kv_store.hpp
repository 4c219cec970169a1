// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "dualdecoder/memory.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/transfer_scheduler.hpp"
#include "dualdecoder/types.hpp"

namespace dualdecoder {

/// Consecutive tokens of one sequence and layer, keys after RoPE.
struct KvBlock {
  ConstTensor keys;    ///< [tokens, kv_heads, head_dim] f32 or bf16
  ConstTensor values;  ///< the same shape and type
};

/// Rows of a pass. Dead rows hold anything.
struct RowBlock {
  ConstTensor queries;  ///< [rows, heads, head_dim] f32 or bf16, after RoPE
  ConstTensor keys;     ///< [rows, kv_heads, head_dim]
  ConstTensor values;   ///< [rows, kv_heads, head_dim]
};

/// Chunks that a predictor expects a layer to need.
struct Prediction {
  Layer layer = 0;
  bool this_step = false;  ///< needed later in this step (layer-ahead) rather than in the next one
  Selection chunks;        ///< rows of it stand for places of the batch: [sequences, kv_heads, capacity]
};

/// Counts over all layers and sequences since the store was made. One unit is one chunk of one KV head.
struct StoreStatistics {
  std::uint64_t needed = 0;         ///< selected by row 0
  std::uint64_t predicted_hit = 0;  ///< of the needed in steps that had a prediction: also predicted
  std::uint64_t predictable = 0;    ///< needed in steps that had a prediction
  std::uint64_t resident_hit = 0;   ///< of the needed: in a slot before the layer ran
  std::uint64_t estimated = 0;      ///< of the needed: neither in a slot nor waited for
  std::uint64_t urgent_bytes = 0;
  std::uint64_t prefetch_bytes = 0;
  std::uint64_t write_back_bytes = 0;
  std::uint64_t prefetch_dropped = 0;  ///< predicted chunks that the bound on prefetch left out
};

/// Where the context lives and how it is attended to. One step calls, per layer: select, resolve_needed, attend, resolve_predicted; then
/// commit once. All work is ordered by the stream. Threading: one thread at a time.
class KvStore {
 public:
  KvStore() = default;
  KvStore(const KvStore&) = delete;
  KvStore& operator=(const KvStore&) = delete;
  virtual ~KvStore() = default;

  /// Readies storage `slot` (0 .. max_sequences-1) for up to `capacity_tokens`. Throws OutOfMemory, InvalidArgument; then nothing changed.
  virtual void open(int slot, int capacity_tokens, StreamRef stream) = 0;
  /// Prefill: adds tokens behind those already appended to the layer and builds their summaries. `last_queries` [n <= tokens, heads,
  /// head_dim] are the queries of the block's last n tokens for calibration, or empty; the newest kCalibrationQueries are kept.
  virtual void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) = 0;
  /// End of prefill: every layer holds the same tokens. Calibrates the tail estimate (docs/concepts.md, "Tail estimate").
  virtual void seal(int slot, StreamRef stream) = 0;
  /// Chooses chunks for every live row of the pass in one read of the summaries.
  virtual void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) = 0;
  /// False: no pass on `view` waits for a load, so resolve_needed lists none and nobody needs to ask its lane.
  virtual bool waits_for_loads(const StepView& view) const noexcept {
    static_cast<void>(view);
    return true;
  }
  /// Places row 0's chunks in slots; `urgent` receives the loads that have to be waited for (none where the miss is estimated).
  virtual void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) = 0;
  /// Attention of every live row over sinks, window, chosen chunks, the tail estimate and the rows before it in the pass; rows' keys and
  /// values are kept until commit decides. out: [rows, heads, head_dim], dead rows zero.
  virtual void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) = 0;
  /// After attend of `layer`: `prefetch` receives loads, best score first; returns the layer that they are for (it may be a later one).
  /// `prediction.chunks` may be empty. With `prediction.this_step` it may name a layer that has not run yet.
  virtual Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                  StreamRef stream) = 0;
  /// Row 0 of single and dual places becomes part of the context, other rows vanish; `write_back` receives completed chunks, for all
  /// layers. The caller sees to it that such a place's position is below the capacity that its slot was opened with: a store whose lengths
  /// live on a device cannot check.
  virtual void commit(const StepView& view, const TransferList& write_back, StreamRef stream) = 0;
  /// Forgets everything behind the first `tokens` tokens. Throws InvalidArgument if fewer are kept than asked for.
  virtual void truncate(int slot, int tokens, StreamRef stream) = 0;
  /// Frees the slot; anything may be closed, also an unsealed or closed one.
  virtual void close(int slot, StreamRef stream) noexcept = 0;

  /// Longest lists that one call can write: [urgent, prefetch, write_back] in TransferItems, and chunks per row and KV head.
  struct Capacities {
    int urgent = 0;
    int prefetch = 0;
    int write_back = 0;
    int selection = 0;
  };
  virtual Capacities capacities() const noexcept = 0;
  virtual StoreStatistics statistics() const = 0;

  static constexpr int kCalibrationQueries = 64;
};

}  // namespace dualdecoder
