#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# The programs run on small shapes and write the rows that they promise. usage: cli_test.sh steps|plan|serve PROGRAM |
# cli_test.sh model PROGRAM MODEL (exit 77: the model is not there)
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

# expect_value NAME FIELD NUMBER: the row of that name has the number
expect_value() {
  local row
  row=$(grep -F "\"row\":\"$1\"" "$work/out") || { fail "no row $1"; return; }
  [[ $row =~ \"$2\":$3[,}] ]] || fail "row $1: $2 is not $3: $row"
}

decode_fields=(model weights selection context batch policy chunk budget slots tok_s ms_step ms_compute ms_link hit urgent link_gb_s
  device_kv_bytes_per_sequence machine commit command)

case $kind in
  steps)
    expect 0 run --device cpu --shape tiny --steps 4 --row tiny-2k-b1 --row tiny-2k-b1-full --machine here --commit abc
    expect_row tiny-2k-b1 "${decode_fields[@]}"
    expect_row tiny-2k-b1-full tok_s ms_step
    expect 0 run --device cpu --steps 4 --budget 64 --row tiny-3k-b2-wait-onelane tiny-3k-b2-pingpong-inorder --miss-rate 0 0.5
    expect_row tiny-3k-b2-wait-onelane-miss50 "${decode_fields[@]}" injected_misses
    expect_row tiny-3k-b2-pingpong-inorder-miss00 "${decode_fields[@]}" injected_misses
    # half of what was foretold is gone, so about half of the hits are, and what takes its place is loaded urgently
    awk_fields='function of(key) { match($0, "\"" key "\":[0-9.]+"); return substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) + 0 }'
    for name in tiny-3k-b2-wait-onelane tiny-3k-b2-pingpong-inorder; do
      grep -F "\"row\":\"$name-miss" "$work/out" |
        awk "$awk_fields"'{ hit[NR] = of("hit"); urgent[NR] = of("urgent") }
             END { exit !(NR == 2 && hit[1] > 0.9 && hit[2] > 0.4 && hit[2] < 0.6 && urgent[2] > 2 * urgent[1]) }' ||
        fail "$name: hits do not follow --miss-rate: $(cat "$work/out")"
    done
    expect 0 run --device cpu --steps 2 --row tiny-2k-b2-specache-2bit
    expect_row tiny-2k-b2-specache-2bit "${decode_fields[@]}"
    "$program" run --device cpu --steps 2 --row tiny-2k-b2-shadowkv >"$work/out" 2>"$work/err"
    grep -q 'needs a build with LAPACK' "$work/err" || expect_row tiny-2k-b2-shadowkv "${decode_fields[@]}"
    expect 1 run --device cpu --row tiny-3k-b1-other
    expect 1 run --device cpu --row tiny-3k
    expect 1 run --device cpu --row huge-3k-b1
    expect 105 run --device cpu --row tiny-3k-b1 --miss-rate 1.5
    expect 0 prefill --device cpu --shape tiny --context 1024 --repeat 1
    expect_row tiny-1k-prefill tok_s seconds first_seconds peak_device_bytes weight_bytes plan_device_bytes
    ;;
  plan)
    # every policy, so that every part of a plan has a kind; the one that needs LAPACK below
    expect 0 plan --shape 8b --policy full dualdecoder dualdecoder-published specache-1bit specache-2bit freekv hisparse quest infinigen
    # bytes that follow from the papers, for 32 layers, 8 KV heads of 128 and 131,072 tokens in 16 bits
    tokens=131072 layers=32 width=$((8 * 128))
    expect_value 8b-128k-b1-specache-1bit low_bit $(((tokens - 64) * 12288))              # arXiv 2503.16163: groups of 64 with a scale
    expect_value 8b-128k-b1-specache-2bit low_bit $(((tokens - 64) * 20480))              # and a zero point in 16 bits, 64 exact tokens
    expect_value 8b-128k-b1-dualdecoder summaries $((tokens / 2 * layers * 8 * (128 + 128 / 2 + 2 * 4)))  # docs/concepts.md: int8, int4, scales; chunks of 2
    "$program" plan --shape 8b --policy shadowkv >"$work/out" 2>"$work/err"
    if ! grep -q 'needs a build with LAPACK' "$work/err"; then
      expect_value 8b-128k-b1-shadowkv low_rank $((layers * 2 * 160 * (tokens + width)))    # arXiv 2410.21465: rank 160, both factors
      expect_value 8b-128k-b1-shadowkv summaries $((tokens / 8 * layers * width * 2))       # a mean for 8 keys: 8,192 bytes a token
    fi
    # parameters as the model cards of Llama-3.1-8B, Qwen2.5-1.5B, -14B and -32B have them
    expect 0 plan --shape 1.5b 8b 14b 32b --context 4096 --policy full
    expect_value 8b-4k-b1-full parameters 8030261248
    expect_value 1.5b-4k-b1-full parameters 1543714304
    expect_value 14b-4k-b1-full parameters 14770033664
    expect_value 32b-4k-b1-full parameters 32763876352
    # the largest batch that fits: 16.1 GB of weights, 4 GB of activations and three times 17.2 GB of keys and values
    expect 0 plan --shape 8b --policy full --fit-gb 80
    expect_row 8b-128k-b3-full fit_gb
    expect 0 plan --shape 32b --policy full --fit-gb 80
    [[ ! -s $work/out ]] || fail "a row of a batch that does not fit"
    expect 1 plan --policy other
    expect 1 plan --shape 9b
    ;;
  serve)
    # a step of one takes 10 ms, of three 20 ms, and a token comes with each
    printf '{"row":"a-b%s-full","model":"m","weights":"synthetic","context":1024,"ms_step":%s,"tokens_per_step":%s}\n' 1 10 1 3 20 3 >"$work/steps"
    printf '{"row":"a-b3","model":"m","weights":"synthetic","context":1024,"ms_step":20,"tokens_per_step":3}\n' >>"$work/steps"
    # so rarely that each is alone: 100 tokens take a second, and all of them are in time
    expect 0 serve --steps "$work/steps" --rows 'a-b*-full' --rate 0.001 --requests 200 -n 100 --limit 1.01
    grep -Eq '"in_limit":1.0,"seconds_50":(1.0|0.9999)' "$work/out" || fail "serve: not a second: $(cat "$work/out")"
    # below the smallest batch that was measured a step takes as long as there, and still a token comes for each
    expect 0 serve --steps "$work/steps" --rows 'a-b*' --rate 0.001 --requests 200 -n 100 --limit 2.01
    grep -Eq '"in_limit":1.0,"seconds_50":(2.0|1.9999)' "$work/out" || fail "serve: not two seconds: $(cat "$work/out")"
    # so often that the places are full: 300 tokens in two seconds, so 1.5 requests a second, and nearly all wait too long
    expect 0 serve --steps "$work/steps" --rows 'a-b*-full' --rate 1000 --requests 300 -n 100 --limit 10
    grep -Eq '"requests_s":1\.(49|50)' "$work/out" || fail "serve: not 1.5 a second: $(cat "$work/out")"
    grep -Eq '"in_limit":0\.0[45]' "$work/out" || fail "serve: not those of the first ten seconds: $(cat "$work/out")"
    expect 1 serve --steps "$work/steps" --rows 'b-b*'
    expect 1 serve --steps "$work/steps" --rows a-b1-full
    expect 1 serve --steps "$work/none" --rows 'a-b*-full'
    echo '{"row":' >>"$work/steps"
    expect 1 serve --steps "$work/steps" --rows 'a-b*-full'
    expect 1 serve
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
    expect 0 fidelity -m "$model" -t "$work/text" --device cpu --tokens 300 -n 6 --setting 'dualdecoder budget=64,predictor=none,tail=drop'
    expect_row fidelity kl agreement hit guesses_right
    expect 1 fidelity -m "$model" -t "$work/text" --device cpu --tokens 300 -n 6 --setting 'dualdecoder budget=many'
    expect 1 fidelity -m "$model" -t "$work/text" --device cpu --tokens 300 -n 6 --setting 'dualdecoder weather=fine'
    serve=(serve -m "$model" -t "$work/text" --device cpu --tokens 200 -n 4 --batch 2 --requests 5 --rate 50)
    expect 0 "${serve[@]}" --setting full 'dualdecoder budget=64'
    for policy in full 'dualdecoder budget=64'; do
      row=$(grep -F "\"policy\":\"$policy\"" "$work/out") || fail "serve: no row of $policy"
      [[ $row == *'"prefill":"counted"'*'"in_limit":1.0,'* ]] || fail "serve: $row"
    done
    expect 0 "${serve[@]}" --setting full --prefill-elsewhere --limit 0.001
    grep -q '"in_limit":0.0,' "$work/out" || fail "serve: something ended within a millisecond"
    expect 1 "${serve[@]}" --setting fast
    ;;
esac
((failures == 0)) || exit 1
echo "as expected"
