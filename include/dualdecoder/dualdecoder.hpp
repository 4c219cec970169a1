// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

// What an application needs to load a model and generate. Needs the CMake target dualdecoder::dualdecoder.
#include "dualdecoder/decode_session.hpp"
#include "dualdecoder/default_backend.hpp"
#include "dualdecoder/load_weights.hpp"
