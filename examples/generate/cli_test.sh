#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Tests of the command line. usage: cli_test.sh usage PROGRAM | cli_test.sh model PROGRAM MODEL (exit 77: the model is not there)
set -uo pipefail

kind=$1
program=$2
model=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# expect CODE PATTERN ARGUMENTS...: the program ends with CODE, and stderr matches PATTERN unless that is empty. stdin is $work/in.
: >"$work/in"
expect() {
  local code=$1 pattern=$2
  shift 2
  "$program" "$@" <"$work/in" >"$work/out" 2>"$work/err"
  local got=$?
  if [[ $got != "$code" ]] || { [[ -n $pattern ]] && ! grep -Eq -- "$pattern" "$work/err"; }; then
    echo "FAILED: $* : exit $got, expected $code; stderr should match '$pattern' and is:"
    cat "$work/err"
    failures=$((failures + 1))
  fi
}

# as expect 1, and the error is one line
expect_error() {
  expect 1 "$@"
  if [[ $(grep -c 'dualdecoder-generate: ' "$work/err") != 1 ]]; then
    echo "FAILED: ${*:2} : no line that says what is wrong"
    failures=$((failures + 1))
  fi
}

# check WHAT EXPRESSION: a Python expression over `lines`, the JSON objects on stdout
check() {
  if ! python3 -c '
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
report = lines[-1]
sys.exit(not eval(sys.argv[2]))' "$work/out" "$2"; then
    echo "FAILED: $1: $2"
    tail -c 2000 "$work/out"
    failures=$((failures + 1))
  fi
}

usage_tests() {
  expect 0 '' --help
  grep -q -- '--budget-tokens' "$work/out" || { echo 'FAILED: --help does not name --budget-tokens'; failures=$((failures + 1)); }
  expect 0 '' --version
  expect 2 'model' --prompt hi
  expect 2 'unheard-of' --model x --unheard-of
  expect 2 'store=automatic\|full\|ping-pong\|resident' --model x --policy store=elsewhere
  expect 2 'predictor=' --model x --policy predictor=crystal-ball
  expect 2 'replay-selection' --model x --policy predictor=oracle
  expect 2 'estimate\|wait' --model x --miss-policy hope
  expect 2 'budget' --model x --budget-tokens many
  expect 2 'chat' --model x --system hi
  expect 2 'max-new-tokens' --model x --max-new-tokens 0
  expect_error 'no-such-model.gguf' --model "$work/no-such-model.gguf" --prompt hi
  printf 'GGUF' >"$work/short.gguf"
  expect_error 'GGUF|short.gguf' --model "$work/short.gguf" --prompt hi
  mkdir "$work/folder"
  expect_error 'folder' --model "$work/folder" --prompt hi
}

