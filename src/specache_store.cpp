// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/specache_store.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "src/chunk_geometry.hpp"
#include "src/prefetch_bound.hpp"
#include "src/summary.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr int rounded_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

}  // namespace

SpeCacheStore::Shape::Shape(const StoreOptions& options)
    : layout(low_bit_layout(options.specache, options.head_dim)),
      tokens(options.specache.group),
      exact(options.specache.exact_tokens),
      heads(options.heads / options.kv_heads),
      // the exact tokens, an unfinished group, and the rows of a pass
      ring(rounded_up(std::min(options.specache.exact_tokens + options.specache.group + 1, options.max_context + 2),
                      options.specache.group)),
      dim(index(options.head_dim)),
      token_bytes(2 * index(options.head_dim) * size_of(options.kv_type)),
      bf16(options.kv_type == DataType::bf16) {
  fetched = std::min(options.specache.fetched_tokens, copied(options.max_context));
}

SpeCacheStore::SpeCacheStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options),
      resources_(resources),
      shape_(options),
      attention_(attention_kernels(resources.isa)),
      dense_(dense_kernels(resources.isa)),
      low_bit_(low_bit_kernels(resources.isa)),
      book_(options),
      predicted_(index(options.max_sequences) * lists(), index(shape_.fetched)),
      sequences_(index(options.max_sequences)),
      unfinished_(std::make_unique<std::atomic<int>[]>(index(options.max_sequences * options.kv_heads))),
      stride_(index(rounded_up(options.max_context + 2, 16))) {
  for (Sequence& sequence : sequences_) sequence.fetched = FetchedTokens(lists(), index(shape_.fetched));
  candidates_.reserve(index(capacities().prefetch));
  Carver counting;
  carve(counting);
  work_bytes_ = counting.bytes();
  if (resources_.device == nullptr) return;
  work_ = Buffer(*resources_.device, work_bytes_, resources_.stream);
  Carver placing(work_.data());
  carve(placing);
  predicted_.forget(0, sequences_.size() * lists());
}

void SpeCacheStore::carve(Carver& carver) {
  const std::size_t row_heads = index(options_.max_sequences * options_.rows_per_sequence) * index(options_.heads);
  const std::size_t threads = index(resources_.thread_count);
  const std::size_t tiles = index(tile_count(0, options_.max_context + 2) + 1);
  scores_ = carver.take<float>((options_.selects_ahead ? 2 : 1) * row_heads * stride_);
  queries_ = carver.take<float>(row_heads * shape_.dim);
  results_ = carver.take<float>(row_heads * tiles * (shape_.dim + 2));
  worker_group_ = carver.take<float>(threads * 2 * shape_.layout.tokens * shape_.dim);
  worker_weights_ = carver.take<float>(threads * index(options_.rows_per_sequence) * index(shape_.heads) * index(kTile));
  worker_row_ = carver.take<float>(threads * 2 * stride_);
  worker_keys_ = carver.take<int>(threads * stride_);
  worker_segments_ = carver.take<Segment>(threads * index(kTile));
  predicted_.carve(carver);
}

void SpeCacheStore::carve_slots(Carver& carver, Sequence& sequence) const {
  sequence.fetched_data = carver.take<std::byte>(lists() * index(shape_.fetched) * shape_.token_bytes);
  sequence.fetched.carve(carver);
}

std::size_t SpeCacheStore::lists() const noexcept { return index(options_.layers) * index(options_.kv_heads); }
std::size_t SpeCacheStore::list_of(Layer layer, int kv_head) const noexcept {
  return index(layer) * index(options_.kv_heads) + index(kv_head);
}

std::size_t SpeCacheStore::host_bytes(int capacity) const noexcept {
  return lists() * index(rounded_up(capacity, shape_.tokens)) * shape_.token_bytes;
}
std::size_t SpeCacheStore::copy_bytes(int capacity) const noexcept {
  return lists() * index(shape_.copied(capacity) / shape_.tokens) * shape_.layout.bytes;
}
std::size_t SpeCacheStore::window_bytes() const noexcept { return lists() * index(shape_.ring) * shape_.token_bytes; }

void SpeCacheStore::plan(MemoryPlan& plan) const {
  const std::size_t sequences = sequences_.size();
  Carver slots;
  Sequence sequence;
  sequence.fetched = FetchedTokens(lists(), index(shape_.fetched));
  carve_slots(slots, sequence);
  plan.add("attention work space", MemoryKind::device, work_bytes_);
  plan.add("low-bit copy", MemoryKind::device, sequences * copy_bytes(options_.max_context));
  plan.add("exact last tokens", MemoryKind::device, sequences * window_bytes());
  plan.add("fetched tokens", MemoryKind::device, sequences * slots.bytes());
  plan.add("keys and values", MemoryKind::pinned, sequences * host_bytes(options_.max_context));
}

