// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Selection and attention of SpeCacheStore. A group is widened once for all rows and query heads that read it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "src/chunk_geometry.hpp"
#include "src/specache_store.hpp"
#include "src/summary.hpp"

namespace dualdecoder::cpu {
namespace {

constexpr std::size_t padded(int count) { return (index(count) + 15) / 16 * 16; }

/// First position behind the tokens that some row of a place sees.
int end_of(const StepView& view, int place) { return row_position(view.mode[place], view.rows_per_sequence - 1, view.position[place]) + 1; }

}  // namespace

int SpeCacheStore::tile_count(int copied, int end) const noexcept {
  return (copied + kTile - 1) / kTile + (end - copied + kTile - 1) / kTile;
}

SpeCacheStore::Tile SpeCacheStore::tile_of(int copied, int end, int number) const noexcept {
  const int in_copy = (copied + kTile - 1) / kTile;
  if (number < in_copy) return {number * kTile, std::min(copied, (number + 1) * kTile), true};
  const int first = copied + (number - in_copy) * kTile;
  return {first, std::min(end, first + kTile), false};
}

float* SpeCacheStore::scores_of(Layer layer, int row, int kv_head) const noexcept {
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  const std::size_t half = options_.selects_ahead ? index(layer & 1) : 0;
  return scores_ + ((half * rows + index(row)) * index(options_.heads) + index(kv_head * shape_.heads)) * stride_;
}

float* SpeCacheStore::queries_of(int row, int kv_head) const noexcept {
  return queries_ + (index(row) * index(options_.heads) + index(kv_head * shape_.heads)) * shape_.dim;
}

float* SpeCacheStore::results_of(int row, int kv_head, int tile) const noexcept {
  const std::size_t tiles = index(tile_count(0, options_.max_context + 2) + 1);
  const std::size_t list = index(row) * index(options_.kv_heads) + index(kv_head);
  return results_ + (list * tiles + index(tile)) * index(shape_.heads) * (shape_.dim + 2);
}

void SpeCacheStore::scale_queries(const StepView& view, const ConstTensor& queries) const {
  const std::size_t width = index(options_.heads) * shape_.dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(options_.head_dim));
  for (int row = 0; row < view.rows(); ++row) {
    if (!row_is_live(view.mode[row / view.rows_per_sequence], row % view.rows_per_sequence)) continue;
    float* scaled = queries_of(row, 0);
    read_elements(queries, index(row) * width, width, scaled);
    for (std::size_t i = 0; i < width; ++i) scaled[i] *= scale;
  }
}

int SpeCacheStore::window_segments(int slot, std::size_t list, int first, int end, Segment* segments) const noexcept {
  for (int position = first; position < end; ++position) segments[position - first] = {window_token(slot, list, position), 1};
  return std::max(0, end - first);
}

void SpeCacheStore::lay_over(int slot, std::size_t list, int position, std::size_t part, float* rows) const {
  const FetchedTokens& fetched = sequences_[index(slot)].fetched;
  const std::span<const int> tokens = fetched.tokens(list);
  auto at = static_cast<std::size_t>(std::lower_bound(tokens.begin(), tokens.end(), position) - tokens.begin());
  for (; at < tokens.size() && tokens[at] < position + shape_.tokens; ++at) {
    widen_elements(fetched_token(slot, list, fetched.slot(list, at)), part * shape_.dim, shape_.dim, shape_.bf16,
                   rows + index(tokens[at] - position) * shape_.dim);
  }
}

