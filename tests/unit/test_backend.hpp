// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::test {

/// Host memory that counts, and that fails at a chosen allocation.
class CountingMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef) override {
    if (allocations_++ == fail_at) throw OutOfMemory("a test", bytes, 0);
    live_bytes += bytes;
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* memory, std::size_t bytes, std::size_t alignment, StreamRef) noexcept override {
    live_bytes -= bytes;
    ::operator delete(memory, std::align_val_t(alignment));
  }

  std::size_t allocations() const noexcept { return allocations_; }

  std::size_t fail_at = std::numeric_limits<std::size_t>::max();  ///< number of the allocation that throws, from 0
  std::size_t live_bytes = 0;

 private:
  std::size_t allocations_ = 0;
};

/// A backend with memory and nothing else: enough for loading weights. All three kinds share one resource.
class MemoryBackend final : public Backend {
 public:
  const char* name() const noexcept override { return "test"; }
  StreamRef stream() noexcept override { return static_cast<CUstream_st*>(nullptr); }
  MemoryResource& memory(MemoryKind) noexcept override { return memory_; }
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

  CountingMemory& counting() noexcept { return memory_; }

 private:
  CountingMemory memory_;
};

}  // namespace dualdecoder::test
