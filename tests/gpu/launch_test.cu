// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Kernels that overlap see what was written before them: behind one another, a plain kernel, a memset and events of another stream,
// enqueued and recorded. Expected values are computed on the host. Prints what a small kernel costs in a recording with and without
// overlap.
#include "cuda/launch.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/step_graph.hpp"
#include "tests/gpu/check.hpp"

namespace dualdecoder::test {
namespace {

using cuda::Event;
using cuda::Stream;

constexpr int kThreads = 128;
constexpr int kBlocks = 8;
constexpr int kCount = kThreads * kBlocks;
constexpr unsigned kDelayNs = 3000;

struct Sum {
  const std::uint32_t* a;
  const std::uint32_t* b;
  std::uint32_t* out;
  unsigned delay_ns;
  bool early;  // lets the next kernel begin long before it writes
};

/// out = a + b + 1, where every block reads what another one wrote, and writes late.
__global__ void __launch_bounds__(kThreads) add(Sum sum) {
  cuda::wait_for_earlier_kernels();
  if (sum.early) cuda::let_next_kernel_begin();
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int mirrored = static_cast<int>(gridDim.x * kThreads) - 1 - i;
  const std::uint32_t value = sum.a[mirrored] + sum.b[mirrored] + 1;
  if (sum.delay_ns != 0) __nanosleep(sum.delay_ns);
  sum.out[i] = value;
}

void overlapped(const Sum& sum, int blocks, cudaStream_t stream) {
  cuda::check(cuda::launch_overlapped(add, static_cast<unsigned>(blocks), kThreads, 0, stream, sum), "launch_overlapped");
}

/// Chains of sums over two streams; the last one is the next run's first operand.
class Chain {
 public:
  Chain() : zero_(kCount), values_(std::vector<std::uint32_t>(kCount)) {
    for (int i = 0; i < kCount; ++i) expected_.push_back(static_cast<std::uint32_t>(i));
    values_.upload(expected_);
    for (int i = 0; i < kBuffers; ++i) buffers_.emplace_back(kCount);
  }

  void enqueue(cudaStream_t stream) {
    reset(stream);
    std::uint32_t* const begin = run(values_.data(), 4, stream);
    fork_.record(stream);
    fork_.hold(side_);
    std::uint32_t* const aside = run(begin, 2, side_.get());
    std::uint32_t* const ahead = run(begin, 3, stream);
    join_.record(side_);
    join_.hold(stream);
    std::uint32_t* const joined = take();
    overlapped({ahead, aside, joined, kDelayNs, true}, kBlocks, stream);
    reset(stream);
    std::uint32_t* const behind_memset = run(joined, 2, stream);
    std::uint32_t* const plain = take();
    add<<<kBlocks, kThreads, 0, stream>>>({behind_memset, zero_.data(), plain, kDelayNs, true});
    cuda::check(cudaGetLastError(), "add");
    overlapped({run(plain, 1, stream), zero_.data(), values_.data(), kDelayNs, false}, kBlocks, stream);
    taken_ = 0;
  }
  /// What one run makes of the values: 4 sums, 3 and 2 beside one another, their sum, 2 more, a plain one and 2 more.
  void expect(const char* name, int round) {
    std::vector<std::uint32_t> next(kCount);
    for (std::size_t i = 0; i < next.size(); ++i) {
      const auto of = [&](int sums) { return expected_[sums % 2 == 0 ? i : next.size() - 1 - i]; };
      // the sum of sums 7 and 6 reads both mirrored: operands of 8 and 7 mirrorings; 5 more follow
      next[i] = (of(8 + 5) + 7) + (of(7 + 5) + 6) + 1 + 5;
    }
    expected_ = next;
    const std::vector<std::uint32_t> got = values_.download();
    int wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected_[i] ? 1 : 0;
    DUALDECODER_EXPECT(wrong == 0, "%s, round %d: %d of %d values are wrong", name, round, wrong, kCount);
    values_.upload(expected_);
  }

 private:
  static constexpr int kBuffers = 16;

  void reset(cudaStream_t stream) {
    cuda::check(cudaMemsetAsync(zero_.data(), 0, kCount * sizeof(std::uint32_t), stream), "cudaMemsetAsync");
  }
  std::uint32_t* take() { return buffers_[static_cast<std::size_t>(taken_++)].data(); }
  std::uint32_t* run(std::uint32_t* from, int sums, cudaStream_t stream) {
    for (int i = 0; i < sums; ++i) {
      std::uint32_t* const to = take();
      overlapped({from, zero_.data(), to, kDelayNs, i % 2 == 0}, kBlocks, stream);
      from = to;
    }
    return from;
  }

  DeviceArray<std::uint32_t> zero_;
  DeviceArray<std::uint32_t> values_;
  std::vector<DeviceArray<std::uint32_t>> buffers_;
  int taken_ = 0;
  std::vector<std::uint32_t> expected_;
  Stream side_ = Stream::create();
  Event fork_ = Event::create();
  Event join_ = Event::create();
};

void test_order(const Stream& stream) {
  Chain chain;
  for (int round = 0; round < 20; ++round) {
    chain.enqueue(stream.get());
    chain.expect("enqueued", round);
  }
  const auto recorded = cuda::record_graph(
      0, [&] { chain.enqueue(stream.get()); }, stream);
  for (int round = 0; round < 50; ++round) {
    recorded->launch(stream);
    chain.expect("recorded", round);
  }
}

void print_cost(const Stream& stream) {
  constexpr int kKernels = 400;
  const DeviceArray<std::uint32_t> zero(std::vector<std::uint32_t>(kThreads, 0));
  const DeviceArray<std::uint32_t> values(kThreads);
  enum class Launch { plain, overlapped, early };
  for (const Launch launch : {Launch::plain, Launch::overlapped, Launch::early}) {
    const Sum sum{zero.data(), zero.data(), values.data(), 0, launch == Launch::early};
    const auto recorded = cuda::record_graph(
        0,
        [&] {
          for (int i = 0; i < kKernels; ++i) {
            if (launch == Launch::plain) {
              add<<<1, kThreads, 0, stream.get()>>>(sum);
            } else {
              overlapped(sum, 1, stream.get());
            }
          }
        },
        stream);
    const double each = milliseconds(stream.get(), 20, [&] { recorded->launch(stream); }) * 1e3 / kKernels;
    const char* name = launch == Launch::plain ? "as usual" : launch == Launch::early ? "overlapped from its start" : "overlapped";
    std::printf("a small kernel in a recording, %s: %.2f us\n", name, each);
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main() {
  namespace test = dualdecoder::test;
  return test::run_on_device([] {
    const auto stream = dualdecoder::cuda::Stream::create();
    test::test_order(stream);
    if (!test::small_run()) test::print_cost(stream);
  });
}
