// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/stream.hpp"

/// Checks that implementers of an interface run from any test framework: each returns what is wrong, in sentences, and nothing if all is
/// well.
namespace dualdecoder::testing {

/// Sentences that say what an implementation does not honour.
class Findings {
 public:
  /// Notes the sentence unless `ok`; the same sentence once.
  bool expect(bool ok, const std::string& sentence) {
    if (!ok && (sentences_.empty() || sentences_.back() != sentence)) sentences_.push_back(sentence);
    return ok;
  }
  /// Notes that `action` did not throw an `Expected`.
  template <class Expected, class Action>
  void expect_throw(Action&& action, const std::string& sentence) {
    try {
      action();
    } catch (const Expected&) {
      return;
    } catch (...) {
      expect(false, sentence + " (threw something else)");
      return;
    }
    expect(false, sentence);
  }
  /// Runs one check; an exception that it did not expect becomes a sentence.
  template <class Check>
  void run(const char* subject, Check&& check) {
    try {
      check();
    } catch (const std::exception& error) {
      expect(false, std::string(subject) + ": an unexpected exception: " + error.what());
    }
  }
  bool empty() const noexcept { return sentences_.empty(); }
  std::size_t size() const noexcept { return sentences_.size(); }
  std::vector<std::string> take() { return std::move(sentences_); }

 private:
  std::vector<std::string> sentences_;
};

/// Seeded numbers that are the same everywhere (splitmix64, Steele, Lea and Flood 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  /// 0 .. bound-1; 0 if the bound is not positive.
  int below(int bound) noexcept { return bound <= 0 ? 0 : static_cast<int>(next() % static_cast<std::uint64_t>(bound)); }
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double probability) noexcept { return uniform() < probability; }
  /// Sum of four uniform numbers, scaled to mean 0 and variance 1: near enough to normal for test data.
  float normal() noexcept { return static_cast<float>((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508075688772); }

 private:
  std::uint64_t state_;
};

/// Memory of the heap, for parts that run on the host.
class HeapMemory final : public MemoryResource {
 public:
  void* allocate(std::size_t bytes, std::size_t alignment, StreamRef) override {
    return ::operator new(bytes, std::align_val_t(alignment));
  }
  void deallocate(void* memory, std::size_t, std::size_t alignment, StreamRef) noexcept override {
    ::operator delete(memory, std::align_val_t(alignment));
  }
};

/// Where the part under test runs: its stream, its memories, and a way to look into them. What it refers to must outlive it.
struct Workplace {
  StreamRef stream;
  MemoryResource* host_tier;                                                      ///< the tier that loads come from
  MemoryResource* device;                                                         ///< the tier that they go to
  std::function<void(void* target, const void* source, std::size_t bytes)> copy;  ///< host or backend memory; returns with it done
  std::function<void()> synchronize;                                              ///< waits for everything on `stream`
};

inline Workplace workplace_of(Backend& backend) {
  const StreamRef stream = backend.stream();
  return {stream, &backend.memory(MemoryKind::pinned), &backend.memory(MemoryKind::device),
          [&backend, stream](void* target, const void* source, std::size_t bytes) { backend.copy(target, source, bytes, stream); },
          [&backend, stream] { backend.synchronize(stream); }};
}

/// A workplace in ordinary memory, where the calling thread is the stream.
inline Workplace host_workplace(MemoryResource& memory) {
  static_assert(sizeof(std::uintptr_t) >= 4);
  const StreamRef stream(reinterpret_cast<CUstream_st*>(std::uintptr_t{64}));  // never dereferenced
  return {stream, &memory, &memory, [](void* target, const void* source, std::size_t bytes) { std::memcpy(target, source, bytes); }, [] {}};
}

}  // namespace dualdecoder::testing
