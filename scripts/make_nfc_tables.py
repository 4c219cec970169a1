#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes examples/common/nfc_tables.inc from the Unicode Character Database that Python's unicodedata module carries.

usage: scripts/make_nfc_tables.py > examples/common/nfc_tables.inc
"""
import sys
import unicodedata

POINTS = [c for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF and not 0xAC00 <= c <= 0xD7A3]


def rows(items, per_line):
    items = list(items)
    return "\n".join("    " + " ".join(items[i : i + per_line]) for i in range(0, len(items), per_line))


def full(c):  # canonical decomposition, one step
    text = unicodedata.decomposition(chr(c))
    return [] if not text or text.startswith("<") else [int(x, 16) for x in text.split()]


decompositions = {c: full(c) for c in POINTS if full(c)}
classes = {c: unicodedata.combining(chr(c)) for c in POINTS if unicodedata.combining(chr(c))}
# A pair composes when NFC keeps the composite, which leaves out the composition exclusions.
compositions = {
    tuple(d): c for c, d in decompositions.items() if len(d) == 2 and unicodedata.normalize("NFC", chr(c)) == chr(c)
}
runs = []  # code points of one combining class that follow each other
for c, k in sorted(classes.items()):
    if runs and runs[-1][1] == c - 1 and runs[-1][2] == k:
        runs[-1][1] = c
    else:
        runs.append([c, c, k])

print("// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0")
print(f"// Written by scripts/make_nfc_tables.py from the Unicode Character Database {unicodedata.unidata_version}; do not edit.")
print("// clang-format off")
print("constexpr CombiningRun kCombiningRuns[] = {  // first, last, class")
print(rows((f"{{0x{a:X}, 0x{b:X}, {k}}}," for a, b, k in runs), 5))
print("};")
print("constexpr Decomposition kDecompositions[] = {  // code point, first, second or 0")
print(rows((f"{{0x{c:X}, 0x{d[0]:X}, 0x{d[1] if len(d) > 1 else 0:X}}}," for c, d in sorted(decompositions.items())), 4))
print("};")
print("constexpr Composition kCompositions[] = {  // first, second, composite")
print(rows((f"{{0x{a:X}, 0x{b:X}, 0x{c:X}}}," for (a, b), c in sorted(compositions.items())), 4))
print("};")
print("// clang-format on")
