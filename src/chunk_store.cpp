// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/chunk_store.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "src/planned_pieces.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr int kMostTogether = 4;  // chunks whose values have one mean
constexpr float kLowest = -std::numeric_limits<float>::infinity();

AttentionRunner::Limits runner_limits(const StoreOptions& options, const ChunkGeometry& geometry, const StoreResources& resources) {
  const int exact_chunks = geometry.sink_chunks + geometry.selected_chunks + geometry.window_chunks;
  return {.jobs = options.max_sequences * options.rows_per_sequence * options.kv_heads,
          .group = geometry.group,
          .tokens = exact_chunks * geometry.chunk,
          .chunks = options.selection.tail_estimate ? geometry.max_chunks : 0,
          .threads = resources.thread_count};
}

}  // namespace

ChunkStore::ChunkStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options),
      resources_(resources),
      geometry_(options),
      kernels_(attention_kernels(resources.isa)),
      runner_(runner_limits(options, geometry_, resources), geometry_.layout(), *resources.threads, resources.isa),
      predictions_(head_count(), index(geometry_.selected_chunks)),
      book_(options),
      sequences_(index(options.max_sequences)),
      unscored_(std::make_unique<std::atomic<int>[]>(index(options.max_sequences * options.kv_heads))),
      segment_capacity_(geometry_.sink_chunks + geometry_.selected_chunks + geometry_.window_chunks) {
  for (Sequence& sequence : sequences_) sequence.kept_queries.resize(index(options.layers));
  jobs_.reserve(index(options.max_sequences * options.rows_per_sequence * options.kv_heads));
}

void ChunkStore::carve(Carver& carver, MemoryPlan& plan) {
  const std::size_t heads = head_count();
  const std::size_t chunks = index(geometry_.max_chunks);
  const std::size_t value_groups = index(geometry_.value_groups);
  const std::size_t dim = index(geometry_.dim);
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  const std::size_t kv_heads = index(options_.kv_heads);
  const std::size_t threads = index(resources_.thread_count);
  const std::size_t group = index(geometry_.group);
  PlannedPieces pieces(carver, plan);
  sinks_ = carver.take<std::byte>(heads * index(geometry_.sink_chunks) * geometry_.chunk_bytes);
  window_ = carver.take<std::byte>(heads * index(geometry_.window_chunks) * geometry_.chunk_bytes);
  pieces.enter("sinks and local window");
  key_means_ = carver.take<std::int8_t>(heads * chunks * dim);
  key_scales_ = carver.take<float>(heads * chunks);
  value_means_ = carver.take<std::uint8_t>(heads * value_groups * (dim / 2));
  value_scales_ = carver.take<float>(heads * value_groups);
  pieces.enter("summaries");
  bias_ = carver.take<float>(index(options_.max_sequences) * index(options_.layers) * index(options_.heads));
  predictions_.carve(carver);
  pieces.enter("tables of chunks");
  scores_ = carver.take<float>(2 * rows * kv_heads * group * chunks);
  queries_ = carver.take<float>(rows * index(options_.heads) * dim);
  shifts_ = carver.take<float>(rows * index(options_.heads));
  segments_ = carver.take<Segment>(rows * kv_heads * index(segment_capacity_));
  exact_ = carver.take<int>(rows * kv_heads * index(geometry_.selected_chunks));
  worker_rank_ = carver.take<float>(threads * chunks);
  worker_keys_ = carver.take<int>(threads * padded_chunks());
  worker_row_ = carver.take<float>(threads * dim * group);
  worker_scores_ = carver.take<float>(threads * index(kQueryBlock) * group * chunks);
  runner_.carve(carver);
  pieces.enter("attention work space");
}

MemoryPlan ChunkStore::plan() const {
  MemoryPlan plan = device_plan_;
  plan.add("calibration queries of one prefill", MemoryKind::device, calibration_bytes(options_));
  plan.add("keys and values", MemoryKind::pinned, index(options_.max_sequences) * sequence_bytes(options_, options_.max_context));
  return plan;
}

void ChunkStore::initialise() {
  predictions_.forget(0, head_count());
  std::fill_n(bias_, index(options_.max_sequences) * index(options_.layers) * index(options_.heads), 0.0F);
}

