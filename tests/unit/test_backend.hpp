// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/testing/counting_resource.hpp"

namespace dualdecoder::test {

/// Host memory.
class HostMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef) override {
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* memory, std::size_t, std::size_t alignment, StreamRef) noexcept override {
    ::operator delete(memory, std::align_val_t(alignment));
  }
};

/// A backend with memory and nothing else: enough for loading weights. All three kinds share one resource, which counts and can be made to
/// fail.
class MemoryBackend final : public Backend {
 public:
  const char* name() const noexcept override { return "test"; }
  StreamRef stream() noexcept override { return static_cast<CUstream_st*>(nullptr); }
  MemoryResource& memory(MemoryKind) noexcept override { return counting_; }
  StepKernels& kernels() noexcept override { std::terminate(); }  // weights need none
  void copy(void* target, const void* source, std::size_t bytes, StreamRef) override { std::memcpy(target, source, bytes); }
  void synchronize(StreamRef) override {}
  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights>, const DenseLimits&) override { return nullptr; }
  std::unique_ptr<KvStore> make_store(const StoreOptions&) override { return nullptr; }
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions&) override { return nullptr; }
  MemoryPlan dense_plan(const ModelConfig&, const DenseLimits&) const override { return {}; }
  MemoryPlan store_plan(const StoreOptions&) const override { return {}; }
  LogSink* log() const noexcept override { return nullptr; }
  TraceSink* trace() const noexcept override { return nullptr; }

  testing::CountingResource& counting() noexcept { return counting_; }

 private:
  HostMemory host_;
  testing::CountingResource counting_{host_};
};

}  // namespace dualdecoder::test
