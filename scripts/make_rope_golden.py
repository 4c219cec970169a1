#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/rope_golden.json: rotary frequencies as the transformers library computes them.

    pip install torch==2.5.1 transformers==4.53.3
    python scripts/make_rope_golden.py tests/data/rope_golden.json

Each case holds the parameters by the names of dualdecoder::RopeConfig, inv_freq [head_dim / 2], the attention factor, and for a few
positions cos and sin [head_dim / 2], both already multiplied by the attention factor, of the float32 product position * inv_freq.
A float32 angle near 131071 is rounded to 2^-7, so an implementation that forms the angle in double may differ by 1e-2 there.
"""
import json
import sys

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

POSITIONS = [0, 1, 100, 8191, 131071]

# kind, theta, head_dim, factor, original_context, and what differs from the defaults.
CASES = [
    ("none", 1e4, 64, 1.0, 2048, {}),
    ("none", 5e5, 128, 1.0, 8192, {}),
    ("none", 1e6, 80, 1.0, 32768, {}),
    ("linear", 1e4, 64, 2.0, 4096, {}),
    ("linear", 1e4, 128, 4.0, 2048, {}),
    ("linear", 1e6, 80, 8.0, 32768, {}),
    ("llama3", 5e5, 128, 8.0, 8192, {}),
    ("llama3", 5e5, 64, 32.0, 8192, {}),
    ("llama3", 1e4, 80, 4.0, 2048, {"low_freq_factor": 2.0, "high_freq_factor": 8.0}),
    ("llama3", 1e6, 128, 8.0, 8192, {"low_freq_factor": 1.5, "high_freq_factor": 3.0}),
    ("yarn", 1e6, 128, 4.0, 32768, {}),
    ("yarn", 1e6, 64, 4.0, 32768, {}),
    ("yarn", 1e4, 128, 16.0, 4096, {}),
    ("yarn", 5e5, 80, 2.0, 8192, {}),
    ("yarn", 1e4, 64, 4.0, 2048, {"beta_fast": 64.0, "beta_slow": 2.0}),
    ("yarn", 1e6, 128, 4.0, 32768, {"attention_factor": 1.0}),
]


def case(kind, theta, head_dim, factor, original, extra):
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, **extra}
    scaling = None
    if kind != "none":
        scaling = {"rope_type": kind, "factor": factor}
        if kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = original
        names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow", "attention_factor")}
        scaling.update({name: parameters[name] for name in names.get(kind, ()) if name in parameters})
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_theta=theta,
                         max_position_embeddings=int(original * factor), rope_scaling=scaling)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["default" if kind == "none" else kind](config, "cpu")
    attention_factor = float(attention_factor)
    rotations = []
    for position in POSITIONS:
        angle = inv_freq.float() * torch.tensor(float(position))
        rotations.append({"position": position, "cos": rounded(angle.cos() * attention_factor),
                          "sin": rounded(angle.sin() * attention_factor)})
    return {"kind": kind, "theta": theta, "head_dim": head_dim, "factor": factor, "original_context": original,
            **{name: parameters[name] for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")},
            "attention_factor_given": extra.get("attention_factor", 0.0), "attention_factor": attention_factor,
            "inv_freq": rounded(inv_freq), "rotations": rotations}


def rounded(tensor):
    """Nine significant digits name every float32."""
    return [float(f"{value:.9g}") for value in tensor.double().tolist()]


def main():
    source = (f"python scripts/make_rope_golden.py; transformers {transformers.__version__} "
              f"(modeling_rope_utils), torch {torch.__version__}, CPU, float32")
    golden = {"source": source, "cases": [case(*parameters) for parameters in CASES]}
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(golden, out, separators=(",", ":"))
        out.write("\n")


if __name__ == "__main__":
    main()
