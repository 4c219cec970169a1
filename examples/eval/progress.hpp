// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "examples/common/terminal.hpp"

namespace dualdecoder::examples {

/// How far a grid has come: a bar with the time left on a terminal, a line a cell elsewhere, all on stderr.
class Progress {
 public:
  explicit Progress(bool shown);

  /// Before anything runs: `missing` cells of a question of `tokens` are to be run.
  void plan(int tokens, std::size_t missing);
  /// Cells of a question of `tokens` each that are run together.
  void begin(const std::string& label, int tokens, std::size_t cells);
  /// `share` of the cells that began last is done.
  void update(double share);
  /// Those cells have ended, with a line each.
  void end(const std::vector<std::string>& lines);
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  std::string note() const;

  bool shown_;
  bool terminal_;
  ProgressBar bar_;
  std::string label_;
  std::size_t cells_ = 0;
  std::size_t done_cells_ = 0;
  double work_ = 0.0;  // a cell counts as many as it has tokens
  double done_work_ = 0.0;
  double begun_work_ = 0.0;
  double share_ = 0.0;
  Clock::time_point start_ = Clock::now();
};

}  // namespace dualdecoder::examples
