// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "dualdecoder/backend.hpp"
#include "examples/eval/plan.hpp"
#include "examples/eval/prompt.hpp"

namespace dualdecoder::examples {

/// Options of a method at a context. Throws InvalidArgument naming what is out of range.
SessionOptions session_options(const Method& method, int context, const ModelConfig& model);

/// Something that would stop cells of a plan.
struct Problem {
  std::string sentence;
  std::size_t model = 0;           ///< of the plan's models
  int context = 0;                 ///< 0: at any
  const TaskKind* task = nullptr;  ///< null: any
  std::string method{};            ///< name(); empty: any

  bool bars(const CellGroup& group, const Method& of_group) const {
    return group.model == model && (context == 0 || group.context == context) && (task == nullptr || group.task == task) &&
           (method.empty() || method == of_group.name());
  }
};

/// All problems of a plan, each once: models that cannot be read, contexts beyond the model or too short for a task, methods that the
/// backend does not support or that take more memory than there is with `batch` questions side by side. Nothing large is allocated for
/// long.
std::vector<Problem> problems_of(const Plan& plan, const std::shared_ptr<Backend>& backend, const Haystack& essay, std::size_t batch);

/// Bytes that every method plans for one sequence, by model and context, weights left out; methods with problems are left out.
std::string memory_table(const Plan& plan, const std::vector<Problem>& problems, const std::shared_ptr<Backend>& backend);

}  // namespace dualdecoder::examples
