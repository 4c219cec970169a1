#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Draws the rows of dualdecoder-eval (docs/evaluation.md explains their fields), one set of figures a model and context.

    pip install matplotlib==3.10.7
    python scripts/plot_quality.py [--last-seed N] [docs/results/quality.jsonl.xz [docs/figures [TASK...]]]

Of all tasks, or of those named alone. Rows may be packed by xz. Where some methods answered more seeds than others, --last-seed leaves the
higher ones out: what has less than half of the most answers is not drawn.

quality-<model>-<context>-scores.svg: the score of every policy by task, full attention's as a line.
quality-<model>-<context>-front.svg: mean KL against device bytes and against link traffic; what lies left and below is better, and the
    line goes through the methods that none beats in both.
quality-<model>-<context>-thirds.svg: mean KL by thirds of the answer, which shows whether errors compound.
"""
import argparse
import collections
import json
import lzma
import pathlib
import re

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "dualdecoder"  # the same rows give the same bytes
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_rows(path):
    """Rows of a file of JSON lines, packed by xz where its name says so."""
    opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else open(path, encoding="utf-8")
    with opened as lines:
        return [json.loads(line) for line in lines if line.strip()]


def question_of(row):
    return row["task"], row["seed"], row["text"]


def read_groups(path, tasks=(), last_seed=None):
    """{(model, context): {method: rows}} of the questions that every method has answered, in the order of the file. A method that has
    answered less than half as many as another is left out. With `tasks` others do not count, nor do seeds above `last_seed`."""
    groups = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in read_rows(path):
        if (tasks and row["task"] not in tasks) or (last_seed is not None and row["seed"] > last_seed):
            continue
        method = f"{row['policy']} {row['setting']}".strip()
        groups[row["model"], row["context"]][method].append(row)
    for methods in groups.values():
        most = max(map(len, methods.values()))
        for method in [method for method, rows in methods.items() if 2 * len(rows) < most]:
            del methods[method]
        common = set.intersection(*({question_of(row) for row in rows} for rows in methods.values()))
        for method, rows in methods.items():
            methods[method] = [row for row in rows if question_of(row) in common]
    return groups


def by_token(rows, field):
    """Mean of a field over tokens; of a list, item by item."""
    total = sum(row["n"] for row in rows)
    if total == 0:
        return 0.0
    if isinstance(rows[0][field], list):
        return [sum(row["n"] * row[field][i] for row in rows) / total for i in range(len(rows[0][field]))]
    return sum(row["n"] * row[field] for row in rows) / total


def by_cell(rows, field):
    """Mean over the cells that have the field."""
    values = [row[field] for row in rows if row[field] is not None]
    return sum(values) / max(1, len(values))


# what sequences share, or one takes for its prefill alone
NOT_KEPT = re.compile("prefill|one prompt|dense part|activations")


def mib_of_store(rows):
    """Planned device memory of one sequence while it decodes: what its store keeps."""
    sums = [sum(size for what, size in row["device_bytes_by_kind"].items() if not NOT_KEPT.search(what)) for row in rows]
    return sum(sums) / len(sums) / 2**20


def link_mb_a_token(rows):
    return 1e3 * sum(row["traffic_gb"] for row in rows) / max(1, sum(row["n"] for row in rows))


def front_of(points):
    """Of points (x, y), those that no other is left of or at and below or at."""
    best, front = float("inf"), []
    for x, y in sorted(points):
        if y < best:
            best = y
            front.append((x, y))
    return front


def draw_scores(axis, methods):
    tasks = list(dict.fromkeys(row["task"] for rows in methods.values() for row in rows if row["score"] is not None))
    sparse = {name: rows for name, rows in methods.items() if name != "full"}
    width = 0.8 / max(1, len(sparse))
    for number, (name, rows) in enumerate(sparse.items()):
        scores = {task: by_cell([row for row in rows if row["task"] == task], "score") for task in tasks}
        places = [tasks.index(task) for task in scores]
        axis.bar([place - 0.4 + (number + 0.5) * width for place in places], scores.values(), width, label=name)
    everyone = [row for rows in methods.values() for row in rows]
    full = [by_cell([row for row in everyone if row["task"] == task], "full_score") for task in tasks]
    axis.hlines(full, [place - 0.45 for place in range(len(tasks))], [place + 0.45 for place in range(len(tasks))], colors="black", label="full attention")
    axis.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", fontsize=8)
    axis.set_ylabel("score")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_front(axes, methods):
    sides = ((mib_of_store, "device memory that a sequence keeps, MiB"),
             (link_mb_a_token, "bytes over the link, MB a token"))
    for axis, (side, label) in zip(axes, sides):
        points = {name: (side(rows), by_token(rows, "kl")) for name, rows in methods.items() if name != "full"}
        front = front_of(points.values())
        axis.step(*zip(*front), where="post", color="tab:grey", linewidth=0.8)
        for name, point in points.items():
            own = re.match("dualdecoder( |$)", name)
            axis.plot(*point, "o" if own else "s", color="tab:blue" if own else "tab:red", markersize=4)
            axis.annotate(name.removeprefix("dualdecoder ") if own else name, point, textcoords="offset points", xytext=(3, 3), fontsize=5)
        axis.set_xscale("symlog", linthresh=0.1) if side is link_mb_a_token else axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("mean KL to full attention, nats")
        axis.margins(0.15)
        axis.grid(True, which="both", alpha=0.25)


def draw_thirds(axis, methods):
    for name, rows in methods.items():
        if name != "full":
            axis.plot(["first", "second", "last"], by_token(rows, "kl_thirds"), marker="o", label=name)
    axis.set_yscale("log")
    axis.set_xlabel("third of the answer")
    axis.set_ylabel("mean KL to full attention, nats")
    axis.grid(True, which="both", alpha=0.25)
    axis.legend(fontsize=8)


def save(figure, title, path):
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=pathlib.Path, default=ROOT / "docs/results/quality.jsonl.xz")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "docs/figures")
    parser.add_argument("task", nargs="*", help="names; default: all")
    parser.add_argument("--last-seed", type=int, help="seeds above are left out")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    for (model, context), methods in read_groups(arguments.results, arguments.task, arguments.last_seed).items():
        title = f"{model}, context {context}"
        stem = re.sub(r"[^a-z0-9]+", "-", f"quality-{model}-{context}".lower())
        figure, axis = plt.subplots(figsize=(9.0, 3.6), constrained_layout=True)
        draw_scores(axis, methods)
        save(figure, title, folder / f"{stem}-scores.svg")
        figure, axes = plt.subplots(1, 2, figsize=(11.0, 5.0), constrained_layout=True)
        draw_front(axes, methods)
        save(figure, title, folder / f"{stem}-front.svg")
        figure, axis = plt.subplots(figsize=(5.0, 3.4), constrained_layout=True)
        draw_thirds(axis, methods)
        save(figure, title, folder / f"{stem}-thirds.svg")


if __name__ == "__main__":
    main()
