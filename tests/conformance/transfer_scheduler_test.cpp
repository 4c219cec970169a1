// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "dualdecoder/testing/scheduler_conformance.hpp"
#include "src/transfer_scheduler.hpp"
#include "tests/catch.hpp"
#include "tests/unit/simulated_scheduler.hpp"

namespace dualdecoder {
namespace {

void check(const testing::SchedulerSubject& subject) {
  for (const std::string& finding : testing::check_transfer_scheduler(subject)) FAIL_CHECK(finding);
  SUCCEED();
}

}  // namespace

TEST_CASE("the lanes on threads honour TransferScheduler", "[lanes][conformance]") {
  testing::HeapMemory memory;
  check(
      {[](const SchedulerOptions& options) { return cpu::make_threaded_scheduler(options); }, testing::host_workplace(memory), true, true});
}

TEST_CASE("a single lane on a thread honours TransferScheduler", "[lanes][conformance]") {
  testing::HeapMemory memory;
  check({[](SchedulerOptions options) {
           options.single_lane = true;
           return cpu::make_threaded_scheduler(options);
         },
         testing::host_workplace(memory), true, false});
}

TEST_CASE("lanes with a copy function honour TransferScheduler", "[lanes][conformance]") {
  testing::HeapMemory memory;
  check({[](const SchedulerOptions& options) {
           return cpu::make_threaded_scheduler(options,
                                               [](const TransferItem& item) { std::memcpy(item.target, item.source, item.bytes); });
         },
         testing::host_workplace(memory), true, true});
}

TEST_CASE("the simulated lanes honour TransferScheduler", "[lanes][conformance]") {
  testing::HeapMemory memory;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    INFO("seed " << seed);
    test::SimulationOptions simulation;
    simulation.seed = seed;
    simulation.compute = std::chrono::microseconds(seed % 3 == 0 ? 0 : 1 << (seed % 9));
    simulation.extra_delay = std::chrono::microseconds(seed % 4 == 0 ? 0 : 1 << (seed % 11));
    check({[&](const SchedulerOptions& options) { return std::make_unique<test::SimulatedScheduler>(options, simulation); },
           testing::host_workplace(memory), false, true});
  }
}

}  // namespace dualdecoder
