// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend as a whole: what it refuses, recording and replaying steps with the lanes in them, weights, two backends in two threads,
// allocations that fail one after the other, and a device that breaks under a running program.
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/check.hpp"
#include "dualdecoder/cpu/backend.hpp"
#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/default_backend.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/log.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "dualdecoder/testing/workplace.hpp"
#include "dualdecoder/trace.hpp"
#include "src/weight_layout.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/small_config.hpp"

extern char** environ;

namespace dualdecoder::test {
namespace {

using cuda::BackendOptions;
using cuda::make_cuda_backend;
using cuda::Stream;
using testing::CountingResource;

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void test_refusals() {
  const int count = cuda::device_count();
  DUALDECODER_EXPECT(count >= 1, "no device is usable");
  for (const int device : {-1, count, 1000}) {
    const std::string text = thrown<InvalidArgument>("a device that is not there", [&] { make_cuda_backend(device); });
    DUALDECODER_EXPECT(contains(text, "device = "), "the sentence is: %s", text.c_str());
  }
  BackendOptions options;
  options.prefetch_blocks = 0;
  DUALDECODER_EXPECT(contains(thrown<InvalidArgument>("no blocks", [&] { make_cuda_backend(options); }), "prefetch_blocks = 0"),
                     "the sentence does not name the field");

  const Stream stream = Stream::create();
  BackendOptions borrowed;
  borrowed.stream = stream.get();
  cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  const std::string text = thrown<InvalidArgument>("a stream in capture mode", [&] { make_cuda_backend(borrowed); });
  DUALDECODER_EXPECT(contains(text, "recorded"), "the sentence is: %s", text.c_str());
  cudaGraph_t graph = nullptr;
  DUALDECODER_EXPECT(cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess, "the refusal broke the caller's capture");
  cudaGraphDestroy(graph);
  const auto backend = make_cuda_backend(borrowed);
  DUALDECODER_EXPECT(backend->stream() == StreamRef(stream), "the caller's stream is not used");
}

class Collected final : public LogSink {
 public:
  void log(LogLevel, std::string_view message) override { text += std::string(message) + "\n"; }
  std::string text;
};

void test_memory_and_copies() {
  Collected log;
  BackendOptions options;
  options.log = &log;
  options.reserve_pinned_bytes = std::size_t{64} << 20U;
  const auto backend = make_cuda_backend(options);
  DUALDECODER_EXPECT(contains(log.text, "CUDA runtime"), "the log says: %s", log.text.c_str());
  DUALDECODER_EXPECT(std::string(backend->name()) == "cuda" && backend->log() == &log, "name or log");
  constexpr std::size_t kBytes = 3 << 20;
  std::vector<std::uint8_t> pattern(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) pattern[i] = static_cast<std::uint8_t>(i * 31 + i / 999);
  const MemoryKind kinds[] = {MemoryKind::device, MemoryKind::pinned, MemoryKind::pageable};
  for (const MemoryKind from : kinds) {
    for (const MemoryKind to : kinds) {
      const Buffer first(backend->memory(from), kBytes, backend->stream());
      const Buffer second(backend->memory(to), kBytes, backend->stream());
      std::vector<std::uint8_t> seen(kBytes);
      backend->copy(first.data(), pattern.data(), kBytes, backend->stream());
      backend->copy(second.data(), first.data(), kBytes, backend->stream());
      backend->copy(seen.data(), second.data(), kBytes, backend->stream());
      DUALDECODER_EXPECT(seen == pattern, "bytes changed on the way from kind %d to %d", static_cast<int>(from), static_cast<int>(to));
    }
  }
  const std::string text = thrown<OutOfMemory>(
      "all memory there is", [&] { backend->memory(MemoryKind::device).allocate(std::size_t{1} << 44U, 256, backend->stream()); });
  DUALDECODER_EXPECT(contains(text, "asked for 17592186044416 bytes"), "the sentence is: %s", text.c_str());
  const Buffer after(backend->memory(MemoryKind::device), kBytes, backend->stream());
}

__global__ void add_one(int* value) { *value += 1; }

void enqueue_add(int* value, StreamRef stream) {
  add_one<<<1, 1, 0, stream.get()>>>(value);
  cuda::check_launch("add_one");
}

int read_int(Backend& backend, const int* value) {
  int result = 0;
  backend.copy(&result, value, sizeof result, backend.stream());
  return result;
}

void test_record() {
  const auto backend = make_cuda_backend();
  const StreamRef stream = backend->stream();
  DeviceArray<int> value(std::vector<int>{0});
  enqueue_add(value.data(), stream);  // the runtime loads a kernel when it is first launched
  DUALDECODER_EXPECT(read_int(*backend, value.data()) == 1, "one and nothing is not one");
  value.upload(std::vector<int>{0});
  const auto graph = backend->record(
      [&] {
        for (int i = 0; i < 3; ++i) enqueue_add(value.data(), stream);
      },
      stream);
  DUALDECODER_EXPECT(graph != nullptr && read_int(*backend, value.data()) == 0, "recording ran the work");
  for (int i = 0; i < 4; ++i) graph->launch(stream);
  DUALDECODER_EXPECT(read_int(*backend, value.data()) == 12, "four launches of three: %d", read_int(*backend, value.data()));

  // the three ways in which a recording fails
  struct Mine {};
  bool reached = false;
  try {
    backend->record(
        [&] {
          enqueue_add(value.data(), stream);
          throw Mine{};
        },
        stream);
  } catch (const Mine&) {
    reached = true;
  }
  DUALDECODER_EXPECT(reached, "what the work throws does not reach the caller");
  thrown<CudaError>("waiting inside a recording", [&] { backend->record([&] { backend->synchronize(stream); }, stream); });
  const Stream other = Stream::create();
  thrown<CudaError>("a stream that is forked and not joined", [&] {
    backend->record(
        [&] {
          cuda::Event event = cuda::Event::create();
          event.record(stream);
          event.hold(other);
          enqueue_add(value.data(), other);
        },
        stream);
  });
  for (const StreamRef each : {stream, StreamRef(other)}) {
    enqueue_add(value.data(), each);
    backend->synchronize(each);
  }
  DUALDECODER_EXPECT(read_int(*backend, value.data()) == 14, "a stream is not usable after a recording that failed");
  const auto again = backend->record([&] { enqueue_add(value.data(), stream); }, stream);
  again->launch(stream);
  DUALDECODER_EXPECT(read_int(*backend, value.data()) == 15, "recording does not work after one that failed");
}

/// Cells in host memory and in device memory, and lists that move them.
struct Cells {
  static constexpr std::size_t kCell = 4096;
  static constexpr int kCount = 64;

