// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "dualdecoder/session_options.hpp"

namespace dualdecoder::examples {

/// A setting in the one form that results use: "budget=512,chunk=4", sorted, without blanks. Empty for none. Throws InvalidArgument when an
/// item is not KEY=VALUE, or a key unknown or twice there.
std::string canonical_setting(std::string_view text);

/// Options of a policy with those of a setting laid over them, for a model of that vocabulary. Throws InvalidArgument naming the item and
/// what it allows.
SessionOptions with_setting(SessionOptions options, std::string_view setting, int vocabulary);

/// "budget=N, chunk=N, ...": every key with its values, for --help.
std::string setting_keys();

}  // namespace dualdecoder::examples
