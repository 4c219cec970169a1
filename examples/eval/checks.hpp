// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "examples/eval/plan.hpp"
#include "examples/eval/prompt.hpp"

namespace dualdecoder::examples {

/// Options of a method at a context. Throws InvalidArgument naming what is out of range.
SessionOptions session_options(const Method& method, int context, const ModelConfig& model);

/// Everything that would stop a cell of the plan, one sentence each, each once: models that cannot be read, contexts beyond the model or
/// too short for a task, methods that the backend does not support or that take more memory than there is. Nothing large is allocated for
/// long.
std::vector<std::string> problems_of(const Plan& plan, Backend& backend, const Haystack& essay);

}  // namespace dualdecoder::examples
