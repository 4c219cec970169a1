// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/shadow_kv_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "dualdecoder/error.hpp"
#include "src/planned_pieces.hpp"
#include "src/prefetch_bound.hpp"
#include "src/summary.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int kScorePart = 512;  // landmarks that one thread scores at a time

/// The whole chunks of the local window, the unfinished one, the guess's, and one whose values may still be on their way to the host.
int window_chunks_of(const StoreOptions& options) { return options.shadow_kv.local_chunks + 3; }

AttentionRunner::Limits runner_limits(const StoreOptions& options, int segments, int chunk, int threads) {
  return {.jobs = options.max_sequences * options.rows_per_sequence * options.kv_heads,
          .group = options.heads / options.kv_heads,
          .tokens = segments * chunk,
          .chunks = 0,
          .threads = threads};
}

std::size_t padded(int count) { return (index(count) + 15) / 16 * 16; }

}  // namespace

ShadowKvStore::ShadowKvStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options),
      resources_(resources),
      geometry_(options),
      window_chunks_(window_chunks_of(options)),
      outlier_slots_(std::min(options.shadow_kv.outlier_chunks, geometry_.max_chunks)),
      kernels_(attention_kernels(resources.isa)),
      runner_(runner_limits(options, outlier_slots_ + geometry_.selected_chunks + window_chunks_, geometry_.chunk, resources.thread_count),
              geometry_.layout(), *resources.threads, resources.isa),
      keys_(options, geometry_, resources),
      predictions_(head_count(), index(geometry_.selected_chunks)),
      book_(options),
      hosts_(index(options.max_sequences)),
      segment_capacity_(outlier_slots_ + geometry_.selected_chunks + window_chunks_) {
  Carver counting;
  carve(counting, device_plan_);
  if (resources_.device == nullptr) return;
  device_ = Buffer(*resources_.device, counting.bytes(), resources_.stream);
  Carver placing(device_.data());
  MemoryPlan again;
  carve(placing, again);
  keys_.fill();
  predictions_.forget(0, head_count());
  std::fill_n(outlier_count_, head_count(), 0);
  std::fill_n(slot_of_, head_count() * index(geometry_.max_chunks), -1);
  std::fill_n(chunk_of_, head_count() * index(geometry_.selected_chunks), -1);
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  jobs_.reserve(rows * index(options_.kv_heads));
  rebuilds_.reserve(rows * index(options_.kv_heads * geometry_.selected_chunks));
  missing_.reserve(index(geometry_.selected_chunks));
  wishes_.reserve(index(capacities().prefetch));
}

void ShadowKvStore::carve(Carver& carver, MemoryPlan& plan) {
  const std::size_t heads = head_count();
  const std::size_t chunks = index(geometry_.max_chunks);
  const std::size_t selected = index(geometry_.selected_chunks);
  const std::size_t dim = index(geometry_.dim);
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  const std::size_t threads = index(resources_.thread_count);
  PlannedPieces pieces(carver, plan);
  keys_.carve_factors(carver);
  pieces.enter("low-rank keys");
  landmarks_ = carver.take<std::byte>(heads * chunks * dim * geometry_.element_bytes);
  pieces.enter("landmarks");
  outliers_ = carver.take<std::byte>(heads * index(outlier_slots_) * geometry_.chunk_bytes);
  outlier_chunks_ = carver.take<int>(heads * index(outlier_slots_));
  outlier_count_ = carver.take<int>(heads);
  pieces.enter("outlier chunks");
  window_ = carver.take<std::byte>(heads * index(window_chunks_) * geometry_.chunk_bytes);
  pieces.enter("local window");
  data_ = carver.take<std::byte>(heads * selected * geometry_.chunk_bytes);
  pieces.enter("buffers of chosen chunks");
  slot_of_ = carver.take<int>(heads * chunks);
  chunk_of_ = carver.take<int>(heads * selected);
  has_keys_ = carver.take<std::uint8_t>(heads * selected);
  predictions_.carve(carver);
  pieces.enter("tables of chunks");
  keys_.carve_work(carver);
  scores_ = carver.take<float>(rows * index(options_.heads) * chunks);
  queries_ = carver.take<float>(rows * index(options_.heads) * dim);
  segments_ = carver.take<Segment>(rows * index(options_.kv_heads) * index(segment_capacity_));
  worker_rank_ = carver.take<float>(threads * chunks);
  worker_keys_ = carver.take<int>(threads * padded(geometry_.max_chunks));
  worker_row_ = carver.take<float>(threads * index(std::max(geometry_.group, 2)) * dim);
  runner_.carve(carver);
  pieces.enter("rotations and work space");
}

