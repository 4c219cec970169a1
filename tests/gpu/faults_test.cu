// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// What goes wrong around sessions: drivers and devices that do not serve, memory of both kinds that runs out, a limit of locked memory, a
// caller's stream that is being recorded, a kernel that traps beside another session, sessions in several threads. Each ends in the
// documented exception, leaves nothing allocated, and what goes on has the tokens of a run without the fault. No device at all, failing
// allocations and recordings that fail: backend_test.
#include <cuda_runtime.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/device_support.hpp"
#include "cuda/memory.hpp"
#include "cuda/pinned_pool.hpp"
#include "dualdecoder/cuda/backend.hpp"
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/error.hpp"
#include "dualdecoder/load_weights.hpp"
#include "dualdecoder/log.hpp"
#include "dualdecoder/testing/counting_resource.hpp"
#include "tests/gpu/check.hpp"
#include "tests/gpu/small_config.hpp"

extern char** environ;

namespace dualdecoder::test {
namespace {

using testing::CountingResource;

constexpr std::size_t kMiB = std::size_t{1} << 20U;

void expect_parts(const std::string& sentence, const std::vector<const char*>& parts) {
  for (const char* part : parts) DUALDECODER_EXPECT(sentence.find(part) != std::string::npos, "\"%s\" lacks %s", sentence.c_str(), part);
}

// Of machines that are not here: what the runtime says of them is made up.
void test_refused_machines() {
  using cuda::require_some_device;
  const auto counted = [](cudaError_t status, int count, cuda::CudaVersions versions) {
    return thrown<CudaError>("counting devices", [&] { require_some_device(status, count, versions); });
  };
  expect_parts(counted(cudaErrorInsufficientDriver, 0, {.runtime = 13000, .driver = 12040}),
               {"CUDA runtime 13.0", "driver for CUDA 12.4", "insufficient"});
  expect_parts(counted(cudaErrorInsufficientDriver, 0, {.runtime = 12080, .driver = 0}), {"CUDA runtime 12.8", "no driver"});
  expect_parts(counted(cudaErrorNoDevice, 0, {.runtime = 13000, .driver = 13010}), {"driver for CUDA 13.1", "no CUDA-capable device"});
  expect_parts(counted(cudaSuccess, 0, {.runtime = 13000, .driver = 13000}), {"there is none"});
  require_some_device(cudaSuccess, 1, {.runtime = 13000, .driver = 13000});

  const cuda::DeviceFacts old{.ordinal = 2, .name = "Tesla T4", .major = 7, .minor = 5};
  expect_parts(thrown<CudaError>("an old device", [&] { cuda::require_capability(old); }),
               {"device 2 (Tesla T4, compute capability 7.5)", "too old", "8.0"});
  for (const int major : {8, 9, 12}) cuda::require_capability({.ordinal = 0, .name = "newer", .major = major, .minor = 0});
  for (const cudaError_t status : {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction}) {
    expect_parts(thrown<CudaError>("no code", [&] { cuda::require_code(status, old); }), {"device 2", "CMAKE_CUDA_ARCHITECTURES"});
  }
  cuda::require_code(cudaSuccess, old);
}

SessionOptions small_options() {
  SessionOptions options;
  options.store = StoreKind::resident;
  options.max_context = 1024;
  options.budget_tokens = 128;
  return options;
}

/// More than a small pool has, of device memory and of pinned memory.
SessionOptions large_options() {
  SessionOptions options = small_options();
  options.max_context = 4096;
  options.max_sequences = 64;
  return options;
}

/// A backend on a stream of the caller, whose memory is counted.
struct Counted {
  Counted() : plain(cuda::make_cuda_backend()), device(plain->memory(MemoryKind::device)), pinned(plain->memory(MemoryKind::pinned)) {
    cuda::BackendOptions options;
    options.stream = stream.get();
    options.device_memory = &device;
    options.pinned = &pinned;
    backend = cuda::make_cuda_backend(options);
    weights = make_synthetic_weights(small_config(), 3, *backend);
    idle = live();
  }
  std::size_t live() const { return device.live_allocations() + pinned.live_allocations(); }
  void expect_idle(const char* after) const {
    DUALDECODER_EXPECT(live() == idle, "%s left %zu allocations where there were %zu", after, live(), idle);
  }
  DecodeSession session(const SessionOptions& options = small_options()) const { return make_session(backend, weights, options); }

