// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/machine.hpp"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace dualdecoder::examples {
namespace {

constexpr std::size_t kBytes = std::size_t{256} << 20U;
constexpr int kPasses = 5;
constexpr std::size_t kStreams = 4;  // as the products of the CPU backend read their weights
constexpr std::size_t kWords = 8;    // of a cache line

std::uint64_t read_all(const std::uint64_t* words, std::size_t count) {
  const std::size_t part = count / kStreams / kWords * kWords;
  std::array<std::uint64_t, kWords> sums{};
  for (std::size_t i = 0; i < part; i += kWords) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      for (std::size_t w = 0; w < kWords; ++w) sums[w] += words[s * part + i + w];
    }
  }
  std::uint64_t sum = 0;
  for (std::uint64_t word : sums) sum += word;
  return sum;
}

/// A field of /proc/self/status that is given in kB.
std::size_t status_bytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoull(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

}  // namespace

double streaming_bandwidth(MemoryResource& memory, StreamRef stream, int threads) {
  const Buffer buffer(memory, kBytes, stream);
  std::memset(buffer.data(), 1, kBytes);
  const auto* words = reinterpret_cast<const std::uint64_t*>(buffer.data());
  const std::size_t share = kBytes / sizeof(std::uint64_t) / static_cast<std::size_t>(threads);
  std::atomic<std::uint64_t> total{0};  // used, so that nothing is optimised away
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; ++t) {
      readers.emplace_back([&, t] {
        ++ready;
        while (!go) std::this_thread::yield();
        total += read_all(words + static_cast<std::size_t>(t) * share, share);
      });
    }
    while (ready < threads) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    go = true;
    for (std::thread& reader : readers) reader.join();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::max(best, static_cast<double>(kBytes) / seconds);
  }
  return total == 0 ? 0.0 : best;
}

std::size_t resident_bytes() { return status_bytes("VmRSS"); }

std::size_t peak_bytes() { return status_bytes("VmHWM"); }

void reset_peak() {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5;  // Linux: the peak becomes what is held now
}

}  // namespace dualdecoder::examples
