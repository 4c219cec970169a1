// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "dualdecoder/error.hpp"
#include "dualdecoder/kv_store.hpp"
#include "dualdecoder/step_view.hpp"
#include "dualdecoder/store_options.hpp"

namespace dualdecoder::test {

/// A KvStore written from its documentation alone: keeps every token, chooses nothing, attends densely, moves nothing. Each rule that it
/// can break, it breaks on request, so that the conformance checks can be checked.
class PlainStore final : public KvStore {
 public:
  enum class Mistake {
    none,
    commits_row1,
    commits_resync,
    forgets_truncate,
    forgets_close,
    leaves_dead_rows,
    sees_idle,
    mixes_heads,
    accepts_anything
  };

  explicit PlainStore(const StoreOptions& options, Mistake mistake = Mistake::none) : options_(options), mistake_(mistake) {
    validate(options);
    slots_.resize(static_cast<std::size_t>(options.max_sequences));
  }

  void open(int slot, int capacity_tokens, StreamRef) override {
    Slot& s = checked(slot);
    detail::require(mistake_ == Mistake::accepts_anything || !s.open, "slot", slot, "a closed slot");
    detail::require(capacity_tokens >= 1 && capacity_tokens <= options_.max_context, "capacity_tokens", capacity_tokens,
                    "in 1 .. max_context");
    if (mistake_ != Mistake::forgets_close) s = {};
    s.open = true;
    s.capacity = capacity_tokens;
    s.layers.resize(static_cast<std::size_t>(options_.layers));
  }
  void append(Layer layer, int slot, const KvBlock& block, ConstTensor, StreamRef) override {
    Slot& s = checked(slot);
    detail::require(s.open, "slot", slot, "an open slot");
    detail::require(layer >= 0 && layer < options_.layers, "layer", layer, "a layer of the store");
    const auto tokens = static_cast<int>(block.keys.dim(0));
    Tokens& t = s.layers[static_cast<std::size_t>(layer)];
    detail::require(mistake_ == Mistake::accepts_anything || t.count(width()) + tokens <= s.capacity, "tokens", t.count(width()) + tokens,
                    "at most the slot's capacity");
    t.append(block.keys.as<float>(), block.values.as<float>(), static_cast<std::size_t>(tokens) * width());
  }
  void seal(int, StreamRef) override {}
  void select(Layer, const StepView& view, ConstTensor, const Selection& by_row, StreamRef) override {
    std::fill_n(by_row.count, view.rows() * options_.kv_heads, 0);
  }
  void resolve_needed(Layer, const StepView&, const Selection&, const TransferList& urgent, StreamRef) override { *urgent.count = 0; }

  void attend(Layer layer, const StepView& view, const RowBlock& rows, const Selection&, Tensor out, StreamRef) override {
    const auto heads = static_cast<std::size_t>(options_.heads);
    for (int row = 0; row < view.rows(); ++row) {
      const int place = row / view.rows_per_sequence;
      float* to = out.as<float>() + static_cast<std::size_t>(row) * heads * dim();
      if (!row_is_live(view.mode[place], row % view.rows_per_sequence)) {
        if (mistake_ != Mistake::leaves_dead_rows) std::fill_n(to, heads * dim(), 0.0F);
        continue;
      }
      Slot& slot = slots_[static_cast<std::size_t>(view.slot_of[place])];
      Tokens seen = slot.layers[static_cast<std::size_t>(layer)];
      for (int r = place * view.rows_per_sequence; r <= row; ++r) {
        if (!row_is_live(view.mode[place], r % view.rows_per_sequence)) continue;
        const std::size_t at = static_cast<std::size_t>(r) * width();
        seen.append(rows.keys.as<float>() + at, rows.values.as<float>() + at, width());
      }
      for (std::size_t head = 0; head < heads; ++head) {
        attend_head(rows.queries.as<float>() + (static_cast<std::size_t>(row) * heads + head) * dim(), seen, head, to + head * dim());
      }
    }
    keep(layer, view, rows);
  }
  Layer resolve_predicted(Layer, const StepView&, const Prediction& prediction, const TransferList& prefetch, StreamRef) override {
    *prefetch.count = 0;
    return prediction.layer;
  }
  void commit(const StepView& view, const TransferList& write_back, StreamRef) override {
    *write_back.count = 0;
    for (int place = 0; place < view.sequences; ++place) {
      Slot& slot = slots_[static_cast<std::size_t>(view.slot_of[place])];
      for (Tokens& t : slot.layers) {
        const bool commits = row_is_live(view.mode[place], 0) || (mistake_ == Mistake::sees_idle && view.mode[place] == RowMode::idle) ||
                             (mistake_ == Mistake::commits_resync && view.mode[place] == RowMode::resync);
        const int rows = mistake_ == Mistake::commits_row1 && view.mode[place] == RowMode::dual ? 2 : 1;
        if (commits && !t.pending_keys.empty()) {
          const std::size_t count = std::min(t.pending_keys.size(), static_cast<std::size_t>(rows) * width());
          t.append(t.pending_keys.data(), t.pending_values.data(), count);
        }
        t.pending_keys.clear();
        t.pending_values.clear();
      }
    }
  }
  void truncate(int slot, int tokens, StreamRef) override {
    Slot& s = checked(slot);
    detail::require(s.open, "slot", slot, "an open slot");
    for (const Tokens& t : s.layers) {
      detail::require(tokens >= 0 && tokens <= t.count(width()), "tokens", tokens, "in 0 .. the tokens kept");
    }
    if (mistake_ == Mistake::forgets_truncate) return;
    for (Tokens& t : s.layers) {
      t.keys.resize(static_cast<std::size_t>(tokens) * width());
      t.values.resize(static_cast<std::size_t>(tokens) * width());
    }
  }
  void close(int slot, StreamRef) noexcept override {
    if (slot < 0 || slot >= options_.max_sequences) return;
    if (mistake_ == Mistake::forgets_close) {
      slots_[static_cast<std::size_t>(slot)].open = false;
    } else {
      slots_[static_cast<std::size_t>(slot)] = {};
    }
  }
  Capacities capacities() const noexcept override { return {1, 1, 1, 1}; }
  StoreStatistics statistics() const override { return {}; }