  std::shared_ptr<Backend> plain;
  CountingResource device;
  CountingResource pinned;
  const cuda::Stream stream = cuda::Stream::create();
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const ModelWeights> weights;
  std::size_t idle = 0;
};

constexpr int kTokens = 12;

std::vector<Token> prompt_of(Token seed) {
  std::vector<Token> prompt(300);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<Token>((static_cast<std::size_t>(seed) * 97 + i * 31) % 1000);
  return prompt;
}

/// What a session makes of a prompt.
std::vector<Token> tokens_of(DecodeSession& session, const std::vector<Token>& prompt) {
  session.add(prompt, {.max_new_tokens = kTokens});
  std::vector<Token> tokens;
  while (session.active() > 0) {
    for (const TokenEvent& event : session.step().tokens) tokens.push_back(event.token);
  }
  return tokens;
}
std::vector<Token> tokens_of(const Counted& place, Token seed) {
  auto session = place.session();
  return tokens_of(session, prompt_of(seed));
}

/// Whatever of the device is free but `left` bytes, until this goes.
class Hog {
 public:
  explicit Hog(std::size_t left) {
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    for (std::size_t piece = free; piece >= kMiB;) {  // what is free need not be in one piece
      cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      if (free <= left) break;
      piece = std::min(piece, free - left);
      void* memory = nullptr;
      if (piece >= kMiB && cudaMalloc(&memory, piece) == cudaSuccess) {
        pieces_.push_back(memory);
      } else {
        cudaGetLastError();
        piece /= 2;
      }
    }
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;
  ~Hog() {
    for (void* piece : pieces_) cudaFree(piece);
  }

 private:
  std::vector<void*> pieces_;
};

void test_out_of_device_memory() {
  if (small_run()) return;  // a tool beside it needs memory too
  const Counted place;
  const std::size_t needed = memory_plan(*place.backend, small_config(), large_options()).device_bytes();
  const std::size_t left = 24 * kMiB;
  DUALDECODER_EXPECT(needed > 2 * left, "the session takes %zu bytes, too few for this test", needed);
  {
    const Hog hog(left);
    expect_parts(thrown<OutOfMemory>("a device without memory", [&] { place.session(large_options()); }), {"device memory", "asked for"});
    place.expect_idle("a session that the device had no memory for");
  }
  auto session = place.session(large_options());
  DUALDECODER_EXPECT(tokens_of(session, prompt_of(1)) == tokens_of(place, 1), "tokens changed after the device had run out of memory");
}

void test_out_of_pinned_memory() {
  const auto plain = cuda::make_cuda_backend();
  cuda::PinnedPool pool({.piece_bytes = 64 * kMiB, .address_bytes = 64 * kMiB});
  CountingResource counted(pool);
  cuda::BackendOptions options;
  options.pinned = &counted;
  const auto backend = cuda::make_cuda_backend(options);
  const auto weights = make_synthetic_weights(small_config(), 3, *backend);
  const std::size_t live = counted.live_allocations();
  const std::size_t needed = memory_plan(*backend, small_config(), large_options()).pinned_bytes();
  DUALDECODER_EXPECT(needed > 128 * kMiB, "the session takes %zu bytes, too few for this test", needed);
  {
    auto session = make_session(backend, weights, large_options());
    const std::size_t before = counted.live_allocations();
    std::vector<SequenceId> ids;
    const std::string sentence = thrown<OutOfMemory>("a pool that is too small", [&] {
      while (session.active() < large_options().max_sequences) ids.push_back(session.add(prompt_of(1), {.max_new_tokens = 3700}));
    });
    expect_parts(sentence, {"pinned host memory", "asked for"});
    DUALDECODER_EXPECT(session.active() == static_cast<int>(ids.size()) && !session.failed(), "%d of %zu sequences are active",
                       session.active(), ids.size());
    for (const SequenceId id : ids) session.remove(id);
    DUALDECODER_EXPECT(counted.live_allocations() == before, "sequences that are gone hold %zu allocations",
                       counted.live_allocations() - before);
    DUALDECODER_EXPECT(tokens_of(session, prompt_of(1)) == tokens_of(Counted(), 1), "tokens changed after pinned memory had run out");
  }
  DUALDECODER_EXPECT(counted.live_allocations() == live, "a session that is gone holds pinned memory");
}

/// Records the caller's stream for the scope, as a program does that makes a graph of its own.
class Recording {
 public:
  explicit Recording(cudaStream_t stream) : stream_(stream) {
    cuda::check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream_, &graph);  // fails where what was enqueued cannot be recorded
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
  }

