#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU: the programs of tests/gpu, the same under compute-sanitizer, and their benchmarks. A build folder may have been
# made elsewhere and copied here, since the programs are run by themselves where CTest cannot be; without one the preset cuda is built for
# the GPU of this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu-check.sh [--quick] [--out DIR] [--stages LIST] [--tests LIST] [--tools LIST] [--jobs N] [--limit SECONDS] [BUILD]
       scripts/gpu-check.sh --pack FILE.tar.xz BUILD
  BUILD      a build folder with the GPU tests, or what --pack made of one; default: builds preset cuda in build/cuda
  --pack     packs the programs of BUILD (tests/gpu, bin), stripped, for a machine without compilers
  --quick    a few minutes: the small cases of every test, memcheck and racecheck alone, no benchmarks, 90 seconds a program
  --out      where logs and JSON go; default: build/gpu-check
  --stages   of tests, sanitizer, bench, comma-separated; default: all
  --tests    names without gpu_ and _test, comma-separated; default: all that the folder has
  --tools    of compute-sanitizer; default: memcheck,racecheck,initcheck,synccheck
  --jobs     programs that the sanitizer stage runs at once; default 4
  --limit    seconds that one program may take; default 300
Writes OUT/machine.txt, OUT/tests.jsonl (one line a program and tool), OUT/<bench>.jsonl and a log each. Exit status: 0 all passed or were
skipped, 1 a failure, 77 everything was skipped. DUALDECODER_MODELS names the folder of models, as for the other tests; without models (see
scripts/get-model.sh) what needs them is skipped. A build of its own needs what scripts/test.sh installs, and nvcc.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/build/gpu-check
stages=tests,sanitizer,bench
tests=
tools=memcheck,racecheck,initcheck,synccheck
jobs=4
limit=300
quick=
build=
pack=
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --quick)
      quick=yes stages=tests,sanitizer tools=memcheck,racecheck limit=90
      shift
      ;;
    --pack | --out | --stages | --tests | --tools | --jobs | --limit)
      (($# >= 2)) || { usage >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    -*) usage >&2; exit 2 ;;
    *) build=$1; shift ;;
  esac
done
for stage in ${stages//,/ }; do
  [[ $stage == tests || $stage == sanitizer || $stage == bench ]] || { usage >&2; exit 2; }
done

if [[ -n $pack ]]; then
  [[ -d $build/tests/gpu ]] || { usage >&2; exit 2; }
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  for program in "$build"/tests/gpu/gpu_*_test "$build"/bin/*; do
    [[ -f $program && -x $program ]] || continue
    target=$stage/build/${program#"$build"/}
    mkdir -p "${target%/*}"
    strip -o "$target" "$program"
  done
  # the programs hold the same kernels: a window larger than a program finds them again
  tar -C "$stage/build" -c . | xz -T1 --lzma2=preset=3,dict=256MiB >"$pack"
  ls -l "$pack"
  exit 0
fi

# the toolkit where its installer puts it, behind what the caller prefers
[[ -d /usr/local/cuda/bin ]] && PATH=$PATH:/usr/local/cuda/bin
# a build folder from another machine may look for the toolkit's libraries where this one does not keep them
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
  [[ -d $folder ]] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
export DUALDECODER_MODELS=${DUALDECODER_MODELS:-$root/models}
export DUALDECODER_TEST_DATA_DIR=${DUALDECODER_TEST_DATA_DIR:-$root/tests/data}

# as nvcc names this machine's GPU; empty without one
architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || return 0
  case $capability in
    9.0) echo 90a-real ;;
    [0-9]*.[0-9]*) echo "${capability/./}-real" ;;
  esac
}

if [[ -z $build ]]; then
  command -v nvcc >/dev/null || { echo "gpu-check.sh: nvcc is neither in PATH nor in /usr/local/cuda/bin" >&2; exit 2; }
  build=$root/build/cuda
  own=$(architecture)
  (cd "$root" && cmake --preset cuda ${own:+"-DCMAKE_CUDA_ARCHITECTURES=$own"} >/dev/null)
  cmake --build "$build" --parallel "$(nproc)" --target gpu_tests dualdecoder-bench-steps
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ -f $build ]]; then
  mkdir -p "$out/build"
  tar -C "$out/build" -xJf "$build"
  build=$out/build
fi
[[ -d $build/tests/gpu ]] || { echo "gpu-check.sh: '$build' has no tests/gpu" >&2; exit 2; }
build=$(cd "$build" && pwd)
: >"$out/tests.jsonl"

{
  git -C "$root" log -1 --format='commit %H' 2>/dev/null || true
  nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv 2>/dev/null || echo "no nvidia-smi"
  nvcc --version 2>/dev/null | tail -n 2 || true
  nproc
  grep -E 'MemTotal|MemAvailable' /proc/meminfo || true
  ulimit -l
} >"$out/machine.txt"

names=()
for program in "$build"/tests/gpu/gpu_*_test; do
  [[ -f $program && -x $program ]] || continue
  name=${program##*/gpu_}
  name=${name%_test}
  [[ -z $tests || ,$tests, == *,$name,* ]] && names+=("$name")
done
((${#names[@]})) || { echo "gpu-check.sh: no test programs in '$build/tests/gpu'" >&2; exit 2; }

has() { [[ ,$stages, == *,$1,* ]]; }

# record NAME TOOL VERDICT EXIT SECONDS: a line of tests.jsonl and one for the reader
record() {
  printf '{"test":"%s","tool":"%s","status":"%s","exit":%d,"seconds":%d}\n' "$1" "$2" "$3" "$4" "$5" >>"$out/tests.jsonl"
  printf '%-12s %-10s %-20s %4d s\n' "$3" "$2" "$1" "$5"
}

verdict_of() {
  case $1 in
    0) echo passed ;;
    77) echo skipped ;;
    124 | 137) echo "not finished" ;;
    *) echo failed ;;
  esac
}

