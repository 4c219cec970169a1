// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/memory.hpp"

namespace dualdecoder::cpu {

/// Enters what a carver takes into a plan of device memory, piece by piece; what precedes a piece to align it counts with it.
class PlannedPieces {
 public:
  /// Borrows both.
  PlannedPieces(const Carver& carver, MemoryPlan& plan) noexcept : carver_(carver), plan_(plan), entered_(carver.bytes()) {}

  /// Names all that was taken since the last entry.
  void enter(const char* what) {
    plan_.add(what, MemoryKind::device, carver_.bytes() - entered_);
    entered_ = carver_.bytes();
  }

 private:
  const Carver& carver_;
  MemoryPlan& plan_;
  std::size_t entered_;
};

}  // namespace dualdecoder::cpu
