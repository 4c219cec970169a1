#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Tests of both forms of the engine. usage: engine_test.sh same_tokens|small_budget|difference|usage DENSE SPARSE
set -euo pipefail
kind=$1 dense=$2 sparse=$3
fail() { echo "FAILED: $*"; exit 1; }

# where the budget holds the whole context, the engine's own dense attention says what comes out
same_tokens() {
  local rows size expected got
  for size in "300 40" "77 40" "520 16"; do
    read -r prompt new <<<"$size"
    expected=$("$dense" --prompt-tokens "$prompt" --new-tokens "$new")
    [[ $(wc -w <<<"$expected") == "$new" ]] || fail "expected $new tokens: $expected"
    for rows in 1 2; do
      got=$("$sparse" --prompt-tokens "$prompt" --new-tokens "$new" --budget-tokens 2048 --rows "$rows" 2>/dev/null)
      [[ $got == "$expected" ]] || fail "$rows rows, $prompt prompt tokens: got $got, expected $expected"
    done
  done
}

# the rows of a guess change what is fetched early, never what is generated; they raise the hit rate
small_budget() {
  local rows said rate=() tokens=() errors
  errors=$(mktemp)
  for rows in 1 2; do
    tokens+=("$("$sparse" --budget-tokens 32 --rows "$rows" 2>"$errors")")
    said=$(<"$errors")
    [[ $(wc -w <<<"${tokens[-1]}") == 40 ]] || fail "$rows rows: not 40 tokens: ${tokens[-1]}"
    [[ $said =~ ^"hit rate "([01]\.[0-9]{3})$ ]] || fail "$rows rows: $said"
    rate+=("${BASH_REMATCH[1]}")
  done
  rm "$errors"
  echo "hit rates with one row and two: ${rate[*]}"
  [[ ${tokens[0]} == "${tokens[1]}" ]] || fail "one row and two generate different tokens"
  [[ ${rate[0]} < ${rate[1]} ]] || fail "two rows hit no more often than one"
}

difference() {
  local lines folder
  folder=$(dirname "${BASH_SOURCE[0]}")
  lines=$(diff "$folder/engine_dense.cpp" "$folder/engine_sparse.cpp" | grep -c '^[<>]' || true)
  echo "$lines lines differ"
  ((lines > 0 && lines < 60)) || fail "the forms should differ in fewer than 60 lines"
}

usage() {
  local message
  message=$("$sparse" --rows 3 2>&1) && fail "--rows 3 is taken"
  [[ $message == *"rows_per_sequence = 3"* ]] || fail "$message"
  message=$("$dense" --unheard-of 1 2>&1) && fail "--unheard-of is taken"
  [[ $message == *"--unheard-of: no such option"* ]] || fail "$message"
  message=$("$dense" --new-tokens many 2>&1) && fail "--new-tokens many is taken"
  [[ $message == *"--new-tokens: needs an integer"* ]] || fail "$message"
}

"$kind"
