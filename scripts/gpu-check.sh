#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU: the programs of tests/gpu, the same under compute-sanitizer, and their benchmarks. Programs are run by
# themselves, without CTest, so the build folder may have been made elsewhere and copied here; without one the preset cuda is built.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu-check.sh [--out DIR] [--stages LIST] [--tests LIST] [--tools LIST] [--jobs N] [--limit SECONDS] [BUILD]
       scripts/gpu-check.sh --pack FILE.tar.xz BUILD
  BUILD      a build folder with the GPU tests, or what --pack made of one; default: builds preset cuda in build/cuda
  --pack     packs the programs of BUILD (tests/gpu, bin), stripped, for a machine without compilers
  --out      where logs and JSON go; default: build/gpu-check
  --stages   of tests, sanitizer, bench, comma-separated; default: all
  --tests    names without gpu_ and _test, comma-separated; default: all that the folder has
  --tools    of compute-sanitizer; default: memcheck,racecheck,initcheck,synccheck
  --jobs     programs that the sanitizer stage runs at once; default 4
  --limit    seconds that one program may take; default 300
Writes OUT/machine.txt, OUT/tests.jsonl (one line a program and tool), OUT/<bench>.jsonl and a log each. Exit status: 0 all passed or were
skipped, 1 a failure, 77 everything was skipped. DUALDECODER_MODELS names the folder of models, as for the other tests.
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/build/gpu-check
stages=tests,sanitizer,bench
tests=
tools=memcheck,racecheck,initcheck,synccheck
jobs=4
limit=300
build=
pack=
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --pack | --out | --stages | --tests | --tools | --jobs | --limit)
      (($# >= 2)) || { usage >&2; exit 2; }
      declare "${1#--}=$2"
      shift 2
      ;;
    -*) usage >&2; exit 2 ;;
    *) build=$1; shift ;;
  esac
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

if [[ -z $build ]]; then
  cmake --preset cuda -S "$root" >/dev/null
  cmake --build "$root/build/cuda" --target gpu_tests
  build=$root/build/cuda
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

export DUALDECODER_MODELS=${DUALDECODER_MODELS:-$root/models}
# a build folder from another machine may look for the toolkit's libraries where this one does not keep them
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
  [[ -d $folder ]] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH PATH=$PATH:/usr/local/cuda/bin

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

# one TOOL NAME: runs a program, alone (TOOL none) or under a tool, and writes its line of tests.jsonl
one() {
  local tool=$1 name=$2 log begin=$SECONDS status=0 verdict
  log=$out/$name.$tool.log
  local command=("$build/tests/gpu/gpu_${name}_test")
  if [[ $tool != none ]]; then
    export DUALDECODER_GPU_TESTS=small
    command=(compute-sanitizer --tool "$tool" --error-exitcode 99 --print-limit 20 "${command[@]}")
    [[ $name == backend ]] && command+=(--no-children)
  fi
  timeout "$limit" "${command[@]}" >"$log" 2>&1 || status=$?
  case $status in
    0) verdict=passed ;;
    77) verdict=skipped ;;
    124) verdict="not finished" ;;
    *) verdict=failed ;;
  esac
  printf '{"test":"%s","tool":"%s","status":"%s","exit":%d,"seconds":%d}\n' "$name" "$tool" "$verdict" "$status" $((SECONDS - begin)) \
    >>"$out/tests.jsonl"
  printf '%-12s %-10s %-20s %4d s\n' "$verdict" "$tool" "$name" $((SECONDS - begin))
  if [[ $verdict == failed ]]; then tail -n 25 "$log" | sed 's/^/    /'; fi
}
export -f one
export build out limit

if has tests; then
  for name in "${names[@]}"; do one none "$name"; done
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
  for name in "${names[@]}"; do
    grep -qs -- '"--bench"' "$root/tests/gpu/${name}_test."* || continue
    echo "bench        $name"
    status=0
    timeout "$limit" "$build/tests/gpu/gpu_${name}_test" --bench >"$out/$name.bench.log" 2>&1 || status=$?
    grep '^{' "$out/$name.bench.log" >"$out/$name.jsonl" || true
    cat "$out/$name.jsonl"
    ((status == 0 || status == 77)) || printf '{"test":"%s","tool":"bench","status":"failed","exit":%d}\n' "$name" "$status" >>"$out/tests.jsonl"
  done
fi

if grep -q '"failed"' "$out/tests.jsonl"; then
  echo "FAILED, see $out"
  exit 1
fi
grep -q '"passed"' "$out/tests.jsonl" || [[ $stages == bench ]] || { echo "everything was skipped or not finished, see $out"; exit 77; }
echo "all passed, see $out"
