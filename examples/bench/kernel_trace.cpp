// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A library that CUDA loads into a program where CUDA_INJECTION64_PATH names it. It notes when every kernel of a replayed graph began and
// ended (CUPTI), and when the program ends writes the replay of median length of each graph, as a Chrome trace to the file that
// DUALDECODER_KERNEL_TRACE names. Kernels that overlap the end of the one before them seem long; the distance between ends is what counts.
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "dualdecoder/chrome_trace.hpp"

namespace {

struct Kernel {
  std::uint64_t begin = 0;  // ns
  std::uint64_t end = 0;
  std::string name;
};
using Replay = std::vector<Kernel>;

std::mutex mutex;
std::map<std::pair<std::uint32_t, std::uint32_t>, Replay> replays;  // by graph and launch

/// Without namespaces, return type and parameters.
std::string short_name(const char* mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  for (const std::string drop : {"void ", "dualdecoder::cuda::", "(anonymous namespace)::", "(int)"}) {
    for (std::size_t at = name.find(drop); at != std::string::npos; at = name.find(drop)) name.erase(at, drop.size());
  }
  name.erase(std::min(name.find('('), name.size()));
  return name;
}

/// What runs beside the compute stream has tracks of its own.
const char* track_of(const std::string& name) {
  if (name.starts_with("gather")) return "loads";
  for (const char* const side : {"copy_row", "needed_kernel", "list_kernel", "place_kernel", "list_buffer", "fill_buffer"}) {
    if (name.starts_with(side)) return "tables of slots";
  }
  return "compute";
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *size = std::size_t{8} << 20U;
  *max_records = 0;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(64, *size));
}

void CUPTIAPI take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    if (kernel.graphId != 0) replays[{kernel.graphId, kernel.correlationId}].push_back({kernel.start, kernel.end, short_name(kernel.name)});
  }
  std::free(buffer);
}

std::uint64_t length_of(const Replay& replay) {
  std::uint64_t first = replay.front().begin;
  std::uint64_t last = 0;
  for (const Kernel& kernel : replay) {
    first = std::min(first, kernel.begin);
    last = std::max(last, kernel.end);
  }
  return last - first;
}

void write_trace() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const std::lock_guard lock(mutex);
  std::map<std::uint32_t, std::vector<Replay*>> by_graph;
  for (auto& [key, replay] : replays) by_graph[key.first].push_back(&replay);
  std::ofstream out(std::getenv("DUALDECODER_KERNEL_TRACE"));
  dualdecoder::ChromeTrace trace(out, "replays of median length");
  const auto origin = std::chrono::steady_clock::now();
  int number = 0;
  for (auto& [graph, all] : by_graph) {
    std::sort(all.begin(), all.end(), [](const Replay* a, const Replay* b) { return length_of(*a) < length_of(*b); });
    Replay& replay = *all[all.size() / 2];
    std::sort(replay.begin(), replay.end(), [](const Kernel& a, const Kernel& b) { return a.begin < b.begin; });
    const std::string prefix = "graph " + std::to_string(++number) + ": ";
    for (const Kernel& kernel : replay) {
      const auto since = [&](std::uint64_t time) { return origin + std::chrono::nanoseconds(time - replay.front().begin); };
      trace.span(prefix + track_of(kernel.name), kernel.name, since(kernel.begin), since(kernel.end));
    }
  }
}

}  // namespace

extern "C" int InitializeInjection() {
  if (std::getenv("DUALDECODER_KERNEL_TRACE") == nullptr) return 1;
  const bool starts = cuptiActivityRegisterCallbacks(give_buffer, take_buffer) == CUPTI_SUCCESS &&
                      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) == CUPTI_SUCCESS && std::atexit(write_trace) == 0;
  if (!starts) std::fputs("dualdecoder-kernel-trace: CUPTI does not start, no trace is written\n", stderr);
  return 1;
}