MemoryPlan ShadowKvStore::plan() const {
  MemoryPlan plan = device_plan_;
  Carver prefill;
  for (int thread = 0; thread < resources_.thread_count; ++thread) keys_.carve_prefill_work(prefill);
  plan.add("factorisation of one prompt", MemoryKind::device, prefill.bytes());
  plan.add("keys of one prompt", MemoryKind::pinned, host_bytes(options_.max_context));
  plan.add("values", MemoryKind::pinned, index(options_.max_sequences) * host_bytes(options_.max_context));
  return plan;
}

KvStore::Capacities ShadowKvStore::capacities() const noexcept {
  const int heads = options_.max_sequences * options_.kv_heads;
  return {.urgent = heads * geometry_.selected_chunks,
          .prefetch = heads * geometry_.selected_chunks,
          .write_back = heads * options_.layers,
          .selection = geometry_.selected_chunks};
}

std::size_t ShadowKvStore::host_bytes(int tokens) const noexcept {
  const std::size_t chunks = index((tokens + geometry_.chunk - 1) / geometry_.chunk);
  return index(options_.layers) * index(options_.kv_heads) * chunks * half_bytes();
}

std::size_t ShadowKvStore::host_offset(const Head& head, int chunk) const noexcept {
  const std::size_t chunks = index((book_.capacity(head.slot) + geometry_.chunk - 1) / geometry_.chunk);
  return ((index(head.layer) * index(options_.kv_heads) + index(head.kv_head)) * chunks + index(chunk)) * half_bytes();
}

std::byte* ShadowKvStore::host_values(const Head& head, int chunk) const noexcept {
  return hosts_[index(head.slot)].values.data() + host_offset(head, chunk);
}

std::byte* ShadowKvStore::window_chunk(const Head& head, int chunk) const noexcept {
  return window_ + (list_of(head) * index(window_chunks_) + index(chunk % window_chunks_)) * geometry_.chunk_bytes;
}

std::byte* ShadowKvStore::landmark(const Head& head, int chunk) const noexcept {
  return landmarks_ + (list_of(head) * index(geometry_.max_chunks) + index(chunk)) * index(geometry_.dim) * geometry_.element_bytes;
}

std::byte* ShadowKvStore::outlier(const Head& head, int number) const noexcept {
  return outliers_ + (list_of(head) * index(outlier_slots_) + index(number)) * geometry_.chunk_bytes;
}

std::span<int> ShadowKvStore::outliers_of(const Head& head) const noexcept {
  return {outlier_chunks_ + list_of(head) * index(outlier_slots_), index(outlier_count_[list_of(head)])};
}

ShadowKvStore::Slots ShadowKvStore::slots_of(const Head& head) const noexcept {
  const std::size_t list = list_of(head);
  const std::size_t selected = index(geometry_.selected_chunks);
  return {slot_of_ + list * index(geometry_.max_chunks), chunk_of_ + list * selected, has_keys_ + list * selected,
          data_ + list * selected * geometry_.chunk_bytes};
}

LowRankKeys::Source ShadowKvStore::window_keys(int slot, Layer layer, int chunk) const noexcept {
  return {window_chunk({slot, layer, 0}, chunk), index(window_chunks_) * geometry_.chunk_bytes};
}

int ShadowKvStore::window_begin(int length) const noexcept {
  return std::max(0, length / geometry_.chunk - options_.shadow_kv.local_chunks);
}

float* ShadowKvStore::scores_of(int row, int kv_head) const noexcept {
  const std::size_t list = index(row) * index(options_.kv_heads) + index(kv_head);
  return scores_ + list * index(geometry_.group) * index(geometry_.max_chunks);
}

void ShadowKvStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  Carver prefill;
  for (int thread = 0; thread < resources_.thread_count; ++thread) keys_.carve_prefill_work(prefill);
  Host host{.values = Buffer(*resources_.host, host_bytes(capacity_tokens), stream),
            .prompt_keys = Buffer(*resources_.host, host_bytes(capacity_tokens), stream),
            .prefill_work = Buffer(*resources_.device, prefill.bytes(), stream)};
  hosts_[index(slot)] = std::move(host);
  book_.open(slot, capacity_tokens);
  forget(slot, 0);
}

void ShadowKvStore::close(int slot, StreamRef) noexcept {
  if (book_.close(slot)) hosts_[index(slot)] = Host{};
}

void ShadowKvStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor, StreamRef) {
  const int tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  resources_.threads->parallel_for(options_.kv_heads, [&](int kv_head, int worker) {
    const std::size_t offset = host_offset({slot, layer, kv_head}, 0);
    float* row = worker_row_ + index(worker) * index(std::max(geometry_.group, 2)) * dim;
    for (int t = 0; t < tokens; ++t) {
      const std::size_t source = (index(t) * index(options_.kv_heads) + index(kv_head)) * dim;
      const std::size_t target = index(first + t) * dim;
      read_elements(block.keys, source, dim, row);
      write_elements(row, dim, hosts_[index(slot)].prompt_keys.data() + offset, target, bf16);
      read_elements(block.values, source, dim, row);
      write_elements(row, dim, hosts_[index(slot)].values.data() + offset, target, bf16);
    }
  });
  book_.append(layer, slot, tokens);
}

void ShadowKvStore::factor_prompt(int slot, int length) {
  const Host& host = hosts_[index(slot)];
  const std::size_t head_bytes = host_offset({slot, 0, 1}, 0);
  const auto keys_from = [&](Layer layer, int chunk) {
    return LowRankKeys::Source{host.prompt_keys.data() + host_offset({slot, layer, 0}, chunk), head_bytes};
  };
  std::vector<LowRankKeys::PrefillWork> work;
  Carver carver(host.prefill_work.data());
  for (int thread = 0; thread < resources_.thread_count; ++thread) work.push_back(keys_.carve_prefill_work(carver));
  resources_.threads->parallel_for(
      options_.layers, [&](int layer, int worker) { keys_.factor(slot, layer, keys_from(layer, 0), length, work[index(worker)]); });
  const int chunks = length / geometry_.chunk;
  resources_.threads->parallel_for(options_.layers * chunks, [&](int job, int worker) {
    keys_.project(slot, job / chunks, job % chunks, keys_from(job / chunks, job % chunks), worker);
  });
}

void ShadowKvStore::summarise(const Head& head, int chunk, const std::byte* keys, int worker) {
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  float* mean = worker_row_ + index(worker) * index(std::max(geometry_.group, 2)) * dim;
  mean_of(keys, 0, geometry_.layout(), mean);
  write_elements(mean, dim, landmark(head, chunk), 0, bf16);
}

/// The lowest cosine between a token's key and the mean of the chunk's.
float ShadowKvStore::worst_cosine(const std::byte* keys, int worker) const {
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  float* mean = worker_row_ + index(worker) * index(std::max(geometry_.group, 2)) * dim;
  float* key = mean + dim;
  mean_of(keys, 0, geometry_.layout(), mean);
  const double mean_norm = std::sqrt(std::inner_product(mean, mean + dim, mean, 0.0));
  double worst = 1.0;
  for (int t = 0; t < geometry_.chunk; ++t) {
    widen_elements(keys, index(t) * dim, dim, bf16, key);
    const double norm = mean_norm * std::sqrt(std::inner_product(key, key + dim, key, 0.0));
    worst = std::min(worst, norm > 0.0 ? std::inner_product(key, key + dim, mean, 0.0) / norm : 0.0);
  }
  return static_cast<float>(worst);
}

void ShadowKvStore::find_outliers(const Head& head, int chunks, int worker) {
  const Host& host = hosts_[index(head.slot)];
  const auto keys_of = [&](int chunk) { return host.prompt_keys.data() + host_offset(head, chunk); };
  float* cosines = worker_rank_ + index(worker) * index(geometry_.max_chunks);
  int* order = worker_keys_ + index(worker) * padded(geometry_.max_chunks);
  for (int chunk = 0; chunk < chunks; ++chunk) cosines[chunk] = worst_cosine(keys_of(chunk), worker);
  std::iota(order, order + chunks, 0);
  const int count = std::min(outlier_slots_, chunks);
  std::partial_sort(order, order + count, order + chunks, [&](int a, int b) { return std::tie(cosines[a], a) < std::tie(cosines[b], b); });
  std::sort(order, order + count);
  outlier_count_[list_of(head)] = count;
  std::copy_n(order, count, outliers_of(head).begin());
  for (int number = 0; number < count; ++number) {
    std::memcpy(outlier(head, number), keys_of(order[number]), half_bytes());
    std::memcpy(outlier(head, number) + half_bytes(), host_values(head, order[number]), half_bytes());
  }
}