  explicit Cells(Backend& owner)
      : backend(owner),
        stream(owner.stream()),
        source(owner.memory(MemoryKind::pinned), kCell * kCount, stream),
        target(owner.memory(MemoryKind::device), kCell * kCount, stream),
        items(owner.memory(MemoryKind::device), kCount * sizeof(TransferItem), stream),
        count(owner.memory(MemoryKind::device), sizeof(int), stream) {
    owner.synchronize(stream);
  }
  void fill(int value) { std::memset(source.data(), value, source.bytes()); }
  void set_list(int first, int last) {
    std::vector<TransferItem> list;
    for (int i = first; i < last; ++i) {
      const std::size_t at = static_cast<std::size_t>(i) * kCell;
      list.push_back({source.data() + at, target.data() + at, kCell, 0.0F});
    }
    const int n = last - first;
    if (n > 0) backend.copy(items.data(), list.data(), list.size() * sizeof(TransferItem), stream);
    backend.copy(count.data(), &n, sizeof n, stream);
  }
  TransferList list() const { return {reinterpret_cast<TransferItem*>(items.data()), reinterpret_cast<int*>(count.data()), kCount}; }
  /// Cells of the target that hold `value` throughout.
  int holding(int value) {
    std::vector<std::uint8_t> seen(kCell * kCount);
    backend.copy(seen.data(), target.data(), seen.size(), stream);
    int cells = 0;
    for (std::size_t at = 0; at < seen.size(); at += kCell) {
      bool all = true;
      for (std::size_t i = 0; i < kCell; ++i) all = all && seen[at + i] == value;
      cells += all ? 1 : 0;
    }
    return cells;
  }

