#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""Writes greedy tokens and logits of the transformers library on a GGUF file that it dequantises, tests/data/golden_<model>.json.

    pip install torch==2.5.1 transformers==4.53.3 accelerate==1.8.1 gguf
    python scripts/make_golden.py smollm2 $(scripts/get-model.sh smollm2) tests/data/golden_smollm2.json
    python scripts/make_golden.py qwen2.5-coder-0.5b $(scripts/get-model.sh qwen2.5-coder-0.5b) tests/data/golden_qwen2.5-coder-0.5b.json

and on a GPU, for long prompts (any transformers from 4.53 on):

    python scripts/make_golden.py qwen2.5-coder-1.5b $(scripts/get-model.sh qwen2.5-coder-1.5b) golden.json \\
        --device cuda --lengths 500 8192 32768 --text prose.txt code.txt
    python scripts/make_golden.py qwen2.5-coder-1.5b $(scripts/get-model.sh qwen2.5-coder-1.5b) golden-yarn.json \\
        --device cuda --lengths 122880 --yarn 4 --text prose.txt code.txt
    DUALDECODER_GOLDEN=golden.json:golden-yarn.json build/cuda/tests/gpu/gpu_real_model_test

Weights and arithmetic are float32, attention is dense. A case holds the prompt's ids, the 64 greedy tokens, and for each of the 64 steps the
logits of 32 fixed probe tokens, the best tokens with their logits, and log(sum(exp(logits))). With --bf16 (implied by --device cuda) a case
also holds how far the same library is from that when it computes as its users do, weights and arithmetic in bfloat16 and its own choice of
an attention kernel, teacher-forced on the same tokens: what bfloat16 does to this model on this prompt, and so the scale for others.

    python scripts/make_golden.py qwen2.5-coder-1.5b $(scripts/get-model.sh qwen2.5-coder-1.5b) golden.json --round-like-cuda --extend

