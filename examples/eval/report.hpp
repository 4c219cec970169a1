// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/eval/cell.hpp"
#include "examples/eval/plan.hpp"

namespace dualdecoder::examples {

/// A result's line; docs/evaluation.md explains each field. What a line has from the plan comes first.
struct LineHead {
  std::string model;
  int context;
  std::string task;
  std::uint64_t seed;
  std::string policy;
  std::string setting;
  std::string text;
};
nlohmann::ordered_json line_head(const LineHead& head);
/// "score 0.750 of full attention's 1.000, agreement 0.9912, KL 0.00210, hit 0.985"
std::string in_short(const nlohmann::ordered_json& line);
void add_result(nlohmann::ordered_json& line, const CellResult& result, const SessionOptions& options, const ModelConfig& config);

/// Averages of one method over the cells of one model and context: scores by cell that has one, fidelity by token.
struct Summary {
  std::string model;
  int context = 0;
  std::string method;
  int cells = 0;
  double score = 0.0;
  double full_score = 0.0;
  double agreement = 0.0;
  double kl = 0.0;
  double hit = 0.0;
  double traffic = 0.0;
};
std::vector<Summary> summarize(const std::vector<nlohmann::ordered_json>& lines);
std::string to_table(const std::vector<Summary>& summaries);

/// What the averages over all lines break of the bounds, one sentence each.
std::vector<std::string> broken(const std::vector<Bound>& bounds, const std::vector<nlohmann::ordered_json>& lines);

}  // namespace dualdecoder::examples
