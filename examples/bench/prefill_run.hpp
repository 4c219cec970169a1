// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "dualdecoder/decode_session.hpp"

namespace dualdecoder::examples {

struct PrefillMeasured {
  double first_seconds = 0.0;    ///< of the first prompt: what a fresh process waits, pinning its host memory included
  std::vector<double> seconds;   ///< of each further one
  std::size_t plan_bytes = 0;    ///< on the device, from the session's memory plan; weights are not in it
  std::size_t pinned_bytes = 0;  ///< likewise
};

/// Adds a prompt of `context` random tokens to a session and removes it, 1 + `repeat` times: from the host's tokens to the first new one.
/// Throws as the session would.
PrefillMeasured time_prefill(const std::shared_ptr<Backend>& backend, const std::shared_ptr<const ModelWeights>& weights,
                             SessionOptions options, int context, int repeat);

}  // namespace dualdecoder::examples
