#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Every block of C++ in the README and in docs stands between two marks "//! [name]" of a file that is compiled: an example, or one in
# tests/package/listings. The block is indented less by as much as the marks are. usage: listings.sh SOURCE_TREE
set -euo pipefail
cd "$1"
awk '
  FNR == 1 { inside = 0; page = FILENAME ~ /\.md$/ }
  page && /^```cpp$/ { inside = 1; indent = 0; listing = ""; place = FILENAME ":" FNR; next }
  page && inside && /^```$/ {
    ++listings
    if (!(listing in compiled)) { print place ": no compiled file has this listing"; ++strangers }
    inside = 0
  }
  !page && /^ *\/\/! \[[a-z_]+\]$/ {
    if (inside) compiled[listing] = 1
    inside = !inside; indent = index($0, "/") - 1; listing = ""
    next
  }
  inside { listing = listing substr($0, indent + 1) "\n" }
  END {
    if (!listings) print "found no listing in any page"
    exit strangers || !listings
  }
' examples/*/*.cpp tests/package/listings/*.cpp README.md docs/*.md docs/adr/*.md