void SpeCacheStore::score_tile(Layer layer, const StepView& view, int place, int kv_head, const Tile& tile, bool laid, int worker) const {
  const int slot = view.slot_of[place];
  const std::size_t list = list_of(layer, kv_head);
  const auto for_rows = [&](const Segment* segments, int count, const SegmentLayout& layout, int position) {
    for (int number = 0; number < view.rows_per_sequence; ++number) {
      if (!row_is_live(view.mode[place], number)) continue;
      const int row = place * view.rows_per_sequence + number;
      attention_.key_scores(queries_of(row, kv_head), shape_.heads, segments, count, layout, scores_of(layer, row, kv_head) + position,
                            stride_);
    }
  };
  if (!tile.copied) {
    Segment* segments = worker_segments_ + index(worker) * index(kTile);
    for_rows(segments, window_segments(slot, list, tile.first, tile.end, segments), shape_.token_layout(), tile.first);
    return;
  }
  float* keys = worker_group_ + index(worker) * 2 * shape_.layout.tokens * shape_.dim;
  const Segment segment{keys, shape_.tokens};
  for (int position = tile.first; position < tile.end; position += shape_.tokens) {
    low_bit_.keys(copied_group(slot, list, position), shape_.layout, keys);
    if (laid) lay_over(slot, list, position, 0, keys);
    for_rows(&segment, 1, shape_.group_layout(), position);
  }
}

void SpeCacheStore::choose(Layer layer, const StepView& view, int place, int kv_head, const Selection& by_row, int worker) const {
  const int length = view.position[place];
  const int copied = shape_.copied(length);
  const std::size_t wanted = index(std::min(by_row.capacity, shape_.fetched));
  if (copied == 0 || wanted == 0) return;
  float* weights = worker_row_ + index(worker) * 2 * stride_;
  float* rank = weights + stride_;
  for (int number = 0; number < view.rows_per_sequence; ++number) {
    if (!row_is_live(view.mode[place], number)) continue;
    const int row = place * view.rows_per_sequence + number;
    std::fill_n(rank, index(copied), 0.0F);
    for (int head = 0; head < shape_.heads; ++head) {
      std::copy_n(scores_of(layer, row, kv_head) + index(head) * stride_, length, weights);
      float largest = -std::numeric_limits<float>::infinity();
      float sum = 0.0F;
      dense_.softmax_block(weights, index(length), padded(length), &largest, &sum, nullptr, 0);
      const float share = 1.0F / (sum * static_cast<float>(shape_.heads));
      for (std::size_t t = 0; t < index(copied); ++t) rank[t] += weights[t] * share;
    }
    int* tokens = by_row.chunks_of(row, kv_head);
    const std::size_t count = attention_.choose(rank, index(copied), wanted, worker_keys_ + index(worker) * stride_, tokens);
    for (std::size_t i = 0; i < count; ++i) by_row.scores_of(row, kv_head)[i] = rank[tokens[i]];
    by_row.count_of(row, kv_head) = static_cast<int>(count);
  }
}

void SpeCacheStore::select(Layer layer, const StepView& view, ConstTensor queries, const Selection& by_row, StreamRef) {
  // when the layer before rehearses this one, what was fetched for it may still be under way
  const bool rehearsed = selecting_ >= 0 && layer == selecting_ + 1;
  if (!rehearsed) selecting_ = layer;
  int tiles = 0;  // of the longest sequence
  for (int place = 0; place < view.sequences; ++place) {
    for (int row = place * view.rows_per_sequence; row < (place + 1) * view.rows_per_sequence; ++row) {
      for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) by_row.count_of(row, kv_head) = 0;
    }
    if (view.mode[place] == RowMode::idle) continue;
    book_.check_place(view, place);
    const int own = tile_count(shape_.copied(view.position[place]), view.position[place]);
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) unfinished_[index(place * options_.kv_heads + kv_head)] = own;
    tiles = std::max(tiles, own);
  }
  scale_queries(view, queries);
  const int lists = view.sequences * options_.kv_heads;
  resources_.threads->parallel_for(lists * tiles, [&](int job, int worker) {
    const int place = job % lists / options_.kv_heads;
    const int kv_head = job % options_.kv_heads;
    if (view.mode[place] == RowMode::idle) return;
    const int length = view.position[place];
    const int copied = shape_.copied(length);
    if (job / lists >= tile_count(copied, length)) return;
    score_tile(layer, view, place, kv_head, tile_of(copied, length, job / lists), !rehearsed && !waits(view, place), worker);
    if (unfinished_[index(job % lists)].fetch_sub(1, std::memory_order_acq_rel) == 1) choose(layer, view, place, kv_head, by_row, worker);
  });
}

