// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "examples/common/terminal.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <utility>

namespace dualdecoder::examples {
namespace {

constexpr std::chrono::milliseconds kRedrawEvery{50};
constexpr std::uint64_t kBarCells = 30;

volatile std::sig_atomic_t signal_came = 0;

extern "C" void note_signal(int number) {
  signal_came = 1;
  std::signal(number, SIG_DFL);
}

}  // namespace

std::string in_bytes(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

ProgressBar::ProgressBar(std::string label, bool shown)
    : label_(std::move(label)), shown_(shown), terminal_(shown && isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (drawn_ && !finished_) std::fputc('\n', stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total, std::string_view note) {
  const auto now = Clock::now();
  if (!terminal_ || finished_ || total == 0 || now - last_draw_ < kRedrawEvery) return;
  last_draw_ = now;
  drawn_ = true;
  const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const auto cells = static_cast<std::size_t>(share * static_cast<double>(kBarCells));
  fmt::print(stderr, "\r\x1b[K{:<8} [{:<{}}] {:3.0f} %  {}", label_, std::string(cells, '#'), kBarCells, share * 100, note);
  std::fflush(stderr);
}

void ProgressBar::finish(std::string_view note) {
  if (finished_) return;
  finished_ = true;
  if (!shown_) return;
  const std::chrono::duration<double> took = Clock::now() - start_;
  fmt::print(stderr, "{}{:<8} {:.2f} s  {}\n", terminal_ ? "\r\x1b[K" : "", label_, took.count(), note);
}

InterruptGuard::InterruptGuard() {
  signal_came = 0;
  std::signal(SIGINT, note_signal);
  std::signal(SIGTERM, note_signal);
}

InterruptGuard::~InterruptGuard() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

bool InterruptGuard::interrupted() noexcept { return signal_came != 0; }

}  // namespace dualdecoder::examples
