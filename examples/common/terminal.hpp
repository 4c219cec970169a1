// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace dualdecoder::examples {

/// Bytes in a unit that reads well: "512 B", "1.5 MiB".
std::string in_bytes(double bytes);

/// Progress of one long task on stderr: a bar that is redrawn in place on a terminal; elsewhere one line when the task is done.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label, bool shown = true);
  ~ProgressBar();  ///< leaves the line, also when the task failed
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Redraws at most twenty times a second. `note` stands behind the bar.
  void update(std::uint64_t done, std::uint64_t total, std::string_view note = {});
  void finish(std::string_view note);

 private:
  using Clock = std::chrono::steady_clock;

  std::string label_;
  bool shown_;
  bool terminal_;
  bool drawn_ = false;
  bool finished_ = false;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_draw_{};
};

/// While one lives, the first Ctrl-C or SIGTERM only sets a flag; a second one ends the program as usual. One at a time.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  static bool interrupted() noexcept;
};

}  // namespace dualdecoder::examples
