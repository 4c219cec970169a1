#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/golden_<model>.json: greedy tokens and logits of the transformers library on a GGUF file that it dequantises.

    pip install torch==2.5.1 transformers==4.53.3 accelerate==1.8.1 gguf
    python scripts/make_golden.py smollm2 $(scripts/get-model.sh smollm2) tests/data/golden_smollm2.json
    python scripts/make_golden.py qwen2.5-coder-0.5b $(scripts/get-model.sh qwen2.5-coder-0.5b) tests/data/golden_qwen2.5-coder-0.5b.json

Weights and arithmetic are float32 on the CPU, attention is dense. A case holds the prompt's ids, the 64 greedy tokens, and for each
of the 64 steps the logits of 32 fixed probe tokens, the five best tokens with their logits, and log(sum(exp(logits))).
"""
import json
import pathlib
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 64
PROBES = 32
TEXT = pathlib.Path("/usr/share/common-licenses/GPL-3")  # on every Debian machine; the ids are stored, so it is not needed to check


LEAST_MARGIN = 0.01  # between the best and the second logit of every step, so that rounding cannot change a greedy token
SENTENCES = [
    "Once upon a time, in a small village near the sea, an old lighthouse keeper",
    "The capital of France is Paris, and the capital of Germany is Berlin",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
]


def prompts(tokenizer):
    """Candidates for prompts of 10, 500 and 4,000 tokens, of which the first with LEAST_MARGIN counts: a plain sentence, and a chat
    question about a long text from one of several places in it on."""
    yield [tokenizer.encode(sentence, add_special_tokens=False)[:10] for sentence in SENTENCES]
    text = TEXT.read_text(encoding="utf-8")
    head = tokenizer.encode("<|im_start|>user\nHere is a document.\n\n", add_special_tokens=False)
    tail = tokenizer.encode("\n\nSummarise the document in three sentences.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    body = tokenizer.encode(text, add_special_tokens=False)
    for length in (500, 4000):
        room = length - len(head) - len(tail)
        yield [head + body[start : start + room] + tail for start in (0, 1000, 2000)]


def probes(vocabulary):
    """Fixed probe tokens, spread over the vocabulary by a multiplier that is coprime to it."""
    return sorted((index * 2654435761 + 12345) % vocabulary for index in range(PROBES))


@torch.inference_mode()
def greedy(model, ids, probe_ids):
    cache = None
    tokens, steps, margin = [], [], float("inf")
    feed = torch.tensor([ids])
    for _ in range(STEPS):
        output = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].float()
        best = torch.topk(logits, 5)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        steps.append({"probes": rounded(logits[probe_ids]), "top_ids": best.indices.tolist(), "top_logits": rounded(best.values),
                      "logsumexp": rounded(torch.logsumexp(logits.double(), 0).view(1))[0]})
        feed = best.indices[:1].view(1, 1)
    return tokens, steps, margin


def rounded(tensor):
    return [float(f"{value:.7g}") for value in tensor.tolist()]


def main():
    name, model_path, out_path = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    where = {"pretrained_model_name_or_path": str(model_path.parent), "gguf_file": model_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, torch_dtype=torch.float32, attn_implementation="sdpa").eval()
    probe_ids = probes(model.config.vocab_size)
    cases = []
    for candidates in prompts(tokenizer):
        for ids in candidates:
            tokens, steps, margin = greedy(model, ids, probe_ids)
            if margin >= LEAST_MARGIN:
                break
        print(f"{name}: prompt {len(ids)}, least margin {margin:.4f}, tied {model.config.tie_word_embeddings}: "
              f"{tokenizer.decode(tokens)!r}", file=sys.stderr)
        cases.append({"prompt": ids, "tokens": tokens, "least_margin": round(margin, 5), "steps": steps})
    source = (f"python scripts/make_golden.py {name} {model_path.name}; transformers {transformers.__version__}, "
              f"torch {torch.__version__}, CPU, float32, sdpa attention")
    golden = {"source": source, "model": name, "file": model_path.name, "probe_ids": probe_ids, "cases": cases}
    with open(out_path, "w", encoding="utf-8") as out:
        json.dump(golden, out, separators=(",", ":"))
        out.write("\n")


if __name__ == "__main__":
    main()
