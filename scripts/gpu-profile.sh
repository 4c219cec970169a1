#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Where a decode step goes on this machine's GPU: a Chrome trace of every kernel of one step, its times by kernel, and what Nsight Compute
# says of the longest kernels of a layer.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu-profile.sh [--shape NAME] [--row NAME] [--trace FILE] [--out DIR] [--layers N] [--parts LIST] [BUILD]
  BUILD     a build folder with dualdecoder-bench-steps and dualdecoder-kernel-trace in bin; default build/cuda
  --shape   as dualdecoder-bench-steps has it; default 8b
  --row     default 8b-128k-b7
  --trace   recorded choices of a real model; default: drawn ones
  --layers  of the shape, for the trace; default: all
  --parts   of trace, ncu, comma-separated; default: both
  --out     default build/gpu-profile
Writes OUT/ROW-step-trace.json, OUT/ROW-kernels.txt and OUT/ROW-ncu.txt. CUPTI's library must be where the loader finds it, ncu in PATH.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/build/gpu-profile
build=$root/build/cuda
shape=8b
row=8b-128k-b7
layers=0
parts=trace,ncu
trace=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --trace) trace=(--trace "$2"); shift 2 ;;
    --shape | --row | --layers | --out | --parts) declare "${1#--}=$2"; shift 2 ;;
    -*) usage >&2; exit 2 ;;
    *) build=$1; shift ;;
  esac
done
mkdir -p "$out"
bench=("$build/bin/dualdecoder-bench-steps" run --device cuda --shape "$shape" --row "$row" "${trace[@]}")

if [[ ,$parts, == *,trace,* ]]; then
  file=$out/$row-step-trace.json
  CUDA_INJECTION64_PATH=$build/bin/dualdecoder-kernel-trace.so DUALDECODER_KERNEL_TRACE=$file "${bench[@]}" --layers "$layers" >"$out/$row.jsonl"
  "$root/scripts/kernel_times.py" "$file" >"$out/$row-kernels.txt"
  cat "$out/$row-kernels.txt"
fi

if [[ ,$parts, == *,ncu,* ]]; then
  # Two layers, so that the store is small. A pass of counters needs the program once more, since what kernels write cannot be put back where
  # the host's memory belongs to it, and every pass must see the same kernels: cuBLAS's are left out. Filling the store runs scores and
  # choices too: the last kernels of each name are those of steps.
  stalls=long_scoreboard,short_scoreboard,barrier,wait,lg_throttle,no_instruction
  metrics=gpu__time_duration.sum,gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active
  for stall in ${stalls//,/ }; do metrics+=,smsp__average_warps_issue_stalled_${stall}_per_issue_active.ratio; done
  ncu --clock-control none --replay-mode application --csv --page raw --metrics "$metrics" \
    -k 'regex:attend_kernel|score_kernel|choose_kernel|few_rows_kernel|join_partials' "${bench[@]}" --layers 2 --steps 2 >"$out/$row-ncu.csv"
  "$root/scripts/ncu_table.py" "$out/$row-ncu.csv" >"$out/$row-ncu.txt"
  cat "$out/$row-ncu.txt"
fi
