#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Tests of the command line. usage: cli_test.sh usage PROGRAM | cli_test.sh model PROGRAM MODEL | cli_test.sh quality PROGRAM MODEL PLAN
# (exit 77: the model is not there)
set -uo pipefail

kind=$1
program=$2
model=${3:-}
plan=${4:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
results=$work/quality.jsonl
failures=0

fail() {
  echo "FAILED: $1"
  failures=$((failures + 1))
}

# expect CODE PATTERN ARGUMENTS...: the program ends with CODE, and stderr matches PATTERN unless that is empty
expect() {
  local code=$1 pattern=$2
  shift 2
  "$program" --device cpu --out "$results" "$@" >"$work/out" 2>"$work/err"
  local got=$?
  if [[ $got != "$code" ]] || { [[ -n $pattern ]] && ! grep -Eq -- "$pattern" "$work/err"; }; then
    fail "$* : exit $got, expected $code; stderr should match '$pattern' and is:"
    cat "$work/err"
  fi
}

# check WHAT EXPRESSION: a Python expression over `lines`, the results so far
check() {
  python3 -c '
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
sys.exit(not eval(sys.argv[2]))' "$results" "$2" || { fail "$1: $2"; tail -c 2000 "$results"; }
}

need_model() {
  [[ -f $model ]] || { echo "skipped: $model is not there (scripts/get-model.sh fetches it)"; exit 77; }
}

usage_tests() {
  local cells=(-m x.gguf -c 4096 -t vt -p full)
  expect 0 '' --help
  grep -q 'code_completion' "$work/out" || fail '--help does not name the tasks'
  grep -q 'dualdecoder-published' "$work/out" || fail '--help does not name the policies'
  expect 0 '' --version
  expect 2 'unheard-of' "${cells[@]}" --unheard-of
  expect 2 'models: must name at least one' -c 4096 -t vt -p full
  expect 2 'contexts: must name at least one' -m x.gguf -t vt -p full
  expect 2 'task = needle: must be .*niah_single_1' "${cells[@]}" -t needle
  expect 2 'policy = best: must be .*dualdecoder' "${cells[@]}" -p best
  expect 2 'setting = speed=9: must be .*budget=N' "${cells[@]}" -p dualdecoder --set speed=9
  expect 2 'x\.gguf' "${cells[@]}"
  expect 2 'no-such-plan' --plan "$work/no-such-plan.json"
  echo '{"contexts": [4096], "speed": 9}' >"$work/plan.json"
  expect 2 'plan\.json.*"speed": must be one of' --plan "$work/plan.json"
  echo '{"contexts": [' >"$work/plan.json"
  expect 2 'plan\.json.*parse error' --plan "$work/plan.json"
  expect 2 'no-such-text' "${cells[@]}" --text "$work/no-such-text"
  expect 2 '--device' "${cells[@]}" --device tpu
  [[ ! -e $results ]] || fail 'bad input leaves a result file'
}

model_tests() {
  need_model
  local cells=(-m "$model" -c 512 -t niah_single_1 -p 'dualdecoder,full' --set 'budget=64,chunk=4')

  expect 2 'context = 100000: must be at most 8192' "${cells[@]}" -c 100000
  expect 2 'context = 64: must be at least .* for task cwe' "${cells[@]}" -c 64 -t cwe
  expect 2 'policy dualdecoder chunk=5: chunk_tokens = 5' "${cells[@]}" --set chunk=5
  results=$work/no-such-folder/x.jsonl expect 2 'no-such-folder' "${cells[@]}"
  [[ ! -s $results ]] || fail 'bad input leaves results'
  expect 0 '' "${cells[@]}" --check
  grep -q '2 cells' "$work/out" || fail '--check does not count the cells'
  grep -Eq 'dualdecoder budget=64,chunk=4 +[0-9.]+ +[0-9.]+$' "$work/out" || fail '--check does not say what a method takes'
  expect 2 'must fit into the' "${cells[@]}" -c 8192 --batch 10000

  expect 0 '1/2 .*full: score' "${cells[@]}"
  check 'two cells' '[l["policy"] for l in lines] == ["full", "dualdecoder"] and lines[1]["setting"] == "budget=64,chunk=4"'
  check 'lengths' 'all(l["prompt_tokens"] + 128 <= 512 and l["prompt_tokens"] > 350 for l in lines)'
  check 'full attention' 'lines[0]["agreement"] == 1 and lines[0]["kl"] == 0 and lines[0]["score"] == lines[1]["full_score"]'
  check 'fidelity' 'lines[1]["n"] > 0 and 0.5 < lines[1]["agreement"] <= 1 and 0 < lines[1]["kl"] < 1 and lines[1]["kl"] <= lines[1]["kl95"] * 20'
  check 'prediction' '0.5 < lines[1]["hit"] <= 1 and 0 < lines[1]["traffic"] < 1 and lines[1]["urgent"] <= lines[1]["traffic"]'
  check 'memory' 'all(sum(l["device_bytes_by_kind"].values()) == l["device_bytes"] > 0 for l in lines)'
  check 'measured memory' '0 < lines[1]["device_bytes_measured"] <= lines[1]["device_bytes"]'

  cp "$results" "$work/first"
  expect 0 '' "${cells[@]}"
  cmp -s "$results" "$work/first" || fail 'cells that are done are run again'
  truncate -s -20 "$results"
  expect 0 '1 lines were torn.*quality\.jsonl\.corrupt' "${cells[@]}"
  [[ $(wc -l <"$results.corrupt") == 1 ]] || fail 'the torn line is not kept'
  python3 -c '
import json, sys
a, b = ([{k: v for k, v in json.loads(l).items() if k != "seconds"} for l in open(f)] for f in sys.argv[1:])
sys.exit(a != b)' "$results" "$work/first" || fail 'a cell run again gives another result'

  # side by side: the same lengths and scores, and fidelity as near as one question's
  results=$work/batch.jsonl
  expect 0 '6/6 ' "${cells[@]}" --seed 1,2,3 --batch 3
  check 'a batch' 'len(lines) == 6 and all(l["batch"] == 3 for l in lines) and [l["seed"] for l in lines] == [1, 2, 3] * 2'
  check 'fidelity in a batch' 'all(l["n"] > 0 and l["agreement"] > 0.5 and l["kl"] < 1 for l in lines)'
  python3 -c '
import json, sys
alone = {l["policy"]: l for l in map(json.loads, open(sys.argv[1]))}
batch = {l["policy"]: l for l in map(json.loads, open(sys.argv[2])) if l["seed"] == 1}
same = all(alone[p][k] == batch[p][k] for p in alone for k in ("prompt_tokens", "n", "score"))
sys.exit(not (same and abs(alone["dualdecoder"]["kl"] - batch["dualdecoder"]["kl"]) < 1e-3))' "$work/first" "$results" ||
    fail 'side by side is not as alone'
  # what cannot run is left out
  expect 1 'context = 100000' "${cells[@]}" -c 512,100000 --seed 4 --keep-going
  check 'the others ran' 'sum(l["seed"] == 4 for l in lines) == 2'
  results=$work/quality.jsonl

  # an interrupt keeps what is done, and the same command goes on
  rm "$results"
  local many=(-m "$model" -c 1024 -t niah_single_1 -p 'full,dualdecoder' --seed 1,2,3,4,5,6,7,8 --device cpu --out "$results")
  "$program" "${many[@]}" >/dev/null 2>"$work/err" &
  local pid=$!
  until [[ -s $results ]] || ! kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
  kill -INT "$pid"
  wait "$pid"
  local got=$?
  [[ $got == 130 ]] && grep -q 'goes on from there' "$work/err" || fail "interrupted: exit $got, $(cat "$work/err")"
  local done_cells
  done_cells=$(wc -l <"$results")
  expect 0 "1/$((4 - done_cells)) " -m "$model" -c 1024 -t niah_single_1 -p 'full,dualdecoder' --seed 1,2
  check 'all cells once' 'len(lines) == 4'
}

# the plan's bounds hold: quality has not become worse
quality_tests() {
  need_model
  expect 0 '' --plan "$plan" -m "$model"
  cat "$work/out" "$work/err"
}

"${kind}_tests"
if ((failures > 0)); then
  echo "$failures failed"
  exit 1
fi
echo 'all passed'
