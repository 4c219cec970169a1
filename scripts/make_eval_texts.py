#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes five texts for evaluations from files of any Debian machine: code, prose, qa, reasoning, needles.

    python3 scripts/make_eval_texts.py FOLDER

Each has 30,000 to 40,000 characters, over 6,000 tokens, and ends with what the model is to continue. They depend on the machine's
versions of Python and base-files only, and otherwise on nothing: no clock, no randomness.
"""
import argparse
import inspect
import pathlib

CHARACTERS = 40_000
LICENSES = pathlib.Path("/usr/share/common-licenses")


def code():
    return inspect.getsource(argparse)[:CHARACTERS]


def prose():
    return (LICENSES / "GPL-3").read_text(encoding="utf-8")[:CHARACTERS]


def chat(document, question):
    return f"<|im_start|>user\n{document}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"


def qa():
    return chat((LICENSES / "Apache-2.0").read_text(encoding="utf-8") + (LICENSES / "GPL-2").read_text(encoding="utf-8")[:28_000],
                "Which license grants a patent license, and when does it end?")


def reasoning():
    """Worked sums, each with the same layout, so that a model carries on with them."""
    lines = []
    for number in range(2, 2000):
        factors, rest, divisor = [], number, 2
        while divisor * divisor <= rest:
            while rest % divisor == 0:
                factors.append(divisor)
                rest //= divisor
            divisor += 1
        factors.append(rest) if rest > 1 else None
        product = " x ".join(map(str, factors))
        lines.append(f"Question: What are the prime factors of {number}? Answer: {number} = {product}, "
                     f"so {'it is prime' if len(factors) == 1 else f'there are {len(factors)} factors'}.\n")
        if sum(map(len, lines)) > CHARACTERS:
            break
    return "".join(lines) + "Question:"


def needles():
    """Facts hidden evenly in prose, and a question about one of them."""
    text = (LICENSES / "GPL-3").read_text(encoding="utf-8")[:CHARACTERS - 2000]
    words = ["amber", "cobalt", "crimson", "emerald", "indigo", "ivory", "magenta", "ochre"]
    part = len(text) // len(words)
    pieces = [f"{text[i * part:(i + 1) * part]}\n\nThe {word} door opens with the number {(i * 7919 + 1234) % 9000 + 1000}.\n\n"
              for i, word in enumerate(words)]
    return chat("".join(pieces), "With which number does the emerald door open? List the numbers of all doors after that.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for make in (code, prose, qa, reasoning, needles):
        (folder / f"{make.__name__}.txt").write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
