#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Prints the tables of docs/evaluation.md from the rows of dualdecoder-eval, as Markdown: an overview, then by model and context.

    python3 scripts/quality_tables.py [docs/results/quality.jsonl.xz] [--context N] [--model TEXT] [--task NAME...]

1. Methods: scores over RULER's kinds beside full attention's, the largest loss of a kind, fidelity, prediction, traffic, memory.
2. Rivals at equal memory and traffic: for each rival the nearest to full attention of this library's settings that takes at most as many bytes
   on the device and at most as many over the link.
3. Kinds: score and KL by task for the methods that differ most in what they are.
4. Texts for robustness: agreement and KL.
"""
import argparse
import collections
import pathlib

from plot_quality import ROOT, by_cell, by_token, link_mb_a_token, mib_of_store, read_groups

RULER = ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multivalue",
         "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"]
ROBUSTNESS = ["languages", "random_text", "repeated", "topics", "equal"]
KINDS_OF = ["dualdecoder", "dualdecoder chunk=4", "dualdecoder budget=1024,chunk=4", "dualdecoder budget=1024,chunk=8",
            "dualdecoder bias_scale=1,budget=1024,chunk=8", "dualdecoder-published", "shadowkv", "specache-1bit", "specache-2bit", "quest", "freekv", "hisparse", "infinigen"]


def of_tasks(rows, tasks):
    return [row for row in rows if row["task"] in tasks]


def tasks_of(rows, known):
    present = {row["task"] for row in rows}
    return [task for task in known if task in present]


def is_own(method):
    return method.split(" ")[0] == "dualdecoder"


def row_of(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head_of(*cells):
    row_of(*cells)
    row_of(*["---"] * len(cells))


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def mean_of_kinds(rows, field):
    """Mean over kinds of the mean over questions, in points."""
    kinds = tasks_of(rows, RULER)
    return 100 * sum(by_cell(of_tasks(rows, [kind]), field) for kind in kinds) / max(1, len(kinds))


def largest_loss(rows):
    losses = {kind: 100 * (by_cell(of_tasks(rows, [kind]), "full_score") - by_cell(of_tasks(rows, [kind]), "score")) for kind in tasks_of(rows, RULER)}
    kind = max(losses, key=losses.get)
    return f"{losses[kind]:.1f} ({kind})" if losses[kind] > 0 else "none"


def hit(rows):
    values = [row["hit"] for row in rows if row["hit"] is not None]
    return sum(values) / len(values) if values else None


def print_methods(methods):
    head_of("method", "RULER mean", "below full", "largest loss of a kind", "agreement", "KL", "KL 95", "hit", "link, MB a token", "MiB a sequence")
    for name, rows in methods.items():
        ruler = of_tasks(rows, RULER)
        score = mean_of_kinds(ruler, "score")
        row_of(f"`{name}`", number(score, 1), number(mean_of_kinds(ruler, "full_score") - score, 1), largest_loss(ruler) if ruler else "-",
               number(by_token(rows, "agreement"), 4), number(by_token(rows, "kl"), 5), number(by_token(rows, "kl95"), 4), number(hit(rows), 3),
               number(link_mb_a_token(rows), 2), number(mib_of_store(rows), 0))


def print_rivals(methods):
    head_of("rival", "KL", "MiB a sequence", "link, MB a token", "ours", "KL", "MiB a sequence", "link, MB a token")
    for name, rows in methods.items():
        if is_own(name) or name == "full":
            continue
        # a rival that keeps all on the device moves nothing; the device is then all there is to compare
        fits = {own: those for own, those in methods.items()
                if is_own(own) and mib_of_store(those) <= mib_of_store(rows) and (link_mb_a_token(those) <= link_mb_a_token(rows) or link_mb_a_token(rows) == 0)}
        best = min(fits, key=lambda own: by_token(fits[own], "kl"), default=None)
        ours = ["-"] * 4 if best is None else [f"`{best}`", number(by_token(fits[best], "kl"), 5), number(mib_of_store(fits[best]), 0), number(link_mb_a_token(fits[best]), 2)]
        row_of(f"`{name}`", number(by_token(rows, "kl"), 5), number(mib_of_store(rows), 0), number(link_mb_a_token(rows), 2), *ours)


def print_kinds(methods, tasks, cell):
    shown = [name for name in KINDS_OF if name in methods]
    first = next(iter(methods.values()))
    head_of("task", *([] if tasks is ROBUSTNESS else ["full"]), *(f"`{name}`" for name in shown))
    for task in tasks_of(first, tasks):
        full = [] if tasks is ROBUSTNESS else [number(100 * by_cell(of_tasks(first, [task]), "full_score"), 0)]
        row_of(f"`{task}`", *full, *(cell(of_tasks(methods[name], [task])) for name in shown))


def print_overview(groups):
    """Methods that stand in most groups: KL / points below full attention / MiB / MB a token, by group."""
    counts = collections.Counter(name for methods in groups.values() for name in methods)
    names = [name for name in dict.fromkeys(name for methods in groups.values() for name in methods) if 2 * counts[name] > len(groups)]
    head_of("method", *(f"{model} {context}" for model, context in groups))
    for name in names:
        cells = []
        for methods in groups.values():
            if name not in methods:
                cells.append("-")
                continue
            rows = methods[name]
            loss = mean_of_kinds(rows, "full_score") - mean_of_kinds(rows, "score")
            cells.append(f"{by_token(rows, 'kl'):.3f} / {loss:.1f} / {mib_of_store(rows):.0f} / {link_mb_a_token(rows):.2f}")
        row_of(f"`{name}`", *cells)


def score_and_kl(rows):
    return f"{100 * by_cell(rows, 'score'):.0f} / {by_token(rows, 'kl'):.4f}"


def agreement_and_kl(rows):
    return f"{by_token(rows, 'agreement'):.3f} / {by_token(rows, 'kl'):.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=pathlib.Path, default=ROOT / "docs/results/quality.jsonl.xz")
    parser.add_argument("--context", type=int)
    parser.add_argument("--model", default="")
    parser.add_argument("--task", nargs="*", default=[], help="of these alone")
    parser.add_argument("--last-seed", type=int, help="seeds above are left out, so that methods with fewer answers stay")
    arguments = parser.parse_args()
    groups = {(model, context): methods for (model, context), methods in read_groups(arguments.results, arguments.task, arguments.last_seed).items()
              if arguments.model in model and arguments.context in (None, context)}
    print_overview(groups)
    for (model, context), methods in groups.items():
        rows = methods.get("full") or next(iter(methods.values()))
        tasks = collections.Counter(row["task"] for row in rows)
        print(f"\n## {model}, {context} tokens: {len(tasks)} tasks, {len(rows)} questions, {sum(row['n'] for row in rows)} compared tokens\n")
        print_methods(methods)
        print()
        print_rivals(methods)
        print()
        print_kinds(methods, [*RULER, "summary", "code_completion", "reasoning"], score_and_kl)
        if tasks_of(rows, ROBUSTNESS):
            print()
            print_kinds(methods, ROBUSTNESS, agreement_and_kl)


if __name__ == "__main__":
    main()
