// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/bench/step_trace.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <set>

#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

constexpr std::array<char, 4> kMagic = {'D', 'D', 'S', '1'};

template <class T>
void put(std::ofstream& out, const std::vector<T>& values) {
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
}

template <class T>
void get(std::ifstream& in, std::vector<T>& values, std::size_t count) {
  values.resize(count);
  in.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
}

/// `count` chunks below `limit`, of which `stays` of those in `before` remain.
std::set<std::uint32_t> drawn(const std::set<std::uint32_t>& before, double stays, int count, std::uint32_t limit,
                              std::mt19937_64& random) {
  std::set<std::uint32_t> set;
  std::bernoulli_distribution stay(stays);
  for (std::uint32_t chunk : before) {
    if (stay(random)) set.insert(chunk);
  }
  std::uniform_int_distribution<std::uint32_t> any(2, limit - 1);
  while (set.size() < static_cast<std::size_t>(count)) set.insert(any(random));
  return set;
}

}  // namespace

void StepTrace::save(const std::filesystem::path& path) const {
  std::ofstream out(path, std::ios::binary);
  out.write(kMagic.data(), kMagic.size());
  put(out, std::vector<std::int32_t>{layers, kv_heads, capacity, chunk, recorded ? 1 : 0, steps()});
  put(out, mode);
  put(out, position);
  put(out, count);
  for (std::size_t list = 0; list < count.size(); ++list) {
    out.write(reinterpret_cast<const char*>(chunks.data() + list * static_cast<std::size_t>(capacity)),
              static_cast<std::streamsize>(count[list] * sizeof(std::uint32_t)));
  }
  if (!out) throw IoError(path.string() + ": cannot be written");
}

StepTrace StepTrace::load(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::array<char, 4> magic{};
  if (!in.read(magic.data(), magic.size())) throw IoError(path.string() + ": cannot be read");
  if (magic != kMagic) throw FormatError(path.string() + ": magic is not DDS1");
  std::vector<std::int32_t> head;
  get(in, head, 6);
  const bool sane = in && std::all_of(head.begin(), head.end(), [](std::int32_t v) { return v >= 0 && v < (1 << 20); });
  if (!sane) throw FormatError(path.string() + ": sizes are out of range");
  StepTrace trace;
  trace.layers = head[0];
  trace.kv_heads = head[1];
  trace.capacity = head[2];
  trace.chunk = head[3];
  trace.recorded = head[4] != 0;
  const auto steps = static_cast<std::size_t>(head[5]);
  get(in, trace.mode, steps);
  get(in, trace.position, steps);
  const std::size_t lists = steps * static_cast<std::size_t>(trace.layers) * kRows * static_cast<std::size_t>(trace.kv_heads);
  get(in, trace.count, lists);
  trace.chunks.resize(lists * static_cast<std::size_t>(trace.capacity));
  for (std::size_t list = 0; in && list < lists; ++list) {
    if (trace.count[list] > trace.capacity) throw FormatError(path.string() + ": a list is longer than the capacity");
    in.read(reinterpret_cast<char*>(trace.chunks.data() + list * static_cast<std::size_t>(trace.capacity)),
            static_cast<std::streamsize>(trace.count[list] * sizeof(std::uint32_t)));
  }
  if (!in) throw FormatError(path.string() + ": ends early");
  return trace;
}

StepTrace StepTrace::random(int layers, int kv_heads, int capacity, int chunk, int position, int steps, double stays, double hit) {
  StepTrace trace;
  trace.layers = layers;
  trace.kv_heads = kv_heads;
  trace.capacity = capacity;
  trace.chunk = chunk;
  trace.mode.assign(static_cast<std::size_t>(steps), RowMode::dual);
  for (int step = 0; step < steps; ++step) trace.position.push_back(position + step);
  const std::size_t lists = trace.list(steps, 0, 0, 0);
  trace.chunks.resize(lists * static_cast<std::size_t>(capacity));
  trace.count.assign(lists, static_cast<std::uint16_t>(capacity));
  std::mt19937_64 random(1);
  const auto limit = static_cast<std::uint32_t>((position - 256) / chunk);
  for (Layer layer = 0; layer < layers; ++layer) {
    for (int head = 0; head < kv_heads; ++head) {
      std::set<std::uint32_t> now = drawn({}, 0.0, capacity, limit, random);
      for (int step = 0; step < steps; ++step) {
        const std::set<std::uint32_t> next = drawn(now, stays, capacity, limit, random);
        const std::set<std::uint32_t> named = drawn(next, hit, capacity, limit, random);
        std::copy(now.begin(), now.end(), trace.chunks.begin() + static_cast<std::ptrdiff_t>(trace.list(step, layer, 0, head)) * capacity);
        std::copy(named.begin(), named.end(),
                  trace.chunks.begin() + static_cast<std::ptrdiff_t>(trace.list(step, layer, 1, head)) * capacity);
        now = next;
      }
    }
  }
  return trace;
}

}  // namespace dualdecoder::examples
