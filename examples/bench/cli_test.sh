#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# The programs run on small shapes and write the rows that they promise. usage: cli_test.sh steps PROGRAM | cli_test.sh model PROGRAM MODEL
# (exit 77: the model is not there)
set -uo pipefail

kind=$1
program=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
  echo "FAILED: $*"
  cat "$work/err"
  failures=$((failures + 1))
}

# expect CODE ARGUMENTS...: the program ends with CODE
expect() {
  local code=$1
  shift
  "$program" "$@" >"$work/out" 2>"$work/err"
  local got=$?
  [[ $got == "$code" ]] || fail "$*: exit $got, expected $code"
}

# expect_row NAME FIELD...: the output has a row of that name, with these fields, none of them null
expect_row() {
  local name=$1 field row
  shift
  row=$(grep -F "\"row\":\"$name\"" "$work/out") || { fail "no row $name"; return; }
  for field in "$@"; do
    [[ $row == *"\"$field\":"* && $row != *"\"$field\":null"* ]] || fail "row $name without $field: $row"
  done
}

decode_fields=(model weights selection context batch policy chunk budget slots tok_s ms_step ms_compute ms_link hit urgent link_gb_s
  device_kv_bytes_per_sequence machine commit command)

case $kind in
  steps)
    expect 0 run --device cpu --shape tiny --steps 4 --row tiny-2k-b1 --row tiny-2k-b1-full --machine here --commit abc
    expect_row tiny-2k-b1 "${decode_fields[@]}"
    expect_row tiny-2k-b1-full tok_s ms_step
    expect 1 run --device cpu --shape tiny --row tiny-3k-b1
    expect 0 prefill --device cpu --shape tiny --context 1024 --repeat 1
    expect_row tiny-1k-prefill tok_s seconds first_seconds peak_device_bytes weight_bytes plan_device_bytes
    ;;
  model)
    model=$3
    [[ -f $model ]] || { echo "SKIPPED: no $model; scripts/get-model.sh fetches it"; exit 77; }
    for i in $(seq 100); do echo "Sentence $i of a text that says $((i * i % 97)) things about $((i * 7 % 13)) matters."; done >"$work/text"
    batch=(batch -m "$model" -t "$work/text" "$work/text" --device cpu --tokens 200 --batch 2 1 --steps 3 -n 4 --name small)
    expect 0 "${batch[@]}" --setting 8:64:calibrated:estimate full
    for name in small-b1 small-b2; do
      expect_row $name "${decode_fields[@]}" agreement kl by_text peak_device_bytes
      expect_row $name-full tok_s ms_step
    done
    expect 1 "${batch[@]}" --setting 8:64:sometimes:estimate
    ;;
esac
((failures == 0)) || exit 1
echo "as expected"
