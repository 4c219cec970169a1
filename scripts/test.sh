#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Everything that has to hold before a change goes in, from a bare Debian or Ubuntu machine: installs what is missing, checks format, builds
# with warnings as errors, runs clang-tidy, the sanitizers, the fuzz targets, the documentation, and last CTest, whose closing lines end the
# output. Stops at the first stage that fails. Build trees are under build/, so a second run only does what changed.
#
# Environment: FUZZ_SECONDS   of each fuzz target, at least 1; default 60. CTest replays the kept inputs in any case
#              JOBS           parallel jobs; default: as many as the machine has processors
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-$(nproc)}
fuzz_seconds=${FUZZ_SECONDS:-60}
[[ $fuzz_seconds =~ ^[1-9][0-9]*$ ]] || { echo "test.sh: FUZZ_SECONDS = '$fuzz_seconds': must be a whole number, at least 1" >&2; exit 2; }

stage() { printf '\n== %s (%s s so far)\n' "$*" "$SECONDS"; }

install_missing() {
  command -v dpkg-query >/dev/null || { echo "test.sh: not a Debian or Ubuntu machine: packages are taken as they are"; return; }
  local wanted=(
    g++ cmake ninja-build git pkg-config binutils catch2 libfmt-dev nlohmann-json3-dev liblapack-dev libcli11-dev libpcre2-dev
    libspdlog-dev libbenchmark-dev doxygen python3 python3-pip ca-certificates clang-14 libclang-rt-14-dev clang-tidy-14
    clang-format-14
  )
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

fuzz_one() { # fuzz_one SECONDS BINARY: new inputs are collected in the build tree, a failing one is left there too
  local name=${2##*/fuzz_} corpus=build/fuzz/corpus
  mkdir -p "$corpus/$name"
  "$2" -max_total_time="$1" -timeout=20 -rss_limit_mb=3000 -artifact_prefix="$corpus/$name-" -print_final_stats=1 \
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

stage "clang-tidy" # headers and sources as clang compiles them; only what changed is looked at again
configure tidy -DCMAKE_CXX_COMPILER=clang++-14 "-DCMAKE_CXX_CLANG_TIDY=clang-tidy-14;--quiet"
compile tidy all all_verify_interface_header_sets

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

stage "fuzz targets, $fuzz_seconds s each"
configure fuzz -DCMAKE_CXX_COMPILER=clang++-14
targets=(gguf safetensors tokenizer)
compile fuzz "${targets[@]/#/fuzz_}"
printf '%s\0' "${targets[@]/#/build/fuzz/tests/fuzz_}" | xargs -0 -P "$jobs" -n 1 bash -c 'fuzz_one "$0" "$1"' "$fuzz_seconds"

stage "the small model"
scripts/get-model.sh smollm2

stage "tests"
ctest --test-dir build/cpu --output-on-failure --parallel "$jobs"
