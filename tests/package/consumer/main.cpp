// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// A stranger's program: generates with a small synthetic model, and catches an exception that crosses the library's border.
#include <cstdio>
#include <cstring>
#include <dualdecoder/cuda/backend.hpp>
#include <dualdecoder/dualdecoder.hpp>
#include <dualdecoder/version.hpp>
#include <vector>

int main() {
  if (std::strcmp(dualdecoder::kVersion, "0.1.0") != 0) return 1;

  const auto backend = dualdecoder::make_default_backend();
  dualdecoder::ModelConfig config;
  config.architecture = "llama";
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 32;
  config.hidden = 128;
  config.intermediate = 256;
  config.vocabulary = 512;
  config.context = 512;
  const auto weights = dualdecoder::make_synthetic_weights(config, 7, *backend);
  auto session =
      dualdecoder::make_session(backend, weights, {.max_context = 256, .budget_tokens = 64, .store = dualdecoder::StoreKind::resident});
  const std::vector<dualdecoder::Token> prompt(100, 3);
  session.add(prompt, {.max_new_tokens = 8});
  int tokens = 0;
  while (session.active() > 0) tokens += static_cast<int>(session.step().tokens.size());
  if (tokens != 8) return std::printf("expected 8 tokens, got %d\n", tokens), 2;

  try {
    dualdecoder::load_weights("no such file.gguf", *backend);
    return 3;
  } catch (const dualdecoder::IoError& error) {
    std::printf("%s\n", error.what());
  }
  if (dualdecoder::cuda::device_count() == 0) {
    try {
      dualdecoder::cuda::make_cuda_backend();
      return 4;
    } catch (const dualdecoder::Error& error) {
      std::printf("%s\n", error.what());
    }
  }
  return 0;
}
