// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// One layer's selection and attention through the KvStore interface, by Google Benchmark. SmolLM2's shape: 9 query and 3 KV heads, D = 64.
#include <benchmark/benchmark.h>

#include <memory>
#include <random>
#include <vector>

#include "dualdecoder/dualdecoder.hpp"

using namespace dualdecoder;

namespace {

constexpr int kHeads = 9;
constexpr int kKvHeads = 3;
constexpr int kDim = 64;

std::vector<float> noise(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

/// A store that holds one sequence of random keys and values in one of its two layers' shapes.
class Layered {
 public:
  Layered(StoreKind kind, int context, int chunk)
      : backend_(cpu::make_cpu_backend()),
        store_(backend_->make_store({.kind = kind,
                                     .layers = 2,
                                     .heads = kHeads,
                                     .kv_heads = kKvHeads,
                                     .head_dim = kDim,
                                     .max_context = context + 64,
                                     .selection = {.chunk_tokens = chunk, .budget_tokens = 256}})),
        queries_(noise(kHeads * kDim, 1)),
        keys_(noise(kKvHeads * kDim, 2)),
        out_(queries_.size()),
        context_(context) {
    const StreamRef stream = backend_->stream();
    const auto tokens = static_cast<std::size_t>(context);
    const std::vector<float> keys = noise(tokens * kKvHeads * kDim, 3);
    const std::vector<float> values = noise(tokens * kKvHeads * kDim, 4);
    store_->open(0, context + 64, stream);
    for (Layer layer = 0; layer < 2; ++layer) {
      store_->append(layer, 0,
                     {{keys.data(), DataType::f32, {context, kKvHeads, kDim}}, {values.data(), DataType::f32, {context, kKvHeads, kDim}}},
                     {}, stream);
    }
    store_->seal(0, stream);
    const KvStore::Capacities capacities = store_->capacities();
    chunks_.resize(static_cast<std::size_t>(kKvHeads * capacities.selection));
    scores_.resize(chunks_.size());
    items_.resize(static_cast<std::size_t>(capacities.urgent + 1));
    selection_ = {chunks_.data(), scores_.data(), counts_, capacities.selection, kKvHeads};
    list_ = {items_.data(), &count_, static_cast<int>(items_.size())};
    select();
    store_->resolve_needed(0, view(), selection_, list_, stream);
    for (int i = 0; i < count_; ++i)
      std::copy_n(items_[static_cast<std::size_t>(i)].source, items_[static_cast<std::size_t>(i)].bytes,
                  items_[static_cast<std::size_t>(i)].target);
  }
  void select() { store_->select(0, view(), queries(), selection_, backend_->stream()); }
  void attend() {
    const ConstTensor row{keys_.data(), DataType::f32, {1, kKvHeads, kDim}};
    store_->attend(0, view(), {queries(), row, row}, selection_, {out_.data(), DataType::f32, {1, kHeads, kDim}}, backend_->stream());
  }

 private:
  StepView view() const { return {.sequences = 1, .rows_per_sequence = 1, .slot_of = &slot_, .position = &context_, .mode = &mode_}; }
  ConstTensor queries() const { return {queries_.data(), DataType::f32, {1, kHeads, kDim}}; }

  std::shared_ptr<Backend> backend_;
  std::unique_ptr<KvStore> store_;
  std::vector<float> queries_, keys_, out_, scores_;
  std::vector<int> chunks_;
  std::vector<TransferItem> items_;
  int counts_[kKvHeads] = {};
  int count_ = 0;
  int slot_ = 0;
  int context_;
  RowMode mode_ = RowMode::single;
  Selection selection_;
  TransferList list_;
};

void select_chunks(benchmark::State& state) {
  Layered layer(StoreKind::resident, static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  for (auto _ : state) layer.select();
}
void attend_sparse(benchmark::State& state) {
  Layered layer(StoreKind::resident, static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  for (auto _ : state) layer.attend();
}
void attend_full(benchmark::State& state) {
  Layered layer(StoreKind::full, static_cast<int>(state.range(0)), 8);
  for (auto _ : state) layer.attend();
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * state.range(0) * kKvHeads * kDim * 4);
}

BENCHMARK(select_chunks)->ArgsProduct({{2048, 8192, 32768}, {4, 8}})->UseRealTime();
BENCHMARK(attend_sparse)->ArgsProduct({{2048, 8192, 32768}, {4, 8}})->UseRealTime();
BENCHMARK(attend_full)->Arg(2048)->Arg(8192)->Arg(32768)->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
