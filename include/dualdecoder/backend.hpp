// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"
#include "dualdecoder/retrieval_predictor.hpp"
#include "dualdecoder/sampling.hpp"
#include "dualdecoder/store_options.hpp"
#include "dualdecoder/stream.hpp"
#include "dualdecoder/tensor.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder {

class LogSink;
class TraceSink;

/// The dense part of a model as coarse calls that each backend fuses as it likes. Rows are independent; the same row gives the same bits
/// whatever its place, as long as the number of rows is the same. All work is ordered by the stream. Threading: one thread at a time.
class DenseModel {
 public:
  DenseModel() = default;
  DenseModel(const DenseModel&) = delete;
  DenseModel& operator=(const DenseModel&) = delete;
  virtual ~DenseModel() = default;

  /// Element type that q, k, v and attention should have to be read and written fastest; f32 is always taken too.
  virtual DataType activation_type() const noexcept { return DataType::f32; }
  /// hidden[r] = embedding of tokens[r]; a token of -1 (a dead row) gives zeros. hidden: [rows, hidden] f32.
  virtual void embed(const Token* tokens, Tensor hidden, StreamRef stream) = 0;
  /// Norm, projections, biases, QK norm and RoPE at positions[r]. hidden is read only; q: [rows, heads, head_dim], k and v: [rows,
  /// kv_heads, head_dim], f32 or activation_type(). With a null k only q is computed (layer-ahead rehearsal).
  virtual void before_attention(Layer layer, ConstTensor hidden, const int* positions, Tensor q, Tensor k, Tensor v, StreamRef stream) = 0;
  /// Output projection, residual, norm, gated MLP, residual. attention: [rows, heads, head_dim]; hidden is updated.
  virtual void after_attention(Layer layer, ConstTensor attention, Tensor hidden, StreamRef stream) = 0;
  /// Final norm and head. logits: [rows, vocabulary] f32.
  virtual void head(ConstTensor hidden, Tensor logits, StreamRef stream) = 0;
  /// Dense causal attention of a prompt block for prefill: query row i sees keys 0 .. offset + i. q, out: [rows, heads, head_dim];
  /// keys, values: [offset + rows, kv_heads, head_dim].
  virtual void prefill_attention(ConstTensor q, ConstTensor keys, ConstTensor values, int offset, Tensor out, StreamRef stream) = 0;
  /// Chooses the token after each row from its logits (see SamplingState); dead rows get -1. Logits may be overwritten.
  virtual void sample(Tensor logits, const SamplingView& sampling, Token* sampled, StreamRef stream) = 0;
};

/// Limits that a DenseModel sizes its work space for.
struct DenseLimits {
  int decode_rows = 2;     ///< rows of the largest decode pass
  int prefill_rows = 512;  ///< rows of the largest block of one call
};

/// Work of a stream that was recorded once and runs again at every launch, on what its memory holds then.
class StepGraph {
 public:
  StepGraph() = default;
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  virtual ~StepGraph() = default;

  virtual void launch(StreamRef stream) = 0;
};

/// A copy to the host that is waited for later than it is enqueued. Destruction waits for it. Threading: one thread at a time.
class Readback {
 public:
  Readback() = default;
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;
  virtual ~Readback() = default;

  /// Enqueues a copy into memory of MemoryKind::pinned, behind what `stream` holds. The one before it was waited for.
  virtual void enqueue(void* target, const void* source, std::size_t bytes, StreamRef stream) = 0;
  /// Waits for the copy alone, not for what was enqueued after it. Throws what went wrong on the stream until then.
  virtual void wait() = 0;
};

/// Makes the parts that run on one device. Owns streams and memory resources; outlives everything made from it. Threading: calls may come
/// from several threads; the parts that it makes are used by one thread each.
class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;
  virtual StreamRef stream() noexcept = 0;
  virtual MemoryResource& memory(MemoryKind kind) noexcept = 0;
  virtual StepKernels& kernels() noexcept = 0;
  /// Copies between memories of the backend and the host, and waits until done.
  virtual void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) = 0;
  /// Waits until everything enqueued on `stream` is done.
  virtual void synchronize(StreamRef stream) = 0;

  /// Records what `work` enqueues on `stream` instead of running it. Null where the backend does not record; `work` is then not called.
  /// Rethrows what `work` throws; the stream is as before. Throws CudaError where something in `work` cannot be recorded.
  virtual std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef stream) {
    static_cast<void>(work);
    static_cast<void>(stream);
    return nullptr;
  }

  /// Null where work has ended when the call that asked for it returns, so that nobody gains by reading later.
  virtual std::unique_ptr<Readback> make_readback() { return nullptr; }

  virtual std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) = 0;
  virtual std::unique_ptr<KvStore> make_store(const StoreOptions& options) = 0;
  virtual std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) = 0;
  /// What make_dense and make_store would take.
  virtual MemoryPlan dense_plan(const ModelConfig& config, const DenseLimits& limits) const = 0;
  virtual MemoryPlan store_plan(const StoreOptions& options) const = 0;

  /// Whether no store is faster than full attention for sequences as long as `options` allow; what StoreKind::automatic goes by. Its kind
  /// is not looked at.
  virtual bool prefers_full(const StoreOptions& options) const noexcept {
    static_cast<void>(options);
    return false;
  }

  /// DenseModel::activation_type() of the models that make_dense makes.
  virtual DataType activation_type() const noexcept { return DataType::f32; }
  /// Prompt tokens of one dense call that suit the backend.
  virtual int prefill_block() const noexcept { return 512; }

  virtual LogSink* log() const noexcept = 0;
  virtual TraceSink* trace() const noexcept = 0;
};

}  // namespace dualdecoder