KvStore::Capacities SpeCacheStore::capacities() const noexcept {
  const int heads = options_.max_sequences * options_.kv_heads;
  return {.urgent = heads * shape_.fetched,
          .prefetch = heads * shape_.fetched,
          .write_back = heads * options_.layers,
          .selection = shape_.fetched};
}

std::byte* SpeCacheStore::host_token(int slot, std::size_t list, int position) const noexcept {
  const std::size_t tokens = index(rounded_up(book_.capacity(slot), shape_.tokens));
  return sequences_[index(slot)].host.data() + (list * tokens + index(position)) * shape_.token_bytes;
}
std::byte* SpeCacheStore::copied_group(int slot, std::size_t list, int position) const noexcept {
  const std::size_t groups = index(shape_.copied(book_.capacity(slot)) / shape_.tokens);
  return sequences_[index(slot)].copy.data() + (list * groups + index(position / shape_.tokens)) * shape_.layout.bytes;
}
std::byte* SpeCacheStore::window_token(int slot, std::size_t list, int position) const noexcept {
  return sequences_[index(slot)].window.data() + (list * index(shape_.ring) + index(position % shape_.ring)) * shape_.token_bytes;
}
std::byte* SpeCacheStore::fetched_token(int slot, std::size_t list, int number) const noexcept {
  return sequences_[index(slot)].fetched_data + (list * index(shape_.fetched) + index(number)) * shape_.token_bytes;
}

void SpeCacheStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  Sequence sequence;
  sequence.host = Buffer(*resources_.host, host_bytes(capacity_tokens), stream);
  sequence.copy = Buffer(*resources_.device, copy_bytes(capacity_tokens), stream);
  sequence.window = Buffer(*resources_.device, window_bytes(), stream);
  sequence.fetched = FetchedTokens(lists(), index(shape_.fetched));
  Carver counting;
  carve_slots(counting, sequence);
  sequence.slots = Buffer(*resources_.device, counting.bytes(), stream);
  Carver placing(sequence.slots.data());
  carve_slots(placing, sequence);
  sequence.fetched.clear();
  sequences_[index(slot)] = std::move(sequence);
  book_.open(slot, capacity_tokens);
  predicted_.forget(index(slot) * lists(), lists());
}

void SpeCacheStore::close(int slot, StreamRef) noexcept {
  if (book_.close(slot)) sequences_[index(slot)] = Sequence();
}

void SpeCacheStore::copy_group(int slot, std::size_t list, int position, const std::byte* tokens, int worker) {
  const std::size_t count = shape_.layout.tokens;
  float* keys = worker_group_ + index(worker) * 2 * count * shape_.dim;
  float* values = keys + count * shape_.dim;
  for (std::size_t t = 0; t < count; ++t) {
    widen_elements(tokens + t * shape_.token_bytes, 0, shape_.dim, shape_.bf16, keys + t * shape_.dim);
    widen_elements(tokens + t * shape_.token_bytes, shape_.dim, shape_.dim, shape_.bf16, values + t * shape_.dim);
  }
  quantise(keys, values, shape_.layout, copied_group(slot, list, position));
}

void SpeCacheStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor, StreamRef) {
  const int tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  const int end = first + tokens;
  const std::size_t dim = shape_.dim;
  resources_.threads->parallel_for(options_.kv_heads, [&](int kv_head, int worker) {
    const std::size_t list = list_of(layer, kv_head);
    float row[512];
    for (int t = 0; t < tokens; ++t) {
      const std::size_t source = (index(t) * index(options_.kv_heads) + index(kv_head)) * dim;
      std::byte* target = host_token(slot, list, first + t);
      read_elements(block.keys, source, dim, row);
      write_elements(row, dim, target, 0, shape_.bf16);
      read_elements(block.values, source, dim, row);
      write_elements(row, dim, target, dim, shape_.bf16);
    }
    for (int position = shape_.copied(first); position < shape_.copied(end); position += shape_.tokens) {
      copy_group(slot, list, position, host_token(slot, list, position), worker);
    }
    for (int position = std::max(first, shape_.copied(end)); position < end; ++position) {
      std::memcpy(window_token(slot, list, position), host_token(slot, list, position), shape_.token_bytes);
    }
  });
  book_.append(layer, slot, tokens);
}

void SpeCacheStore::seal(int slot, StreamRef) {
  book_.check_seal(slot);
  book_.seal(slot);
}

void SpeCacheStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef) {
  *urgent.count = 0;
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const int slot = view.slot_of[place];
    const int row = place * view.rows_per_sequence;
    FetchedTokens& fetched = sequences_[index(slot)].fetched;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const std::size_t list = list_of(layer, kv_head);
      const std::span<const int> needed(by_row.chunks_of(row, kv_head), index(by_row.count_of(row, kv_head)));
      predicted_.count(index(slot) * lists() + list, needed, statistics_);
      const auto missing =
          index(static_cast<int>(std::count_if(needed.begin(), needed.end(), [&](int t) { return !fetched.holds(list, t); })));
      statistics_.resident_hit += needed.size() - missing;
      if (!waits(view, place)) {
        statistics_.estimated += missing;
        continue;
      }
      fetched.keep(list, needed);
      for (int token : needed) {
        if (fetched.holds(list, token)) continue;
        urgent.items[(*urgent.count)++] = {host_token(slot, list, token), fetched_token(slot, list, fetched.add(list, token)),
                                           static_cast<std::uint32_t>(shape_.token_bytes), 1.0F};
        statistics_.urgent_bytes += shape_.token_bytes;
      }
    }
  }
}

Layer SpeCacheStore::resolve_predicted(Layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch, StreamRef) {
  *prefetch.count = 0;
  const Selection& predicted = prediction.chunks;
  if (predicted.chunks == nullptr) return prediction.layer;
  candidates_.clear();
  for (int place = 0; place < view.sequences; ++place) {
    if (view.mode[place] == RowMode::idle) continue;
    const int slot = view.slot_of[place];
    FetchedTokens& fetched = sequences_[index(slot)].fetched;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const std::size_t list = list_of(prediction.layer, kv_head);
      const std::span<const int> tokens(predicted.chunks_of(place, kv_head), index(predicted.count_of(place, kv_head)));
      predicted_.remember(index(slot) * lists() + list, tokens, shape_.copied(book_.length(slot)));
      fetched.keep(list, tokens);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (!fetched.holds(list, tokens[i])) candidates_.push_back({predicted.scores_of(place, kv_head)[i], slot, kv_head, tokens[i]});
      }
    }
  }
  // the best of all heads first, so that a bound cuts the least important
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(-a.score, a.slot, a.kv_head, a.token) < std::tuple(-b.score, b.slot, b.kv_head, b.token);
  });
  const std::size_t allowed = std::min(candidates_.size(), most_prefetches(options_, shape_.token_bytes));
  statistics_.prefetch_dropped += candidates_.size() - allowed;
  for (const Candidate& candidate : std::span(candidates_).first(allowed)) {
    const std::size_t list = list_of(prediction.layer, candidate.kv_head);
    const int number = sequences_[index(candidate.slot)].fetched.add(list, candidate.token);
    prefetch.items[(*prefetch.count)++] = {host_token(candidate.slot, list, candidate.token), fetched_token(candidate.slot, list, number),
                                           static_cast<std::uint32_t>(shape_.token_bytes), candidate.score};
  }
  statistics_.prefetch_bytes += allowed * shape_.token_bytes;
  return prediction.layer;
}

void SpeCacheStore::commit(const StepView& view, const TransferList& write_back, StreamRef) {
  *write_back.count = 0;
  book_.check_commit(view);
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const int slot = view.slot_of[place];
    const int copied = shape_.copied(book_.length(slot));
    const int length = book_.commit(slot);
    if (shape_.copied(length) > copied) {
      resources_.threads->parallel_for(static_cast<int>(lists()), [&](int list, int worker) {
        copy_group(slot, index(list), copied, window_token(slot, index(list), copied), worker);
      });
    }
    if (length % shape_.tokens != 0) continue;
    const int first = length - shape_.tokens;
    const std::size_t bytes = shape_.layout.tokens * shape_.token_bytes;
    for (std::size_t list = 0; list < lists(); ++list) {
      write_back.items[(*write_back.count)++] = {window_token(slot, list, first), host_token(slot, list, first),
                                                 static_cast<std::uint32_t>(bytes), 0.0F};
      statistics_.write_back_bytes += bytes;
    }
  }
}

void SpeCacheStore::truncate(int slot, int tokens, StreamRef) {
  book_.check_truncate(slot, tokens);
  const int copied = shape_.copied(tokens);
  const int copied_before = shape_.copied(book_.length(slot));
  for (std::size_t list = 0; list < lists(); ++list) {
    // what the window had overwritten comes back from the host
    for (int position = copied; position < std::min(tokens, copied_before); ++position) {
      std::memcpy(window_token(slot, list, position), host_token(slot, list, position), shape_.token_bytes);
    }
    sequences_[index(slot)].fetched.forget_from(list, copied);
  }
  predicted_.forget(index(slot) * lists(), lists());
  book_.truncate(slot, tokens);
}

}  // namespace dualdecoder::cpu
