// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A stranger's engine that brings its own store, predictor, scheduler and step kernels, and links nothing: SparseAttention drives them, and
// the result is compared with softmax attention written out (Vaswani et al. 2017, equation 1).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dualdecoder/sparse_attention.hpp>
#include <dualdecoder/testing/workplace.hpp>
#include <memory>
#include <vector>

namespace dd = dualdecoder;

namespace {

constexpr int kDim = 4;
using Row = std::vector<float>;

Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values) {
  Row out(kDim, 0.0F);
  float mass = 0.0F;
  for (std::size_t t = 0; t < keys.size(); ++t) {
    float score = 0.0F;
    for (std::size_t d = 0; d < kDim; ++d) score += query[d] * keys[t][d];
    const float weight = std::exp(score / std::sqrt(float{kDim}));
    mass += weight;
    for (std::size_t d = 0; d < kDim; ++d) out[d] += weight * values[t][d];
  }
  for (float& x : out) x /= mass;
  return out;
}

Row row_of(dd::ConstTensor tensor, int row) {
  const float* data = tensor.as<float>() + row * kDim;
  return {data, data + kDim};
}

/// One layer, one head, one sequence; keeps every row and loads nothing.
class MyStore final : public dd::KvStore {
 public:
  void open(int, int, dd::StreamRef) override {}
  void append(dd::Layer, int, const dd::KvBlock& block, dd::ConstTensor, dd::StreamRef) override {
    for (int t = 0; t < block.keys.dim(0); ++t) keep(row_of(block.keys, t), row_of(block.values, t));
  }
  void seal(int, dd::StreamRef) override {}
  void select(dd::Layer, const dd::StepView&, dd::ConstTensor, const dd::Selection& by_row, dd::StreamRef) override { *by_row.count = 0; }
  void resolve_needed(dd::Layer, const dd::StepView&, const dd::Selection&, const dd::TransferList& urgent, dd::StreamRef) override {
    *urgent.count = 0;
  }
  void attend(dd::Layer, const dd::StepView&, const dd::RowBlock& rows, const dd::Selection&, dd::Tensor out, dd::StreamRef) override {
    now_ = {row_of(rows.keys, 0), row_of(rows.values, 0)};
    auto keys = keys_;
    auto values = values_;
    keys.push_back(now_[0]);
    values.push_back(now_[1]);
    const Row result = ::attend(row_of(rows.queries, 0), keys, values);
    std::memcpy(out.data, result.data(), sizeof(float) * kDim);
  }
  dd::Layer resolve_predicted(dd::Layer layer, const dd::StepView&, const dd::Prediction&, const dd::TransferList& prefetch,
                              dd::StreamRef) override {
    *prefetch.count = 0;
    return layer;
  }
  void commit(const dd::StepView&, const dd::TransferList& write_back, dd::StreamRef) override {
    keep(now_[0], now_[1]);
    *write_back.count = 0;
  }
  void truncate(int, int tokens, dd::StreamRef) override {
    keys_.resize(static_cast<std::size_t>(tokens));
    values_.resize(static_cast<std::size_t>(tokens));
  }
  void close(int, dd::StreamRef) noexcept override {}
  Capacities capacities() const noexcept override { return {.urgent = 1, .prefetch = 1, .write_back = 1, .selection = 1}; }
  dd::StoreStatistics statistics() const override { return {}; }

 private:
  void keep(Row key, Row value) {
    keys_.push_back(std::move(key));
    values_.push_back(std::move(value));
  }
  std::vector<Row> keys_, values_;
  std::vector<Row> now_{2};
};

class MyPredictor final : public dd::RetrievalPredictor {
 public:
  dd::PredictorTraits traits() const noexcept override { return {.name = "mine"}; }
  void predict(dd::Layer, const dd::StepView& view, const dd::Selection& by_row, const dd::Selection&, dd::Prediction& prediction,
               dd::StepKernels& kernels, dd::StreamRef stream) override {
    kernels.copy_row(view, by_row, 0, prediction.chunks, stream);
  }
  void observe(const dd::StepState&, const dd::Outcome&, int, dd::StepKernels&, dd::StreamRef) override {}
  dd::RowMode first_mode() const noexcept override { return dd::RowMode::single; }
};

