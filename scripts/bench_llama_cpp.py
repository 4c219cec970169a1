#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of llama.cpp on the same GGUF file: what the tables in docs/performance.md set beside our own.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
    python scripts/bench_llama_cpp.py $(scripts/get-model.sh smollm2) --contexts 2048 4096 8064 --threads 2

One JSON object a line. llama.cpp multiplies by the file's quantised weights (about 0.6 bytes a weight for Q4_1) with an f16 cache and
dense attention; dualdecoder's CPU backend dequantises to bf16 (2 bytes a weight). A decode step of a small model is bound by weight
bytes, so the two compare whole programs, not attention. llama.cpp's threads spin at every node of its graph: with other work on the cores
it slows down far more than in proportion, so measure on an idle machine.
"""
import argparse
import json
import pathlib
import statistics
import time

import llama_cpp


def measure(llama, tokens, generate):
    """Seconds of prefill, and of each of `generate` greedy single-token steps after it."""
    llama.reset()
    begin = time.perf_counter()
    llama.eval(tokens)
    prefill = time.perf_counter() - begin
    steps = []
    for _ in range(generate):
        token = llama.sample(temp=0.0)
        begin = time.perf_counter()
        llama.eval([token])
        steps.append(time.perf_counter() - begin)
    return prefill, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, default=pathlib.Path("/usr/share/common-licenses/GPL-3"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8064])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--machine", default="unnamed")
    options = parser.parse_args()

    llama = llama_cpp.Llama(str(options.model), n_ctx=max(options.contexts) + options.generate, n_threads=options.threads,
                            n_threads_batch=options.threads, n_batch=512, seed=0, verbose=False)
    text = llama.tokenize(options.text.read_bytes(), add_bos=False)
    for context in options.contexts:
        tokens = (text * (context // len(text) + 1))[:context]
        runs = [measure(llama, tokens, options.generate) for _ in range(options.repeat)]
        prefill = statistics.median(run[0] for run in runs)
        step = statistics.median(statistics.fmean(run[1]) for run in runs)
        median_step = statistics.median(statistics.median(run[1]) for run in runs)
        print(json.dumps({"row": "llama.cpp", "version": f"llama-cpp-python {llama_cpp.__version__}", "model": options.model.name,
                          "weights": "real, as quantised in the file", "kv": "f16, dense attention", "context": context, "batch": 1,
                          "generated": options.generate, "prefill_tok_s": round(context / prefill, 1), "tok_s": round(1 / step, 2),
                          "ms_pass": round(1e3 * step, 2), "ms_pass_median": round(1e3 * median_step, 2),
                          "file_bytes": options.model.stat().st_size, "threads": options.threads, "runs": options.repeat,
                          "machine": options.machine}), flush=True)


if __name__ == "__main__":
    main()