void ShadowKvStore::seal(int slot, StreamRef) {
  const int length = book_.check_seal(slot);
  factor_prompt(slot, length);
  const int begin = window_begin(length);
  resources_.threads->parallel_for(options_.layers * options_.kv_heads, [&](int list, int worker) {
    const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
    const std::byte* keys = hosts_[index(slot)].prompt_keys.data() + host_offset(head, 0);
    for (int chunk = 0; chunk < length / geometry_.chunk; ++chunk) summarise(head, chunk, keys + index(chunk) * half_bytes(), worker);
    find_outliers(head, begin, worker);
    for (int chunk = begin; chunk * geometry_.chunk < length; ++chunk) {
      std::memcpy(window_chunk(head, chunk), keys + index(chunk) * half_bytes(), half_bytes());
      std::memcpy(window_chunk(head, chunk) + half_bytes(), host_values(head, chunk), half_bytes());
    }
  });
  hosts_[index(slot)].prompt_keys = Buffer();
  hosts_[index(slot)].prefill_work = Buffer();
  book_.seal(slot);
}

int ShadowKvStore::choose(const Head& head, int row, int count, const Selection& by_row, int worker) const {
  const std::span<const int> outliers = outliers_of(head);
  const std::size_t stride = index(geometry_.max_chunks);
  float* scores = scores_of(row, head.kv_head);
  for (int chunk : outliers) {
    for (int g = 0; g < geometry_.group; ++g) scores[index(g) * stride + index(chunk)] = kLowest;  // attended to in any case
  }
  const int wanted = std::min({by_row.capacity, geometry_.selected_chunks, count - static_cast<int>(outliers.size())});
  if (wanted <= 0) return 0;
  float* rank = worker_rank_ + index(worker) * stride;
  int* chosen = by_row.chunks_of(row, head.kv_head);
  kernels_.rank(scores, stride, geometry_.group, index(count), rank);
  kernels_.choose(rank, index(count), index(wanted), worker_keys_ + index(worker) * padded(geometry_.max_chunks), chosen);
  std::transform(chosen, chosen + wanted, by_row.scores_of(row, head.kv_head), [&](int chunk) { return std::exp(rank[chunk]); });
  return wanted;
}

void ShadowKvStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef) {
  const int kv_heads = options_.kv_heads;
  const std::size_t dim = index(geometry_.dim);
  const std::size_t width = index(geometry_.group) * dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(geometry_.dim));
  int longest = 0;
  for (int place = 0; place < view.sequences; ++place) {
    if (view.mode[place] == RowMode::idle) continue;
    book_.check_place(view, place);
    longest = std::max(longest, window_begin(view.position[place]));
  }
  const int lists = view.rows() * kv_heads;
  const auto is_live = [&](int row) { return row_is_live(view.mode[row / view.rows_per_sequence], row % view.rows_per_sequence); };
  const auto head_of = [&](int list) { return Head{view.slot_of[list / kv_heads / view.rows_per_sequence], layer, list % kv_heads}; };
  resources_.threads->parallel_for(lists * ((longest + kScorePart - 1) / kScorePart), [&](int job, int worker) {
    const int row = job % lists / kv_heads;
    const int first = job / lists * kScorePart;
    const int count = is_live(row) ? window_begin(view.position[row / view.rows_per_sequence]) : 0;
    if (first >= count) return;
    float* scaled = worker_row_ + index(worker) * index(std::max(geometry_.group, 2)) * dim;
    read_elements(queries, index(job % lists) * width, width, scaled);
    for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
    const Head head = head_of(job % lists);
    const Segment part{landmark(head, first), std::min(kScorePart, count - first)};
    SegmentLayout layout = geometry_.layout();
    layout.chunk = kScorePart;
    kernels_.key_scores(scaled, geometry_.group, &part, 1, layout, scores_of(row, head.kv_head) + first, index(geometry_.max_chunks));
  });
  resources_.threads->parallel_for(lists, [&](int list, int worker) {
    const int row = list / kv_heads;
    const int count = is_live(row) ? window_begin(view.position[row / view.rows_per_sequence]) : 0;
    by_row.count_of(row, list % kv_heads) = count > 0 ? choose(head_of(list), row, count, by_row, worker) : 0;
  });
}

