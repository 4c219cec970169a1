// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "dualdecoder/cpu/backend.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/trace.hpp"
#include "src/host_memory.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"
#include "tests/unit/session_fixture.hpp"

namespace dualdecoder::cpu {
namespace {

class IgnoringTrace final : public TraceSink {
 public:
  void span(std::string_view, std::string_view, Time, Time) noexcept override {}
  void counter(std::string_view, Time, double) noexcept override {}
};

}  // namespace

TEST_CASE("the CPU backend serves memory of every kind, aligned", "[backend]") {
  const auto backend = make_cpu_backend();
  CHECK(std::string_view(backend->name()) == "cpu");
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::pinned, MemoryKind::pageable}) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1000}, std::size_t{9} << 20U}) {
      for (const std::size_t alignment : {std::size_t{16}, std::size_t{256}, std::size_t{4096}}) {
        void* memory = backend->memory(kind).allocate(bytes, alignment, backend->stream());
        CHECK(reinterpret_cast<std::uintptr_t>(memory) % alignment == 0);
        std::memset(memory, 1, bytes);
        backend->memory(kind).deallocate(memory, bytes, alignment, backend->stream());
      }
    }
  }
}

TEST_CASE("memory beyond the machine's is refused with both figures", "[backend]") {
  const auto backend = make_cpu_backend({.threads = 1});
  // More than a machine has, and more than an address space has.
  for (const std::size_t bytes : {std::size_t{1} << 46U, std::numeric_limits<std::size_t>::max() / 4}) {
    try {
      backend->memory(MemoryKind::device).allocate(bytes, 256, backend->stream());
      FAIL("nothing was thrown");
    } catch (const OutOfMemory& error) {
      CHECK(error.asked_bytes() == bytes);
      CHECK(error.free_bytes() > 0);
      CHECK(error.free_bytes() < std::size_t{1} << 46U);
    }
  }
  CHECK(free_host_bytes() > 0);
}

TEST_CASE("a caller's own memory resources serve their kinds", "[backend]") {
  testing::HeapMemory heap;
  testing::CountingResource device(heap);
  testing::CountingResource pinned(heap);
  testing::CountingResource pageable(heap);
  IgnoringTrace trace;
  const auto backend = make_cpu_backend({.threads = 1, .trace = &trace, .device = &device, .pinned = &pinned, .pageable = &pageable});
  CHECK(&backend->memory(MemoryKind::device) == &device);
  CHECK(&backend->memory(MemoryKind::pinned) == &pinned);
  CHECK(&backend->memory(MemoryKind::pageable) == &pageable);
  CHECK(backend->trace() == &trace);
  CHECK(backend->log() == nullptr);

  LoadOptions options;
  options.threads = 1;
  const auto weights = make_synthetic_weights(test::tiny_config(), 1, *backend, options);
  CHECK(device.live_bytes() == weights->memory().device_bytes());
  const std::size_t before = device.live_bytes();
  {
    const auto dense = backend->make_dense(weights, {});
    CHECK(device.live_bytes() - before == backend->dense_plan(test::tiny_config(), {}).device_bytes());
  }
  CHECK(device.live_bytes() == before);
  device.fail_at(0);
  CHECK_THROWS_AS(backend->make_dense(weights, {}), OutOfMemory);
  CHECK(device.live_bytes() == before);
  CHECK(pinned.live_bytes() == 0);
}

TEST_CASE("the CPU backend copies at once, and its kernels work on its memory", "[backend]") {
  const auto backend = make_cpu_backend({.threads = 2});
  const std::array source{1, 2, 3};
  std::array<int, 3> target{};
  backend->copy(target.data(), source.data(), sizeof source, backend->stream());
  backend->copy(nullptr, nullptr, 0, backend->stream());
  backend->synchronize(backend->stream());
  CHECK(target == source);
  target = {};
  backend->kernels().upload(target.data(), source.data(), sizeof source, backend->stream());
  CHECK(target == source);
}

