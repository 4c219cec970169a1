// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "dualdecoder/memory.hpp"
#include "dualdecoder/model_weights.hpp"
#include "dualdecoder/sparse_attention.hpp"

namespace dualdecoder::detail {

/// What a prefill drives, and the shape of its work. All of it outlives the prefill.
struct PrefillParts {
  Backend* backend = nullptr;
  DenseModel* dense = nullptr;
  SparseAttention* attention = nullptr;
  const ModelConfig* model = nullptr;
  DataType activation = DataType::f32;
  int block = 0;  ///< most prompt tokens of one dense call
};

/// The prefill of one prompt, layer by layer: a layer turns the hidden state of all tokens into that of the next one and leaves its keys
/// and values in the cache, so that the device holds this state and one layer's keys and values, however many layers there are. It runs in
/// blocks, and passes of other sequences may run between them.
class Prefill {
 public:
  /// Bytes of device memory that the prefill of `tokens` takes.
  static std::size_t bytes(const ModelConfig& model, DataType activation, int block, int tokens) {
    Carver counting;
    carve(counting, model, activation, std::min(block, tokens), tokens);
    return counting.bytes();
  }

  /// Takes the memory and embeds the prompt, which is not needed later. `slot` is open and empty. Throws OutOfMemory.
  Prefill(const PrefillParts& parts, int slot, std::span<const Token> prompt)
      : parts_(parts), slot_(slot), count_(static_cast<int>(prompt.size())), block_(std::min(parts.block, count_)) {
    const ModelConfig& model = *parts_.model;
    const StreamRef stream = parts_.backend->stream();
    StepKernels& kernels = parts_.backend->kernels();
    buffer_ = Buffer(parts_.backend->memory(MemoryKind::device), bytes(model, parts_.activation, block_, count_), stream);
    Carver carver(buffer_.data());
    work_ = carve(carver, model, parts_.activation, block_, count_);
    std::vector<int> ascending(prompt.size());
    std::iota(ascending.begin(), ascending.end(), 0);
    kernels.upload(work_.tokens, prompt.data(), prompt.size_bytes(), stream);
    kernels.upload(work_.positions, ascending.data(), ascending.size() * sizeof(int), stream);
    for (int first = 0; first < count_; first += block_) {
      parts_.dense->embed(work_.tokens + first, hidden(first, std::min(block_, count_ - first)), stream);
    }
  }

  bool done() const noexcept { return layer_ == parts_.model->layers; }
  /// Hidden state of the last token once all is done. [1, hidden]
  Tensor last_hidden() const noexcept { return hidden(count_ - 1, 1); }

  /// Enqueues as many blocks as make up `layer_tokens` (prompt tokens times layers), at least one; 0: all. The last one seals the slot.
  /// `on_progress` may be empty; what it throws ends the prefill.
  void advance(std::size_t layer_tokens, const std::function<void(std::size_t done, std::size_t total)>& on_progress) {
    std::size_t left = layer_tokens == 0 ? std::numeric_limits<std::size_t>::max() : layer_tokens;
    do {
      const auto rows = static_cast<std::size_t>(next_rows());
      run_block();
      left -= std::min(left, rows);
      const auto all = static_cast<std::size_t>(count_);
      if (on_progress) {
        on_progress(static_cast<std::size_t>(layer_) * all + static_cast<std::size_t>(first_),
                    static_cast<std::size_t>(parts_.model->layers) * all);
      }
    } while (!done() && static_cast<std::size_t>(next_rows()) <= left);
    if (done()) parts_.attention->seal(slot_, parts_.backend->stream());
  }

 private:
  struct Work {
    Token* tokens;      // [tokens]
    int* positions;     // [tokens]
    float* hidden;      // [tokens, hidden]
    std::byte* keys;    // [tokens, kv_heads, head_dim] of one layer
    std::byte* values;  // the same
    std::byte* q;       // [block, heads, head_dim]
    std::byte* out;     // the same
  };

  static Work carve(Carver& carver, const ModelConfig& model, DataType activation, int block, int tokens) {
    const auto n = static_cast<std::size_t>(tokens);
    const std::size_t kv_bytes = n * static_cast<std::size_t>(model.kv_width()) * size_of(activation);
    const std::size_t q_bytes = static_cast<std::size_t>(block) * static_cast<std::size_t>(model.q_width()) * size_of(activation);
    Work work{};
    work.tokens = carver.take<Token>(n);
    work.positions = carver.take<int>(n);
    work.hidden = carver.take<float>(n * static_cast<std::size_t>(model.hidden));
    work.keys = carver.take<std::byte>(kv_bytes);
    work.values = carver.take<std::byte>(kv_bytes);
    work.q = carver.take<std::byte>(q_bytes);
    work.out = carver.take<std::byte>(q_bytes);
    return work;
  }

  Tensor hidden(int first, int rows) const noexcept {
    const int width = parts_.model->hidden;
    return {work_.hidden + static_cast<std::size_t>(first) * static_cast<std::size_t>(width), DataType::f32, {rows, width}};
  }
  Tensor heads(std::byte* data, int first, int rows, int count) const noexcept {
    const std::size_t row_bytes =
        static_cast<std::size_t>(count) * static_cast<std::size_t>(parts_.model->head_dim) * size_of(parts_.activation);
    return {data + static_cast<std::size_t>(first) * row_bytes, parts_.activation, {rows, count, parts_.model->head_dim}};
  }
  int next_rows() const noexcept { return std::min(block_, count_ - first_); }

  void run_block() {
    const ModelConfig& model = *parts_.model;
    const StreamRef stream = parts_.backend->stream();
    DenseModel& dense = *parts_.dense;
    const int rows = next_rows();
    const int end = first_ + rows;
    const Tensor state = hidden(first_, rows);
    const Tensor q = heads(work_.q, 0, rows, model.heads);
    const Tensor out = heads(work_.out, 0, rows, model.heads);
    const Tensor k = heads(work_.keys, first_, rows, model.kv_heads);
    const Tensor v = heads(work_.values, first_, rows, model.kv_heads);
    dense.before_attention(layer_, state, work_.positions + first_, q, k, v, stream);
    dense.prefill_attention(q, heads(work_.keys, 0, end, model.kv_heads), heads(work_.values, 0, end, model.kv_heads), first_, out, stream);
    dense.after_attention(layer_, out, state, stream);
    const int kept = std::max(first_, count_ - KvStore::kCalibrationQueries);
    ConstTensor last_queries;
    if (kept < end) last_queries = heads(work_.q, kept - first_, end - kept, model.heads);
    parts_.attention->append(layer_, slot_, {.keys = k, .values = v}, last_queries, stream);
    first_ = end;
    if (first_ < count_) return;
    first_ = 0;
    ++layer_;
  }

  PrefillParts parts_;
  int slot_;
  int count_;
  int block_;
  Buffer buffer_;
  Work work_{};
  Layer layer_ = 0;
  int first_ = 0;  // token of layer_ that comes next
};

}  // namespace dualdecoder::detail