void ShadowKvStore::evict(const Slots& slots, int slot) const {
  if (slots.chunk_of[slot] >= 0) slots.slot_of[slots.chunk_of[slot]] = -1;
  slots.chunk_of[slot] = -1;
}

void ShadowKvStore::place(const Slots& slots, int slot, int chunk) const {
  evict(slots, slot);
  slots.chunk_of[slot] = chunk;
  slots.slot_of[chunk] = slot;
  slots.has_keys[slot] = 0;
}

void ShadowKvStore::forget(int slot, int first_chunk) {
  for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
    const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
    const Slots slots = slots_of(head);
    for (int s = 0; s < geometry_.selected_chunks; ++s) {
      if (slots.chunk_of[s] >= first_chunk) evict(slots, s);
    }
    const std::span<const int> outliers = outliers_of(head);
    outlier_count_[list_of(head)] = static_cast<int>(std::lower_bound(outliers.begin(), outliers.end(), first_chunk) - outliers.begin());
  }
  predictions_.forget(list_of({slot, 0, 0}), index(options_.layers) * index(options_.kv_heads));
}

void ShadowKvStore::fetch_missing(const Head& head, std::span<const int> needed, const TransferList& urgent) {
  const Slots slots = slots_of(head);
  predictions_.count(list_of(head), needed, statistics_);
  missing_.clear();
  for (int chunk : needed) {
    if (slots.slot_of[chunk] < 0) missing_.push_back(chunk);
  }
  statistics_.resident_hit += needed.size() - missing_.size();
  int slot = 0;
  for (int chunk : missing_) {
    // there are as many slots as chunks can be needed, so one is left whose chunk is not
    while (slots.chunk_of[slot] >= 0 && std::binary_search(needed.begin(), needed.end(), slots.chunk_of[slot])) ++slot;
    place(slots, slot, chunk);
    urgent.items[(*urgent.count)++] = {host_values(head, chunk), slots.data + index(slot) * geometry_.chunk_bytes + half_bytes(),
                                       static_cast<std::uint32_t>(half_bytes()), 1.0F};
    statistics_.urgent_bytes += half_bytes();
  }
}

void ShadowKvStore::resolve_needed(Layer layer, const StepView& view, const Selection& by_row, const TransferList& urgent, StreamRef) {
  *urgent.count = 0;
  for (int place_index = 0; place_index < view.sequences; ++place_index) {
    if (!row_is_live(view.mode[place_index], 0)) continue;
    const int row = place_index * view.rows_per_sequence;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      fetch_missing({view.slot_of[place_index], layer, kv_head}, {by_row.chunks_of(row, kv_head), index(by_row.count_of(row, kv_head))},
                    urgent);
    }
  }
}

int ShadowKvStore::chooser_of(const StepView& view, int row) const noexcept {
  const bool is_guess = view.mode[row / view.rows_per_sequence] == RowMode::dual && row % view.rows_per_sequence == 1;
  return is_guess && options_.row1_set == Row1Set::row0 ? row - 1 : row;
}

void ShadowKvStore::write_row(const Head& head, int position, const RowBlock& rows, int row) {
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  const std::size_t source = (index(row) * index(options_.kv_heads) + index(head.kv_head)) * dim;
  const std::size_t target = index(position % geometry_.chunk) * dim;
  std::byte* data = window_chunk(head, position / geometry_.chunk);
  float* values = worker_row_;
  read_elements(rows.keys, source, dim, values);
  write_elements(values, dim, data, target, bf16);
  read_elements(rows.values, source, dim, values);
  write_elements(values, dim, data + half_bytes(), target, bf16);
}