adds to the cases of a file logits with float32 arithmetic, teacher-forced on the same tokens, in which what the CUDA backend keeps in bfloat16
is rounded to that: weights, normed rows, queries, keys, values, what attention and SwiGLU put out, and of the prompt what SwiGLU takes in.
"""
import argparse
import functools
import json
import pathlib
import sys
import time

import gguf
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

STEPS = 64
PROBES = 32
BEST = 8
TEXT = "/usr/share/common-licenses/GPL-3"  # on every Debian machine; the ids are stored, so it is not needed to check
LEAST_MARGIN = 0.01  # between the best and the second logit of every step, so that rounding cannot change a greedy token
SCORES = 1 << 30  # elements of one block of scores: 4 GiB
SENTENCES = [
    "Once upon a time, in a small village near the sea, an old lighthouse keeper",
    "The capital of France is Paris, and the capital of Germany is Berlin",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
]


def round_to_bf16(tensor):
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def dense_attention(module, query, key, value, attention_mask, scaling=None, **_):
    """softmax(q k^T) v by its definition, causal, over blocks of queries, so that 122,880 keys fit. [batch, heads, rows, head_dim]."""
    assert attention_mask is None and query.shape[0] == 1
    if module.config._attn_implementation == "dense_rounded":
        query, key, value = (round_to_bf16(tensor) for tensor in (query, key, value))
    heads, rows, dim = query.shape[1:]
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    offset = keys - rows
    scale = scaling if scaling is not None else dim ** -0.5
    out = torch.empty_like(query)
    block = max(1, min(rows, SCORES // (heads * keys)))
    for first in range(0, rows, block):
        last = min(first + block, rows)
        seen = offset + last
        block_q = query[0, :, first:last].reshape(kv_heads, group * (last - first), dim)
        scores = torch.matmul(block_q, key[0, :, :seen].transpose(1, 2)).view(kv_heads, group, last - first, seen).mul_(scale)
        hidden = torch.ones(last - first, last - first, dtype=torch.bool, device=query.device).triu_(1)
        scores[..., offset + first :].masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        del scores
        out[0, :, first:last] = torch.matmul(weights.view(kv_heads, -1, seen), value[0, :, :seen]).view(heads, last - first, dim)
        del weights
    return out.transpose(1, 2).contiguous(), None


def prompts(tokenizer, lengths, text_path):
    """For each length the candidates of which the first with LEAST_MARGIN counts: the beginning of a sentence, and from 100 tokens on a
    chat question about a text from one of several places in it on."""
    text = pathlib.Path(text_path).read_text(encoding="utf-8")
    head = tokenizer.encode("<|im_start|>user\nHere is a document.\n\n", add_special_tokens=False)
    tail = tokenizer.encode("\n\nSummarise the document in three sentences.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    body = tokenizer.encode(text, add_special_tokens=False)
    for length in lengths:
        if length < 100:
            yield [tokenizer.encode(sentence, add_special_tokens=False)[:length] for sentence in SENTENCES]
            continue
        room = length - len(head) - len(tail)
        if room > len(body):
            raise SystemExit(f"make_golden.py: {text_path} holds {len(body)} tokens, fewer than {room}")
        yield [head + body[start : start + room] + tail for start in (0, 1000, 2000) if start + room <= len(body)]


def probes(vocabulary):
    """Fixed probe tokens, spread over the vocabulary by a multiplier that is coprime to it."""
    return sorted((index * 2654435761 + 12345) % vocabulary for index in range(PROBES))


@torch.inference_mode()
def greedy(model, ids, probe_ids):
    cache = None
    tokens, steps, margin = [], [], float("inf")
    feed = torch.tensor([ids], device=model.device)
    for _ in range(STEPS):
        output = model(feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].float()
        best = torch.topk(logits, BEST)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(best.indices[0].item())
        steps.append({"probes": rounded(logits[probe_ids]), "top_ids": best.indices.tolist(), "top_logits": rounded(best.values),
                      "logsumexp": rounded(torch.logsumexp(logits.double(), 0).view(1))[0]})
        feed = best.indices[:1].view(1, 1)
    return tokens, steps, margin


@torch.inference_mode()
def forced_logits(model, case):
    """[STEPS, vocabulary], teacher-forced on the case's tokens."""
    ids = torch.tensor([case["prompt"] + case["tokens"][:-1]], device=model.device)
    return model(ids, use_cache=False, logits_to_keep=STEPS).logits[0].double().cpu()


def distance(logits, case, probe_ids):
    """How far they are from those of the case."""
    wanted = torch.tensor([step["probes"] + step["top_logits"] for step in case["steps"]], dtype=torch.float64)
    places = torch.tensor([probe_ids + step["top_ids"] for step in case["steps"]])
    off = (torch.gather(logits, 1, places) - wanted).abs()
    equal = (logits.argmax(1) == torch.tensor(case["tokens"])).sum().item()
    return {"largest": round(off.max().item(), 5), "rms": round(off.square().mean().sqrt().item(), 6), "equal_tokens": equal}


def round_like_cuda(model, case, probe_ids):
    """Steps of the case with the CUDA backend's roundings, and how far they are from those without. Matrices are rounded already."""
    prompt = len(case["prompt"])

    def round_input(module, inputs):
        return (round_to_bf16(inputs[0]),)

    def round_prompt(module, inputs, output):
        output[:, :prompt] = round_to_bf16(output[:, :prompt])
        return output

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(round_input))
            if name.endswith(("gate_proj", "up_proj")):
                hooks.append(module.register_forward_hook(round_prompt))
    logits = forced_logits(model, case)
    for hook in hooks:
        hook.remove()
    steps = [{"probes": rounded(logits[i, probe_ids]), "top_logits": rounded(logits[i, step["top_ids"]])} for i, step in enumerate(case["steps"])]
    return {**distance(logits, case, probe_ids), "steps": steps}


def rounded(tensor):
    return [float(f"{value:.7g}") for value in tensor.tolist()]