std::byte* ChunkStore::host_chunk(const Head& head, int chunk) const noexcept {
  const std::size_t chunks = index((book_.capacity(head.slot) + geometry_.chunk - 1) / geometry_.chunk);
  const std::size_t list = index(head.layer) * index(options_.kv_heads) + index(head.kv_head);
  return sequences_[index(head.slot)].host.data() + (list * chunks + index(chunk)) * geometry_.chunk_bytes;
}

std::byte* ChunkStore::near_chunk(const Head& head, int chunk) const noexcept {
  const std::size_t list = head_index(head);
  if (chunk < geometry_.sink_chunks) {
    return sinks_ + (list * index(geometry_.sink_chunks) + index(chunk)) * geometry_.chunk_bytes;
  }
  return window_ + (list * index(geometry_.window_chunks) + index(chunk % geometry_.window_chunks)) * geometry_.chunk_bytes;
}

ChunkStore::Range ChunkStore::range_of(int, int length) const noexcept {
  const int end = geometry_.window_begin(length, options_.selection.local_tokens);
  return {geometry_.sink_chunks, end - geometry_.sink_chunks};
}

template <class At>
void ChunkStore::summarise_chunk(const Head& head, int chunk, int worker, const At& at) {
  if (chunk >= geometry_.max_chunks) return;
  const std::size_t place = head_index(head) * index(geometry_.max_chunks) + index(chunk);
  summarise_keys(at(chunk), geometry_.layout(), worker_mean(worker), {key_means_ + place * index(geometry_.dim), key_scales_ + place});
  summarise_group(head, chunk, worker, at);
}

template <class At>
void ChunkStore::summarise_group(const Head& head, int chunk, int worker, const At& at) {
  const void* chunks[kMostTogether];
  std::size_t count = 0;
  for (int j = chunk - chunk % geometry_.value_group; j <= chunk; ++j) chunks[count++] = at(j);
  const std::size_t place = head_index(head) * index(geometry_.value_groups) + index(chunk / geometry_.value_group);
  summarise_values({chunks, count}, geometry_.layout(), worker_mean(worker),
                   {value_means_ + place * index(geometry_.dim / 2), value_scales_ + place});
}

float* ChunkStore::scores_of(Layer layer, int row, int kv_head) const noexcept {
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  const std::size_t list = (index(layer & 1) * rows + index(row)) * index(options_.kv_heads) + index(kv_head);
  return scores_ + list * index(geometry_.group) * index(geometry_.max_chunks);
}

std::size_t ChunkStore::sequence_bytes(const StoreOptions& options, int tokens) {
  const ChunkGeometry geometry(options);
  const std::size_t chunks = index((tokens + geometry.chunk - 1) / geometry.chunk);
  return index(options.layers) * index(options.kv_heads) * chunks * geometry.chunk_bytes;
}

std::size_t ChunkStore::calibration_bytes(const StoreOptions& options) {
  return index(options.layers) * index(kCalibrationQueries) * index(options.heads) * index(options.head_dim) * sizeof(float);
}

void ChunkStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  Buffer host(*resources_.host, sequence_bytes(options_, capacity_tokens), stream);
  Buffer calibration(*resources_.device, calibration_bytes(options_), stream);
  Sequence& sequence = sequences_[index(slot)];
  sequence.host = std::move(host);
  sequence.calibration = std::move(calibration);
  std::fill(sequence.kept_queries.begin(), sequence.kept_queries.end(), 0);
  book_.open(slot, capacity_tokens);
  forget_predictions(slot);
  forget(slot, 0);
}

void ChunkStore::close(int slot, StreamRef) noexcept {
  if (!book_.close(slot)) return;
  sequences_[index(slot)].host = Buffer();
  sequences_[index(slot)].calibration = Buffer();
}

void ChunkStore::keep_queries(Sequence& sequence, Layer layer, const ConstTensor& queries) {
  const std::size_t row = index(options_.heads) * index(geometry_.dim);
  auto* ring = reinterpret_cast<float*>(sequence.calibration.data()) + index(layer) * index(kCalibrationQueries) * row;
  for (std::int64_t r = 0; r < queries.dim(0); ++r) {
    int& kept = sequence.kept_queries[index(layer)];
    read_elements(queries, static_cast<std::size_t>(r) * row, row, ring + index(kept % kCalibrationQueries) * row);
    ++kept;
  }
}

void ChunkStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor last_queries, StreamRef) {
  const int tokens = static_cast<int>(block.keys.dim(0));
  const int first = book_.check_append(layer, slot, tokens);
  const int end = first + tokens;
  const int chunk = geometry_.chunk;
  const int chunk_begin = first / chunk;
  const int chunk_end = (end + chunk - 1) / chunk;
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  const int near_begin = std::max(0, (end - 1) / chunk - geometry_.window_chunks + 1);
  resources_.threads->parallel_for(options_.kv_heads, [&](int kv_head, int worker) {
    const Head head{slot, layer, kv_head};
    float* row = worker_row_ + index(worker) * dim * index(geometry_.group);
    for (int j = chunk_begin; j < chunk_end; ++j) {
      std::byte* data = host_chunk(head, j);
      for (int position = std::max(first, j * chunk); position < std::min(end, (j + 1) * chunk); ++position) {
        const std::size_t source = (index(position - first) * index(options_.kv_heads) + index(kv_head)) * dim;
        const std::size_t target = index(position - j * chunk) * dim;
        read_elements(block.keys, source, dim, row);
        write_elements(row, dim, data, target, bf16);
        read_elements(block.values, source, dim, row);
        write_elements(row, dim, data, index(chunk) * dim + target, bf16);
      }
      if ((j + 1) * chunk <= end) summarise_chunk(head, j, worker, [&](int of) { return host_chunk(head, of); });
      if (j < geometry_.sink_chunks || j >= near_begin) std::memcpy(near_chunk(head, j), data, geometry_.chunk_bytes);
    }
  });
  if (last_queries) keep_queries(sequences_[index(slot)], layer, last_queries);
  book_.append(layer, slot, tokens);
}

int ChunkStore::choose(const float* scores, int count, int capacity, int worker, int* chunks, float* shares) const {
  if (count <= 0) return 0;
  float* rank = worker_rank_ + index(worker) * index(geometry_.max_chunks);
  int* keys = worker_keys_ + index(worker) * padded_chunks();
  kernels_.rank(scores, index(geometry_.max_chunks), geometry_.group, index(count), rank);
  const int chosen = static_cast<int>(kernels_.choose(rank, index(count), index(capacity), keys, chunks));
  for (int i = 0; i < chosen; ++i) {
    shares[i] = std::exp(rank[chunks[i]]);
    chunks[i] += geometry_.sink_chunks;
  }
  return chosen;
}

void ChunkStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef) {
  const int kv_heads = options_.kv_heads;
  const std::size_t dim = index(geometry_.dim);
  const std::size_t width = index(geometry_.group) * dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(geometry_.dim));
  for (int place = 0; place < view.sequences; ++place) {
    if (view.mode[place] != RowMode::idle) book_.check_place(view, place);
  }
  int parts = 0;  // of the longest sequence
  for (int place = 0; place < view.sequences; ++place) {
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      for (int row = place * view.rows_per_sequence; row < (place + 1) * view.rows_per_sequence; ++row) by_row.count_of(row, kv_head) = 0;
    }
    if (view.mode[place] == RowMode::idle) continue;
    const int count = range_of(view.slot_of[place], view.position[place]).count;
    const int own = count <= 0 ? 0 : (count + kScorePart - 1) / kScorePart;
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) unscored_[index(place * kv_heads + kv_head)].store(own, std::memory_order_relaxed);
    parts = std::max(parts, own);
  }
  const int lists = view.sequences * kv_heads;
  resources_.threads->parallel_for(lists * parts, [&](int job, int worker) {
    const int list = job % lists;
    const int place = list / kv_heads;
    const Head head{view.slot_of[place], layer, list % kv_heads};
    if (view.mode[place] == RowMode::idle) return;
    const Range range = range_of(head.slot, view.position[place]);
    const int first = job / lists * kScorePart;
    if (first >= range.count) return;
    // one read of the summaries serves every row of the sequence and the whole query group
    for (int number = 0; number < view.rows_per_sequence; ++number) {
      if (!row_is_live(view.mode[place], number)) continue;
      const int row = place * view.rows_per_sequence + number;
      float* scaled = worker_row_ + index(worker) * width;
      read_elements(queries, (index(row) * index(kv_heads) + index(head.kv_head)) * width, width, scaled);
      for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
      const std::size_t at = head_index(head) * index(geometry_.max_chunks) + index(range.first + first);
      kernels_.summary_scores(scaled, geometry_.group, key_means_ + at * dim, key_scales_ + at,
                              index(std::min(kScorePart, range.count - first)), dim, scores_of(layer, row, head.kv_head) + first,
                              index(geometry_.max_chunks));
    }
    if (unscored_[index(list)].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int number = 0; number < view.rows_per_sequence; ++number) {
      if (!row_is_live(view.mode[place], number)) continue;
      const int row = place * view.rows_per_sequence + number;
      by_row.count_of(row, head.kv_head) =
          choose(scores_of(layer, row, head.kv_head), range.count, std::min(by_row.capacity, geometry_.selected_chunks), worker,
                 by_row.chunks_of(row, head.kv_head), by_row.scores_of(row, head.kv_head));
    }
  });
}