TEST_CASE("the CPU backend makes the parts that its plans describe", "[backend]") {
  testing::HeapMemory heap;
  testing::CountingResource device(heap);
  testing::CountingResource pinned(heap);
  const auto backend = make_cpu_backend({.threads = 2, .device = &device, .pinned = &pinned});
  StoreOptions options;
  options.layers = 2;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 16;
  options.max_context = 256;
  options.selection.budget_tokens = 64;
  for (const StoreKind kind : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full}) {
    options.kind = kind;
    const MemoryPlan plan = backend->store_plan(options);
    const auto store = backend->make_store(options);
    store->open(0, options.max_context, backend->stream());
    CHECK(device.live_bytes() == plan.device_bytes());
    CHECK(pinned.live_bytes() == plan.pinned_bytes());
    store->close(0, backend->stream());
  }
  SchedulerOptions link;
  link.layers = 2;
  link.max_items_per_submit = 8;
  const auto scheduler = backend->make_scheduler(link);
  scheduler->drain(backend->stream());
  CHECK(scheduler->statistics(Lane::urgent).moved_items == 0);
}

TEST_CASE("the plan of a store of chunks names every part", "[backend]") {
  const auto backend = make_cpu_backend({.threads = 1});
  StoreOptions options;
  options.layers = 3;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 64;
  options.max_context = 1024;
  options.max_sequences = 2;
  options.selection.chunk_tokens = 8;
  options.selection.budget_tokens = 64;
  options.slots_per_budget = 2.0F;
  const auto bytes_of = [&](StoreKind kind, std::string_view what) {
    options.kind = kind;
    std::size_t bytes = 0;
    for (const MemoryPlan::Item& item : backend->store_plan(options).items) bytes += item.what == what ? item.bytes : 0;
    return bytes;
  };
  // docs/concepts.md: of a chunk-head, int8 means of keys, int4 means of values and a scale of each; slots hold keys and values in bf16
  const std::size_t heads = 2 * 3 * 2;
  const std::size_t summaries = heads * (1024 / 8) * (64 + 64 / 2 + 2 * sizeof(float));
  CHECK(bytes_of(StoreKind::resident, "summaries") == summaries);
  CHECK(bytes_of(StoreKind::ping_pong, "summaries") == summaries);
  options.selection.value_group_chunks = 4;  // one mean of values and its scale for four chunks
  CHECK(bytes_of(StoreKind::resident, "summaries") == heads * (1024 / 8) * (64 + 4) + heads * (1024 / 32) * (64 / 2 + 4));
  CHECK(bytes_of(StoreKind::resident, "slots") == heads * 2 * 64 * 2 * 64 * 2);
  CHECK(bytes_of(StoreKind::ping_pong, "two layers' slots") == 2 * 2 * 2 * 64 * 2 * 64 * 2);
}

TEST_CASE("backend options out of range are named", "[backend]") {
  test::expect_error<InvalidArgument>([] { make_cpu_backend({.threads = -2}); }, {"threads = -2"});
}

TEST_CASE("a counting resource counts, limits and fails where it is told", "[counting_resource]") {
  testing::HeapMemory heap;
  testing::CountingResource memory(heap);
  const StreamRef stream = static_cast<CUstream_st*>(nullptr);
  {
    const Buffer a(memory, 100, stream);
    const Buffer b(memory, 50, stream);
    CHECK(memory.live_bytes() == 150);
    CHECK(memory.live_allocations() == 2);
    test::expect_error<InvalidArgument>([&] { memory.limit(149); }, {"limit = 149"});
    memory.limit(200);
    test::expect_error<OutOfMemory>([&] { Buffer(memory, 51, stream); }, {"51 bytes", "50 free"});
  }
  CHECK(memory.live_bytes() == 0);
  CHECK(memory.live_allocations() == 0);
  CHECK(memory.peak_bytes() == 150);
  CHECK(memory.allocations() == 3);
  memory.fail_at(1);
  const Buffer fine(memory, 10, stream);
  CHECK_THROWS_AS(Buffer(memory, 10, stream), OutOfMemory);
  const Buffer fine_again(memory, 10, stream);
  memory.fail_at(testing::CountingResource::kNever);
  CHECK(memory.live_bytes() == 20);
}

}  // namespace dualdecoder::cpu
