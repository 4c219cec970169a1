// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/lane_trace.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr std::array<std::string_view, kLaneCount> kTracks = {"urgent", "prefetch", "write-back"};

}  // namespace

LaneTrace::LaneTrace(TraceSink& sink, MemoryResource& memory, StreamRef owner, StreamRef stream)
    : sink_(sink), memory_(memory, sizeof(SpanRing), owner), stream_(stream) {
  const auto initial = std::make_unique<SpanRing>();
  check(cudaMemcpyAsync(ring(), initial.get(), sizeof(SpanRing), cudaMemcpyDefault, owner.get()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(owner.get()), "cudaStreamSynchronize");
  auto* const time = &ring()->spans[0].begin_ns;  // free until the first gather
  for (int round = 0; round < 2; ++round) {       // the first one loads the kernel
    const auto before = std::chrono::steady_clock::now();
    check(launch_read_timer(time, stream), "reading the device's timer");
    check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
    host_zero_ = before + (std::chrono::steady_clock::now() - before) / 2;
  }
  check(cudaMemcpyAsync(&device_zero_ns_, time, sizeof device_zero_ns_, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
}

void LaneTrace::report() {
  const auto ring_copy = std::make_unique<SpanRing>();
  check(cudaMemcpyAsync(ring_copy.get(), ring(), sizeof(SpanRing), cudaMemcpyDefault, stream_.get()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize");
  if (ring_copy->written - reported_ > SpanRing::kSpans) reported_ = ring_copy->written - SpanRing::kSpans;
  for (; reported_ != ring_copy->written; ++reported_) {
    const SpanRing::Span& span = ring_copy->spans[reported_ % SpanRing::kSpans];
    if (span.number != reported_ + 1) continue;  // caught while it was being written
    sink_.span(kTracks[static_cast<std::size_t>(span.lane)], "layer " + std::to_string(span.layer), time_of(span.begin_ns),
               time_of(span.end_ns));
  }
}

TraceSink::Time LaneTrace::time_of(unsigned long long device_ns) const {
  const auto since = std::chrono::nanoseconds(static_cast<long long>(device_ns - device_zero_ns_));
  return host_zero_ + std::chrono::duration_cast<TraceSink::Time::duration>(since);
}

}  // namespace dualdecoder::cuda