/// Keeps the rows' keys and values, and scores what select could not: the rows themselves, and tokens that have been waited for.
void SpeCacheStore::begin_rows(Layer layer, const StepView& view, const RowBlock& rows, int place, int kv_head, int worker) const {
  const int slot = view.slot_of[place];
  const int length = view.position[place];
  const std::size_t list = list_of(layer, kv_head);
  const std::size_t dim = shape_.dim;
  Segment* segments = worker_segments_ + index(worker) * index(kTile);
  float* some = worker_weights_ + index(worker) * index(options_.rows_per_sequence) * index(shape_.heads) * index(kTile);
  const FetchedTokens& fetched = sequences_[index(slot)].fetched;
  const std::span<const int> waited = waits(view, place) ? fetched.tokens(list) : std::span<const int>();
  for (int number = 0; number < view.rows_per_sequence; ++number) {
    if (!row_is_live(view.mode[place], number)) continue;
    const int row = place * view.rows_per_sequence + number;
    const int position = row_position(view.mode[place], number, length);
    const std::size_t source = (index(row) * index(options_.kv_heads) + index(kv_head)) * dim;
    std::byte* token = window_token(slot, list, position);
    float values[512];
    read_elements(rows.keys, source, dim, values);
    write_elements(values, dim, token, 0, shape_.bf16);
    read_elements(rows.values, source, dim, values);
    write_elements(values, dim, token, dim, shape_.bf16);
    float* scores = scores_of(layer, row, kv_head);
    attention_.key_scores(queries_of(row, kv_head), shape_.heads, segments, window_segments(slot, list, length, position + 1, segments),
                          shape_.token_layout(), scores + length, stride_);
    for (std::size_t first = 0; first < waited.size(); first += index(kTile)) {
      const std::size_t count = std::min(waited.size() - first, index(kTile));
      for (std::size_t i = 0; i < count; ++i) segments[i] = {fetched_token(slot, list, fetched.slot(list, first + i)), 1};
      attention_.key_scores(queries_of(row, kv_head), shape_.heads, segments, static_cast<int>(count), shape_.token_layout(), some,
                            index(kTile));
      for (std::size_t head = 0; head < index(shape_.heads); ++head) {
        for (std::size_t i = 0; i < count; ++i) scores[head * stride_ + index(waited[first + i])] = some[head * index(kTile) + i];
      }
    }
  }
}

