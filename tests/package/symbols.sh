#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# The shared libraries export nothing but namespace dualdecoder, and of it only what is declared for export. usage: symbols.sh STAGE
set -euo pipefail
found=0
for library in $(find "$1" -name 'libdualdecoder-*.so' | sort); do
  symbols=$(nm -D --defined-only -C "$library" | cut -c20-)
  echo "$library: $(wc -l <<<"$symbols") symbols"
  strange=$(grep -vE '^((vtable|typeinfo|typeinfo name) for )?dualdecoder::' <<<"$symbols" || true)
  inner=$(grep -E 'dualdecoder::(cpu::)?(detail|simd_[a-z0-9]+|\(anonymous namespace\))::' <<<"$symbols" || true)
  [[ -z $strange ]] || { echo "exported from outside of dualdecoder:"; echo "$strange"; exit 1; }
  [[ -z $inner ]] || { echo "exported from inside of dualdecoder:"; echo "$inner"; exit 1; }
  (($(wc -l <<<"$symbols") < 60)) || { echo "more symbols than an interface of this size has:"; echo "$symbols"; exit 1; }
  found=$((found + 1))
done
[[ $found == 2 ]] || { echo "expected libdualdecoder-cpu and libdualdecoder-cuda, found $found libraries"; exit 1; }
