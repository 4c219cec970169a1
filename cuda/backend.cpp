// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/cuda/backend.hpp"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "cuda/check.hpp"
#include "cuda/dense_model.hpp"
#include "cuda/device_support.hpp"
#include "cuda/gather.hpp"
#include "cuda/memory.hpp"
#include "cuda/pinned_pool.hpp"
#include "cuda/readback.hpp"
#include "cuda/step_graph.hpp"
#include "cuda/step_kernels.hpp"
#include "cuda/store.hpp"
#include "cuda/transfer_scheduler.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/log.hpp"

namespace dualdecoder::cuda {
namespace {

CudaVersions versions() {
  CudaVersions found;
  if (cudaRuntimeGetVersion(&found.runtime) != cudaSuccess || cudaDriverGetVersion(&found.driver) != cudaSuccess) cudaGetLastError();
  return found;
}

int visible_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError();
  require_some_device(status, count, versions());
  return count;
}

DeviceFacts facts_of(int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return {device, properties.name, properties.major, properties.minor};
}

void check_device(const BackendOptions& options) {
  const DeviceFacts facts = facts_of(options.device);
  require_capability(facts);
  const DeviceGuard guard(options.device);
  const cudaError_t status = find_gather();
  if (status != cudaSuccess) cudaGetLastError();
  require_code(status, facts);
}

void check_stream(const BackendOptions& options) {
  if (options.stream == nullptr) return;
  const DeviceGuard guard(options.device);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(options.stream, &capturing), "cudaStreamIsCapturing of BackendOptions::stream");
  if (capturing != cudaStreamCaptureStatusNone) {
    throw InvalidArgument("stream: is being recorded; the backend must be made outside of a recording");
  }
#if CUDART_VERSION >= 12080
  int device = options.device;
  check(cudaStreamGetDevice(options.stream, &device), "cudaStreamGetDevice of BackendOptions::stream");
  dualdecoder::detail::require(device == options.device, "device of the stream", device, "the backend's own");
#endif
}

const BackendOptions& checked(const BackendOptions& options) {
  const auto blocks = [](const char* field, int value) {
    dualdecoder::detail::require(value >= 1 && value <= 1024, field, value, "in 1 .. 1024");
  };
  blocks("prefetch_blocks", options.prefetch_blocks);
  blocks("urgent_blocks", options.urgent_blocks);
  const int count = visible_devices();
  dualdecoder::detail::require(options.device >= 0 && options.device < count, "device", options.device,
                               ("in 0 .. " + std::to_string(count - 1)).c_str());
  check_stream(options);
  check_device(options);
  return options;
}

// Compute goes before what runs beside it.
Stream make_compute_stream(const BackendOptions& options) {
  if (options.stream != nullptr) return {};
  const DeviceGuard guard(options.device);
  int lowest = 0;
  int highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  return Stream::create(highest);
}

PinnedPoolOptions pinned_options(const BackendOptions& options) {
  PinnedPoolOptions pinned;
  pinned.device = options.device;
  pinned.reserve_bytes = options.reserve_pinned_bytes;
  pinned.log = options.log;
  pinned.on_progress = options.on_pinned;
  return pinned;
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options)
      : options_(checked(options)),
        own_stream_(make_compute_stream(options)),
        device_memory_(options.device),
        pinned_(pinned_options(options)),
        kernels_(options.device) {
    if (options_.log != nullptr) {
      options_.log->log(LogLevel::info, "device " + std::to_string(options_.device) + ": " + to_string(facts_of(options_.device)) + "; " +
                                            to_string(versions()));
    }
  }

  const char* name() const noexcept override { return "cuda"; }
  StreamRef stream() noexcept override { return options_.stream != nullptr ? StreamRef(options_.stream) : StreamRef(own_stream_); }
  MemoryResource& memory(MemoryKind kind) noexcept override {
    switch (kind) {
      case MemoryKind::device: return options_.device_memory != nullptr ? *options_.device_memory : device_memory_;
      case MemoryKind::pinned: return options_.pinned != nullptr ? *options_.pinned : pinned_;
      case MemoryKind::pageable: break;
    }
    return options_.pageable != nullptr ? *options_.pageable : pageable_;
  }
  StepKernels& kernels() noexcept override { return kernels_; }
  void copy(void* target, const void* source, std::size_t bytes, StreamRef stream) override {
    if (bytes > 0) kernels_.download(target, source, bytes, stream);  // which copies any way, and waits
  }
  void synchronize(StreamRef stream) override {
    const DeviceGuard guard(options_.device);
    check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  }
  std::unique_ptr<StepGraph> record(const std::function<void()>& work, StreamRef stream) override {
    return record_graph(options_.device, work, stream);
  }
  std::unique_ptr<Readback> make_readback() override { return make_cuda_readback(options_.device); }

  std::unique_ptr<DenseModel> make_dense(std::shared_ptr<const ModelWeights> weights, const DenseLimits& limits) override {
    const DeviceGuard guard(options_.device);
    return make_cuda_dense(std::move(weights), limits, {memory(MemoryKind::device), stream()});
  }
  std::unique_ptr<KvStore> make_store(const StoreOptions& options) override {
    return make_cuda_store(options, {&memory(MemoryKind::device), &memory(MemoryKind::pinned), stream(), options_.device});
  }
  std::unique_ptr<TransferScheduler> make_scheduler(const SchedulerOptions& options) override {
    return make_cuda_scheduler(options, {.device = options_.device,
                                         .memory = &memory(MemoryKind::device),
                                         .stream = stream(),
                                         .prefetch_blocks = options_.prefetch_blocks,
                                         .urgent_blocks = options_.urgent_blocks});
  }
  MemoryPlan dense_plan(const ModelConfig& config, const DenseLimits& limits) const override { return cuda_dense_plan(config, limits); }
  MemoryPlan store_plan(const StoreOptions& options) const override { return cuda_store_plan(options); }
  bool prefers_full(const StoreOptions& options) const noexcept override {
    // Keys and values of a layer, over all sequences, that full attention reads in the time that selecting costs: on an H200 11 us a layer,
    // at 1 us for each 1,024 tokens of 4 KiB (docs/performance.md). A little more than that: full attention is exact, and interpolation has
    // it 1 % slower.
    constexpr std::size_t kShortBytes = std::size_t{64} << 20U;
    const std::size_t token =
        2 * size_of(options.kv_type) * static_cast<std::size_t>(options.kv_heads) * static_cast<std::size_t>(options.head_dim);
    return token * static_cast<std::size_t>(options.max_context) * static_cast<std::size_t>(options.max_sequences) <= kShortBytes;
  }
  DataType activation_type() const noexcept override { return DataType::bf16; }
  int prefill_block() const noexcept override { return 4096; }

  LogSink* log() const noexcept override { return options_.log; }
  TraceSink* trace() const noexcept override { return options_.trace; }

 private:
  BackendOptions options_;
  Stream own_stream_;
  DevicePool device_memory_;
  PinnedPool pinned_;
  PageableMemory pageable_;
  CudaStepKernels kernels_;
};

}  // namespace

int device_count() noexcept {
  int count = 0;
  int usable = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (; usable < count; ++usable) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, usable) != cudaSuccess || major < kOldestMajor) break;
  }
  cudaGetLastError();
  return usable;
}

std::shared_ptr<Backend> make_cuda_backend(const BackendOptions& options) { return std::make_shared<CudaBackend>(options); }

std::shared_ptr<Backend> make_cuda_backend(int device) {
  BackendOptions options;
  options.device = device;
  return make_cuda_backend(options);
}

}  // namespace dualdecoder::cuda
