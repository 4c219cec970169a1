// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//! [quickstart]
#include <cstdio>
#include <dualdecoder/dualdecoder.hpp>
#include <exception>

#include "examples/common/tokenizer.hpp"  // any tokenizer will do: the library speaks token ids

int main(int argc, char** argv) try {
  if (argc != 3) return std::fprintf(stderr, "usage: quickstart MODEL.gguf PROMPT\n"), 2;

  const auto tokenizer = dualdecoder::examples::Tokenizer::load(argv[1]);
  const auto prompt = tokenizer.encode(argv[2]);

  auto backend = dualdecoder::make_default_backend();  // cuda when built in and present, else cpu
  auto weights = dualdecoder::load_weights(argv[1], *backend);
  auto session = dualdecoder::make_session(backend, weights, {.max_context = 8192, .budget_tokens = 1024});

  const auto ends = tokenizer.end_tokens();
  session.add(prompt, {.max_new_tokens = 64, .stop_tokens = {ends.begin(), ends.end()}});
  dualdecoder::examples::TextStream text(tokenizer);
  while (session.active()) {
    for (const auto& event : session.step().tokens) std::fputs(text.push(event.token).c_str(), stdout);
    std::fflush(stdout);
  }
  std::puts(text.finish().c_str());
} catch (const std::exception& error) {
  return std::fprintf(stderr, "quickstart: %s\n", error.what()), 1;
}
//! [quickstart]