void ShadowKvStore::rebuild_chosen(Layer layer, const StepView& view, const Selection& by_row) {
  rebuilds_.clear();
  for (int row = 0; row < view.rows(); ++row) {
    if (!row_is_live(view.mode[row / view.rows_per_sequence], row % view.rows_per_sequence)) continue;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const Head head{view.slot_of[row / view.rows_per_sequence], layer, kv_head};
      const Slots slots = slots_of(head);
      const int* chosen = by_row.chunks_of(row, kv_head);
      for (int i = 0; i < by_row.count_of(row, kv_head); ++i) {
        const int slot = slots.slot_of[chosen[i]];
        if (slot < 0 || slots.has_keys[slot] != 0) continue;
        slots.has_keys[slot] = 1;
        rebuilds_.push_back({head, chosen[i], slots.data + index(slot) * geometry_.chunk_bytes});
      }
    }
  }
  resources_.threads->parallel_for(static_cast<int>(rebuilds_.size()), [&](int job, int worker) {
    const Rebuild& rebuild = rebuilds_[index(job)];
    keys_.rebuild(rebuild.head.slot, rebuild.head.layer, rebuild.head.kv_head, rebuild.chunk, rebuild.keys, worker);
  });
}

int ShadowKvStore::gather_segments(const Head& head, int length, int end, std::span<const int> chosen, Segment* segments) const {
  const int chunk = geometry_.chunk;
  const Slots slots = slots_of(head);
  int count = 0;
  for (int number = 0; number < outlier_count_[list_of(head)]; ++number) segments[count++] = {outlier(head, number), chunk};
  for (int j : chosen) {
    if (slots.slot_of[j] >= 0) segments[count++] = {slots.data + index(slots.slot_of[j]) * geometry_.chunk_bytes, chunk};
  }
  for (int j = window_begin(length); j * chunk < end; ++j) segments[count++] = {window_chunk(head, j), std::min(chunk, end - j * chunk)};
  return count;
}

void ShadowKvStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef) {
  const int kv_heads = options_.kv_heads;
  const int per_sequence = view.rows_per_sequence;
  const std::size_t width = index(geometry_.group) * index(geometry_.dim);
  const float scale = 1.0F / std::sqrt(static_cast<float>(geometry_.dim));
  auto* result = out.as<float>();
  rebuild_chosen(layer, view, by_row);
  jobs_.clear();
  for (int row = 0; row < view.rows(); ++row) {
    const int place_index = row / per_sequence;
    const RowMode mode = view.mode[place_index];
    if (!row_is_live(mode, row % per_sequence)) {
      std::fill_n(result + index(row) * index(kv_heads) * width, index(kv_heads) * width, 0.0F);
      continue;
    }
    book_.check_place(view, place_index);
    const int length = view.position[place_index];
    const int position = row_position(mode, row % per_sequence, length);
    const int chooser = chooser_of(view, row);
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const Head head{view.slot_of[place_index], layer, kv_head};
      write_row(head, position, rows, row);
      const std::size_t list = index(row) * index(kv_heads) + index(kv_head);
      float* scaled = queries_ + list * width;
      read_elements(rows.queries, list * width, width, scaled);
      for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
      AttentionJob job;
      job.queries = scaled;
      job.segments = segments_ + list * index(segment_capacity_);
      job.segment_count = gather_segments(head, length, position + 1,
                                          {by_row.chunks_of(chooser, kv_head), index(by_row.count_of(chooser, kv_head))}, job.segments);
      job.out = result + list * width;
      jobs_.push_back(job);
    }
  }
  runner_.run(jobs_.data(), static_cast<int>(jobs_.size()));
}

Layer ShadowKvStore::resolve_predicted(Layer layer, const StepView& view, const Prediction& prediction, const TransferList& prefetch,
                                       StreamRef) {
  *prefetch.count = 0;
  const Layer target = prediction.layer;
  const Selection& predicted = prediction.chunks;
  wishes_.clear();
  for (int place_index = 0; place_index < view.sequences; ++place_index) {
    if (view.mode[place_index] == RowMode::idle) continue;
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
      const int slot = view.slot_of[place_index];
      if (!options_.shadow_kv.reuse) {
        const Slots used = slots_of({slot, layer, kv_head});
        for (int s = 0; s < geometry_.selected_chunks; ++s) evict(used, s);
      }
      if (predicted.chunks == nullptr) continue;
      const Head head{slot, target, kv_head};
      const int* chunks = predicted.chunks_of(place_index, kv_head);
      const int count = std::min(predicted.count_of(place_index, kv_head), geometry_.selected_chunks);
      predictions_.remember(list_of(head), {chunks, index(count)}, window_begin(view.position[place_index]));
      const Slots slots = slots_of(head);
      for (int i = 0; i < count; ++i) {
        if (slots.slot_of[chunks[i]] < 0) {
          wishes_.push_back({predicted.scores_of(place_index, kv_head)[i], slot, kv_head, chunks[i], {chunks, index(count)}});
        }
      }
    }
  }
  prefetch_wishes(target, prefetch);
  return target;
}

