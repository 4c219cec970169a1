#!/usr/bin/env python3
# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
"""What PyTorch takes for the same work as dualdecoder's rows of an 8B shape: prefill of 131,072 tokens, and full-attention decoding at batch 7.

    python scripts/bench_torch.py --out torch.jsonl

32 layers, 32 query and 8 KV heads of 128, hidden 4,096, MLP 14,336, vocabulary 128,256, bfloat16, random weights and inputs, one GPU.
Prefill: whole layers (RMSNorm, QKV, RoPE, scaled_dot_product_attention with is_causal and enable_gqa, output, gated MLP) one after the
other over all rows, `--layers` of them timed, times 32 (the row says so: "layers_timed"); under each attention backend that takes the
inputs. Decode: one query row a sequence over 131,072 keys, and every dense product of a step by torch.matmul; their sum times 32, with the
head, is the step that PyTorch would need with no launch gaps at all. Rows whose backend is not there say so ("error").
"""
import argparse
import json
import math
import pathlib
import sys
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH}


class Shape:
    layers, hidden, intermediate, heads, kv_heads, dim, vocabulary = 32, 4096, 14336, 32, 8, 128, 128256


class Tiny(Shape):
    layers, hidden, intermediate, heads, kv_heads, dim, vocabulary = 4, 256, 512, 8, 2, 64, 1024


