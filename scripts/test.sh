#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Everything that has to hold before a change goes in, from a bare Debian or Ubuntu machine: installs what is missing, checks format, builds
# with warnings as errors, runs the sanitizers, the fuzz targets, the documentation, and last CTest, whose closing lines end the output.
# Stops at the first stage that fails. Build trees are under build/, so a second run only does what changed.
#
# Environment: CI or FULL (not empty)   also fuzzes, FUZZ_SECONDS (60) for each target; without, the kept inputs are replayed
#              JOBS                     parallel jobs; default: as many as the machine has processors
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-$(nproc)}
full=${CI:-}${FULL:-}

stage() { printf '\n== %s (%s s so far)\n' "$*" "$SECONDS"; }

install_missing() {
  command -v dpkg-query >/dev/null || { echo "test.sh: not a Debian or Ubuntu machine: packages are taken as they are"; return; }
  local wanted=(
    g++ cmake ninja-build git pkg-config binutils catch2 libfmt-dev nlohmann-json3-dev libcli11-dev libpcre2-dev
    libbenchmark-dev doxygen python3 python3-pip ca-certificates clang clang-tidy clang-format-14
  )
  [[ -z $full ]] || wanted+=(libclang-rt-14-dev)
  local missing=() package
  for package in "${wanted[@]}"; do
    [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) == *' installed' ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  stage "installing ${missing[*]}"
  local as_root=()
  ((EUID == 0)) || as_root=(sudo)
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

sources() { git ls-files -co --exclude-standard -- '*.hpp' '*.cpp' '*.inl' '*.cu' '*.cuh'; }

check_format() { sources | xargs clang-format-14 --dry-run --Werror; }

configure() { # configure PRESET [OPTION...]
  mkdir -p build
  cmake --preset "$@" >"build/$1.log" 2>&1 || { cat "build/$1.log"; return 1; }
}

compile() { # compile PRESET [TARGET...]
  local preset=$1
  shift
  cmake --build "build/$preset" --parallel "$jobs" ${1:+--target "$@"}
}

fuzz_one() { # fuzz_one BINARY: new inputs are collected in the build tree, a failing one is left there too
  local name=${1##*/fuzz_} corpus=build/fuzz/corpus
  mkdir -p "$corpus/$name"
  "$1" -max_total_time="${FUZZ_SECONDS:-60}" -timeout=20 -rss_limit_mb=3000 -artifact_prefix="$corpus/$name-" -print_final_stats=1 \
    "$corpus/$name" "tests/fuzz/seeds/$name" >"$corpus/$name.log" 2>&1 || { tail -n 40 "$corpus/$name.log"; return 255; }
  echo "$name: $(grep number_of_executed_units "$corpus/$name.log")"
}
export -f fuzz_one

install_missing

stage "format"
check_format

stage "build"
configure cpu -DDUALDECODER_DOCS=ON
compile cpu

stage "documentation"
compile cpu docs

if command -v nvcc >/dev/null; then
  stage "CUDA for one architecture"
  configure cuda-ci
  compile cuda-ci gpu_tests
  ctest --test-dir build/cuda-ci -L gpu --output-on-failure
fi

stage "address and undefined-behaviour sanitizers"
configure asan
compile asan unit_tests
build/asan/tests/unit_tests '~[slow]~[real_model]' | tail -n 4

stage "thread sanitizer on the transfer lanes"
configure tsan
compile tsan unit_tests
TSAN_OPTIONS=halt_on_error=1 build/tsan/tests/unit_tests '[lanes]' | tail -n 4

if [[ -n $full ]]; then
  stage "fuzz targets"
  configure fuzz
  compile fuzz fuzz_gguf fuzz_safetensors fuzz_tokenizer
  find build/fuzz/tests -maxdepth 1 -name 'fuzz_*' -type f -perm -u+x -print0 | xargs -0 -P "$jobs" -n 1 bash -c 'fuzz_one "$0"'
fi

stage "the small model"
scripts/get-model.sh smollm2

stage "tests"
ctest --test-dir build/cpu --output-on-failure --parallel "$jobs"
