// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/readout.hpp"

#include <cuda_runtime_api.h>

#include "cuda/check.hpp"

namespace dualdecoder::cuda {
namespace {

void read(void* pinned, const void* source, std::size_t bytes, StreamRef stream) {
  check(cudaMemcpyAsync(pinned, source, bytes, cudaMemcpyDeviceToHost, stream.get()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

}  // namespace

StoreStatistics read_statistics(const std::uint64_t* counters, std::byte* pinned, StreamRef stream) {
  read(pinned, counters, kReadoutBytes, stream);
  const auto* const numbers = reinterpret_cast<const std::uint64_t*>(pinned);
  const auto count = [&](Counter counter) { return numbers[static_cast<std::size_t>(counter)]; };
  return {.needed = count(Counter::needed),
          .predicted_hit = count(Counter::predicted_hit),
          .predictable = count(Counter::predictable),
          .resident_hit = count(Counter::resident_hit),
          .estimated = count(Counter::estimated),
          .urgent_bytes = count(Counter::urgent_bytes),
          .prefetch_bytes = count(Counter::prefetch_bytes),
          .write_back_bytes = count(Counter::write_back_bytes),
          .prefetch_dropped = count(Counter::prefetch_dropped)};
}

int read_length(const int* lengths, int slot, std::byte* pinned, StreamRef stream) {
  read(pinned, lengths + slot, sizeof(int), stream);
  return *reinterpret_cast<const int*>(pinned);
}

}  // namespace dualdecoder::cuda
