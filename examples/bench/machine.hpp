// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "dualdecoder/memory.hpp"

namespace dualdecoder::examples {

/// Bytes a second that `threads` threads read together from 256 MiB of `memory`, each its own part in four streams, best of five passes:
/// the bound on whatever reads more than the caches hold.
double streaming_bandwidth(MemoryResource& memory, StreamRef stream, int threads);

/// Memory that the process holds now, in bytes.
std::size_t resident_bytes();
/// The most that it held since the last reset_peak(), in bytes.
std::size_t peak_bytes();
/// Gives freed memory back to the system and starts peak_bytes() anew.
void reset_peak();

}  // namespace dualdecoder::examples
