// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::test {

/// A model small enough to be made dozens of times, with heads that the CUDA backend takes.
inline ModelConfig small_config() {
  ModelConfig config;
  config.architecture = "llama";
  config.layers = 2;
  config.hidden = 256;
  config.intermediate = 512;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.vocabulary = 1024;
  config.context = 4096;
  return config;
}

}  // namespace dualdecoder::test