void SpeCacheStore::attend_tile(Layer layer, const StepView& view, int place, int kv_head, int number, int worker) const {
  const int slot = view.slot_of[place];
  const int length = view.position[place];
  const std::size_t list = list_of(layer, kv_head);
  const std::size_t heads = index(shape_.heads);
  const std::size_t dim = shape_.dim;
  const Tile tile = tile_of(shape_.copied(length), end_of(view, place), number);
  float* weights = worker_weights_ + index(worker) * index(options_.rows_per_sequence) * heads * index(kTile);
  // calls f(row, its weights, its tokens of the tile)
  const auto for_rows = [&](auto f) {
    for (int r = 0; r < view.rows_per_sequence; ++r) {
      if (!row_is_live(view.mode[place], r)) continue;
      const int seen = std::min(tile.end, row_position(view.mode[place], r, length) + 1) - tile.first;
      f(place * view.rows_per_sequence + r, weights + index(r) * heads * index(kTile), std::max(0, seen));
    }
  };
  for_rows([&](int row, float* of_row, int seen) {
    float* result = results_of(row, kv_head, number);
    float* largest = result + heads * dim;
    std::fill_n(result, heads * dim, 0.0F);
    std::fill_n(largest, heads, -std::numeric_limits<float>::infinity());
    std::fill_n(largest + heads, heads, 0.0F);
    if (seen == 0) return;
    for (std::size_t head = 0; head < heads; ++head) {
      float* of_head = of_row + head * index(kTile);
      std::copy_n(scores_of(layer, row, kv_head) + head * stride_ + index(tile.first), seen, of_head);
      dense_.softmax_block(of_head, index(seen), padded(seen), &largest[head], &largest[heads + head], nullptr, 0);
    }
  });
  if (!tile.copied) {
    Segment* segments = worker_segments_ + index(worker) * index(kTile);
    window_segments(slot, list, tile.first, tile.end, segments);
    for_rows([&](int row, const float* of_row, int seen) {
      attention_.add_values(of_row, index(kTile), shape_.heads, segments, seen, shape_.token_layout(), results_of(row, kv_head, number));
    });
    return;
  }
  float* group = worker_group_ + index(worker) * 2 * shape_.layout.tokens * dim;
  float* values = group + shape_.layout.tokens * dim;
  const Segment segment{group, shape_.tokens};
  for (int position = tile.first; position < tile.end; position += shape_.tokens) {
    low_bit_.values(copied_group(slot, list, position), shape_.layout, values);
    lay_over(slot, list, position, 1, values);
    for_rows([&](int row, const float* of_row, int) {
      attention_.add_values(of_row + index(position - tile.first), index(kTile), shape_.heads, &segment, 1, shape_.group_layout(),
                            results_of(row, kv_head, number));
    });
  }
}

void SpeCacheStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef) {
  selecting_ = -1;
  const std::size_t width = index(shape_.heads) * shape_.dim;
  auto* result = out.as<float>();
  int tiles = 0;
  for (int place = 0; place < view.sequences; ++place) {
    for (int number = 0; number < view.rows_per_sequence; ++number) {
      if (row_is_live(view.mode[place], number)) continue;
      const std::size_t row = index(place * view.rows_per_sequence + number);
      std::fill_n(result + row * index(options_.kv_heads) * width, index(options_.kv_heads) * width, 0.0F);
    }
    if (view.mode[place] == RowMode::idle) continue;
    book_.check_place(view, place);
    const int own = tile_count(shape_.copied(view.position[place]), end_of(view, place));
    for (int kv_head = 0; kv_head < options_.kv_heads; ++kv_head) unfinished_[index(place * options_.kv_heads + kv_head)] = own;
    tiles = std::max(tiles, own);
  }
  scale_queries(view, rows.queries);
  const int lists = view.sequences * options_.kv_heads;
  resources_.threads->parallel_for(lists, [&](int job, int worker) {
    const int place = job / options_.kv_heads;
    if (view.mode[place] != RowMode::idle) begin_rows(layer, view, rows, place, job % options_.kv_heads, worker);
  });
  resources_.threads->parallel_for(lists * tiles, [&](int job, int worker) {
    const int place = job % lists / options_.kv_heads;
    const int kv_head = job % options_.kv_heads;
    if (view.mode[place] == RowMode::idle) return;
    const int own = tile_count(shape_.copied(view.position[place]), end_of(view, place));
    if (job / lists >= own) return;
    attend_tile(layer, view, place, kv_head, job / lists, worker);
    if (unfinished_[index(job % lists)].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int number = 0; number < view.rows_per_sequence; ++number) {
      if (!row_is_live(view.mode[place], number)) continue;
      const int row = place * view.rows_per_sequence + number;
      join_parts(results_of(row, kv_head, 0), own, shape_.heads, shape_.dim, result + index(row * options_.kv_heads + kv_head) * width);
    }
  });
}

}  // namespace dualdecoder::cpu