void ChunkStore::write_row(const Head& head, int position, const RowBlock& rows, int row) {
  const std::size_t dim = index(geometry_.dim);
  const bool bf16 = options_.kv_type == DataType::bf16;
  const std::size_t source = (index(row) * index(options_.kv_heads) + index(head.kv_head)) * dim;
  const std::size_t target = index(position % geometry_.chunk) * dim;
  std::byte* data = near_chunk(head, position / geometry_.chunk);
  float values[512];
  read_elements(rows.keys, source, dim, values);
  write_elements(values, dim, data, target, bf16);
  read_elements(rows.values, source, dim, values);
  write_elements(values, dim, data, index(geometry_.chunk) * dim + target, bf16);
}

int ChunkStore::gather_segments(const Head& head, int length, int end, std::span<const int> chosen, Segment* segments, int* exact,
                                int* exact_count) const {
  const int chunk = geometry_.chunk;
  int count = 0;
  const auto add_near = [&](int j) { segments[count++] = {near_chunk(head, j), std::min(chunk, end - j * chunk)}; };
  const Range range = range_of(head.slot, length);
  for (int j = 0; j < geometry_.sink_chunks && j * chunk < end; ++j) add_near(j);
  *exact_count = 0;
  for (int j : chosen) {
    const std::byte* data = resident(head, j);
    if (data == nullptr) continue;
    segments[count++] = {data, chunk};
    exact[(*exact_count)++] = j - range.first;
  }
  for (int j = range.first + range.count; j * chunk < end; ++j) add_near(j);
  return count;
}

void ChunkStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection& by_row, Tensor out, StreamRef) {
  const int kv_heads = options_.kv_heads;
  const int per_sequence = view.rows_per_sequence;
  const int group = geometry_.group;
  const std::size_t dim = index(geometry_.dim);
  const std::size_t width = index(group) * dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(geometry_.dim));
  auto* result = out.as<float>();
  jobs_.clear();
  for (int row = 0; row < view.rows(); ++row) {
    const int place = row / per_sequence;
    const RowMode mode = view.mode[place];
    if (!row_is_live(mode, row % per_sequence)) {
      std::fill_n(result + index(row) * index(kv_heads) * width, index(kv_heads) * width, 0.0F);
      continue;
    }
    book_.check_place(view, place);
    const int slot = view.slot_of[place];
    const int length = view.position[place];
    const int position = row_position(mode, row % per_sequence, length);
    const bool follows_row0 = mode == RowMode::dual && row % per_sequence == 1 && options_.row1_set == Row1Set::row0;
    const int chooser = follows_row0 ? row - 1 : row;
    const float* bias = bias_of(slot, layer);
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const Head head{slot, layer, kv_head};
      write_row(head, position, rows, row);
      const std::size_t list = index(row) * index(kv_heads) + index(kv_head);
      float* scaled = queries_ + list * width;
      read_elements(rows.queries, list * width, width, scaled);
      for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
      AttentionJob job;
      job.queries = scaled;
      job.segments = segments_ + list * index(segment_capacity_);
      int* exact = exact_ + list * index(geometry_.selected_chunks);
      const std::span<const int> chosen(by_row.chunks_of(chooser, kv_head), index(by_row.count_of(chooser, kv_head)));
      job.segment_count = gather_segments(head, length, position + 1, chosen, job.segments, exact, &job.exact_count);
      job.exact = exact;
      job.out = result + list * width;
      const Range range = range_of(slot, length);
      if (options_.selection.tail_estimate && range.count > job.exact_count) {
        float* shifts = shifts_ + list * index(group);
        for (int g = 0; g < group; ++g) {
          shifts[g] = std::log(static_cast<float>(geometry_.chunk)) + options_.selection.bias_scale * bias[kv_head * group + g];
        }
        const std::size_t at = head_index(head) * index(geometry_.value_groups) + index(range.first / geometry_.value_group);
        job.tail = {.scores = scores_of(layer, row, kv_head),
                    .stride = index(geometry_.max_chunks),
                    .value_means = value_means_ + at * (dim / 2),
                    .value_scales = value_scales_ + at,
                    .value_group = geometry_.value_group,
                    .cut_off = range.first % geometry_.value_group,
                    .chunks = range.count,
                    .shifts = shifts};
      }
      jobs_.push_back(job);
    }
  }
  runner_.run(jobs_.data(), static_cast<int>(jobs_.size()));
}

