#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/dequantize_golden.bin: random and extreme blocks of every format that is read, with the values that the `gguf` Python
package makes of them. Run as: pip install gguf==0.19.0 && python3 scripts/make_dequant_golden.py tests/data/dequantize_golden.bin

The file is a sequence of records, little-endian: u32 type, u32 blocks, u32 bytes of a block, u32 values of a block, the blocks, the values as
f32. Scales and values are finite; how NaN and Inf are refused is tested elsewhere."""
import struct
import sys

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

# Offsets of the f16 scales and minima in a block.
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
EXTREME_HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF]  # zeros, subnormals, smallest normal, largest


def finite_halves(rng: np.random.Generator, count: int) -> np.ndarray:
    halves = rng.integers(0, 1 << 16, count, dtype=np.uint16)
    halves = np.where((halves & 0x7C00) == 0x7C00, halves & 0xBBFF, halves).astype(np.uint16)
    halves[: len(EXTREME_HALVES)] = EXTREME_HALVES
    return halves


def quantised(rng: np.random.Generator, kind: Type, count: int) -> np.ndarray:
    block_bytes = GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    blocks[len(EXTREME_HALVES)] = 0x00
    blocks[len(EXTREME_HALVES) + 1] = 0xFF
    for turn, offset in enumerate(HALVES[kind]):
        halves = np.roll(finite_halves(rng, count), turn)  # so that extreme scales meet ordinary minima too
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks


def plain(rng: np.random.Generator, kind: Type, count: int) -> np.ndarray:
    if kind == Type.F16:
        return finite_halves(rng, count).view(np.uint8).reshape(count, 2)
    size = 4 if kind == Type.F32 else 2
    words = rng.integers(0, 1 << (8 * size), count, dtype=np.uint32 if size == 4 else np.uint16)
    exponent = np.array(0x7F800000 if size == 4 else 0x7F80, dtype=words.dtype)
    words = np.where((words & exponent) == exponent, words ^ (exponent & -exponent), words).astype(words.dtype)
    words[:4] = [0, 1, 1 << (8 * size - 1), exponent - 1]
    return words.view(np.uint8).reshape(count, size)


def main() -> None:
    rng = np.random.default_rng(20260730)
    with open(sys.argv[1], "wb") as out:
        for kind in [Type.F32, Type.F16, Type.BF16, *HALVES]:
            values, block_bytes = GGML_QUANT_SIZES[kind]
            count = 256 if kind not in HALVES else 24 if values == 32 else 12
            blocks = quantised(rng, kind, count) if kind in HALVES else plain(rng, kind, count)
            assert blocks.shape == (count, block_bytes)
            expected = np.ascontiguousarray(dequantize(blocks.reshape(1, -1), kind).astype(np.float32, copy=False))
            assert expected.size == count * values and np.isfinite(expected).all()
            out.write(struct.pack("<4I", int(kind), count, block_bytes, values))
            out.write(blocks.tobytes())
            out.write(expected.tobytes())


if __name__ == "__main__":
    main()
