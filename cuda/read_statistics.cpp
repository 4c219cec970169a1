// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/read_statistics.hpp"

#include <cuda_runtime_api.h>

#include "cuda/check.hpp"
#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

StoreStatistics read_statistics(const std::uint64_t* counters, std::byte* pinned, StreamRef stream) {
  constexpr std::size_t kBytes = static_cast<std::size_t>(Counter::count) * sizeof(std::uint64_t);
  check(cudaMemcpyAsync(pinned, counters, kBytes, cudaMemcpyDeviceToHost, stream.get()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  const auto* const read = reinterpret_cast<const std::uint64_t*>(pinned);
  const auto count = [&](Counter counter) { return read[static_cast<std::size_t>(counter)]; };
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

}  // namespace dualdecoder::cuda
