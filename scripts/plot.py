#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/performance.md from the rows in docs/results.

    pip install matplotlib==3.10.7
    python scripts/plot.py

docs/figures/h200-context.svg: what a token costs against the length of the context, from the rows 8b-<context>k-b<batch> and their -full
twins of h200-decode.jsonl. The last row of a name counts.
"""
import json
import pathlib
import re
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "dualdecoder"  # the same rows give the same bytes
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS, FULL = "#1f77b4", "#d62728"


def read_rows(path):
    """Rows by name."""
    with open(path, encoding="utf-8") as lines:
        return {row["row"]: row for row in map(json.loads, filter(str.strip, lines))}


def points(rows, single, suffix):
    """(context, milliseconds a token, batch) of the plain rows, ascending: batch 1 alone, or the largest batch of every context."""
    found = {}
    for name, row in rows.items():
        match = re.fullmatch(r"8b-\d+k-b(\d+)" + suffix, name)
        if not match or (single and match[1] != "1"):
            continue
        batch = int(match[1])
        if row["context"] not in found or batch > found[row["context"]][1]:
            found[row["context"]] = (1e3 / row["tok_s"], batch)
    return [(context, *found[context]) for context in sorted(found)]


def draw(rows, out):
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.4), constrained_layout=True)
    titles = (True, "one sequence"), (False, "as many sequences as 112 GiB of host memory hold")
    for axis, (single, title) in zip(axes, titles):
        for suffix, label, colour, marker in (("", "sparse, KV in host memory", OURS, "o"), ("-full", "full attention, KV in HBM", FULL, "s")):
            line = points(rows, single, suffix)
            if not single:
                line = [point for point in line if point[0] >= 65536]
            if not line:
                continue
            axis.plot([p[0] / 1024 for p in line], [p[1] for p in line], marker=marker, color=colour, label=label)
            if not single:
                for context, cost, batch in line:
                    axis.annotate(f"batch {batch}", (context / 1024, cost), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=7)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("context, units of 1,024 tokens")
        axis.set_ylabel("milliseconds a token")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xticks(sorted({p[0] / 1024 for p in points(rows, single, "") if single or p[0] >= 65536}))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value * 1e6)[0] in "25" else "")
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.09, y=0.15)
        axis.grid(True, which="both", alpha=0.25)
        axis.legend(fontsize=8)
    figure.suptitle("Shape of an 8B model, bf16, one H200", fontsize=10)
    figure.savefig(out, metadata={"Date": None, "Creator": None})


def main():
    results = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/results/h200-decode.jsonl"
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/figures/h200-context.svg"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(read_rows(results), out)
    print(out)


if __name__ == "__main__":
    main()
