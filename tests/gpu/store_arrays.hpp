// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/check.hpp"
#include "cuda/store_layout.hpp"
#include "dualdecoder/step_view.hpp"
#include "tests/gpu/check.hpp"

/// A store's device arrays without a store, for tests of its kernels.
namespace dualdecoder::test {

struct StoreShape {
  int layers = 2;
  int kv_heads = 1;
  int group = 1;
  int dim = 64;
  int max_sequences = 1;
  int rows_per_sequence = 1;
  int chunk = 4;
  int sink_chunks = 1;
  int local_tokens = 16;
  int max_tokens = 1024;
  int selected = 16;
  int slots = 32;
  bool swaps = false;
  bool wait_policy = false;
  int value_group = 1;
};

class StoreArrays {
 public:
  explicit StoreArrays(const StoreShape& shape) {
    layout.layers = shape.layers;
    layout.heads = shape.kv_heads * shape.group;
    layout.kv_heads = shape.kv_heads;
    layout.group = shape.group;
    layout.dim = shape.dim;
    layout.max_sequences = shape.max_sequences;
    layout.rows_per_sequence = shape.rows_per_sequence;
    layout.chunk = shape.chunk;
    layout.sink_chunks = shape.sink_chunks;
    layout.window_chunks = std::max((shape.local_tokens + shape.chunk - 1) / shape.chunk + 3, shape.value_group + 1);
    layout.value_group = shape.value_group;
    layout.local_tokens = shape.local_tokens;
    layout.max_chunks = (shape.max_tokens / shape.chunk + cuda::kTileChunks - 1) / cuda::kTileChunks * cuda::kTileChunks;
    layout.splits = (layout.max_chunks + cuda::kSplitChunks - 1) / cuda::kSplitChunks;
    layout.selected = shape.selected;
    layout.slots = shape.slots;
    layout.slot_layers = shape.swaps ? 2 : shape.layers;
    layout.swaps = shape.swaps;
    layout.chunk_bytes = static_cast<std::uint32_t>(2 * shape.chunk * shape.dim * 2);
    layout.wait_policy = shape.wait_policy;
  }

  /// An array of zeros that lives as long as this object.
  template <class T>
  T* take(std::size_t count) {
    arrays_.push_back(std::make_unique<DeviceArray<std::byte>>(count * sizeof(T)));
    cuda::check(cudaMemset(arrays_.back()->data(), 0, count * sizeof(T)), "cudaMemset");
    return reinterpret_cast<T*>(arrays_.back()->data());
  }
  template <class T>
  T* take(const std::vector<T>& values) {
    T* const data = take<T>(values.size());
    put(data, values);
    return data;
  }

  std::size_t lists() const { return layout.list(layout.max_sequences, 0, 0); }
  std::size_t slot_lists() const {
    return static_cast<std::size_t>(layout.max_sequences) * static_cast<std::size_t>(layout.slot_layers) *
           static_cast<std::size_t>(layout.kv_heads);
  }
  std::size_t chunks() const { return static_cast<std::size_t>(layout.max_chunks); }

  /// Summaries of keys and what a pass writes of them.
  void take_selection() {
    const auto group = static_cast<std::size_t>(layout.group);
    layout.key_means = take<std::int8_t>(lists() * chunks() * static_cast<std::size_t>(layout.dim));
    layout.key_scales = take<float>(lists() * chunks());
    layout.tile_max = take<float>(layout.score_lists() * static_cast<std::size_t>(layout.splits * cuda::kSplitTiles * layout.columns()));
    layout.score_levels = take<std::uint16_t>(layout.score_lists() * chunks() * static_cast<std::size_t>(layout.columns()));
    layout.score_max = take<float>(2 * layout.row_lists() * static_cast<std::size_t>(layout.score_pieces()) * group);
    layout.score_sum = take<float>(2 * layout.row_lists() * static_cast<std::size_t>(layout.score_pieces()) * group);
  }
  /// Slots, predictions, counters.
  void take_slots() {
    layout.predicted = take<int>(lists() * static_cast<std::size_t>(layout.selected));
    layout.predicted_count = take(std::vector<int>(lists(), -1));
    layout.predicted_limit = take<int>(lists());
    layout.slot_of = take(std::vector<int>(slot_lists() * chunks(), -1));
    layout.chunk_of = take(std::vector<int>(slot_lists() * static_cast<std::size_t>(layout.slots), -1));
    layout.used = take<std::uint32_t>(slot_lists() * static_cast<std::size_t>(layout.slots));
    layout.data = take<std::byte>(slot_lists() * static_cast<std::size_t>(layout.slots) * layout.chunk_bytes);
    layout.pass = take(std::vector<std::uint32_t>{1});
    layout.counters = take<std::uint64_t>(static_cast<std::size_t>(cuda::Counter::count));
  }
  /// Sinks, window and the summaries that are made of them.
  void take_window() {
    const auto dim = static_cast<std::size_t>(layout.dim);
    layout.sinks = take<std::byte>(lists() * static_cast<std::size_t>(layout.sink_chunks) * layout.chunk_bytes);
    layout.window = take<std::byte>(lists() * static_cast<std::size_t>(layout.window_chunks) * layout.chunk_bytes);
    if (layout.key_means == nullptr) layout.key_means = take<std::int8_t>(lists() * chunks() * dim);
    if (layout.key_scales == nullptr) layout.key_scales = take<float>(lists() * chunks());
    const auto value_tiles = static_cast<std::size_t>(layout.value_tile_count());
    layout.value_tiles = take<std::uint32_t>(lists() * value_tiles * 2 * dim);
    layout.value_scales = take<float>(lists() * value_tiles * cuda::kTileChunks);
  }

  cuda::StoreLayout layout{};

  template <class T>
  static void put(T* target, const std::vector<T>& values) {
    cuda::check(cudaMemcpy(target, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  }
  template <class T>
  static std::vector<T> get(const T* source, std::size_t count) {
    std::vector<T> values(count);
    cuda::check(cudaMemcpy(values.data(), source, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
    return values;
  }

 private:
  std::vector<std::unique_ptr<DeviceArray<std::byte>>> arrays_;
};

/// A selection in device memory.
inline Selection device_selection(StoreArrays& arrays, int rows, int capacity) {
  const auto lists = static_cast<std::size_t>(rows) * static_cast<std::size_t>(arrays.layout.kv_heads);
  Selection selection;
  selection.chunks = arrays.take<int>(lists * static_cast<std::size_t>(capacity));
  selection.scores = arrays.take<float>(lists * static_cast<std::size_t>(capacity));
  selection.count = arrays.take<int>(lists);
  selection.capacity = capacity;
  selection.kv_heads = arrays.layout.kv_heads;
  return selection;
}

}  // namespace dualdecoder::test
