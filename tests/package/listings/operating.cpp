// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// The listings of docs/operating.md.
#include <cstddef>
#include <dualdecoder/decode_session.hpp>
#include <dualdecoder/load_weights.hpp>
#include <memory>

namespace listings {

std::size_t planned(const std::shared_ptr<dualdecoder::Backend>& backend, const dualdecoder::SessionOptions& options) {
  //! [plan]
  const auto config = dualdecoder::read_model_config("model.gguf");
  const auto plan = dualdecoder::memory_plan(*backend, config, options);
  //! [plan]
  return plan.device_bytes();
}

}  // namespace listings
