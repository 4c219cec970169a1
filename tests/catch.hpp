// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

// One include for Catch2 v2 and v3, with the names of v2 in the global namespace.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

/// Ends the test case as skipped: CTest shows "Skipped" when a test prints this word, in both versions of Catch2. `reason` is a string.
#define DUALDECODER_SKIP(reason)   \
  do {                             \
    WARN("SKIPPED: " << (reason)); \
    return;                        \
  } while (false)
