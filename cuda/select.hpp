// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/store_layout.hpp"

namespace dualdecoder::cuda {

/// How the tiles of every list are cut into pieces, which blocks score in this order: first the `graded` ones, which all run at once and
/// grow by `growth` / 16 tiles, so that they end one after the other and memory stays busy while the next ones begin; then small ones, so
/// that all end together.
struct ScoreCut {
  int graded;
  int first;   ///< tiles of the first graded piece
  int growth;  ///< sixteenths of a tile
  int rest;    ///< tiles of the others
  int pieces;

  /// First tile of a piece, for `pieces` behind the last.
  DUALDECODER_HOST_DEVICE int begin(int piece) const {
    const int n = piece < graded ? piece : graded;
    return n * first + n * (n - 1) * growth / 32 + (piece - n) * rest;
  }
};

inline constexpr int kMostPieceTiles = 64;
/// The cut of a pass of so many sequences; it depends on capacities alone. At most layout.score_pieces().
ScoreCut score_cut(const StoreLayout& layout, int sequences);

}  // namespace dualdecoder::cuda
