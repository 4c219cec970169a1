// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks what the compiled components export; everything else in them is hidden.
#if defined(__GNUC__)
#define DUALDECODER_EXPORT __attribute__((visibility("default")))
#else
#define DUALDECODER_EXPORT
#endif
