// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "dualdecoder/decode_session.hpp"
#include "src/low_rank.hpp"
#include "tests/catch.hpp"
#include "tests/unit/session_fixture.hpp"

// A sanitizer brings operators of its own, which only partly give way to others.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// The test program's own operator new, which counts what any thread asks for while a step runs. It replaces the library's throughout the
// program; the forms that are not here forward to these two.

namespace {

std::atomic<bool> counting{false};
std::atomic<int> allocations{0};

void* counted(void* memory) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(std::malloc(bytes == 0 ? 1 : bytes)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto unit = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit + (bytes == 0 ? unit : 0)));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace dualdecoder {
namespace {

/// What steps 2 to the last allocate, while sequences run, generate, complete chunks and fail guesses.
int allocations_of_steps(const test::SessionModel& model, const SessionOptions& options, const AddOptions& add) {
  DecodeSession session = make_session(model.backend, model.weights, options);
  for (int i = 0; i < options.max_sequences; ++i) session.add(test::random_tokens(150 + 40 * i, 5 + static_cast<unsigned>(i)), add);
  session.step();
  allocations = 0;
  for (int step = 0; step < 60; ++step) {
    counting = true;
    session.step();
    counting = false;
  }
  REQUIRE(session.active() == options.max_sequences);
  return allocations;
}

}  // namespace

TEST_CASE("a step allocates nothing after the first", "[session]") {
  const test::SessionModel model;
  AddOptions greedy;
  greedy.max_new_tokens = 200;
  AddOptions drawn = greedy;
  drawn.sampling.temperature = 0.8F;
  drawn.sampling.top_k = 40;
  drawn.sampling.top_p = 0.9F;
  drawn.sampling.min_p = 0.05F;
  drawn.sampling.repetition_penalty = 1.1F;
  for (const StoreKind store : {StoreKind::resident, StoreKind::ping_pong, StoreKind::full, StoreKind::shadow_kv, StoreKind::specache}) {
    if (store == StoreKind::shadow_kv && !cpu::has_lapack()) continue;
    for (const PredictorKind predictor : {PredictorKind::none, PredictorKind::previous_step, PredictorKind::layer_ahead,
                                          PredictorKind::published_dual_row, PredictorKind::front_runner}) {
      for (const MissPolicy policy : {MissPolicy::wait, MissPolicy::estimate}) {
        if (store == StoreKind::shadow_kv && policy == MissPolicy::estimate) continue;  // refused
        for (const double rate : {0.0, 2e9}) {
          SessionOptions options = test::tiny_options();
          options.max_sequences = 3;
          options.store = store;
          options.predictor = predictor;
          options.miss_policy = policy;
          options.link_bytes_per_second = rate;
          INFO("store " << int(store) << ", predictor " << int(predictor) << ", policy " << int(policy) << ", rate " << rate);
          CHECK(allocations_of_steps(model, options, greedy) == 0);
          if (rate == 0.0) CHECK(allocations_of_steps(model, options, drawn) == 0);
        }
      }
    }
  }
}

TEST_CASE("the allocation count counts", "[session]") {
  allocations = 0;
  counting = true;
  std::vector<int> numbers(100);
  const std::string text(100, 'x');
  counting = false;
  CHECK(allocations == 2);
  CHECK(numbers.size() + text.size() == 200);
}

}  // namespace dualdecoder

#endif