# one TOOL NAME: runs a program, alone (TOOL none) or under a tool
one() {
  local tool=$1 name=$2 begin=$SECONDS status=0
  local log=$out/$name.$tool.log
  local command=("$build/tests/gpu/gpu_${name}_test")
  if [[ $tool != none ]]; then
    export DUALDECODER_GPU_TESTS=small
    local reports=() shown=20
    [[ $tool == memcheck ]] && reports=(--report-api-errors no) # tests make calls fail on purpose, and see for themselves that those do
    [[ $tool == racecheck ]] && shown=10000 # all hazards are told apart below
    [[ $tool == synccheck ]] && reports=(--num-cuda-barriers 65536) # it tracks fewer by itself, and dies of one too many
    command=(compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit "$shown" "${reports[@]}" "${command[@]}")
    [[ $name == backend || $name == faults ]] && command+=(--no-children)
  fi
  (cd "$root" && exec timeout -k 5 "$limit" "${command[@]}") >"$log" 2>&1 || status=$?
  # cuBLAS's kernels, whose asynchronous copies racecheck takes for hazards. Leaving them out by name ends the programs with a fault of the
  # tool's own.
  if [[ $tool == racecheck && $status == 99 ]]; then
    local all within
    all=$(sed -nE 's/^.*RACECHECK SUMMARY: ([0-9]+) hazard.*$/\1/p' "$log" | tail -n 1)
    within=$(grep -c 'Race reported.*nvjet' "$log" || true)
    [[ -n $all && $all -gt 0 && $all == "$within" ]] && status=0
  fi
  local verdict
  verdict=$(verdict_of "$status")
  record "$name" "$tool" "$verdict" "$status" $((SECONDS - begin))
  if [[ $verdict == failed ]]; then tail -n 25 "$log" | sed 's/^/    /'; fi
}
export -f one record verdict_of
export build out limit root

# CTest, on the programs that are there
with_ctest() {
  local log=$out/ctest.log status=0 chosen
  chosen=$(IFS='|'; echo "${names[*]}")
  ctest --test-dir "$build" -L gpu -R "^gpu\\.($chosen)_test\$" --timeout "$limit" --output-on-failure >"$log" 2>&1 || status=$?
  # "  3/18 Test  #7: gpu.attend_test ....   Passed    2.51 sec", or "***Failed", "***Skipped", "***Timeout" and the like
  while read -r name verdict seconds; do
    case $verdict in
      Passed) record "$name" none passed 0 "${seconds%.*}" ;;
      Skipped) record "$name" none skipped 77 "${seconds%.*}" ;;
      Timeout) record "$name" none "not finished" 124 "${seconds%.*}" ;;
      *) record "$name" none failed 1 "${seconds%.*}" ;;
    esac
  done < <(sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: gpu\.([^ ]+)_test \.* *(\*\*\*)?([A-Za-z]+).* ([0-9]+\.[0-9]+) sec.*$/\1 \3 \4/p' "$log")
  ((status == 0)) || tail -n 60 "$log" | sed 's/^/    /'
  grep -q '"none"' "$out/tests.jsonl" || { echo "gpu-check.sh: CTest ran nothing, see $log" >&2; exit 1; }
}

if has tests; then
  [[ -n $quick ]] && export DUALDECODER_GPU_TESTS=small
  # a folder that was made for these sources, not one that was copied here
  if command -v ctest >/dev/null && grep -qsF "$root" "$build/tests/gpu/CTestTestfile.cmake"; then
    with_ctest
  else
    for name in "${names[@]}"; do one none "$name"; done
  fi
fi

if has sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in ${tools//,/ }; do
      for name in "${names[@]}"; do printf '%s %s\n' "$tool" "$name"; done
    done | xargs -P "$jobs" -L 1 bash -c 'one "$0" "$1"'
  else
    echo "compute-sanitizer is not here: that stage is left out"
  fi
fi

if has bench; then
  unset DUALDECODER_GPU_TESTS
  for name in "${names[@]}"; do
    grep -qs -- '"--bench"' "$root/tests/gpu/${name}_test."* || continue
    echo "bench        $name"
    begin=$SECONDS status=0
    timeout -k 5 "$limit" "$build/tests/gpu/gpu_${name}_test" --bench >"$out/$name.bench.log" 2>&1 || status=$?
    grep '^{' "$out/$name.bench.log" | tee "$out/$name.jsonl" || true
    record "$name" bench "$(verdict_of "$status")" "$status" $((SECONDS - begin))
  done
fi

# whole steps, sparse beside full, with drawn choices
if has bench && [[ -x $build/bin/dualdecoder-bench-steps ]] && nvidia-smi -L >/dev/null 2>&1; then
  echo "bench        steps"
  begin=$SECONDS status=0
  timeout -k 5 "$limit" "$build/bin/dualdecoder-bench-steps" run --device cuda --shape 8b --row 8b-2k-b1 --row 8b-2k-b1-full \
    >"$out/steps.jsonl" 2>"$out/steps.bench.log" || status=$?
  cat "$out/steps.jsonl"
  record steps bench "$(verdict_of "$status")" "$status" $((SECONDS - begin))
fi

if grep -q '"failed"' "$out/tests.jsonl"; then
  echo "FAILED, see $out"
  exit 1
fi
grep -q '"passed"' "$out/tests.jsonl" || { echo "everything was skipped or not finished, see $out"; exit 77; }
echo "all passed or skipped, see $out"