class MyScheduler final : public dd::TransferScheduler {
 public:
  void submit(dd::Lane lane, dd::Layer, const dd::TransferList& list, dd::StreamRef) override {
    for (int i = 0; i < *list.count; ++i) std::memcpy(list.items[i].target, list.items[i].source, list.items[i].bytes);
    ++submissions[static_cast<std::size_t>(lane)];
  }
  void wait(dd::Lane, dd::Layer, dd::StreamRef) override {}
  void drain(dd::StreamRef) override {}
  dd::LaneStatistics statistics(dd::Lane lane) const override { return {.submitted_items = submissions[static_cast<std::size_t>(lane)]}; }

 private:
  std::uint64_t submissions[dd::kLaneCount] = {};
};

class MyKernels final : public dd::StepKernels {
 public:
  void copy_row(const dd::StepView&, const dd::Selection&, int, const dd::Selection& to, dd::StreamRef) override { *to.count = 0; }
  void advance(const dd::StepState&, const dd::Outcome&, const dd::AdvanceRule&, dd::StreamRef) override {}
  void lay_out(const dd::StepState&, dd::Token*, int*, dd::StreamRef) override {}
  void force(const dd::StepState&, const dd::Token*, dd::Token*, dd::StreamRef) override {}
  void mark_seen(const dd::StepState&, std::uint64_t* const*, dd::StreamRef) override {}
  void upload(void* target, const void* source, std::size_t bytes, dd::StreamRef) override { std::memcpy(target, source, bytes); }
  void copy(void* target, const void* source, std::size_t bytes, dd::StreamRef) override { std::memcpy(target, source, bytes); }
  void download(void* target, const void* source, std::size_t bytes, dd::StreamRef) override { std::memcpy(target, source, bytes); }
};

}  // namespace

int main() {
  dd::testing::HeapMemory memory;
  const dd::StreamRef stream = dd::testing::host_workplace(memory).stream;
  MyKernels kernels;
  dd::SparseAttentionParts parts{std::make_unique<MyStore>(), std::make_unique<MyPredictor>(), std::make_unique<MyScheduler>(), &kernels,
                                 &memory};
  dd::SparseAttention attention(std::move(parts), {.layers = 1, .kv_heads = 1, .max_sequences = 1}, stream);

  dd::testing::Random random(1);
  const auto random_row = [&] {
    Row row(kDim);
    for (float& x : row) x = random.normal();
    return row;
  };
  std::vector<Row> keys, values;
  const int slot = attention.open(64, stream);
  for (int t = 0; t < 5; ++t) {
    keys.push_back(random_row());
    values.push_back(random_row());
    const dd::KvBlock block{{keys.back().data(), dd::DataType::f32, {1, 1, kDim}}, {values.back().data(), dd::DataType::f32, {1, 1, kDim}}};
    attention.append(0, slot, block, {}, stream);
  }
  attention.seal(slot, stream);

  for (int step = 0; step < 3; ++step) {
    keys.push_back(random_row());
    values.push_back(random_row());
    const Row query = random_row();
    const int position = 5 + step;
    const dd::RowMode mode = dd::RowMode::single;
    attention.begin_step({.sequences = 1, .rows_per_sequence = 1, .slot_of = &slot, .position = &position, .mode = &mode}, stream);
    Row out(kDim);
    const dd::RowBlock rows{{query.data(), dd::DataType::f32, {1, 1, kDim}},
                            {keys.back().data(), dd::DataType::f32, {1, 1, kDim}},
                            {values.back().data(), dd::DataType::f32, {1, 1, kDim}}};
    attention.attend(0, rows, {}, {out.data(), dd::DataType::f32, {1, 1, kDim}}, stream);
    attention.end_step(stream);
    const Row expected = attend(query, keys, values);
    for (std::size_t d = 0; d < kDim; ++d) {
      if (std::abs(out[d] - expected[d]) > 1e-6F)
        return std::printf("step %d, element %zu: %g, expected %g\n", step, d, out[d], expected[d]), 1;
    }
  }
  if (attention.lane_statistics(dd::Lane::prefetch).submitted_items != 3) return std::puts("the scheduler was not asked once a step"), 1;
  attention.close(slot, stream);
  return 0;
}
