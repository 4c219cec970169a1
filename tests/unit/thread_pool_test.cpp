// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/thread_pool.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

#include "dualdecoder/error.hpp"
#include "tests/catch.hpp"
#include "tests/unit/expect_error.hpp"

namespace dualdecoder::cpu {

TEST_CASE("a loop runs every index once, whatever the threads", "[thread_pool]") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (const int count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](int index) { ++calls[static_cast<std::size_t>(index)]; });
      for (const std::atomic<int>& times : calls) CHECK(times == 1);
    }
  }
}

TEST_CASE("loops follow each other without a trace of the one before", "[thread_pool]") {
  ThreadPool pool(3);
  long sum = 0;  // not atomic: the end of a loop orders its bodies before what follows
  std::vector<int> values(16);
  for (int loop = 0; loop < 20000; ++loop) {
    pool.parallel_for(16, [&](int index) { values[static_cast<std::size_t>(index)] = loop + index; });
    for (const int value : values) sum += value;
    if (loop % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // workers fall asleep
  }
  CHECK(sum == 16L * 20000 * 19999 / 2 + 20000L * 120);
}

TEST_CASE("no two bodies share a worker at once", "[thread_pool]") {
  ThreadPool pool(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<bool> shared{false};
  pool.parallel_for(400, [&](int, int worker) {
    if (++inside[static_cast<std::size_t>(worker)] != 1) shared = true;
    std::this_thread::yield();
    --inside[static_cast<std::size_t>(worker)];
  });
  CHECK_FALSE(shared);
}

TEST_CASE("an exception of a body reaches the caller, and the pool goes on", "[thread_pool]") {
  ThreadPool pool(2);
  for (int loop = 0; loop < 100; ++loop) {
    CHECK_THROWS_AS(pool.parallel_for(50,
                                      [](int index) {
                                        if (index % 10 == 3) throw std::runtime_error("a body");
                                      }),
                    std::runtime_error);
    std::atomic<int> calls{0};
    pool.parallel_for(50, [&](int) { ++calls; });
    CHECK(calls == 50);
  }
}

TEST_CASE("a loop within a body, and one of another thread, run on their caller alone", "[thread_pool]") {
  ThreadPool pool(2);
  std::atomic<int> calls{0};
  pool.parallel_for(8, [&](int) { pool.parallel_for(8, [&](int) { ++calls; }); });
  CHECK(calls == 64);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int loop = 0; loop < 200; ++loop) pool.parallel_for(8, [&](int) { ++calls; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(calls == 64 + 3 * 200 * 8);
}

TEST_CASE("thread counts out of range are named", "[thread_pool]") {
  test::expect_error<InvalidArgument>([] { ThreadPool pool(-1); }, {"threads = -1", "must be"});
  CHECK(ThreadPool(0).size() >= 1);
}

}  // namespace dualdecoder::cpu