  Backend& backend;
  StreamRef stream;
  Buffer source;
  Buffer target;
  Buffer items;
  Buffer count;
};

void test_recorded_lanes(bool single_lane, bool concurrent_prefetch) {
  const auto backend = make_cuda_backend();
  const StreamRef stream = backend->stream();
  Cells cells(*backend);
  SchedulerOptions options;
  options.layers = 3;
  options.max_items_per_submit = Cells::kCount;
  options.single_lane = single_lane;
  options.concurrent_prefetch = concurrent_prefetch;
  const auto scheduler = backend->make_scheduler(options);
  const auto step = [&] {
    for (Layer layer = 0; layer < 3; ++layer) {
      scheduler->wait(Lane::prefetch, layer, stream);
      scheduler->submit(Lane::urgent, layer, cells.list(), stream);
      scheduler->wait(Lane::urgent, layer, stream);
      const StreamRef side = scheduler->side_stream(stream);
      scheduler->submit(Lane::prefetch, (layer + 1) % 3, cells.list(), side);
    }
    scheduler->wait(Lane::write_back, 0, stream);
    scheduler->rejoin(stream);
    scheduler->submit(Lane::write_back, 0, cells.list(), stream);
  };
  cells.set_list(0, 0);
  step();
  const auto graph = backend->record(step, stream);
  for (int round = 1; round <= 20; ++round) {
    cells.fill(round);
    cells.set_list(0, round);
    graph->launch(stream);
    DUALDECODER_EXPECT(cells.holding(round) == round, "after replay %d, %d cells hold their value", round, cells.holding(round));
  }
  std::uint64_t items = 0;
  for (int round = 1; round <= 20; ++round) items += static_cast<std::uint64_t>(round);
  DUALDECODER_EXPECT(scheduler->statistics(Lane::urgent).moved_items == 3 * items, "urgent items were miscounted");
  DUALDECODER_EXPECT(scheduler->statistics(Lane::prefetch).moved_items == 3 * items, "prefetched items were miscounted");
  DUALDECODER_EXPECT(scheduler->statistics(Lane::write_back).moved_bytes == items * Cells::kCell, "bytes were miscounted");
  DUALDECODER_EXPECT(scheduler->statistics(Lane::prefetch).busy.count() > 0, "the lane was never busy");

  // a fork that nobody rejoined: refused inside a recording, and everything works afterwards
  cells.set_list(0, 5);
  scheduler->submit(Lane::prefetch, 0, cells.list(), scheduler->side_stream(stream));
  thrown<CudaError>("a recording without rejoin()", [&] { backend->record(step, stream); });
  thrown<CudaError>("a side stream that is not rejoined", [&] {
    scheduler->rejoin(stream);
    backend->record([&] { scheduler->submit(Lane::prefetch, 0, cells.list(), scheduler->side_stream(stream)); }, stream);
  });
  cells.fill(99);
  step();
  DUALDECODER_EXPECT(cells.holding(99) == 5, "eager steps do not work after a recording that failed");
  const auto again = backend->record(step, stream);
  cells.fill(100);
  again->launch(stream);
  DUALDECODER_EXPECT(cells.holding(100) == 5, "recording does not work after one that failed");
}

class Spans final : public TraceSink {
 public:
  void span(std::string_view track, std::string_view name, Time begin, Time end) noexcept override {
    ++count;
    right = right && (track == "urgent" || track == "prefetch" || track == "write-back") && name == "layer 1" && begin <= end;
    first = count == 1 ? begin : std::min(first, begin);
    last = count == 1 ? end : std::max(last, end);
  }
  void counter(std::string_view, Time, double) noexcept override {}

