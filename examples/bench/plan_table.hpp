// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

namespace dualdecoder::examples {

/// `dualdecoder-bench plan ...`: what a shape takes by context, batch, policy and kind of memory, from memory plans alone. Prints one JSON
/// object a line; nothing that they name is allocated. Returns the exit code.
int run_plan(std::span<char* const> arguments);

}  // namespace dualdecoder::examples