class Timer:
    """Milliseconds of one of `rounds` calls, the median, after one that does not count."""

    def __init__(self, device):
        self.device = device

    def __call__(self, call, rounds):
        call()
        times = []
        for _ in range(rounds):
            if self.device == "cpu":
                begin = time.perf_counter()
                call()
                times.append(1e3 * (time.perf_counter() - begin))
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times)[len(times) // 2]


def free(device):
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random(device, *size):
    return torch.randn(*size, device=device, dtype=torch.bfloat16)


class Layer:
    def __init__(self, shape, device):
        scale = shape.hidden ** -0.5
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.shape = shape
        self.norms = [torch.ones(shape.hidden, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.qkv = random(device, width, shape.hidden) * scale
        self.out = random(device, shape.hidden, shape.heads * shape.dim) * scale
        self.gate_up = random(device, 2 * shape.intermediate, shape.hidden) * scale
        self.down = random(device, shape.hidden, shape.intermediate) * shape.intermediate ** -0.5

    def mlp(self, x, out, block):
        """Adds the gated MLP of `x`, whose rows go in blocks, since 131,072 rows of two products of 14,336 are 7.5 GB."""
        for rows, target in zip(x.split(block), out.split(block)):
            gate, up = F.linear(rows, self.gate_up).chunk(2, -1)
            target += F.linear(F.silu(gate) * up, self.down)

    def __call__(self, x, cos, sin, block):
        shape, rows = self.shape, x.shape[0]
        qkv = F.linear(F.rms_norm(x, (shape.hidden,), self.norms[0], 1e-5), self.qkv).view(1, rows, -1, shape.dim).transpose(1, 2)
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
        del q, k, v, qkv
        x = x + F.linear(attention.transpose(1, 2).reshape(rows, -1), self.out)
        del attention
        self.mlp(F.rms_norm(x, (shape.hidden,), self.norms[1], 1e-5), x, block)
        return x


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def prefill(shape, device, rows, layers, backend, timer, budget_s):
    free(device)
    angle = torch.outer(torch.arange(rows, device=device).float(), 500000.0 ** -(torch.arange(0, shape.dim, 2, device=device) / shape.dim))
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    del angle
    stack = [Layer(shape, device) for _ in range(layers)]
    x = random(device, rows, shape.hidden)

    def run():
        y = x
        for layer in stack:
            y = layer(y, cos, sin, 16384)
        return y

    q, k, v = random(device, 1, shape.heads, rows, shape.dim), *(random(device, 1, shape.kv_heads, rows, shape.dim) for _ in range(2))
    with torch.inference_mode(), sdpa_kernel(BACKENDS[backend]):
        attention_ms = timer(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 1)
        if attention_ms > 1e3 * budget_s:
            raise RuntimeError(f"attention alone takes {attention_ms:.0f} ms a layer")
        del q, k, v
        ms = timer(run, 2) / layers
    flops = 4 * rows * rows / 2 * shape.heads * shape.dim
    return {"ms_layer": ms, "ms_attention": attention_ms, "attention_tflop_s": 1e-9 * flops / attention_ms,
            "seconds": 1e-3 * ms * shape.layers, "tok_s": rows / (1e-3 * ms * shape.layers), "layers_timed": layers,
            "scaled_to_layers": shape.layers, "peak_device_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None}


def decode_attention(shape, device, batch, keys, backend, timer):
    free(device)
    q = random(device, batch, shape.heads, 1, shape.dim)
    k, v = (random(device, batch, shape.kv_heads, keys, shape.dim) for _ in range(2))
    with torch.inference_mode(), sdpa_kernel(BACKENDS[backend]):
        us = 1e3 * timer(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 5)
    kv_bytes = 2 * 2 * batch * shape.kv_heads * keys * shape.dim
    return {"us_layer": us, "tb_s": 1e-6 * kv_bytes / us}


def decode_grouped(shape, device, batch, keys, backend, timer):
    """The same sums with the query heads of a group as rows of one KV head, which suits backends that read keys once a query head."""
    free(device)
    group = shape.heads // shape.kv_heads
    q = random(device, batch, shape.kv_heads, group, shape.dim)
    k, v = (random(device, batch, shape.kv_heads, keys, shape.dim) for _ in range(2))
    with torch.inference_mode(), sdpa_kernel(BACKENDS[backend]):
        us = 1e3 * timer(lambda: F.scaled_dot_product_attention(q, k, v), 5)
    kv_bytes = 2 * 2 * batch * shape.kv_heads * keys * shape.dim
    return {"us_layer": us, "tb_s": 1e-6 * kv_bytes / us}


def decode_products(shape, device, batch, timer):
    """Four layers' weights in turn, so that none is found in a cache; their graph is replayed where there is one."""
    free(device)
    stack = [Layer(shape, device) for _ in range(4)]
    head = random(device, shape.vocabulary, shape.hidden)
    x, attention, middle = (random(device, batch, n) for n in (shape.hidden, shape.heads * shape.dim, shape.intermediate))

    def products():
        for layer in stack:
            F.linear(x, layer.qkv), F.linear(attention, layer.out), F.linear(x, layer.gate_up), F.linear(middle, layer.down)

    with torch.inference_mode():
        call = products
        if device != "cpu":
            products()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                products()
            call = graph.replay
        us = 1e3 * timer(call, 20) / len(stack)
        head_us = 1e3 * timer(lambda: F.linear(x, head), 20)
    layer_bytes = 2 * sum(w.numel() for w in (stack[0].qkv, stack[0].out, stack[0].gate_up, stack[0].down))
    return {"us_layer": us, "us_head": head_us, "tb_s": 1e-6 * layer_bytes / us}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=131072, help="tokens of the prefill, and keys of the decode")
    parser.add_argument("--batch", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4, help="of the prefill that are timed")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to see that it runs")
    parser.add_argument("--out", default="-")
    parser.add_argument("--machine", default="unnamed")
    options = parser.parse_args()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=UserWarning)  # why a backend is not used: its row says that it is not
    shape, device, timer = (Tiny if options.tiny else Shape), options.device, Timer(options.device)
    out = sys.stdout if options.out == "-" else open(options.out, "a", encoding="utf-8")
    name = "tiny" if options.tiny else "8b"

    def row(suffix, values):
        line = {"row": f"{name}-{options.rows // 1024}k-{suffix}", "model": name, "weights": "synthetic", "program": f"torch {torch.__version__}",
                "context": options.rows, **values, "machine": options.machine, "command": " ".join(pathlib.PurePath(argument).name for argument in sys.argv)}
        print(json.dumps(line), file=out, flush=True)
        print(f"{line['row']:44} " + " ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float)) + values.get("error", ""),
              file=sys.stderr, flush=True)

    def attempt(suffix, call, **fields):
        try:
            values = call()
        except Exception as error:  # a backend that does not take these inputs is a result
            values = {"error": str(error).split("\n")[0][:200]}
        row(suffix, {**fields, **values})
        return values

    backends = ["math"] if device == "cpu" else ["cudnn", "flash"]
    for backend in backends:
        attempt(f"prefill-torch-{backend}", lambda b=backend: prefill(shape, device, options.rows, options.layers, b, timer, 4.0),
                batch=1, backend=backend)
    best = math.inf
    for backend in backends + ([] if device == "cpu" else ["efficient"]):
        for how, call in (("", decode_attention), ("-grouped", decode_grouped)):
            values = attempt(f"b{options.batch}-full-torch-{backend}{how}",
                             lambda b=backend, c=call: c(shape, device, options.batch, options.rows, b, timer),
                             batch=options.batch, backend=backend)
            best = min(best, values.get("us_layer", math.inf))
    products = attempt(f"b{options.batch}-products-torch", lambda: decode_products(shape, device, options.batch, timer), batch=options.batch)
    if math.isfinite(best) and "us_layer" in products:
        ms = 1e-3 * (shape.layers * (best + products["us_layer"]) + products["us_head"])
        row(f"b{options.batch}-full-torch", {"batch": options.batch, "policy": "full", "ms_step": ms, "tok_s": 1e3 * options.batch / ms,
                                              "us_attention_layer": best, "us_products_layer": products["us_layer"],
                                              "note": "attention and products of a step alone, no norms, RoPE, append, sampling or gaps"})


if __name__ == "__main__":
    main()