model_tests() {
  [[ -f $model ]] || { echo "skipped: $model is not there (scripts/get-model.sh fetches it)"; exit 77; }
  local quick=(--model "$model" --max-new-tokens 8)

  expect_error 'prompt is empty' "${quick[@]}"
  expect_error 'no-such-prompt' "${quick[@]}" --prompt-file "$work/no-such-prompt"
  expect_error 'budget_tokens = 0' "${quick[@]}" --prompt hi --budget-tokens 0
  expect_error 'chunk_tokens = 5' "${quick[@]}" --prompt hi --chunk-tokens 5
  expect_error 'temperature = -1' "${quick[@]}" --prompt hi --temperature -1
  expect_error 'max_context = 1000000' "${quick[@]}" --prompt hi --max-context 1000000
  expect_error 'prompt' "${quick[@]}" --prompt 'one two three four five six' --max-context 4

  expect 0 '' --model "$model" --memory-plan
  grep -Eq '^total +all' "$work/out" || { echo 'FAILED: --memory-plan prints no total'; failures=$((failures + 1)); }
  expect 0 '' --model "$model" --memory-plan --json --max-context 4096
  check 'memory plan' 'len(lines) == 1 and report["event"] == "memory_plan" and report["total_bytes"] == sum(i["bytes"] for i in report["items"]) > 0'

  expect 0 '' "${quick[@]}" --prompt 'A short context:' --json
  check 'nothing is selected in a short context' 'report["store"] == "full" and report["predictor"] == "none" and report["guesses"] == 0'
  expect 0 '' "${quick[@]}" --prompt 'A long context:' --json --max-context 8192
  check 'a long context is' 'report["store"] == "resident" and report["predictor"] == "front-runner"'

  expect 0 'generated' "${quick[@]}" --chat --prompt 'What is the capital of France?'
  grep -q 'Paris' "$work/out" || { echo "FAILED: the capital of France is '$(cat "$work/out")'"; failures=$((failures + 1)); }
  cp "$work/out" "$work/by-argument"
  echo 'What is the capital of France?' >"$work/in"
  expect 0 'generated' "${quick[@]}" --chat
  cmp -s "$work/out" "$work/by-argument" || { echo 'FAILED: the prompt on stdin gives another answer'; failures=$((failures + 1)); }
  : >"$work/in"
  echo 'What is the capital of France?' >"$work/prompt"
  expect 0 '' "${quick[@]}" --chat --prompt-file "$work/prompt" --quiet
  cmp -s "$work/out" "$work/by-argument" || { echo 'FAILED: the prompt in a file gives another answer'; failures=$((failures + 1)); }
  [[ ! -s $work/err ]] || { echo "FAILED: --quiet says: $(cat "$work/err")"; failures=$((failures + 1)); }

  for _ in {1..80}; do echo 'The river was wide, and the ferry went only twice a day.'; done >"$work/prompt"
  expect 0 '' "${quick[@]}" --prompt-file "$work/prompt" --budget-tokens 64 --ignore-end --json --compare-full --trace "$work/trace.json" \
    --record-selection "$work/selection"
  check 'tokens' 'sum(l["event"] == "token" for l in lines) == report["generated_tokens"] == 8 and report["finish"] == "max_tokens"'
  check 'report' 'report["event"] == "report" and report["prompt_tokens"] > 1000 and report["tokens_per_second"] > 0 and 0 < report["hit_rate"] <= 1'
  check 'comparison' 'report["compare_full"]["tokens"] == 8 and 0.5 <= report["compare_full"]["agreement"] <= 1 and report["compare_full"]["mean_kl"] < 1'
  python3 -c 'import json, sys; assert len(json.load(open(sys.argv[1]))["traceEvents"]) > 100' "$work/trace.json" ||
    { echo 'FAILED: the trace is no Chrome trace'; failures=$((failures + 1)); }
  grep '"token"' "$work/out" >"$work/tokens"

  local policy
  for policy in predictor=none predictor=previous-step predictor=layer-ahead predictor=published store=ping-pong; do
    expect 0 '' "${quick[@]}" --prompt-file "$work/prompt" --budget-tokens 64 --ignore-end --json --policy "$policy"
    grep '"token"' "$work/out" | cmp -s - "$work/tokens" || { echo "FAILED: --policy $policy generates other tokens"; failures=$((failures + 1)); }
  done
  expect 0 '' "${quick[@]}" --prompt-file "$work/prompt" --budget-tokens 64 --ignore-end --json --policy predictor=oracle \
    --replay-selection "$work/selection"
  check 'the oracle is always right' 'report["hit_rate"] > 0.999'
  expect 0 '' "${quick[@]}" --prompt-file "$work/prompt" --json --policy store=full,predictor=none --compare-full
  check 'full against full' 'report["compare_full"]["agreement"] == 1 and report["compare_full"]["mean_kl"] < 1e-6'
}

"${kind}_tests"
if ((failures > 0)); then
  echo "$failures failed"
  exit 1
fi
echo 'all passed'
