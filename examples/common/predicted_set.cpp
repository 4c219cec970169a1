// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/predicted_set.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "dualdecoder/cuda/rivals.hpp"
#include "dualdecoder/error.hpp"

namespace dualdecoder::examples {
namespace {

std::size_t index(int i) { return static_cast<std::size_t>(i); }

/// Mean over `group` heads of the cosine between two queries. a, b: [group, dim].
double mean_cosine(std::span<const float> a, std::span<const float> b, std::size_t group) {
  const std::size_t dim = a.size() / group;
  double sum = 0;
  for (std::size_t g = 0; g < group; ++g) {
    double dot = 0;
    double of_a = 0;
    double of_b = 0;
    for (std::size_t i = g * dim; i < (g + 1) * dim; ++i) {
      dot += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      of_a += static_cast<double>(a[i]) * static_cast<double>(a[i]);
      of_b += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    }
    sum += dot / std::sqrt(std::max(of_a * of_b, 1e-30));
  }
  return sum / static_cast<double>(group);
}

}  // namespace

PredictedSetStore::PredictedSetStore(std::unique_ptr<KvStore> inner, const StoreOptions& store, const PredictedSetOptions& options)
    : ForwardingStore(std::move(inner)), store_(store), options_(options) {
  dualdecoder::detail::require(store.rows_per_sequence == 1, "rows_per_sequence", store.rows_per_sequence,
                               "1 where a row attends to what was predicted");
  const int capacity = ForwardingStore::capacities().selection;
  const std::size_t lists = index(store.max_sequences) * index(store.kv_heads);
  heads_.resize(lists * index(store.layers));
  for (Head& head : heads_) head.predicted.reserve(index(capacity));
  chunks_.resize(lists * index(capacity));
  scores_.resize(lists * index(capacity));
  count_.resize(lists);
  used_ = {chunks_.data(), scores_.data(), count_.data(), capacity, store.kv_heads};
}

PredictedSetStore::Head& PredictedSetStore::head_of(int slot, Layer layer, int kv_head) {
  return heads_[(index(slot) * index(store_.layers) + index(layer)) * index(store_.kv_heads) + index(kv_head)];
}

void PredictedSetStore::forget(int slot) {
  for (int list = 0; list < store_.layers * store_.kv_heads; ++list) {
    Head& head = head_of(slot, list / store_.kv_heads, list % store_.kv_heads);
    head.has_prediction = false;
    head.turned = false;
    head.queries.clear();
  }
}

void PredictedSetStore::open(int slot, int capacity_tokens, StreamRef stream) {
  ForwardingStore::open(slot, capacity_tokens, stream);
  forget(slot);
}

void PredictedSetStore::truncate(int slot, int tokens, StreamRef stream) {
  ForwardingStore::truncate(slot, tokens, stream);
  forget(slot);
}

void PredictedSetStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef stream) {
  ForwardingStore::select(layer, view, queries, by_row, stream);
  if (options_.correct_below <= 0.0F) return;
  const std::size_t group = index(store_.heads / store_.kv_heads);
  const std::size_t width = group * index(store_.head_dim);
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    for (int kv_head = 0; kv_head < store_.kv_heads; ++kv_head) {
      Head& head = head_of(view.slot_of[place], layer, kv_head);
      const std::span<const float> now(queries.as<float>() + (index(place) * index(store_.kv_heads) + index(kv_head)) * width, width);
      head.turned = !head.queries.empty() && mean_cosine(now, head.queries, group) < static_cast<double>(options_.correct_below);
      head.queries.assign(now.begin(), now.end());
    }
  }
}

void PredictedSetStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent,
                                       StreamRef stream) {
  for (int place = 0; place < view.sequences; ++place) {
    for (int kv_head = 0; kv_head < store_.kv_heads; ++kv_head) {
      used_.count_of(place, kv_head) = 0;
      if (!row_is_live(view.mode[place], 0)) continue;
      const Head& head = head_of(view.slot_of[place], layer, kv_head);
      const std::span<const int> selected(by_row.chunks_of(place, kv_head), index(by_row.count_of(place, kv_head)));
      needed_ += selected.size();
      if (head.has_prediction) {
        predictable_ += selected.size();
        for (const int chunk : selected)
          predicted_hit_ += std::binary_search(head.predicted.begin(), head.predicted.end(), chunk) ? 1U : 0U;
      }
      const std::span<const int> used = head.has_prediction && !head.turned ? std::span<const int>(head.predicted) : selected;
      std::copy(used.begin(), used.end(), used_.chunks_of(place, kv_head));
      std::fill_n(used_.scores_of(place, kv_head), used.size(), 0.0F);
      used_.count_of(place, kv_head) = static_cast<int>(used.size());
    }
  }
  ForwardingStore::resolve_needed(layer, view, used_, urgent, stream);
}

void PredictedSetStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef stream) {
  ForwardingStore::attend(layer, view, rows, used_, out, stream);
}

Layer PredictedSetStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                           StreamRef stream) {
  const Selection& predicted = prediction.chunks;
  for (int place = 0; predicted.chunks != nullptr && place < view.sequences; ++place) {
    if (view.mode[place] == RowMode::idle) continue;
    for (int kv_head = 0; kv_head < store_.kv_heads; ++kv_head) {
      Head& head = head_of(view.slot_of[place], prediction.layer, kv_head);
      const int* chunks = predicted.chunks_of(place, kv_head);
      head.predicted.assign(chunks, chunks + predicted.count_of(place, kv_head));
      head.has_prediction = true;
    }
  }
  return ForwardingStore::resolve_predicted(layer, view, prediction, prefetch, stream);
}

StoreStatistics PredictedSetStore::statistics() const {
  StoreStatistics statistics = ForwardingStore::statistics();
  statistics.needed = needed_;
  statistics.predictable = predictable_;
  statistics.predicted_hit = predicted_hit_;
  return statistics;
}

PredictedSetBackend::PredictedSetBackend(std::shared_ptr<Backend> inner, const PredictedSetOptions& options)
    : ForwardingBackend(std::move(inner)), options_(options), on_cuda_(std::string_view(name()) == "cuda") {
  if (!on_cuda_ && std::string_view(name()) != "cpu") {
    throw InvalidArgument("backend = " + std::string(name()) + ": must be cpu or cuda where rows attend to what was predicted");
  }
}

std::unique_ptr<KvStore> PredictedSetBackend::make_store(const StoreOptions& options) {
  std::unique_ptr<KvStore> inner = ForwardingBackend::make_store(options);
  if (!on_cuda_) return std::make_unique<PredictedSetStore>(std::move(inner), options, options_);
  return cuda::attend_predicted(std::move(inner), options, options_.correct_below, memory(MemoryKind::device), stream());
}

MemoryPlan PredictedSetBackend::store_plan(const StoreOptions& options) const {
  MemoryPlan plan = ForwardingBackend::store_plan(options);
  if (on_cuda_) cuda::plan_predicted(options, options_.correct_below, plan);
  return plan;
}

}  // namespace dualdecoder::examples
