#!/usr/bin/env bash
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# On a bare Debian (12 or later) or Ubuntu (24.04 or later): installs what is missing, builds, fetches SmolLM2-135M (98 MB, kept in models/),
# and lets it answer a question about a document of about 6,000 tokens. Where nvcc is, the CUDA backend is built too, for the GPU that is here;
# the program then computes there. Options after the script's name are passed to dualdecoder-generate.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*" >&2; }

packages=(g++ cmake ninja-build libfmt-dev nlohmann-json3-dev liblapack-dev libcli11-dev libpcre2-dev python3 python3-pip ca-certificates)
missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) == *' installed' ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  say "installing ${missing[*]}"
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

build=build/quickstart
[[ -d /usr/local/cuda/bin ]] && export PATH=$PATH:/usr/local/cuda/bin # where the toolkit's installer puts nvcc
cuda=(-DDUALDECODER_CUDA=OFF)
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 || true)
if command -v nvcc >/dev/null && [[ $capability =~ ^([89]|[1-9][0-9]+)\.[0-9]$ ]]; then # 8.0 is the oldest that the backend takes
  architecture=${capability/./}-real
  [[ $architecture == 90-real ]] && architecture=90a-real # with the instructions that this very one has
  cuda=(-DDUALDECODER_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$architecture")
fi
say "building in $build, ${cuda[*]}"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${cuda[@]}" -DDUALDECODER_TESTS=OFF >/dev/null
cmake --build "$build" --target dualdecoder-generate

say "fetching the model"
model=$(scripts/get-model.sh smollm2 | tail -n 1)

# The document: the licence text that every Debian and Ubuntu carries, cut to what the model's context of 8,192 tokens holds with ease.
licence=/usr/share/common-licenses/GPL-3
[[ -r $licence ]] || { echo "quickstart.sh: $licence is not there (package base-files)" >&2; exit 1; }
document=$build/document.txt
head -c 27500 "$licence" | sed '$d' >"$document"
question='What is the purpose of the license above? Answer in one paragraph.'

say "asking about $(wc -c <"$document") bytes of text: $question"
"$build/bin/dualdecoder-generate" --model "$model" --chat --prompt-file "$document" --prompt "$question" --budget 1024 \
  --max-new-tokens 64 "$@"
