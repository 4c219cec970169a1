// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/full_store.hpp"

#include <algorithm>
#include <cmath>

#include "src/summary.hpp"

namespace dualdecoder::cpu {

FullStore::FullStore(const StoreOptions& options, const StoreResources& resources)
    : options_(options),
      resources_(resources),
      layout_{index(kBlock), index(options.head_dim), options.kv_type == DataType::bf16},
      group_(options.heads / options.kv_heads),
      runner_({.jobs = options.max_sequences * options.rows_per_sequence * options.kv_heads,
               .group = group_,
               .tokens = blocks_of(options.max_context) * kBlock,
               .chunks = 0,
               .threads = resources.thread_count},
              layout_, *resources.threads, resources.isa),
      book_(options),
      data_(index(options.max_sequences)) {
  jobs_.reserve(index(options.max_sequences * options.rows_per_sequence * options.kv_heads));
  Carver counting;
  carve(counting);
  device_bytes_ = counting.bytes();
  if (resources_.device == nullptr) return;
  device_ = Buffer(*resources_.device, counting.bytes(), resources_.stream);
  Carver placing(device_.data());
  carve(placing);
}

void FullStore::carve(Carver& carver) {
  const std::size_t rows = index(options_.max_sequences * options_.rows_per_sequence);
  queries_ = carver.take<float>(rows * index(options_.heads) * layout_.dim);
  segments_ = carver.take<Segment>(rows * index(options_.kv_heads) * index(blocks_of(options_.max_context)));
  runner_.carve(carver);
}

std::size_t FullStore::sequence_bytes(const StoreOptions& options, int tokens) {
  const std::size_t block = 2 * index(kBlock) * index(options.head_dim) * size_of(options.kv_type);
  return index(options.layers) * index(options.kv_heads) * index(blocks_of(tokens)) * block;
}

std::byte* FullStore::block_of(int slot, Layer layer, int kv_head, int block) const noexcept {
  const std::size_t list = index(layer) * index(options_.kv_heads) + index(kv_head);
  const std::size_t bytes = 2 * layout_.chunk * layout_.dim * size_of(options_.kv_type);
  return data_[index(slot)].data() + (list * index(blocks_of(book_.capacity(slot))) + index(block)) * bytes;
}

void FullStore::write(int slot, Layer layer, int kv_head, int position, const ConstTensor& keys, const ConstTensor& values,
                      std::size_t first) const {
  float row[512];
  std::byte* block = block_of(slot, layer, kv_head, position / kBlock);
  const std::size_t target = index(position % kBlock) * layout_.dim;
  read_elements(keys, first, layout_.dim, row);
  write_elements(row, layout_.dim, block, target, layout_.bf16);
  read_elements(values, first, layout_.dim, row);
  write_elements(row, layout_.dim, block, layout_.chunk * layout_.dim + target, layout_.bf16);
}

void FullStore::open(int slot, int capacity_tokens, StreamRef stream) {
  book_.check_open(slot, capacity_tokens);
  data_[index(slot)] = Buffer(*resources_.device, sequence_bytes(options_, capacity_tokens), stream);
  book_.open(slot, capacity_tokens);
}

void FullStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor, StreamRef) {
  const int tokens = static_cast<int>(block.keys.dim(0));
  const int appended = book_.check_append(layer, slot, tokens);
  resources_.threads->parallel_for(options_.kv_heads, [&](int kv_head) {
    for (int t = 0; t < tokens; ++t) {
      const std::size_t first = (index(t) * index(options_.kv_heads) + index(kv_head)) * layout_.dim;
      write(slot, layer, kv_head, appended + t, block.keys, block.values, first);
    }
  });
  book_.append(layer, slot, tokens);
}

void FullStore::seal(int slot, StreamRef) {
  book_.check_seal(slot);
  book_.seal(slot);
}

void FullStore::select(Layer, const StepView& view, ConstTensor, const Selection& by_row, StreamRef) {
  std::fill_n(by_row.count, index(view.rows()) * index(by_row.kv_heads), 0);
}

void FullStore::resolve_needed(Layer, const StepView&, const Selection&, const TransferList& urgent, StreamRef) { *urgent.count = 0; }

Layer FullStore::resolve_predicted(Layer layer, const StepView&, const Prediction&, const TransferList& prefetch, StreamRef) {
  *prefetch.count = 0;
  return layer;
}

void FullStore::attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef) {
  const int kv_heads = options_.kv_heads;
  const std::size_t width = index(group_) * layout_.dim;
  const float scale = 1.0F / std::sqrt(static_cast<float>(options_.head_dim));
  auto* result = out.as<float>();
  jobs_.clear();
  for (int row = 0; row < view.rows(); ++row) {
    const int place = row / view.rows_per_sequence;
    const int number = row % view.rows_per_sequence;
    if (!row_is_live(view.mode[place], number)) {
      std::fill_n(result + index(row) * index(kv_heads) * width, index(kv_heads) * width, 0.0F);
      continue;
    }
    book_.check_place(view, place);
    const int slot = view.slot_of[place];
    const int position = row_position(view.mode[place], number, view.position[place]);
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const std::size_t list = index(row) * index(kv_heads) + index(kv_head);
      write(slot, layer, kv_head, position, rows.keys, rows.values, list * layout_.dim);
      float* scaled = queries_ + list * width;
      read_elements(rows.queries, list * width, width, scaled);
      for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
      AttentionJob job;
      job.queries = scaled;
      job.segments = segments_ + list * index(blocks_of(options_.max_context));
      for (int block = 0; block * kBlock <= position; ++block) {
        job.segments[job.segment_count++] = {block_of(slot, layer, kv_head, block), std::min(kBlock, position + 1 - block * kBlock)};
      }
      job.out = result + list * width;
      jobs_.push_back(job);
    }
  }
  runner_.run(jobs_.data(), static_cast<int>(jobs_.size()));
}

void FullStore::commit(const StepView& view, const TransferList& write_back, StreamRef) {
  *write_back.count = 0;
  book_.check_commit(view);
  for (int place = 0; place < view.sequences; ++place) {
    if (row_is_live(view.mode[place], 0)) book_.commit(view.slot_of[place]);
  }
}

void FullStore::truncate(int slot, int tokens, StreamRef) {
  book_.check_truncate(slot, tokens);
  book_.truncate(slot, tokens);
}

void FullStore::close(int slot, StreamRef) noexcept {
  if (book_.close(slot)) data_[index(slot)] = Buffer();
}

}  // namespace dualdecoder::cpu
