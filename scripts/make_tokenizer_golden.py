#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/tokenizer_golden.txt: what the Hugging Face `tokenizers` library makes of 10,000 generated strings.

The strings come from a seeded generator over tests/data/tokenizer_fragments.json that tests/unit/tokenizer_test.cpp repeats. The
tokenizers are built from the vocabulary and merges of the GGUF files with the normaliser and pre-tokenisers that the models' own
tokenizer.json declares: SmolLM2: Digits(individual) + ByteLevel; Qwen2.5: NFC, Split(the pattern below) + ByteLevel.

usage: pip install tokenizers gguf
       scripts/make_tokenizer_golden.py $(scripts/get-model.sh smollm2) $(scripts/get-model.sh qwen2.5-coder-0.5b) \\
         > tests/data/tokenizer_golden.txt
"""
import json
import pathlib
import struct
import sys

import gguf
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

COUNT = 10_000
M64 = (1 << 64) - 1
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Random:  # splitmix64
    def __init__(self, seed):
        self.state = seed & M64

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & M64
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        return z ^ (z >> 31)

    def below(self, bound):
        return self.next() % bound


def make_string(index, data):
    random = Random(index * 0xD1B54A32D192ED03)
    out = []
    for _ in range(1 + random.below(24)):
        kind = random.below(10)
        if kind < 5:
            out.append(data["fragments"][random.below(len(data["fragments"]))])
        elif kind == 5:  # letters of one script
            first, last = data["blocks"][random.below(len(data["blocks"]))]
            out += [chr(first + random.below(last - first + 1)) for _ in range(1 + random.below(6))]
        elif kind == 6:  # random bytes, read as Latin-1
            out += [chr(random.below(256)) for _ in range(1 + random.below(12))]
        elif kind == 7:
            out += [chr(data["white_space"][random.below(len(data["white_space"]))]) for _ in range(1 + random.below(6))]
        elif kind == 8:
            out += [chr(48 + random.below(10)) for _ in range(1 + random.below(8))]
        else:
            out.append(data["control"][random.below(len(data["control"]))])
    return "".join(out)


def load(path):
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=False, use_regex=True)]
    else:
        tokenizer.normalizer = normalizers.NFC()
        steps = [pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == gguf.TokenType.CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == gguf.TokenType.USER_DEFINED])
    return tokenizer


def digest(text, ids):  # FNV-1a over the text's bytes and the ids, folded to 32 bits
    value = 0xCBF29CE484222325
    for byte in text.encode() + struct.pack(f"<{len(ids)}i", *ids):
        value = ((value ^ byte) * 0x100000001B3) & M64
    return (value ^ (value >> 32)) & 0xFFFFFFFF


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    data = json.loads((root / "tests/data/tokenizer_fragments.json").read_text())
    smollm2, qwen = (load(path) for path in sys.argv[1:3])
    print(f"# {COUNT} strings, one a line: digest for SmolLM2, digest for Qwen2.5-Coder")
    print(f"# from tokenizers {tokenizers.__version__} by scripts/make_tokenizer_golden.py")
    for index in range(COUNT):
        text = make_string(index, data)
        print(*(f"{digest(text, t.encode(text).ids):08x}" for t in (smollm2, qwen)))


if __name__ == "__main__":
    main()
