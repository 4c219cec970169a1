// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/backend.hpp"

#include <cstring>
#include <memory>
#include <utility>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/host_step_kernels.hpp"
#include "src/dense_model.hpp"
#include "src/host_memory.hpp"
#include "src/simd/dispatch.hpp"
#include "src/store.hpp"
#include "src/thread_pool.hpp"
#include "src/transfer_scheduler.hpp"

namespace dualdecoder::cpu {
namespace {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options) : options_(options), pool_(options.threads) {}

  const char* name() const noexcept override { return "cpu"; }
  StreamRef stream() noexcept override { return static_cast<CUstream_st*>(nullptr); }
  MemoryResource& memory(MemoryKind kind) noexcept override {
    switch (kind) {
      case MemoryKind::device: return options_.device != nullptr ? *options_.device : streamed_;
      case MemoryKind::pinned: return options_.pinned != nullptr ? *options_.pinned : plain_;
      case MemoryKind::pageable: break;
    }
    return options_.pageable != nullptr ? *options_.pageable : plain_;
  }
  StepKernels& kernels() noexcept override { return kernels_; }
  void copy(void* target, const void* source, std::size_t bytes, StreamRef) override {
    if (bytes > 0) std::memcpy(target, source, bytes);
  }
  void synchronize(StreamRef) override {}

  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) override {
    return make_cpu_dense(std::move(weights), limits, {memory(MemoryKind::device), stream(), pool_});
  }
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override {
    return make_cpu_store(options, {&memory(MemoryKind::device), &memory(MemoryKind::pinned), &pool_, stream()});
  }
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override { return make_threaded_scheduler(options); }
  MemoryPlan dense_plan(const ModelConfig& config, const DenseLimits& limits) const override {
    return cpu_dense_plan(config, limits, pool_.size(), detected_isa());
  }
  MemoryPlan store_plan(const StoreOptions& options) const override { return cpu_store_plan(options, pool_.size()); }
  bool prefers_full(const StoreOptions& options) const noexcept override {
    // two rows attend to a budget each and score the summaries, which with a budget of 256 takes less time than one row's full attention
    // from about 1,400 tokens on, as docs/performance.md has it
    return options.max_context <= 1024 + 2 * options.selection.budget_tokens;
  }

  LogSink* log() const noexcept override { return options_.log; }
  TraceSink* trace() const noexcept override { return options_.trace; }

 private:
  BackendOptions options_;
  HostMemory streamed_{true};
  HostMemory plain_{false};
  HostStepKernels kernels_;
  ThreadPool pool_;
};

}  // namespace

std::shared_ptr<Backend> make_cpu_backend(const BackendOptions& options) { return std::make_shared<CpuBackend>(options); }

}  // namespace dualdecoder::cpu
