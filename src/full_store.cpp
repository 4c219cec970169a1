// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/full_store.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "dualdecoder/error.hpp"
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
      sequences_(index(options.max_sequences)) {
  for (Sequence& sequence : sequences_) sequence.appended.resize(index(options.layers));
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

FullStore::Sequence& FullStore::open_sequence(int slot, const char* what) {
  detail::require(slot >= 0 && slot < options_.max_sequences, "slot", slot, "in 0 .. max_sequences-1");
  if (!sequences_[index(slot)].open) throw InvalidArgument(std::string(what) + ": slot = " + std::to_string(slot) + ": must be open");
  return sequences_[index(slot)];
}

const FullStore::Sequence& FullStore::sealed_sequence(const StepView& view, int place) const {
  const int slot = view.slot_of[place];
  detail::require(slot >= 0 && slot < options_.max_sequences, "slot", slot, "in 0 .. max_sequences-1");
  const Sequence& sequence = sequences_[index(slot)];
  if (!sequence.sealed) throw InvalidArgument("step: slot = " + std::to_string(slot) + ": must be open and sealed");
  if (view.position[place] != sequence.length) {
    throw InvalidArgument("position = " + std::to_string(view.position[place]) + " of slot " + std::to_string(slot) +
                          ": must be its committed length " + std::to_string(sequence.length));
  }
  return sequence;
}

std::byte* FullStore::block_of(const Sequence& sequence, Layer layer, int kv_head, int block) const noexcept {
  const std::size_t list = index(layer) * index(options_.kv_heads) + index(kv_head);
  const std::size_t bytes = 2 * layout_.chunk * layout_.dim * size_of(options_.kv_type);
  return sequence.data.data() + (list * index(blocks_of(sequence.capacity)) + index(block)) * bytes;
}

void FullStore::write(const Sequence& sequence, Layer layer, int kv_head, int position, const ConstTensor& keys, const ConstTensor& values,
                      std::size_t first) const {
  float row[512];
  std::byte* block = block_of(sequence, layer, kv_head, position / kBlock);
  const std::size_t target = index(position % kBlock) * layout_.dim;
  read_elements(keys, first, layout_.dim, row);
  write_elements(row, layout_.dim, block, target, layout_.bf16);
  read_elements(values, first, layout_.dim, row);
  write_elements(row, layout_.dim, block, layout_.chunk * layout_.dim + target, layout_.bf16);
}

void FullStore::open(int slot, int capacity_tokens, StreamRef stream) {
  detail::require(slot >= 0 && slot < options_.max_sequences, "slot", slot, "in 0 .. max_sequences-1");
  detail::require(capacity_tokens >= 1 && capacity_tokens <= options_.max_context, "capacity_tokens", capacity_tokens,
                  "in 1 .. max_context");
  Sequence& sequence = sequences_[index(slot)];
  if (sequence.open) throw InvalidArgument("open: slot = " + std::to_string(slot) + ": must be closed");
  sequence.data = Buffer(*resources_.device, sequence_bytes(options_, capacity_tokens), stream);
  sequence.open = true;
  sequence.sealed = false;
  sequence.capacity = capacity_tokens;
  sequence.length = 0;
  std::fill(sequence.appended.begin(), sequence.appended.end(), 0);
}

void FullStore::append(Layer layer, int slot, const KvBlock& block, ConstTensor, StreamRef) {
  Sequence& sequence = open_sequence(slot, "append");
  detail::require(layer >= 0 && layer < options_.layers, "layer", layer, "in 0 .. layers-1");
  if (sequence.sealed) throw InvalidArgument("append: slot = " + std::to_string(slot) + ": must not be sealed yet");
  const int tokens = static_cast<int>(block.keys.dim(0));
  int& appended = sequence.appended[index(layer)];
  if (tokens > sequence.capacity - appended) {
    throw InvalidArgument("append: " + std::to_string(appended) + " + " + std::to_string(tokens) +
                          " tokens: must be at most the capacity of " + std::to_string(sequence.capacity));
  }
  resources_.threads->parallel_for(options_.kv_heads, [&](int kv_head) {
    for (int t = 0; t < tokens; ++t) {
      const std::size_t first = (index(t) * index(options_.kv_heads) + index(kv_head)) * layout_.dim;
      write(sequence, layer, kv_head, appended + t, block.keys, block.values, first);
    }
  });
  appended += tokens;
}

void FullStore::seal(int slot, StreamRef) {
  Sequence& sequence = open_sequence(slot, "seal");
  if (sequence.sealed) throw InvalidArgument("seal: slot = " + std::to_string(slot) + ": must not be sealed yet");
  const int length = sequence.appended.front();
  for (Layer layer = 0; layer < options_.layers; ++layer) {
    if (sequence.appended[index(layer)] != length || length == 0) {
      throw InvalidArgument("seal: layer " + std::to_string(layer) + " holds " + std::to_string(sequence.appended[index(layer)]) +
                            " tokens: must be as many as layer 0, at least 1");
    }
  }
  sequence.length = length;
  sequence.sealed = true;
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
    const Sequence& sequence = sealed_sequence(view, place);
    const int position = row_position(view.mode[place], number, view.position[place]);
    for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const std::size_t list = index(row) * index(kv_heads) + index(kv_head);
      write(sequence, layer, kv_head, position, rows.keys, rows.values, list * layout_.dim);
      float* scaled = queries_ + list * width;
      read_elements(rows.queries, list * width, width, scaled);
      for (std::size_t d = 0; d < width; ++d) scaled[d] *= scale;
      AttentionJob job;
      job.queries = scaled;
      job.segments = segments_ + list * index(blocks_of(options_.max_context));
      for (int block = 0; block * kBlock <= position; ++block) {
        job.segments[job.segment_count++] = {block_of(sequence, layer, kv_head, block), std::min(kBlock, position + 1 - block * kBlock)};
      }
      job.out = result + list * width;
      jobs_.push_back(job);
    }
  }
  runner_.run(jobs_.data(), static_cast<int>(jobs_.size()));
}

void FullStore::commit(const StepView& view, const TransferList& write_back, StreamRef) {
  *write_back.count = 0;
  for (int place = 0; place < view.sequences; ++place) {
    if (!row_is_live(view.mode[place], 0)) continue;
    const Sequence& sequence = sealed_sequence(view, place);
    if (sequence.length >= sequence.capacity) {
      throw InvalidArgument("commit: slot " + std::to_string(view.slot_of[place]) + " is at its capacity of " +
                            std::to_string(sequence.capacity) + " tokens");
    }
  }
  for (int place = 0; place < view.sequences; ++place) {
    if (row_is_live(view.mode[place], 0)) ++sequences_[index(view.slot_of[place])].length;
  }
}

void FullStore::truncate(int slot, int tokens, StreamRef) {
  Sequence& sequence = open_sequence(slot, "truncate");
  if (!sequence.sealed) throw InvalidArgument("truncate: slot = " + std::to_string(slot) + ": must be sealed");
  if (tokens < 1 || tokens > sequence.length) {
    throw InvalidArgument("truncate: tokens = " + std::to_string(tokens) + ": must be in 1 .. " + std::to_string(sequence.length));
  }
  sequence.length = tokens;
}

void FullStore::close(int slot, StreamRef) noexcept {
  if (slot < 0 || slot >= options_.max_sequences) return;
  Sequence& sequence = sequences_[index(slot)];
  sequence.open = false;
  sequence.sealed = false;
  sequence.data = Buffer();
}

}  // namespace dualdecoder::cpu