void ChunkStore::commit(const StepView& view, const TransferList& write_back, StreamRef) {
  *write_back.count = 0;
  book_.check_commit(view);
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const int slot = view.slot_of[place];
    const Range before = range_of(slot, book_.length(slot));
    const int length = book_.commit(slot);
    const Range after = range_of(slot, length);
    for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
      const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
      if (length % geometry_.chunk == 0) {
        const int chunk = length / geometry_.chunk - 1;
        const std::byte* data = near_chunk(head, chunk);
        summarise_chunk(head, chunk, 0, [&](int of) { return near_chunk(head, of); });
        write_back.items[(*write_back.count)++] = {data, host_chunk(head, chunk), static_cast<std::uint32_t>(geometry_.chunk_bytes), 0.0F};
        statistics_.write_back_bytes += geometry_.chunk_bytes;
      }
      for (int chunk = before.first + before.count; chunk < after.first + after.count; ++chunk) {
        leave_window(head, chunk, near_chunk(head, chunk));
      }
    }
  }
  end_pass();
}

void ChunkStore::truncate(int slot, int tokens, StreamRef) {
  book_.check_truncate(slot, tokens);
  const int chunk = geometry_.chunk;
  const int whole_before = book_.length(slot) / chunk;  // chunks that the host holds
  const Range before = range_of(slot, book_.length(slot));
  const int window_before = before.first + before.count;
  book_.truncate(slot, tokens);
  const Range range = range_of(slot, tokens);
  const int whole = tokens / chunk;
  const int cut_group = whole - whole % geometry_.value_group;  // its first chunk; commit finds its values in the window
  const int restored = std::max(geometry_.sink_chunks, std::min(range.first + range.count, cut_group));
  for (int list = 0; list < options_.layers * options_.kv_heads; ++list) {
    const Head head{slot, list / options_.kv_heads, list % options_.kv_heads};
    for (int j = restored; j * chunk < tokens; ++j) {
      // what the window had overwritten comes back from the host
      if (j < window_before && j < whole_before) std::memcpy(near_chunk(head, j), host_chunk(head, j), geometry_.chunk_bytes);
    }
    // its mean is again that of the chunks which are left
    if (whole > cut_group) summarise_group(head, whole - 1, 0, [&](int of) { return host_chunk(head, of); });
  }
  forget(slot, range.first + range.count);
  forget_predictions(slot);
}

void ChunkStore::forget_predictions(int slot) {
  predictions_.forget(head_index({slot, 0, 0}), index(options_.layers) * index(options_.kv_heads));
}

void ChunkStore::remember_prediction(const Head& head, std::span<const int> predicted) {
  const Range range = range_of(head.slot, book_.length(head.slot));
  predictions_.remember(head_index(head), predicted, range.first + range.count);
}

void ChunkStore::seal(int slot, StreamRef) {
  const int length = book_.check_seal(slot);
  resources_.threads->parallel_for(options_.layers * options_.kv_heads, [&](int list, int worker) {
    calibrate({slot, list / options_.kv_heads, list % options_.kv_heads}, length, worker);
  });
  sequences_[index(slot)].calibration = Buffer();
  book_.seal(slot);
}

