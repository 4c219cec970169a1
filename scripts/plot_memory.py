#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Draws device memory by policy from the rows of dualdecoder-bench plan (docs/performance.md, "Memory beside the rivals").

    pip install matplotlib==3.10.7
    python scripts/plot_memory.py [docs/results/memory-plans.jsonl [docs/figures]]

memory-kinds.svg: the 8B shape at 128K and batch 7 by kind and policy.
memory-helpers.svg: helper state by shape and policy, as a share of 80 GB filled with sequences and of what the sequences keep on the device.
memory-batch.svg: the 8B and 32B shapes at 128K by batch.
memory-context.svg: the 8B shape and one sequence by context.
All but the first leave out what only a prefill takes; the batches that fill 80 GB leave room for it.
"""
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "dualdecoder"  # the same rows give the same bytes
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
POLICIES = {
    "full": ("full attention", "#d62728", "s"),
    "shadowkv": ("ShadowKV", "#2ca02c", "^"),
    "specache-2bit": ("SpeCache, 2 bits", "#9467bd", "D"),
    "specache-1bit": ("SpeCache, 1 bit", "#ff7f0e", "v"),
    "dualdecoder-published": ("DualDecoder as published", "#7f7f7f", "P"),
    "dualdecoder": ("this library", "#1f77b4", "o"),
}
KINDS = {
    "weights": ("weights", "#c7c7c7"),
    "summaries": ("summaries, landmarks", "#1f77b4"),
    "low_rank": ("low-rank keys", "#2ca02c"),
    "low_bit": ("low-bit copy", "#9467bd"),
    "tables": ("tables of chunks", "#17becf"),
    "exact": ("exact keys and values", "#ff7f0e"),
    "activations": ("activations, work space", "#8c564b"),
    "prefill": ("while a prompt is read", "#ffffff"),
}
SHAPES = {"8b": "8B", "14b": "14B", "32b": "32B"}
K128 = 131072
GPU = 80.0  # GB of the paper's GPUs


def read_rows(path):
    """Rows by (shape, context, batch, policy), and those of the batches that fill a GPU by (shape, policy)."""
    by_cell, filled = {}, {}
    with open(path, encoding="utf-8") as lines:
        for row in map(json.loads, filter(str.strip, lines)):
            if "fit_gb" in row:
                filled[row["model"], row["policy"]] = row
            else:
                by_cell[row["model"], row["context"], row["batch"], row["policy"]] = row
    return by_cell, filled


def decoding_gb(row):
    return 1e-9 * (row["device_bytes"] - row["by_kind"]["prefill"])


def save(figure, out):
    figure.savefig(out, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(out)


def draw_kinds(by_cell, out):
    figure, axis = plt.subplots(figsize=(9.0, 3.2), constrained_layout=True)
    names = list(reversed(POLICIES))
    rows = [by_cell["8b", K128, 7, name] for name in names]
    left = [0.0] * len(rows)
    for kind, (label, colour) in KINDS.items():
        widths = [1e-9 * row["by_kind"][kind] for row in rows]
        style = {"hatch": "////", "edgecolor": "#8c564b"} if kind == "prefill" else {}
        axis.barh(range(len(rows)), widths, left=left, color=colour, label=label, height=0.65, linewidth=0.5, **style)
        left = [start + width for start, width in zip(left, widths)]
    limit = 52.0
    for place, total in enumerate(left):
        text = f"{total:.1f}" if total <= limit else f"{total:.1f}, beyond the axis"
        axis.annotate(text, (min(total, limit), place), textcoords="offset points", xytext=(4 if total <= limit else -4, 0),
                      ha="left" if total <= limit else "right", va="center", fontsize=8,
                      bbox=None if total <= limit else {"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    axis.set_xlim(0.0, limit)
    axis.set_yticks(range(len(rows)), [POLICIES[name][0] for name in names], fontsize=8)
    axis.set_xlabel("GB on the device, planned")
    axis.grid(True, axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    figure.legend(*axis.get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center")
    figure.suptitle("Shape of an 8B model, 128K tokens, batch 7", fontsize=10)
    save(figure, out)


def draw_helpers(filled, out):
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), constrained_layout=True)
    width = 0.8 / len(POLICIES)
    for number, (name, (label, colour, _)) in enumerate(POLICIES.items()):
        for shape_number, shape in enumerate(SHAPES):
            row = filled.get((shape, name))
            place = shape_number + (number - (len(POLICIES) - 1) / 2) * width
            if row is None:
                axes[0].annotate("does not fit", (place, 1.0), rotation=90, ha="center", va="bottom", fontsize=6)
                continue
            helper = row["helper_bytes"]
            shares = helper / (1e9 * row["fit_gb"]), helper / (helper + row["by_kind"]["exact"])
            for axis, share in zip(axes, shares):
                axis.bar(place, 100.0 * share, width, color=colour, label=label if shape_number == 0 else None)
            axes[0].annotate(str(row["batch"]), (place, 100.0 * shares[0]), textcoords="offset points", xytext=(0, 1), ha="center",
                             va="bottom", fontsize=6)
    axes[0].set_title("share of 80 GB filled with as many sequences as fit (number on the bar)", fontsize=8)
    axes[1].set_title("share of what the sequences keep on the device", fontsize=8)
    for axis in axes:
        axis.set_xticks(range(len(SHAPES)), SHAPES.values())
        axis.set_ylabel("helper state, %")
        axis.set_ylim(0.0, 108.0)
        axis.grid(True, axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, ncols=6, loc="outside lower center")
    figure.suptitle("Helper state at 128K", fontsize=10)
    save(figure, out)


def draw_lines(axis, by_cell, x_of, limits):
    """A line a policy through the rows to which `x_of` gives a place; full attention may leave the limits."""
    for name, (label, colour, marker) in POLICIES.items():
        points = sorted((x_of(cell), decoding_gb(row)) for cell, row in by_cell.items() if cell[3] == name and x_of(cell) is not None)
        axis.plot([p[0] for p in points], [p[1] for p in points], marker=marker, markersize=4, color=colour, label=label,
                  linestyle="--" if name == "specache-2bit" else "-")  # lies on ShadowKV's
    if limits[0] < GPU < limits[1]:
        axis.axhline(GPU, color="black", linewidth=0.8, linestyle=":")
        axis.annotate("80 GB", (0.0, GPU), xycoords=("axes fraction", "data"), textcoords="offset points", xytext=(3, 3), fontsize=7)
    axis.set_ylim(*limits)
    axis.set_ylabel("GB on the device, planned")
    axis.grid(True, alpha=0.25)


def draw_batch(by_cell, out):
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), constrained_layout=True)
    for axis, shape, limits in zip(axes, ("8b", "32b"), ((15.0, 55.0), (65.0, 105.0))):
        draw_lines(axis, by_cell, lambda cell, shape=shape: cell[2] if cell[:2] == (shape, K128) else None, limits)
        axis.set_xlabel("batch")
        axis.set_title(f"{SHAPES[shape]} shape", fontsize=9)
    axes[1].set_xticks(range(1, 5))
    axes[0].set_xticks(range(1, 13))
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, ncols=6, loc="outside lower center")
    figure.suptitle("128K tokens, while decoding", fontsize=10)
    save(figure, out)


def draw_context(by_cell, out):
    figure, axis = plt.subplots(figsize=(6.0, 3.6), constrained_layout=True)
    draw_lines(axis, by_cell, lambda cell: cell[1] / 1024 if cell[0] == "8b" and cell[2] == 1 else None, (15.0, 40.0))
    axis.set_xscale("log", base=2)
    axis.set_xticks([64, 128, 256, 512])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.set_xlabel("context, units of 1,024 tokens")
    figure.legend(*axis.get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
    figure.suptitle("Shape of an 8B model, one sequence, while decoding", fontsize=10)
    save(figure, out)


def main():
    results = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/results/memory-plans.jsonl"
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    by_cell, filled = read_rows(results)
    draw_kinds(by_cell, out / "memory-kinds.svg")
    draw_helpers(filled, out / "memory-helpers.svg")
    draw_batch(by_cell, out / "memory-batch.svg")
    draw_context(by_cell, out / "memory-context.svg")


if __name__ == "__main__":
    main()
