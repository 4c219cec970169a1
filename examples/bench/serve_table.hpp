// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

namespace dualdecoder::examples {

/// dualdecoder-bench serve: requests that arrive at random, by setting and rate, as JSON lines on stdout and a table on stderr. Returns the
/// exit code.
int run_serve(std::span<char* const> arguments);

}  // namespace dualdecoder::examples