  int count = 0;
  bool right = true;
  Time first, last;
};

void test_trace() {
  const auto backend = make_cuda_backend();
  const StreamRef stream = backend->stream();
  Cells cells(*backend);
  cells.set_list(0, Cells::kCount);
  Spans spans;
  SchedulerOptions options;
  options.layers = 2;
  options.max_items_per_submit = Cells::kCount;
  options.trace = &spans;
  const auto scheduler = backend->make_scheduler(options);
  const auto begin = std::chrono::steady_clock::now();
  const auto step = [&] {
    for (const Lane lane : {Lane::urgent, Lane::prefetch, Lane::write_back}) {
      scheduler->submit(lane, 1, cells.list(), stream);
      scheduler->wait(lane, 1, stream);
    }
    scheduler->rejoin(stream);
  };
  step();
  const auto graph = backend->record(step, stream);
  for (int i = 0; i < 9; ++i) graph->launch(stream);
  backend->synchronize(stream);
  const auto end = std::chrono::steady_clock::now();
  scheduler->statistics(Lane::urgent);
  DUALDECODER_EXPECT(spans.count == 30 && spans.right, "%d spans of 30 transfers", spans.count);
  const auto slack = std::chrono::milliseconds(1);  // of putting the device's clock beside the host's
  DUALDECODER_EXPECT(spans.first + slack >= begin && spans.last <= end + slack, "spans lie outside of the time in which they ran");
}

void test_two_threads() {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&wrong, t] {
      try {
        for (int round = 0; round < (small_run() ? 1 : 5); ++round) {
          const auto backend = make_cuda_backend();
          const StreamRef stream = backend->stream();
          Cells cells(*backend);
          SchedulerOptions options;
          options.layers = 1;
          options.max_items_per_submit = Cells::kCount;
          const auto scheduler = backend->make_scheduler(options);
          cells.set_list(0, Cells::kCount);
          const auto graph = backend->record(
              [&] {
                for (int i = 0; i < 20; ++i) {
                  scheduler->submit(Lane::prefetch, 0, cells.list(), scheduler->side_stream(stream));
                  scheduler->wait(Lane::prefetch, 0, stream);
                }
                scheduler->rejoin(stream);
              },
              stream);
          for (int i = 0; i < 10; ++i) {
            const int value = (t * 50 + round * 10 + i) % 256;
            cells.fill(value);
            graph->launch(stream);
            if (cells.holding(value) != Cells::kCount) ++wrong;
          }
        }
      } catch (const std::exception& error) {
        std::printf("thread %d: %s\n", t, error.what());
        ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  DUALDECODER_EXPECT(wrong == 0, "%d times backends of several threads disturbed each other", wrong.load());
}

/// Every tensor of `ours` has the bytes of `theirs`.
void expect_same_weights(const ModelWeights& ours, Backend& our_backend, const ModelWeights& theirs) {
  for (const detail::WeightEntry& entry : detail::weight_entries(theirs.config())) {
    const ConstTensor expected = theirs.tensor(entry.role, entry.layer);
    const ConstTensor tensor = ours.tensor(entry.role, entry.layer);
    std::vector<std::byte> seen(expected.bytes());
    DUALDECODER_EXPECT(tensor.type == expected.type && tensor.bytes() == expected.bytes(), "a tensor has another shape");
    our_backend.copy(seen.data(), tensor.data, seen.size(), our_backend.stream());
    DUALDECODER_EXPECT(std::memcmp(seen.data(), expected.data, seen.size()) == 0, "role %d of layer %d differs from the CPU backend's",
                       static_cast<int>(entry.role), entry.layer);
  }
}

void test_weights() {
  const auto ours = make_cuda_backend();
  const auto theirs = cpu::make_cpu_backend();
  expect_same_weights(*make_synthetic_weights(small_config(), 3, *ours), *ours, *make_synthetic_weights(small_config(), 3, *theirs));
  const char* folder = std::getenv("DUALDECODER_MODELS");
  const auto path = std::filesystem::path(folder != nullptr ? folder : DUALDECODER_MODEL_DIR) / "SmolLM2-135M-Instruct.Q4_1.gguf";
  if (small_run()) return;
  if (!std::filesystem::exists(path)) {
    std::printf("left out: no model at %s (scripts/get-model.sh smollm2)\n", path.c_str());
    return;
  }
  expect_same_weights(*load_weights(path, *ours), *ours, *load_weights(path, *theirs));
}

/// Fails every allocation of every kind in turn: nothing is left allocated, and the next attempt works.
void test_failing_allocations() {
  const auto plain = make_cuda_backend();
  CountingResource device(plain->memory(MemoryKind::device));
  CountingResource pinned(plain->memory(MemoryKind::pinned));
  BackendOptions options;
  options.stream = plain->stream().get();
  options.device_memory = &device;
  options.pinned = &pinned;
  const auto backend = make_cuda_backend(options);
  const auto weights = make_synthetic_weights(small_config(), 3, *backend);
  SessionOptions session_options;
  session_options.store = StoreKind::resident;
  session_options.max_context = 1024;
  session_options.budget_tokens = 128;
  const std::vector<Token> prompt(300, 17);
  const auto live = device.live_allocations() + pinned.live_allocations();
  for (CountingResource* failing : {&device, &pinned}) {
    int failed = 0;
    for (std::uint64_t at = 0; at < (small_run() ? 5 : 200); ++at) {
      failing->fail_at(at);
      bool done = false;
      try {
        auto session = make_session(backend, weights, session_options);
        session.add(prompt, {.max_new_tokens = 3});
        while (session.active() > 0) session.step();
        done = true;
      } catch (const OutOfMemory&) {
        ++failed;
      }
      failing->fail_at(CountingResource::kNever);
      DUALDECODER_EXPECT(device.live_allocations() + pinned.live_allocations() == live, "allocation %d failed, and something is left",
                         static_cast<int>(at));
      if (done) break;
    }
    DUALDECODER_EXPECT(failed >= 1, "only %d allocations were failed", failed);
  }
}

/// Runs this program again with one argument, and with a variable of its environment set; returns its exit status, or -1.
int run_again(const char* program, const char* argument, const std::string& setting) {
  std::vector<char*> environment;
  const std::string name = setting.substr(0, setting.find('=') + 1);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (name.empty() || std::strncmp(*variable, name.c_str(), name.size()) != 0) environment.push_back(*variable);
  }
  std::string own_setting = setting;
  if (!setting.empty()) environment.push_back(own_setting.data());
  environment.push_back(nullptr);
  std::string first = program;
  std::string second = argument;
  char* arguments[] = {first.data(), second.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, program, nullptr, nullptr, arguments, environment.data()) != 0) return -1;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

// Without a visible device.
int child_without_device() {
  DUALDECODER_EXPECT(cuda::device_count() == 0, "a device is counted");
  const std::string text = thrown<CudaError>("no device", [] { make_cuda_backend(); });
  DUALDECODER_EXPECT(contains(text, "no CUDA device") && contains(text, "CUDA runtime") && contains(text, "driver"), "the sentence is: %s",
                     text.c_str());
  DUALDECODER_EXPECT(std::string(make_default_backend()->name()) == "cpu", "the default is not the CPU backend");
  return failures == 0 ? 0 : 1;
}

__global__ void write_nowhere(int* target) { *target = 1; }

// A kernel of one session writes where it must not: the context of the process is lost, and both backends say so.
int child_with_broken_device() {
  const auto one = make_cuda_backend();
  const auto other = make_cuda_backend();
  SchedulerOptions options;
  options.layers = 1;
  options.max_items_per_submit = 4;
  const auto scheduler = other->make_scheduler(options);
  Buffer held(other->memory(MemoryKind::device), 1000, other->stream());
  Buffer pinned(other->memory(MemoryKind::pinned), 1000, other->stream());
  write_nowhere<<<1, 1, 0, one->stream().get()>>>(reinterpret_cast<int*>(std::uintptr_t{64}));
  const std::string text = thrown<CudaError>("the session at fault", [&] { one->synchronize(one->stream()); });
  DUALDECODER_EXPECT(contains(text, "cudaErrorIllegalAddress"), "the sentence is: %s", text.c_str());
  thrown<CudaError>("the other session", [&] {
    const int value = 1;
    other->copy(held.data(), &value, sizeof value, other->stream());
  });
  thrown<CudaError>("its lanes", [&] { scheduler->statistics(Lane::urgent); });
  return failures == 0 ? 0 : 1;  // and everything is destroyed without an abort
}

void test_children(const char* program) {
  DUALDECODER_EXPECT(run_again(program, "--child-without-device", "CUDA_VISIBLE_DEVICES=") == 0, "without a device");
  DUALDECODER_EXPECT(run_again(program, "--child-with-broken-device", "") == 0, "with a device that breaks");
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char** argv) {
  namespace test = dualdecoder::test;
  const std::string argument = argc > 1 ? argv[1] : "";
  if (argument == "--child-without-device") return test::child_without_device();
  if (argument == "--child-with-broken-device") return test::child_with_broken_device();
  return test::run_on_device([&] {
    test::test_refusals();
    test::test_memory_and_copies();
    test::test_record();
    for (const bool single_lane : {false, true}) {
      for (const bool concurrent_prefetch : {false, true}) test::test_recorded_lanes(single_lane, concurrent_prefetch);
    }
    test::test_trace();
    test::test_two_threads();
    test::test_weights();
    test::test_failing_allocations();
    if (argument != "--no-children") test::test_children(argv[0]);
  });
}