def load(path, device, yarn):
    """The model in float32, its context stretched by `yarn` (0: as it is), and its tokenizer."""
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(gguf.GGUFReader)  # configuration, tokenizer and weights each read the file
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**where)
    if yarn:
        scaling = {"rope_type": "yarn", "factor": yarn, "original_max_position_embeddings": config.max_position_embeddings}
        if getattr(config, "rope_parameters", None):  # transformers 5
            config.rope_parameters = {**config.rope_parameters, **scaling}
        else:
            config.rope_scaling = scaling
        config.max_position_embeddings = int(config.max_position_embeddings * yarn)
    kind = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"
    for attention in ("dense_by_definition", "dense_rounded"):
        ALL_ATTENTION_FUNCTIONS.register(attention, dense_attention)
    model = AutoModelForCausalLM.from_pretrained(**where, config=config, attn_implementation="dense_by_definition",
                                                 **{kind: torch.float32})
    return model.eval().to(device), AutoTokenizer.from_pretrained(**where)


def source_of(options):
    where = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    return (f"python scripts/make_golden.py {options.name} {options.model.name}; transformers {transformers.__version__}, "
            f"torch {torch.__version__}, {where}, float32, dense attention")


def new_golden(model, tokenizer, options, say):
    probe_ids = probes(model.config.vocab_size)
    cases = []
    for text in options.text:
        for candidates in prompts(tokenizer, options.lengths, text):
            for ids in candidates:
                tokens, steps, margin = greedy(model, ids, probe_ids)
                if margin >= LEAST_MARGIN or options.device != "cpu":
                    break
            say(f"{pathlib.Path(text).stem}, prompt {len(ids)}, least margin {margin:.4f}: {tokenizer.decode(tokens)!r}")
            cases.append({"text": pathlib.Path(text).stem, "prompt": ids, "tokens": tokens, "least_margin": round(margin, 5), "steps": steps})
    return {"source": source_of(options), "model": options.name, "file": options.model.name, "yarn_factor": options.yarn,
            "probe_ids": probe_ids, "cases": cases}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 500, 4000], help="of the prompts, in tokens")
    parser.add_argument("--text", nargs="+", default=[TEXT], help="what the prompts are about, each text at each length")
    parser.add_argument("--yarn", type=float, default=0.0, help="stretches the model's context by this factor")
    parser.add_argument("--bf16", action="store_true", help="add how far the library's own bfloat16 is off")
    parser.add_argument("--round-like-cuda", action="store_true", help="add logits with the roundings of the CUDA backend")
    parser.add_argument("--extend", action="store_true", help="the adds to the cases of the file OUT instead of making new ones")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.monotonic()

    def say(sentence):
        print(f"{time.monotonic() - begin:6.1f} s  {options.name}: {sentence}", file=sys.stderr, flush=True)

    model, tokenizer = load(options.model, options.device, options.yarn)
    say("loaded")
    if options.extend:
        golden = json.loads(pathlib.Path(options.out).read_text(encoding="utf-8"))
    else:
        golden = new_golden(model, tokenizer, options, say)
    probe_ids, cases = golden["probe_ids"], golden["cases"]
    if options.round_like_cuda:
        for parameter in model.parameters():
            if parameter.dim() > 1:  # weights of norms and biases stay float32 there
                parameter.data = round_to_bf16(parameter.data)
        model.config._attn_implementation = "dense_rounded"
        for case in cases:
            case["rounded"] = round_like_cuda(model, case, probe_ids)
            say(f"{case['text']}, prompt {len(case['prompt'])}, rounded: {case['rounded']['largest']}, {case['rounded']['rms']}")
        golden["rounded_by"] = source_of(options)
    if options.bf16 or (options.device != "cpu" and not options.extend):
        for parameter in model.parameters():  # not the buffers: rotary frequencies stay float32, as the library loads them
            parameter.data = parameter.data.to(torch.bfloat16)
        model.config._attn_implementation = "sdpa"
        for case in cases:
            case["bf16"] = distance(forced_logits(model, case), case, probe_ids)
            say(f"{case['text']}, prompt {len(case['prompt'])}, bfloat16: {case['bf16']}")
    with open(options.out, "w", encoding="utf-8") as out:
        json.dump(golden, out, separators=(",", ":"))
        out.write("\n")
    say(f"wrote {options.out}")


if __name__ == "__main__":
    main()