 private:
  cudaStream_t stream_;
};

void test_stream_in_capture_mode() {
  const Counted place;
  const std::vector<Token> want = tokens_of(place, 5);
  {
    auto session = place.session();
    {
      const Recording recording(place.stream.get());
      expect_parts(
          thrown<InvalidArgument>("add() while the stream is recorded", [&] { session.add(prompt_of(5), {.max_new_tokens = kTokens}); }),
          {"stream", "recorded"});
    }
    DUALDECODER_EXPECT(session.active() == 0 && !session.failed(), "add() failed and left %d sequences", session.active());
    DUALDECODER_EXPECT(tokens_of(session, prompt_of(5)) == want, "tokens changed after add() while the stream was recorded");
  }
  place.expect_idle("a session whose add() failed");
  for (const int steps : {0, 1, 5}) {  // before the first pass, before one is recorded, and with a recorded one
    auto session = place.session();
    session.add(prompt_of(5), {.max_new_tokens = 100});
    for (int i = 0; i < steps; ++i) session.step();
    const Recording recording(place.stream.get());
    thrown<CudaError>("step() while the stream is recorded", [&] {
      for (int i = 0; i < 3; ++i) session.step();  // tokens come a pass late
    });
  }
  place.expect_idle("a session whose step() failed");
  DUALDECODER_EXPECT(tokens_of(place, 5) == want, "tokens changed after step() while the stream was recorded");
}

void test_sessions_in_threads() {
  constexpr int kThreads = 3;
  std::vector<std::vector<Token>> want;
  for (Token seed = 0; seed < kThreads; ++seed) want.push_back(tokens_of(Counted(), seed));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (Token seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([&, seed] {
      try {
        const Counted place;
        for (int round = 0; round < (small_run() ? 1 : 5); ++round) {
          if (tokens_of(place, seed) != want[static_cast<std::size_t>(seed)]) ++wrong;
        }
        place.expect_idle("a session in a thread");
      } catch (const std::exception& error) {
        std::printf("thread %d: %s\n", static_cast<int>(seed), error.what());
        ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  DUALDECODER_EXPECT(wrong == 0, "%d times sessions of several threads disturbed each other", wrong.load());
}

__global__ void trap() { asm volatile("trap;"); }

// A kernel beside one session traps: the context of the process is lost. Both sessions say so, and everything can be destroyed.
int child_with_trap() {
  {
    const Counted one;
    const Counted other;
    {
      auto hit = one.session();
      auto beside = other.session();
      for (DecodeSession* session : {&hit, &beside}) {
        session->add(prompt_of(1), {.max_new_tokens = 500});
        for (int i = 0; i < 3; ++i) session->step();
      }
      trap<<<1, 1, 0, one.stream.get()>>>();
      for (DecodeSession* session : {&hit, &beside}) {
        expect_parts(thrown<CudaError>("a session after a trap",
                                       [&] {
                                         for (int i = 0; i < 5; ++i) session->step();
                                       }),
                     {"cudaError"});
        thrown<Error>("a session that has failed", [&] { session->add(prompt_of(1), {}); });
      }
    }
    one.expect_idle("the session that was hit");
    other.expect_idle("the other session");
  }
  thrown<CudaError>("a backend after a trap", [] { cuda::make_cuda_backend(); });
  return failures == 0 ? 0 : 1;
}

class Collected final : public LogSink {
 public:
  void log(LogLevel, std::string_view message) override { text += std::string(message) + "\n"; }
  std::string text;
};

void set_limit_of_locked_memory(std::size_t bytes) {
  const rlimit limit{.rlim_cur = bytes, .rlim_max = bytes};
  DUALDECODER_EXPECT(setrlimit(RLIMIT_MEMLOCK, &limit) == 0, "setrlimit failed");
}

// With 1 MiB of lockable memory. Drivers pin without asking for the limit, so that it mostly does not bind; where it does, and where
// pinning fails for another reason, the sentence names it.
int child_with_pin_limit() {
  set_limit_of_locked_memory(kMiB);
  const cuda::Stream stream = cuda::Stream::create();
  Collected log;
  cuda::PinnedPool pool({.piece_bytes = 64 * kMiB, .log = &log});
  CountingResource counted(pool);
  std::string sentence;
  try {
    const Buffer buffer(counted, 60 * kMiB, stream);
    sentence = log.text;
    std::printf("60 MiB with a limit of 1 MiB of locked memory: %s\n", sentence.empty() ? "pinned" : "pageable");
  } catch (const OutOfMemory& error) {
    sentence = error.what();
    std::printf("60 MiB with a limit of 1 MiB of locked memory: %s\n", sentence.c_str());
  }
  if (!sentence.empty()) expect_parts(sentence, {"cudaHostRegister", "ulimit -l", "1048576"});
  DUALDECODER_EXPECT(counted.live_allocations() == 0, "what could not be pinned is still allocated");
  return failures == 0 ? 0 : 1;
}

// The same where the piece cannot be registered, since somebody else has registered a page of it.
int child_with_pin_limit_and_refusal() {
  set_limit_of_locked_memory(kMiB);
  const cuda::Stream stream = cuda::Stream::create();
  Collected log;
  cuda::PinnedPool pool({.piece_bytes = 64 * kMiB, .log = &log});
  CountingResource counted(pool);
  std::string sentence;
  {
    const Buffer first(counted, 60 * kMiB, stream);
    std::byte* const page = first.data() + pool.committed_bytes();  // where the pool commits next
    cuda::check(mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0 ? cudaSuccess : cudaErrorUnknown, "mprotect");
    cuda::check(cudaHostRegister(page, 4096, cudaHostRegisterDefault), "cudaHostRegister of one page");
    try {
      const Buffer second(counted, 60 * kMiB, stream);
      sentence = log.text;
    } catch (const OutOfMemory& error) {
      sentence = error.what();
    }
    cuda::check(cudaHostUnregister(page), "cudaHostUnregister");
  }
  expect_parts(sentence, {"cudaHostRegister of 67108864 bytes", "the limit of locked memory (ulimit -l) is 1048576 bytes"});
  DUALDECODER_EXPECT(counted.live_allocations() == 0, "what could not be pinned is still allocated");
  return failures == 0 ? 0 : 1;
}

struct Child {
  const char* argument;
  int (*run)();
};
constexpr Child kChildren[] = {{"--child-with-trap", child_with_trap},
                               {"--child-with-pin-limit", child_with_pin_limit},
                               {"--child-with-pin-limit-and-refusal", child_with_pin_limit_and_refusal}};

/// Runs this program again with one argument; returns its exit status, or -1 where it did not exit by itself.
int run_again(const char* program, const char* argument) {
  std::string first = program;
  std::string second = argument;
  char* arguments[] = {first.data(), second.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  if (posix_spawn(&child, program, nullptr, nullptr, arguments, environ) != 0) return -1;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

int run_child(const Child& child) {
  try {
    return child.run();
  } catch (const std::exception& error) {
    std::printf("%s: an unexpected exception: %s\n", child.argument, error.what());
    return 1;
  }
}

}  // namespace
}  // namespace dualdecoder::test

int main(int argc, char** argv) {
  namespace test = dualdecoder::test;
  const std::string argument = argc > 1 ? argv[1] : "";
  for (const test::Child& child : test::kChildren) {
    if (argument == child.argument) return test::run_child(child);
  }
  return test::run_on_device([&] {
    test::test_refused_machines();
    test::test_out_of_device_memory();
    test::test_out_of_pinned_memory();
    test::test_stream_in_capture_mode();
    test::test_sessions_in_threads();
    if (argument == "--no-children") return;
    for (const test::Child& child : test::kChildren) {
      DUALDECODER_EXPECT(test::run_again(argv[0], child.argument) == 0, "%s failed or was aborted", child.argument);
    }
  });
}