 private:
  struct Tokens {
    std::vector<float> keys;  // [tokens, kv_heads, head_dim]
    std::vector<float> values;
    std::vector<float> pending_keys;  // of the pass, until commit decides
    std::vector<float> pending_values;
    int count(std::size_t width) const { return static_cast<int>(keys.size() / width); }
    void append(const float* k, const float* v, std::size_t numbers) {
      keys.insert(keys.end(), k, k + numbers);
      values.insert(values.end(), v, v + numbers);
    }
  };
  struct Slot {
    bool open = false;
    int capacity = 0;
    std::vector<Tokens> layers;
  };

  std::size_t dim() const { return static_cast<std::size_t>(options_.head_dim); }
  std::size_t width() const { return static_cast<std::size_t>(options_.kv_heads) * dim(); }
  Slot& checked(int slot) {
    detail::require(slot >= 0 && slot < options_.max_sequences, "slot", slot, "in 0 .. max_sequences-1");
    return slots_[static_cast<std::size_t>(slot)];
  }

  void attend_head(const float* query, const Tokens& seen, std::size_t head, float* out) const {
    const std::size_t group = static_cast<std::size_t>(options_.heads / options_.kv_heads);
    const std::size_t kv = (mistake_ == Mistake::mixes_heads ? head % static_cast<std::size_t>(options_.kv_heads) : head / group) * dim();
    std::vector<double> sum(dim(), 0.0);
    double mass = 0;
    for (std::size_t at = kv; at < seen.keys.size(); at += width()) {
      double score = 0;
      for (std::size_t i = 0; i < dim(); ++i) score += static_cast<double>(query[i]) * static_cast<double>(seen.keys[at + i]);
      const double weight = std::exp(score / std::sqrt(static_cast<double>(dim())));
      mass += weight;
      for (std::size_t i = 0; i < dim(); ++i) sum[i] += weight * static_cast<double>(seen.values[at + i]);
    }
    for (std::size_t i = 0; i < dim(); ++i) out[i] = static_cast<float>(sum[i] / mass);
  }

  void keep(Layer layer, const StepView& view, const RowBlock& rows) {
    for (int place = 0; place < view.sequences; ++place) {
      Slot& slot = slots_[static_cast<std::size_t>(view.slot_of[place])];
      if (slot.layers.empty()) continue;
      Tokens& t = slot.layers[static_cast<std::size_t>(layer)];
      const std::size_t first = static_cast<std::size_t>(place * view.rows_per_sequence) * width();
      const std::size_t numbers = static_cast<std::size_t>(view.rows_per_sequence) * width();
      t.pending_keys.assign(rows.keys.as<float>() + first, rows.keys.as<float>() + first + numbers);
      t.pending_values.assign(rows.values.as<float>() + first, rows.values.as<float>() + first + numbers);
    }
  }

  StoreOptions options_;
  Mistake mistake_;
  std::vector<Slot> slots_;
};

}  // namespace dualdecoder::test
