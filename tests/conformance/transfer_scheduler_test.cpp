// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/testing/scheduler_conformance.hpp"
#include "tests/catch.hpp"
#include "tests/unit/simulated_scheduler.hpp"

namespace dualdecoder {
namespace {

void check(const testing::SchedulerSubject& subject) {
  for (const std::string& finding : testing::check_transfer_scheduler(subject)) FAIL_CHECK(finding);
  SUCCEED();
}

}  // namespace

TEST_CASE("the lanes of the CPU backend honour TransferScheduler", "[lanes][conformance]") {
  const std::shared_ptr<Backend> backend = cpu::make_cpu_backend({.threads = 1});
  for (const bool single_lane : {false, true}) {
    check({[&](SchedulerOptions options) {
             options.single_lane = single_lane;
             return backend->make_scheduler(options);
           },
           testing::workplace_of(*backend), true, !single_lane});
  }
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
