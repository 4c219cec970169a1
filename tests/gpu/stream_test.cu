// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A cudaStream_t is a StreamRef as it stands, and the headers of core compile under nvcc: a MemoryResource on cudaMallocAsync gives memory
// that is usable in the order of its stream.
#include <cuda_runtime.h>

#include <cstdio>
#include <type_traits>

#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/stream.hpp"

static_assert(std::is_convertible_v<cudaStream_t, dualdecoder::StreamRef>);
static_assert(!std::is_convertible_v<int, dualdecoder::StreamRef>);

namespace {

void check(cudaError_t status) {
  if (status != cudaSuccess) throw dualdecoder::CudaError(cudaGetErrorString(status));
}

class PoolMemory final : public dualdecoder::MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t, dualdecoder::StreamRef stream) override {
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes, stream.get()));
    return memory;
  }
  void deallocate(void* memory, std::size_t, std::size_t, dualdecoder::StreamRef stream) noexcept override {
    cudaFreeAsync(memory, stream.get());
  }
};

__global__ void squares(int* out) { out[threadIdx.x] = static_cast<int>(threadIdx.x * threadIdx.x); }

}  // namespace

int main() try {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: no CUDA device on this machine\n");
    return 77;
  }
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  PoolMemory memory;
  int host[64] = {};
  {
    dualdecoder::Buffer buffer(memory, sizeof(host), stream);
    squares<<<1, 64, 0, stream>>>(reinterpret_cast<int*>(buffer.data()));
    check(cudaGetLastError());
    check(cudaMemcpyAsync(host, buffer.data(), sizeof(host), cudaMemcpyDeviceToHost, stream));
  }
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));
  for (int i = 0; i < 64; ++i) {
    if (host[i] != i * i) return std::printf("element %d is %d\n", i, host[i]), 1;
  }
  std::printf("64 squares arrived\n");
  return 0;
} catch (const std::exception& error) {
  return std::printf("%s\n", error.what()), 1;
}
