#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Draws the figures of DualDecoder's paper again with this library's rows (docs/performance.md, "The paper's figures again").

    pip install matplotlib==3.10.7
    python scripts/plot_figures.py [docs/results [docs/figures]]

paper-prediction.svg: prediction of chunks beside that of tokens, and what the first guess is worth (cpu-prediction.jsonl,
h200-prediction.jsonl, quality.jsonl.xz). paper-throughput.svg: tokens a second by shape and context (h200-decode.jsonl).
paper-serving.svg: requests that end within a limit (serving.jsonl). paper-dual-row.svg: attention of two rows (h200-dual-row.jsonl).
paper-urgent-lane.svg: time of a step by misses (h200-urgent-lane.jsonl). paper-gathering.svg: ways of gathering (h200-gather-ways.jsonl).
paper-ablations.svg: what each part is worth in speed and in fidelity (h200-decode.jsonl, cpu-ablations.jsonl).
A figure whose rows are not there is left out. Of rows with the same name the last counts.
"""
import pathlib
import re
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "dualdecoder"  # the same rows give the same bytes
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

from plot_quality import ROOT, read_rows  # noqa: E402

OURS, WAIT, PUBLISHED, FULL, OTHER = "#1f77b4", "#17becf", "#7f7f7f", "#d62728", "#ff7f0e"
class Rows:
    def __init__(self, folder):
        self.folder = folder

    def all(self, *files):
        rows = []
        for file in files:
            path = self.folder / file
            if path.exists():
                rows += read_rows(path)
        return rows

    def by(self, key, *files):
        return {key(row): row for row in self.all(*files)}


def save(figure, path):
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(path)


def finish(axis, title, ylabel, legend=True):
    axis.set_title(title, fontsize=9)
    axis.set_ylabel(ylabel, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(True, axis="y", alpha=0.25)
    if legend:
        axis.legend(fontsize=7)


def mean(values):
    return sum(values) / len(values)


def bars(axis, groups, series):
    """`series`: (label, colour, value by group; None leaves a gap)."""
    width = 0.8 / len(series)
    for i, (label, colour, values) in enumerate(series):
        at = [g + (i - (len(series) - 1) / 2) * width for g, v in enumerate(values) if v is not None]
        found = axis.bar(at, [v for v in values if v is not None], width, label=label, color=colour)
        axis.bar_label(found, fmt=lambda v: f"{v:,.0f}" if v >= 100 else f"{v:.3g}", fontsize=6, padding=1)
    axis.set_xticks(range(len(groups)), groups)


def short_context(row):
    model = re.search(r"SmolLM2|Coder[- ][0-9.]+B", row["model"], re.IGNORECASE)[0].replace("Smollm2", "SmolLM2").replace(" ", "-")
    tokens = row["context"]
    return f"{model}\n" + (f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}")


def predictions(rows):
    """{label: {(predictor, field): value}}: means over texts, and over tokens of the questions that both policies answered."""
    names = {"front-runner, resync always": "front runner", "front-runner, random first guess": "front runner, random",
             "published dual row": "published", "published dual row, random first guess": "published, random",
             "previous step": "previous step", "layer ahead": "layer ahead",
             "dualdecoder resync=always,tail=plain,miss=estimate": "front runner",
             "dualdecoder first_guess=random,resync=never,tail=plain,miss=estimate": "front runner, random",
             "dualdecoder-published": "published", "dualdecoder-published first_guess=random": "published, random",
             "dualdecoder predictor=previous-step,tail=plain,miss=estimate": "previous step",
             "dualdecoder predictor=layer-ahead,tail=plain,miss=estimate": "layer ahead"}
    fields = "hit", "guesses_right"
    values, found = {}, {}
    for row in rows.by(lambda r: (r["model"], r["text"], r["policy"]), "cpu-prediction.jsonl", "h200-prediction.jsonl").values():
        if row["policy"] in names:
            for field in fields:
                found.setdefault((short_context(row), names[row["policy"]], field), []).append(row[field])
    for (label, name, field), numbers in found.items():
        values.setdefault(label + ", texts", {})[name, field] = mean(numbers)
    groups = {}
    for row in rows.all("quality.jsonl.xz"):
        # chunk 8 and budget 1,024, as the rows of texts; those of 4,096 tokens are of the whole bias
        name = {("dualdecoder", "budget=1024,chunk=8"): "front runner", ("dualdecoder", "bias_scale=1,budget=1024,chunk=8"): "front runner",
                ("dualdecoder-published", ""): "published"}.get((row["policy"], row["setting"]))
        if name and (not row["setting"].startswith("bias_scale") or row["context"] == 4096):
            groups.setdefault((row["model"], row["context"]), {}).setdefault((row["task"], row["seed"]), {})[name] = row
    for key in sorted(groups, key=lambda k: ("Smol" not in k[0], k)):
        both = [pair for pair in groups[key].values() if len(pair) == 2 and all(row["hit"] is not None for row in pair.values())]
        if both:
            label = short_context(both[0]["published"]) + ", tasks"
            for name in both[0]:
                for field in fields:
                    tokens = sum(pair[name]["n"] for pair in both)
                    values.setdefault(label, {})[name, field] = sum((pair[name][field] or 0.0) * pair[name]["n"] for pair in both) / tokens
    return values


def prediction(rows, out):
    values = predictions(rows)
    if not values:
        return
    figure, axes = plt.subplots(1, 3, figsize=(14.5, 3.8), constrained_layout=True, width_ratios=(2.2, 1, 2))
    for axis, title, papers, series in (
        (axes[0], "keys and values against tokens", [(0.88, "chunks, mean")],
         (("published: chunks", PUBLISHED, "published", "hit"), ("published: guessed token", "#c7c7c7", "published", "guesses_right"),
          ("front runner: chunks", OURS, "front runner", "hit"), ("front runner: guessed token", "#aec7e8", "front runner", "guesses_right"))),
        (axes[1], "first guess true or random", [(0.88, "true, mean"), (0.58, "random, 0.56 to 0.60")],
         (("published, true", PUBLISHED, "published", "hit"), ("published, random", "#c7c7c7", "published, random", "hit"),
          ("front runner, true, mended", OURS, "front runner", "hit"), ("front runner, random", "#aec7e8", "front runner, random", "hit"))),
        (axes[2], "predictors by context", [(0.826, "least, at 128K")],
         (("front runner", OURS, "front runner", "hit"), ("published dual row", PUBLISHED, "published", "hit"),
          ("layer ahead", "#2ca02c", "layer ahead", "hit"), ("previous step", OTHER, "previous step", "hit")))):
        order = [label for label in values if axis is not axes[1] or ("published, random", "hit") in values[label]]
        bars(axis, order, [(label, colour, [values[o].get((name, field)) for o in order]) for label, colour, name, field in series])
        for (share, label), style in zip(papers, (":", "--")):
            axis.axhline(share, color="black", linewidth=0.8, linestyle=style, label=f"paper: {label}")
        axis.set_ylim(0, 1.7)
        axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        finish(axis, title, "share")
        axis.tick_params(axis="x", labelsize=7)
    save(figure, out / "paper-prediction.svg")


def throughput(rows, out):
    by_row = rows.by(lambda r: r["row"], "h200-decode.jsonl")
    def largest(shape, context, suffix):
        pattern = re.compile(rf"{shape}-{context}k-b(\d+){suffix}")
        return max((row for name, row in by_row.items() if pattern.fullmatch(name)), key=lambda row: row["batch"], default=None)
    shapes = {"1.5b": "1.5B", "coder1.5b": "Qwen2.5-Coder-1.5B", "8b": "8B", "14b": "14B", "32b": "32B"}
    policies = (("", "this library, estimate", OURS), ("-wait", "this library, wait", WAIT), ("-pingpong", "as published", PUBLISHED),
                ("-full", "full attention in HBM", FULL))
    groups = [(shape, context) for shape in shapes for context in (64, 120, 128, 256, 512) if largest(re.escape(shape), context, "")]
    if not groups:
        return
    found = {suffix: [largest(re.escape(shape), context, suffix) for shape, context in groups] for suffix, _, _ in policies}
    labels = []
    for i, (shape, context) in enumerate(groups):
        batches = {rows[i]["batch"] for rows in found.values() if rows[i]}
        labels.append(f"{shapes[shape]}, {context}K\nbatch {' or '.join(str(b) for b in sorted(batches))}")
    figure, axis = plt.subplots(figsize=(2.0 + 1.5 * len(groups), 3.6), constrained_layout=True)
    bars(axis, labels, [(label, colour, [row and row["tok_s"] for row in found[suffix]]) for suffix, label, colour in policies])
    axis.set_yscale("log")
    finish(axis, "One H200; shapes: made-up weights and recorded choices; model: real weights and live selection; no bar: not measured", "tokens a second")
    save(figure, out / "paper-throughput.svg")


def serving(rows, out):
    found = rows.all("serving.jsonl")
    panels = [(kind, sorted({(r["model"], r["context"], r["limit_s"], r["answer_tokens"], r["prefill"]) for r in found if r["row"] == kind}))
              for kind in ("serve-measured", "serve")]
    panels = [(kind, *about) for kind, abouts in panels for about in abouts]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), constrained_layout=True, squeeze=False)
    for axis, (kind, model, context, limit, answer, prefill) in zip(axes[0], panels):
        mine = [r for r in found if (r["row"], r["model"], r["context"], r["limit_s"], r["answer_tokens"], r["prefill"]) == (kind, model, context, limit, answer, prefill)]
        for policy in dict.fromkeys(r["policy"] for r in mine):
            line = sorted({r["rate"]: r for r in mine if r["policy"] == policy}.items())
            full = "full" in policy
            published = "pingpong" in policy
            label = "full attention" if full else "as published" if published else "this library, wait" if "wait" in policy else "this library"
            axis.plot([rate for rate, _ in line], [r["seconds_99"] for _, r in line], marker="o", markersize=3, label=label,
                      color=FULL if full else PUBLISHED if published else WAIT if "wait" in policy else OURS)
        axis.axhline(limit, color="black", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.set_ylim(top=5 * limit)
        axis.set_xscale("log")
        axis.set_xlabel("requests offered a second", fontsize=8)
        axis.set_xticks([x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if axis.get_xlim()[0] <= x <= axis.get_xlim()[1]])
        axis.xaxis.set_minor_formatter(lambda v, _: "")
        for of_axis in (axis.xaxis, axis.yaxis):
            of_axis.set_major_formatter(lambda v, _: f"{v:g}")
        finish(axis, f"{model.upper() if kind == 'serve-measured' else model}, prompts of {context:,} tokens, answers of {answer}\n"
                     f"{'measured steps' if kind == 'serve-measured' else 'real sessions'}, prefill {prefill}", "seconds, 99th percentile")
    save(figure, out / "paper-serving.svg")


def dual_row(rows, out):
    found = rows.by(lambda r: (r["batch"], r["rows"], r["tail"]), "h200-dual-row.jsonl")
    shapes = sorted({(batch, tail) for batch, _, tail in found if (batch, 1, tail) in found and (batch, 2, tail) in found})
    if not shapes:
        return
    figure, axis = plt.subplots(figsize=(5.0, 3.4), constrained_layout=True)
    bars(axis, [f"batch {batch},\n{'with' if tail else 'without'} tail" for batch, tail in shapes],
         [("two rows in one pass", OURS, [found[b, 2, t]["us"] for b, t in shapes]),
          ("one row, twice", OTHER, [2 * found[b, 1, t]["us"] for b, t in shapes]),
          ("one row", "#c7c7c7", [found[b, 1, t]["us"] for b, t in shapes])])
    finish(axis, "Attention of one layer, 8B shape, 128K, budget 1,024", "microseconds")
    save(figure, out / "paper-dual-row.svg")


def urgent_lane(rows, out):
    found = {}
    for row in rows.all("h200-urgent-lane.jsonl"):
        found.setdefault(row["row"].split("-miss")[0], {})[row["injected_misses"]] = row
    if not found:
        return
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.6), constrained_layout=True, sharey=True)
    for name in sorted(found):
        line = [found[name][share] for share in sorted(found[name])]
        pingpong = "pingpong" in name
        single = name.endswith("-onelane")
        label = "estimate: nothing urgent" if not pingpong and "wait" not in name else "one lane" if single else "urgent lane"
        axes[0 if pingpong else 1].plot([1 - r["hit"] for r in line], [r["ms_step"] for r in line], marker="o", markersize=4, label=label,
                                        color=OURS if label.startswith("estimate") else OTHER if single else PUBLISHED if pingpong else WAIT)
    about = next(iter(next(iter(found.values())).values()))
    for axis, title in zip(axes, ("two layer buffers, as published", "resident set of this library")):
        axis.set_xlabel("share of needed chunks that nobody predicted", fontsize=8)
        axis.set_ylim(bottom=0)
        finish(axis, f"{title}: {about['model'].upper()}, {about['context'] // 1024}K, batch {about['batch']}", "milliseconds a step")
    save(figure, out / "paper-urgent-lane.svg")


def gathering(rows, out):
    found = rows.by(lambda r: (r["way"], r["workers"], r["item_bytes"]), "h200-gather-ways.jsonl")
    if not found:
        return
    names = {"cpu": "host, {} thread{}", "copy-calls": "copy engine,\ncalls", "copy-batch": "copy engine,\nbatch", "zero-copy": "zero copy,\n{} blocks"}
    ways = list(dict.fromkeys((way, workers) for way, workers, _ in found))
    sizes = sorted({size for _, _, size in found}, reverse=True)
    figure, axis = plt.subplots(figsize=(8.0, 3.4), constrained_layout=True)
    bars(axis, [names[way].format(workers, "s" if workers > 1 else "") for way, workers in ways],
         [(f"pieces of {size} bytes", colour, [found[(*way, size)]["ms"] if (*way, size) in found else None for way in ways])
          for size, colour in zip(sizes, (OURS, OTHER))])
    axis.set_yscale("log")
    finish(axis, f"{next(iter(found.values()))['bytes'] / 1e6:.0f} MB of scattered chunks to one H200", "milliseconds")
    save(figure, out / "paper-gathering.svg")


def ablation_label(policy):
    """What sets a policy apart from the front runner with resync, plain tail and estimate."""
    whole = {"resync": "always", "tail": "plain", "miss": "estimate"}
    apart = dict(item.split("=") for item in policy.removeprefix("dualdecoder ").split(","))
    apart = {key: value for key, value in apart.items() if whole.get(key) != value and key != "budget"}
    if "first_guess" in apart or apart.get("predictor") == "published":
        apart.pop("resync", None)  # which is never there
    return ", ".join(f"{key}={value}" for key, value in apart.items()) or "the whole"


def ablations(rows, out):
    speed = rows.by(lambda r: r["row"], "h200-decode.jsonl")
    kl = {}
    for row in rows.all("cpu-ablations.jsonl"):
        kl.setdefault(ablation_label(row["policy"]), {})[row["text"]] = row["kl"]
    if not kl:
        return
    figure, axes = plt.subplots(1, 2, figsize=(10.0, 3.8), constrained_layout=True)
    names = [("", "estimate"), ("-wait", "wait"), ("-published", "  published predictor"), ("-resident", "  no prediction"),
             ("-previous", "  previous step, slots 1x"), ("-pingpong", "  nothing resident, as published"), ("-full", "full attention")]
    names = [(f"8b-128k-b7{suffix}", label) for suffix, label in names if f"8b-128k-b7{suffix}" in speed]
    found = axes[0].barh(range(len(names)), [speed[name]["tok_s"] for name, _ in names], color=OURS)
    axes[0].bar_label(found, fmt=lambda v: f"{v:.0f}", fontsize=7, padding=2)
    axes[0].set_yticks(range(len(names)), [label for _, label in names])
    axes[0].set_xlabel("tokens a second", fontsize=8)
    finish(axes[0], "Speed: 8B shape, 128K, batch 7, recorded choices", "", legend=False)
    texts = sorted({text for by_text in kl.values() for text in by_text})
    height = 0.8 / len(texts)
    for i, text in enumerate(texts):
        at = [g + (i - (len(texts) - 1) / 2) * height for g, by_text in enumerate(kl.values()) if text in by_text]
        found = axes[1].barh(at, [by_text[text] for by_text in kl.values() if text in by_text], height, label=text, color=(OURS, OTHER)[i % 2])
        axes[1].bar_label(found, fmt=lambda v: f"{v:.3g}", fontsize=6, padding=1)
    axes[1].set_yticks(range(len(kl)), list(kl))
    axes[1].set_xlabel("KL against full attention, nats", fontsize=8)
    finish(axes[1], "Fidelity: SmolLM2, 3,000 tokens, budget 256", "")
    for axis in axes:
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.tick_params(labelsize=7)
        axis.grid(False)
    save(figure, out / "paper-ablations.svg")


def main():
    rows = Rows(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/results")
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/figures"
    out.mkdir(parents=True, exist_ok=True)
    for draw in (prediction, throughput, serving, dual_row, urgent_lane, gathering, ablations):
        draw(rows, out)


if __name__ == "__main__":
    main()
