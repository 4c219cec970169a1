#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Builds and runs a program with nothing but pkg-config's flags. usage: pkg_config.sh STAGE static|shared COMPILER SOURCE PROGRAM
set -euo pipefail
stage=$1 kind=$2 compiler=$3 source=$4 program=$5

pc=$(find "$stage" -name dualdecoder.pc)
export PKG_CONFIG_PATH=${pc%/*}
options=(--cflags --libs)
[[ $kind == static ]] && options+=(--static)
read -ra flags <<<"$(pkg-config "${options[@]}" dualdecoder)"
[[ $(pkg-config --modversion dualdecoder) == 0.1.* ]]

libdir=$(pkg-config --variable=libdir dualdecoder)
[[ $(realpath "$libdir") == "$(realpath "$stage")"/* ]] || { echo "libdir is $libdir, outside of $stage"; exit 1; }
"$compiler" -std=c++20 "$source" -o "$program" "${flags[@]}"
LD_LIBRARY_PATH=$libdir "$program"
