#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# No code of the library prints, aborts or exits: it throws, or calls a LogSink. usage: quiet_library.sh SOURCE_TREE
set -euo pipefail
cd "$1"
code() { # the sources without comments
  find include src cuda -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 sed -s -E -n 's://.*::; F; p' | awk '/^(include|src|cuda)\/[^ ]*$/ { file = $0; next } { print file ": " $0 }'
}
[[ $(code | wc -l) -gt 1000 ]] || { echo "found no sources in $1"; exit 1; }
if code | grep -E '\b(std::)?(abort|exit|_Exit|quick_exit|terminate)[[:space:]]*\(|\b[vf]*printf[[:space:]]*\(|\bf?puts[[:space:]]*\(|std::(cout|cerr|clog)\b|#include <iostream>|\bassert[[:space:]]*\('; then
  exit 1
fi
