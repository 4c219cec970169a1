// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "dualdecoder/error.hpp"
#include "dualdecoder/model_weights.hpp"

namespace dualdecoder::examples {

/// The shape of a model for made-up weights and plans: 8b (as Llama-3.1-8B), 1.5b, 14b, 32b (as Qwen2.5-1.5B, -14B and -32B), their
/// contexts stretched, or tiny. Throws InvalidArgument naming --shape.
inline ModelConfig shape_named(const std::string& name) {
  ModelConfig config;
  config.architecture = "llama";
  config.name = name;
  config.context = 1 << 20;
  config.rope.theta = 500000.0F;
  if (name == "8b") {
    config.layers = 32;
    config.hidden = 4096;
    config.intermediate = 14336;
    config.heads = 32;
    config.kv_heads = 8;
    config.head_dim = 128;
    config.vocabulary = 128256;
  } else if (name == "1.5b") {
    config.architecture = "qwen2";
    config.layers = 28;
    config.hidden = 1536;
    config.intermediate = 8960;
    config.heads = 12;
    config.kv_heads = 2;
    config.head_dim = 128;
    config.vocabulary = 151936;
    config.tied_embeddings = true;
    config.attention_bias = true;
    config.rope.theta = 1000000.0F;
  } else if (name == "14b" || name == "32b") {
    config.architecture = "qwen2";
    config.layers = name == "14b" ? 48 : 64;
    config.hidden = 5120;
    config.intermediate = name == "14b" ? 13824 : 27648;
    config.heads = 40;
    config.kv_heads = 8;
    config.head_dim = 128;
    config.vocabulary = 152064;
    config.attention_bias = true;
    config.rope.theta = 1000000.0F;
  } else if (name == "tiny") {
    config.layers = 4;
    config.hidden = 256;
    config.intermediate = 512;
    config.heads = 8;
    config.kv_heads = 2;
    config.head_dim = 64;
    config.vocabulary = 1024;
  } else {
    throw InvalidArgument("--shape = " + name + ": must be 1.5b, 8b, 14b, 32b or tiny");
  }
  return config;
}

}  // namespace dualdecoder::examples
