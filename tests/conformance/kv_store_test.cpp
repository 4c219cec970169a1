// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/store_conformance.hpp"
#include "tests/catch.hpp"
#include "tests/unit/plain_store.hpp"
#include "tests/unit/simulated_scheduler.hpp"

namespace dualdecoder {
namespace {

using MakeScheduler = std::function<std::unique_ptr<TransferScheduler>(const SchedulerOptions&)>;

void check(StoreKind kind, DataType kv_type, MakeScheduler make_scheduler) {
  const std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 2});
  const auto make = [&](StoreOptions options) {
    // small enough for the suite's contexts; a budget that covers the context is an exact window that does
    const bool covers = options.selection.budget_tokens >= options.max_context;
    options.specache = {.bits = 2, .group = 32, .exact_tokens = covers ? options.max_context : 12, .fetched_tokens = 20};
    return backend->make_store(options);
  };
  const testing::StoreSubject subject{make, std::move(make_scheduler), testing::workplace_of(*backend), kind, kv_type};
  for (const std::string& finding : testing::check_kv_store(subject)) FAIL_CHECK(finding);
  SUCCEED();
}

std::unique_ptr<TransferScheduler> lanes(const SchedulerOptions& options) {
  return cpu::make_cpu_backend({.threads = 1})->make_scheduler(options);
}

std::unique_ptr<TransferScheduler> throttled_lanes(SchedulerOptions options) {
  options.bytes_per_second = 500e6;
  options.latency = std::chrono::microseconds(5);
  return lanes(options);
}

std::vector<std::string> findings_of_plain_store(test::PlainStore::Mistake mistake) {
  testing::HeapMemory memory;
  return testing::check_kv_store({[=](const StoreOptions& options) { return std::make_unique<test::PlainStore>(options, mistake); }, lanes,
                                  testing::host_workplace(memory), StoreKind::full, DataType::f32});
}

}  // namespace

TEST_CASE("a store written from the documentation alone honours KvStore", "[conformance]") {
  for (const std::string& finding : findings_of_plain_store(test::PlainStore::Mistake::none)) FAIL_CHECK(finding);
  SUCCEED();
}

TEST_CASE("the checks of KvStore notice each mistake", "[conformance]") {
  using Mistake = test::PlainStore::Mistake;
  const std::vector<std::pair<Mistake, std::string>> mistakes = {
      {Mistake::commits_row1, "With a budget that covers the context, row 0 differs"},
      {Mistake::commits_resync, "Resync passes in between change row 0's bits."},
      {Mistake::forgets_truncate, "After truncate()"},
      {Mistake::forgets_close, "truncate() and reuse"},
      {Mistake::leaves_dead_rows, "The output of a dead row is not zero."},
      {Mistake::sees_idle, "Steps in which a place was idle changed its sequence."},
      {Mistake::mixes_heads, "With a budget that covers the context, row 0 differs"},
      {Mistake::accepts_anything, "append() beyond the slot's capacity is not refused."},
  };
  for (const auto& [mistake, sentence] : mistakes) {
    INFO(sentence);
    bool noticed = false;
    for (const std::string& finding : findings_of_plain_store(mistake)) noticed = noticed || finding.find(sentence) == 0;
    CHECK(noticed);
  }
}

TEST_CASE("the resident store honours KvStore", "[conformance]") {
  check(StoreKind::resident, DataType::f32, lanes);
  check(StoreKind::resident, DataType::bf16, throttled_lanes);
}

TEST_CASE("the ping-pong store honours KvStore", "[conformance]") {
  check(StoreKind::ping_pong, DataType::f32, lanes);
  check(StoreKind::ping_pong, DataType::bf16, throttled_lanes);
}

TEST_CASE("the full store honours KvStore", "[conformance]") {
  check(StoreKind::full, DataType::f32, lanes);
  check(StoreKind::full, DataType::bf16, lanes);
}

TEST_CASE("the store of a low-bit copy honours KvStore", "[conformance]") {
  check(StoreKind::specache, DataType::f32, lanes);
  check(StoreKind::specache, DataType::bf16, throttled_lanes);
}

TEST_CASE("the store of low-rank keys honours KvStore", "[conformance]") {
#ifndef DUALDECODER_HAS_LAPACK
  DUALDECODER_SKIP("a build without LAPACK");
#endif
  const std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 2});
  const auto check_with = [&](ShadowKvOptions shadow_kv, DataType kv_type, MakeScheduler make_scheduler, double truncate_tolerance) {
    const auto make = [&](StoreOptions options) {
      options.shadow_kv = shadow_kv;
      return backend->make_store(options);
    };
    const testing::StoreSubject subject{.make = make,
                                        .make_scheduler = std::move(make_scheduler),
                                        .workplace = testing::workplace_of(*backend),
                                        .kind = StoreKind::shadow_kv,
                                        .kv_type = kv_type,
                                        .estimates = false,
                                        .truncate_tolerance = truncate_tolerance};
    for (const std::string& finding : testing::check_kv_store(subject)) FAIL_CHECK(finding);
    SUCCEED();
  };
  // the rank is that of all directions, so a budget that covers the context must be dense attention; outliers and rounded factors of a
  // rewound prompt are those of the whole, so what it decodes may differ in anything but where there are neither
  constexpr double kAnything = 100.0;
  check_with({.outlier_chunks = 0, .local_chunks = 2}, DataType::f32, lanes, 1e-5);
  check_with({.outlier_chunks = 3, .local_chunks = 1}, DataType::f32, throttled_lanes, kAnything);
  check_with({.outlier_chunks = 3, .local_chunks = 2, .reuse = false}, DataType::bf16, lanes, kAnything);
}

TEST_CASE("stores honour KvStore whatever the link does", "[conformance][simulation]") {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    for (const StoreKind kind : {StoreKind::resident, StoreKind::ping_pong, StoreKind::specache}) {
      INFO("seed " << seed);
      check(kind, DataType::f32, [seed](SchedulerOptions options) {
        options.bytes_per_second = 1e7 * static_cast<double>(seed);
        test::SimulationOptions simulation;
        simulation.seed = seed;
        simulation.extra_delay = std::chrono::milliseconds(1);
        return std::make_unique<test::SimulatedScheduler>(options, simulation);
      });
    }
  }
}

}  // namespace dualdecoder