void ShadowKvStore::prefetch_wishes(Layer target, const TransferList& prefetch) {
  // the best of all heads first, so that a bound cuts the least important
  std::sort(wishes_.begin(), wishes_.end(), [](const Wish& a, const Wish& b) {
    return std::tuple(-a.score, a.slot, a.kv_head, a.chunk) < std::tuple(-b.score, b.slot, b.kv_head, b.chunk);
  });
  const std::size_t allowed = std::min(index(prefetch.capacity), most_prefetches(options_, half_bytes()));
  for (const Wish& wish : wishes_) {
    if (index(*prefetch.count) >= allowed) {
      ++statistics_.prefetch_dropped;
      continue;
    }
    const Head head{wish.slot, target, wish.kv_head};
    const Slots slots = slots_of(head);
    // there are as many slots as chunks can be predicted, so one is left whose chunk is not
    int slot = 0;
    while (slots.chunk_of[slot] >= 0 && std::binary_search(wish.predicted.begin(), wish.predicted.end(), slots.chunk_of[slot])) ++slot;
    place(slots, slot, wish.chunk);
    prefetch.items[(*prefetch.count)++] = {host_values(head, wish.chunk), slots.data + index(slot) * geometry_.chunk_bytes + half_bytes(),
                                           static_cast<std::uint32_t>(half_bytes()), wish.score};
    statistics_.prefetch_bytes += half_bytes();
  }
}

void ShadowKvStore::commit(const StepView& view, const TransferList& write_back, StreamRef) {
  *write_back.count = 0;
  book_.check_commit(view);
  for (int place_index = 0; place_index < view.sequences; ++place_index) {
    if (!row_is_live(view.mode[place_index], 0)) continue;
    const int slot = view.slot_of[place_index];
    const int length = book_.commit(slot);
    if (length % geometry_.chunk != 0) continue;
    const int chunk = length / geometry_.chunk - 1;
    resources_.threads->parallel_for(options_.layers, [&](int layer, int worker) {
      keys_.project(slot, layer, chunk, window_keys(slot, layer, chunk), worker);
      for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) {
        const Head head{slot, layer, kv_head};
        summarise(head, chunk, window_chunk(head, chunk), worker);
      }
    });
    for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
      const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
      write_back.items[(*write_back.count)++] = {window_chunk(head, chunk) + half_bytes(), host_values(head, chunk),
                                                 static_cast<std::uint32_t>(half_bytes()), 0.0F};
      statistics_.write_back_bytes += half_bytes();
    }
  }
}

void ShadowKvStore::truncate(int slot, int tokens, StreamRef) {
  book_.check_truncate(slot, tokens);
  const int overwritten = window_begin(book_.length(slot));  // chunks before it are not in the window any more
  const int begin = window_begin(tokens);
  for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
    const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
    const std::span<const int> outliers = outliers_of(head);
    for (int chunk = begin; chunk < overwritten && chunk * geometry_.chunk < tokens; ++chunk) {
      const auto found = std::lower_bound(outliers.begin(), outliers.end(), chunk);
      if (found != outliers.end() && *found == chunk) {
        std::memcpy(window_chunk(head, chunk), outlier(head, static_cast<int>(found - outliers.begin())), geometry_.chunk_bytes);
      } else {
        keys_.rebuild(slot, head.layer, head.kv_head, chunk, window_chunk(head, chunk), 0);
        std::memcpy(window_chunk(head, chunk) + half_bytes(), host_values(head, chunk), half_bytes());
      }
    }
  }
  book_.truncate(slot, tokens);
  forget(slot, begin);
}

}  // namespace dualdecoder::cpu