/// docs/concepts.md, "Tail estimate": per query head the mean over the last prompt queries of log(true unselected mass / estimated), each
/// kept in -3 .. 6. The last query also names the chunks that the store starts with.
void ChunkStore::calibrate(const Head& head, int length, int worker) {
  const auto [slot, layer, kv_head] = head;
  const Sequence& sequence = sequences_[index(slot)];
  const Range range = range_of(slot, length);
  const int group = geometry_.group;
  float* bias = bias_of(slot, layer) + kv_head * group;
  std::fill_n(bias, group, 0.0F);
  const int kept = std::min(sequence.kept_queries[index(layer)], kCalibrationQueries);
  if (range.count <= 0 || kept == 0) return;
  const std::size_t dim = index(geometry_.dim);
  const std::size_t stride = index(geometry_.max_chunks);
  const float scale = 1.0F / std::sqrt(static_cast<float>(geometry_.dim));
  float* scores = worker_scores_ + index(worker) * index(kQueryBlock) * index(group) * stride;
  std::vector<float> query(index(group) * dim);
  std::vector<int> chosen(index(geometry_.selected_chunks));
  std::vector<float> shares(index(geometry_.selected_chunks));
  std::vector<char> is_chosen(index(range.count));
  std::vector<float> token_scores(index(group) * index(geometry_.chunk));
  std::vector<double> sums(index(group), 0.0);
  std::vector<double> exact_mass(index(group));
  std::vector<double> estimated_mass(index(group));
  std::vector<float> largest(index(group));
  int used = 0;
  const std::size_t at = head_index(head) * stride + index(range.first);
  const auto* queries =
      reinterpret_cast<const float*>(sequence.calibration.data()) + index(layer) * index(kCalibrationQueries) * index(options_.heads) * dim;
  for (int age = kept; age-- > 0;) {  // oldest first; the newest names the warm set
    const int number = sequence.kept_queries[index(layer)] - 1 - age;
    const int position = length - 1 - age;
    const bool newest = age == 0;
    const bool sees_all = position >= (range.first + range.count) * geometry_.chunk - 1;
    if (!newest && (!sees_all || !options_.selection.tail_estimate || !options_.selection.calibrate_tail)) continue;
    const float* from = queries + index(number % kCalibrationQueries) * index(options_.heads) * dim + index(kv_head * group) * dim;
    for (std::size_t d = 0; d < query.size(); ++d) query[d] = from[d] * scale;
    kernels_.summary_scores(query.data(), group, key_means_ + at * dim, key_scales_ + at, index(range.count), dim, scores, stride);
    const int count = choose(scores, range.count, geometry_.selected_chunks, worker, chosen.data(), shares.data());
    if (newest) warm(head, {chosen.data(), index(count)});
    if (count == range.count || !sees_all || !options_.selection.tail_estimate || !options_.selection.calibrate_tail) continue;
    std::fill(is_chosen.begin(), is_chosen.end(), char{0});
    for (int c = 0; c < count; ++c) is_chosen[index(chosen[index(c)] - range.first)] = 1;
    std::fill(exact_mass.begin(), exact_mass.end(), 0.0);
    std::fill(estimated_mass.begin(), estimated_mass.end(), 0.0);
    // masses are relative to exp of the largest estimate, which keeps both in range
    for (int g = 0; g < group; ++g) {
      const float* row = scores + index(g) * stride;
      largest[index(g)] = kLowest;
      for (int c = 0; c < range.count; ++c) {
        if (is_chosen[index(c)] == 0) largest[index(g)] = std::max(largest[index(g)], row[c]);
      }
    }
    for (int c = 0; c < range.count; ++c) {
      if (is_chosen[index(c)] != 0) continue;
      const Segment segment{host_chunk(head, range.first + c), geometry_.chunk};
      kernels_.key_scores(query.data(), group, &segment, 1, geometry_.layout(), token_scores.data(), index(geometry_.chunk));
      for (int g = 0; g < group; ++g) {
        for (int t = 0; t < geometry_.chunk; ++t) {
          exact_mass[index(g)] += std::exp(token_scores[index(g * geometry_.chunk + t)] - largest[index(g)]);
        }
        estimated_mass[index(g)] +=
            static_cast<float>(geometry_.chunk) * std::exp(scores[index(g) * stride + index(c)] - largest[index(g)]);
      }
    }
    for (int g = 0; g < group; ++g) {
      sums[index(g)] += std::clamp(std::log(exact_mass[index(g)] / estimated_mass[index(g)]), -3.0, 6.0);
    }
    ++used;
  }
  if (used == 0) return;
  for (int g = 0; g < group; ++g) bias[g] = static_cast<float>(sums[index(g)] / used);
}

}  // namespace dualdecoder::cpu
