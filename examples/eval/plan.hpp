// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "examples/common/policies.hpp"
#include "examples/eval/tasks.hpp"

namespace dualdecoder::examples {

struct ModelChoice {
  std::filesystem::path path;
  std::string name;  ///< in results; the file's or folder's name where the plan gives none
  float yarn = 0.0F;
};

/// One question to one model: what its cells share, full attention's answer above all.
struct CellGroup {
  std::size_t model = 0;  ///< of the plan's models
  int context = 0;        ///< tokens, answer included
  const TaskKind* task = nullptr;
  std::uint64_t seed = 0;
};

/// How a question is answered.
struct Method {
  const Policy* policy = nullptr;
  std::string setting;  ///< canonical

  std::string name() const { return policy->name + (setting.empty() ? "" : " " + setting); }
};

/// What a method's results, averaged over all cells of a plan, must hold to.
struct Bound {
  std::string method;
  double most_kl = 0.0;
  double least_agreement = 0.0;
  double most_score_loss = 0.0;  ///< of full attention's score
};

/// What is to be run: every method on every group.
struct Plan {
  std::vector<ModelChoice> models;
  std::vector<CellGroup> groups;  ///< those of one model behind each other
  std::vector<Method> methods;    ///< full attention first where it is among them
  std::vector<Bound> bounds;
};

/// The lists that a plan is the product of, as a file or a command line gives them.
struct PlanLists {
  std::vector<ModelChoice> models;
  std::vector<int> contexts;
  std::vector<std::string> tasks;  ///< names, "ruler" for its thirteen, "robustness" for its five, "all"
  std::vector<std::uint64_t> seeds;
  std::vector<std::string> policies;  ///< names, or "NAME SETTING" for one with a setting of its own
  std::vector<std::string> settings;  ///< of every policy without its own, but of full attention; none: as they are
  std::vector<Bound> bounds;
};

/// Lists from JSON: an object with "models" (paths, or objects with path, name, yarn), "contexts", "tasks", "seeds", "policies",
/// "settings" (texts, or objects of keys) and "bounds". Throws IoError, FormatError naming the file and what is wrong.
PlanLists read_plan(const std::filesystem::path& file);

/// Throws InvalidArgument for an empty list, an unknown name or a bad setting.
Plan make_plan(const PlanLists& lists);

}  // namespace dualdecoder::examples
