// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The engine with its attention handed over: dualdecoder keeps the context, and every step attends to the part of it that matters.
#include "engine.hpp"

#include <dualdecoder/cpu/backend.hpp>
#include <dualdecoder/predictors/front_runner.hpp>
#include <dualdecoder/predictors/no_prediction.hpp>
#include <dualdecoder/sparse_attention.hpp>
#include <exception>

namespace dd = dualdecoder;

int main(int argc, char** argv) try {
  const engine::Options options(argc, argv);
  const int prompt_tokens = options.prompt_tokens;

  engine::Model model(/*seed=*/7);
  const engine::Shape& shape = model.shape();
  const std::vector<std::int32_t> prompt = model.prompt(prompt_tokens);

  const auto backend = dd::cpu::make_cpu_backend();
  const dd::StreamRef stream = backend->stream();
  const int longest = prompt_tokens + options.new_tokens;
  const int width = options.rows;
  auto store = backend->make_store({.layers = shape.layers,
                                    .heads = shape.heads,
                                    .kv_heads = shape.kv_heads,
                                    .head_dim = shape.head_dim,
                                    .max_context = longest,
                                    .rows_per_sequence = width,
                                    .kv_type = dd::DataType::f32,
                                    .selection = {.budget_tokens = options.budget_tokens, .local_tokens = 32}});
  const auto most = store->capacities();
  auto link = backend->make_scheduler({shape.layers, std::max({most.urgent, most.prefetch, most.write_back})});
  std::unique_ptr<dd::RetrievalPredictor> predictor = std::make_unique<dd::NoPrediction>();
  if (width == 2) predictor = std::make_unique<dd::FrontRunner>();
  dd::SparseAttention attention(
      {std::move(store), std::move(predictor), std::move(link), &backend->kernels(), &backend->memory(dd::MemoryKind::device)},
      {.layers = shape.layers, .kv_heads = shape.kv_heads}, stream);
  const int slot = attention.open(longest, stream);
  const auto block = [&](engine::Floats& rows, int heads) {
    return dd::Tensor(rows.data(), dd::DataType::f32, {std::ssize(rows) / heads / shape.head_dim, heads, shape.head_dim});
  };

  std::vector<int> positions(prompt.size());
  for (int i = 0; i < prompt_tokens; ++i) positions[engine::at(i)] = i;
  engine::Floats hidden = model.embed(prompt);
  for (int layer = 0; layer < shape.layers; ++layer) {
    engine::Projected rows = model.before_attention(layer, hidden, positions);
    model.after_attention(layer, engine::prompt_attention(shape, rows, prompt_tokens), hidden);
    attention.append(layer, slot, {block(rows.k, shape.kv_heads), block(rows.v, shape.kv_heads)}, block(rows.q, shape.heads), stream);
  }
  attention.seal(slot, stream);
  std::vector<std::int32_t> generated{model.greedy(hidden, prompt).back()};

  std::vector<std::int32_t> tokens;
  int position = prompt_tokens;
  dd::RowMode mode = attention.first_mode();
  dd::Token token = generated.back(), guess = -1;
  std::uint8_t waits = 0;
  const dd::StepState state{1, width, &mode, &position, &token, &guess, &waits};
  tokens.resize(engine::at(width));
  positions.resize(engine::at(width));
  while (static_cast<int>(generated.size()) < options.new_tokens) {
    backend->kernels().lay_out(state, tokens.data(), positions.data(), stream);
    attention.begin_step({1, width, &slot, &position, &mode, &waits}, stream);
    hidden = model.embed(tokens);
    for (int layer = 0; layer < shape.layers; ++layer) {
      engine::Projected rows = model.before_attention(layer, hidden, positions);
      engine::Floats out(rows.q.size());
      attention.attend(layer, {block(rows.q, shape.heads), block(rows.k, shape.kv_heads), block(rows.v, shape.kv_heads)}, {},
                       block(out, shape.heads), stream);
      model.after_attention(layer, out, hidden);
    }
    const std::vector<std::int32_t> sampled = model.greedy(hidden, tokens);
    attention.end_step(stream);
    if (sampled[0] >= 0) generated.push_back(sampled[0]);
    attention.observe(state, {sampled.data()}, 1, stream);
  }
  engine::print(generated);
  const dd::StoreStatistics counts = attention.store_statistics();
  engine::print_share("hit rate", counts.resident_hit, counts.needed);
  attention.close(slot, stream);
} catch (const std::exception& error) {
  std::fprintf(stderr, "engine: %s\n", error.what());
  return 1;
}
