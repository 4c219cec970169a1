// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/readback.hpp"

#include <cuda_runtime_api.h>

#include <utility>

#include "cuda/check.hpp"
#include "cuda/memory.hpp"

namespace dualdecoder::cuda {
namespace {

class CudaReadback final : public Readback {
 public:
  explicit CudaReadback(int device) : device_(device) {
    const DeviceGuard guard(device);
    done_ = Event::create();
  }
  ~CudaReadback() override {
    if (enqueued_ && cudaEventSynchronize(done_.get()) != cudaSuccess) cudaGetLastError();  // or the driver is gone: nothing runs any more
  }

  void enqueue(void* target, const void* source, std::size_t bytes, StreamRef stream) override {
    const DeviceGuard guard(device_);
    enqueued_ = true;
    copy_async(target, source, bytes, stream);
    done_.record(stream);
  }
  void wait() override {
    if (!std::exchange(enqueued_, false)) return;
    const DeviceGuard guard(device_);
    check(cudaEventSynchronize(done_.get()), "cudaEventSynchronize");
  }

 private:
  int device_;
  Event done_;
  bool enqueued_ = false;
};

}  // namespace

std::unique_ptr<Readback> make_cuda_readback(int device) { return std::make_unique<CudaReadback>(device); }

}  // namespace dualdecoder::cuda
