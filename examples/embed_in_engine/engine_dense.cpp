// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The engine as it was: every step attends to the whole context, which it keeps in vectors of its own.
#include "engine.hpp"

#include <exception>

int main(int argc, char** argv) try {
  const engine::Options options(argc, argv);
  const int prompt_tokens = options.prompt_tokens;

  engine::Model model(/*seed=*/7);
  const engine::Shape& shape = model.shape();
  const std::vector<std::int32_t> prompt = model.prompt(prompt_tokens);

  std::vector<engine::Projected> context(engine::at(shape.layers));

  std::vector<int> positions(prompt.size());
  for (int i = 0; i < prompt_tokens; ++i) positions[engine::at(i)] = i;
  engine::Floats hidden = model.embed(prompt);
  for (int layer = 0; layer < shape.layers; ++layer) {
    engine::Projected rows = model.before_attention(layer, hidden, positions);
    model.after_attention(layer, engine::prompt_attention(shape, rows, prompt_tokens), hidden);
    context[engine::at(layer)] = std::move(rows);
  }
  std::vector<std::int32_t> generated{model.greedy(hidden, prompt).back()};

  std::vector<std::int32_t> tokens;
  int position = prompt_tokens;
  while (static_cast<int>(generated.size()) < options.new_tokens) {
    tokens = {generated.back()};
    positions = {position++};
    hidden = model.embed(tokens);
    for (int layer = 0; layer < shape.layers; ++layer) {
      engine::Projected rows = model.before_attention(layer, hidden, positions);
      engine::Floats out(rows.q.size());
      engine::Projected& kept = context[engine::at(layer)];
      kept.k.insert(kept.k.end(), rows.k.begin(), rows.k.end());
      kept.v.insert(kept.v.end(), rows.v.begin(), rows.v.end());
      engine::attend(shape, rows.q.data(), kept.k.data(), kept.v.data(), position, out.data());
      model.after_attention(layer, out, hidden);
    }
    const std::vector<std::int32_t> sampled = model.greedy(hidden, tokens);
    generated.push_back(sampled[0]);
  }
  engine::print(generated);
} catch (const std::exception& error) {
  std::fprintf(stderr, "engine: %s\n", error.what());
  return 1;
}
