// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/eval/progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace dualdecoder::examples {

Progress::Progress(bool shown) : shown_(shown), terminal_(shown && isatty(STDERR_FILENO) == 1), bar_("eval", shown && terminal_) {}

void Progress::plan(int tokens, std::size_t missing) {
  cells_ += missing;
  work_ += static_cast<double>(missing) * tokens;
}

void Progress::begin(const std::string& label, int tokens, std::size_t cells) {
  label_ = label;
  begun_work_ = static_cast<double>(cells) * tokens;
  update(0.0);
}

void Progress::update(double share) {
  share_ = share;
  bar_.update(static_cast<std::uint64_t>(done_work_ + share_ * begun_work_), static_cast<std::uint64_t>(work_), note());
}

std::string Progress::note() const {
  const double done = done_work_ + share_ * begun_work_;
  const std::string cells = fmt::format("{} of {} cells", done_cells_, cells_);
  if (done <= 0.0) return fmt::format("{}, {}", cells, label_);
  const double spent = std::chrono::duration<double>(Clock::now() - start_).count();
  const auto left = static_cast<long>(std::ceil(spent * (work_ - done) / done));
  return fmt::format("{}, {}:{:02}:{:02} left, {}", cells, left / 3600, left / 60 % 60, left % 60, label_);
}

void Progress::end(const std::vector<std::string>& lines) {
  done_work_ += begun_work_;
  begun_work_ = 0.0;
  for (const std::string& line : lines) {
    ++done_cells_;
    if (shown_) fmt::print(stderr, "{}{}/{} {}\n", terminal_ ? "\r\x1b[K" : "", done_cells_, cells_, line);
  }
}

void Progress::finish() {
  if (cells_ > 0) bar_.finish(fmt::format("{} cells", done_cells_));
}

}  // namespace dualdecoder::examples
