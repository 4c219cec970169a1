// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::testing {

/// Hands every call to another store: a base for tools that watch or change a few of them. Threading: as the other store.
class ForwardingStore : public KvStore {
 public:
  explicit ForwardingStore(std::unique_ptr<KvStore> inner) : inner_(std::move(inner)) {}

  void open(int slot, int capacity_tokens, StreamRef stream) override { inner_->open(slot, capacity_tokens, stream); }
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef stream) override {
    inner_->append(layer, slot, block, last_queries, stream);
  }
  void seal(int slot, StreamRef stream) override { inner_->seal(slot, stream); }
  void select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) override {
    inner_->select(layer, view, queries, by_row, stream);
  }
  bool waits_for_loads(const StepView& view) const noexcept override { return inner_->waits_for_loads(view); }
  void resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef stream) override {
    inner_->resolve_needed(layer, view, by_row, urgent, stream);
  }
  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef stream) override {
    inner_->attend(layer, view, rows, by_row, out, stream);
  }
  Layer resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                          StreamRef stream) override {
    return inner_->resolve_predicted(layer, view, prediction, prefetch, stream);
  }
  void commit(const StepView& view, const TransferList& write_back, StreamRef stream) override { inner_->commit(view, write_back, stream); }
  void truncate(int slot, int tokens, StreamRef stream) override { inner_->truncate(slot, tokens, stream); }
  void close(int slot, StreamRef stream) noexcept override { inner_->close(slot, stream); }
  Capacities capacities() const noexcept override { return inner_->capacities(); }
  StoreStatistics statistics() const override { return inner_->statistics(); }

 private:
  std::unique_ptr<KvStore> inner_;
};

/// Hands every call to another scheduler.
class ForwardingScheduler : public TransferScheduler {
 public:
  explicit ForwardingScheduler(std::unique_ptr<TransferScheduler> inner) : inner_(std::move(inner)) {}

  void submit(Lane lane, Layer layer, const TransferList& list, StreamRef after) override { inner_->submit(lane, layer, list, after); }
  void wait(Lane lane, Layer layer, StreamRef stream) override { inner_->wait(lane, layer, stream); }
  StreamRef side_stream(StreamRef after) override { return inner_->side_stream(after); }
  void rejoin(StreamRef stream) override { inner_->rejoin(stream); }
  void drain(StreamRef stream) override { inner_->drain(stream); }
  LaneStatistics statistics(Lane lane) const override { return inner_->statistics(lane); }

 private:
  std::unique_ptr<TransferScheduler> inner_;
};

/// Hands every call to another backend.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::shared_ptr<Backend> inner) : inner_(std::move(inner)) {}

  const char* name() const noexcept override { return inner_->name(); }
  StreamRef stream() noexcept override { return inner_->stream(); }
  MemoryResource& memory(MemoryKind kind) noexcept override { return inner_->memory(kind); }
  StepKernels& kernels() noexcept override { return inner_->kernels(); }
  void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) override { inner_->copy(target, source, bytes, stream); }
  void synchronize(StreamRef stream) override { inner_->synchronize(stream); }
  std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef stream) override { return inner_->record(work, stream); }
  std::unique_ptr<Readback> make_readback() override { return inner_->make_readback(); }
  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) override {
    return inner_->make_dense(std::move(weights), limits);
  }
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override { return inner_->make_store(options); }
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override { return inner_->make_scheduler(options); }
  MemoryPlan dense_plan(const ModelConfig& config, const DenseLimits& limits) const override { return inner_->dense_plan(config, limits); }
  MemoryPlan store_plan(const StoreOptions& options) const override { return inner_->store_plan(options); }
  bool prefers_full(const StoreOptions& options) const noexcept override { return inner_->prefers_full(options); }
  DataType activation_type() const noexcept override { return inner_->activation_type(); }
  int prefill_block() const noexcept override { return inner_->prefill_block(); }
  LogSink* log() const noexcept override { return inner_->log(); }
  TraceSink* trace() const noexcept override { return inner_->trace(); }

 private:
  std::shared_ptr<Backend> inner_;
};

}  // namespace dualdecoder::testing
