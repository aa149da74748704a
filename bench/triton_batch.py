"""The kernels of several rows on a CUDA device: checks, then times of many variants; a line of JSON each, as it goes.

    python bench/triton_batch.py --out batch.jsonl --seconds 70 [--parts check,decode,library,batch,rows,three,attend,..]

Processes on all cores compile what will be timed (into Triton's cache) and run the checks; the timing itself is alone on
the device: graphs over copies of the weights that together outgrow its cache, medians of 7.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quarrel.gguf import GGMLType
from quarrel.ops import ALL_OPS, EXTRA_OPS, draw
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.compare import case_error
from quarrel.ops.contract import Case
from quarrel.ops.linear import LinearAddSpec, LinearSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.triton_backend import attention, matmul, rows
from quarrel.triton_backend.backend import create
from quarrel.triton_backend.dequant import decode_rows
from quarrel.triton_backend.experts import group_pairs
from quarrel.triton_backend.fragments import GROUP, STEP, arrange
from quarrel.triton_backend.grouped import grouped_tiles
from quarrel.triton_backend.half import is_fast
from quarrel.triton_backend.matmul import TL_TYPES
from quarrel.triton_backend.pack import Packed, Uploader, pack
from quarrel.triton_backend.runtime import cdiv, launch

ROTATE = 240 << 20
F16 = torch.float16
Go = Callable[[int], None]


def device() -> torch.device:
    return torch.device("cuda", 0)


@functools.lru_cache(maxsize=6)
def packed(name: str, n: int, k: int) -> Packed:
    """A weight of random blocks: 64 drawn rows over and over, each under a scale of its own where the copy is cheap."""
    type = GGMLType[name]
    few = draw.weight(np.random.default_rng(1), type, min(n, 512), k)

    def read(start: int, stop: int) -> np.ndarray:
        return few.raw[np.arange(start, stop) % len(few.raw)]

    return pack(type, n, k, read, Uploader(device()))


def copies(weight: Packed, count: int) -> list[Packed]:
    """The same weight at other addresses."""
    made = [weight]
    for _ in range(count - 1):
        made.append(Packed(weight.format, weight.n, weight.k, weight.buffer, tuple(p.clone() for p in weight.planes)))  # type: ignore[arg-type]
    return made


def turns(weight: Packed, small: bool) -> list[Packed]:
    return copies(weight, 1 if small else max(2, min(24, -(-ROTATE // max(1, weight.nbytes)))))


@functools.lru_cache(maxsize=4)
def exact(name: str, n: int, k: int) -> torch.Tensor:
    """The weight's float32 values, by the kernels' exact path."""
    w = packed(name, n, k)
    out = torch.full((n, k), float("nan"), device=device())
    run_decode(out, w, 8, 16, 4, False, "float32")
    return out


def activations(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, k, device=device()).to(F16)


def run_decode(out: torch.Tensor, w: Packed, r: int, b: int, warps: int, fast: bool, compute: str = "float16") -> None:
    launch(
        decode_rows, (cdiv(w.n, r), w.k // 32 // b), out, *w.planes, 0, w.n, K=w.k, FORMAT=w.format, FAST=fast,
        COMPUTE=TL_TYPES[compute], R=r, B=b, warps=warps, stages=1,
    )  # fmt: skip


Made = tuple[Go, int, Callable[[], float], dict[str, float]]
"""Run turn i, number of turns, the error, and what to divide by the seconds (`gb`, `tflop`)."""


def make_decode(p: dict[str, Any], small: bool) -> Made:
    w = packed(p["format"], p["n"], p["k"])
    all_w = turns(w, small)
    out = torch.full((w.n, w.k), float("nan"), device=device(), dtype=F16)

    def go(i: int) -> None:
        run_decode(out, all_w[i], p["r"], p["b"], p["warps"], p["fast"])

    def error() -> float:
        return relative(out.float(), exact(p["format"], w.n, w.k))

    return go, len(all_w), error, {"gb": (w.nbytes + out.numel() * 2) / 1e9}


def make_library(p: dict[str, Any], small: bool) -> Made:
    n, k, tokens = p["n"], p["k"], p["tokens"]
    count = 1 if small else max(2, ROTATE // (n * k * 2))
    ws = [torch.randn(n, k, device=device()).to(F16) for _ in range(count)]
    x = activations(tokens, k)
    if p["add"]:
        before, y = torch.randn(tokens, n, device=device()), torch.empty(tokens, n, device=device())

        def go(i: int) -> None:
            torch.addmm(before, x, ws[i].T, out_dtype=torch.float32, alpha=0.5, out=y)

        def error() -> float:
            return relative(y, before + 0.5 * (x.float() @ ws[-1].float().T))
    else:
        y = torch.empty(tokens, n, device=device(), dtype=F16)

        def go(i: int) -> None:
            torch.mm(x, ws[i].T, out=y)

        def error() -> float:
            return relative(y.float(), x.float() @ ws[-1].float().T)

    return go, count, error, {"tflop": 2e-12 * n * k * tokens}


def make_batch(p: dict[str, Any], small: bool) -> Made:
    """batch_tiles: one map, or gate and up; `residual` as after attention."""
    name, n, k, tokens, parts = p["format"], p["n"], p["k"], p["tokens"], p["parts"]
    w = packed(name, n, k)
    both = p.get("gated", False)
    all_w = [*turns(w, small), w] if both else turns(w, small)
    count = len(all_w) - both
    bt, bn = p["bt"], p["bn"]
    x = activations(tokens, k)
    residual = torch.randn(tokens, n, device=device())
    add = not both and p.get("add", False)
    y = torch.full((tokens, n), float("nan"), device=device(), dtype=torch.float32 if add else F16)
    tiles = cdiv(n, bn) * cdiv(tokens, bt)
    part = torch.empty(2 * parts * tiles * bn * bt, device=device())
    arrived = torch.zeros(tiles, dtype=torch.int32, device=device())

    def go(i: int) -> None:
        a, b = all_w[i], all_w[i + 1] if both else all_w[i]
        launch(
            matmul.batch_tiles, (cdiv(n, bn), cdiv(tokens, bt), parts), y, x, *a.planes, *b.planes, y, y, residual, part,
            arrived, tokens, 0.5 if add else 1.0, n, K=k, FORMAT=name,
            FAST=is_fast(name, "float16", p["nb"]), COMPUTE=TL_TYPES["float16"], BIAS=False, ADD=add, GATED=both,
            KIND="silu" if both else "none", PARTS=parts,
            BN=bn, BT=bt, NB=p["nb"], STAGES=p["stages"], warps=p["warps"], stages=p["stages"], early=True,
        )  # fmt: skip

    def error() -> float:
        sums = x.float() @ exact(name, n, k).T
        if both:
            sums = torch.nn.functional.silu(sums) * sums
        return relative(y.float(), residual + 0.5 * sums if add else sums)

    return go, count, error, {"gb": w.nbytes * (2 if both else 1) / 1e9}


def arranged(x: torch.Tensor, width: int) -> torch.Tensor:
    """As the kernels of a few rows read it."""
    tokens, k = x.shape
    to = torch.empty(width * k, device=device(), dtype=F16)
    launch(arrange, (k // STEP, width // GROUP), to, x, tokens, K=k, PDL=False)
    return to


def make_rows(p: dict[str, Any], small: bool) -> Made:
    """rows_one: one map, or gate and up, decoded in the registers of `mma`."""
    name, n, k, tokens = p["format"], p["n"], p["k"], p["tokens"]
    w = packed(name, n, k)
    both = p.get("gated", False)
    all_w = [*turns(w, small), w] if both else turns(w, small)
    count = len(all_w) - both
    x = activations(tokens, k)
    there = arranged(x, p["bt"])
    residual = torch.randn(tokens, n, device=device())
    add = not both and p.get("add", False)
    y = torch.full((tokens, n), float("nan"), device=device(), dtype=torch.float32 if add else F16)

    def go(i: int) -> None:
        a, b = all_w[i], all_w[i + 1] if both else all_w[i]
        launch(
            rows.rows_one, (cdiv(n, p["bm"]),), y, there, *a.planes, *b.planes, residual, residual, residual, tokens,
            0.5 if add else 1.0, n, K=k, FORMAT=name, BIAS=False, ADD=add, GATED=both, KIND="silu" if both else "none",
            W=p["turns"], M=p["tall"], BM=p["bm"], BT=p["bt"], DEEP=p["deep"], warps=p["tall"] * p["turns"], stages=1,
            early=p.get("early", True),
        )  # fmt: skip

    def error() -> float:
        sums = x.float() @ exact(name, n, k).T
        if both:
            sums = torch.nn.functional.silu(sums) * sums
        return relative(y.float(), residual + 0.5 * sums if add else sums)

    return go, count, error, {"gb": w.nbytes * (2 if both else 1) / 1e9}


def make_three(p: dict[str, Any], small: bool) -> Made:
    """batch_three: query, key and value."""
    k, tokens, parts, bn, bt = p["k"], p["tokens"], p["parts"], p["bn"], p["bt"]
    ns = p["ns"]
    sets = [turns(packed(f, n, k), small) for f, n in zip(p["formats"], ns, strict=True)]
    count = min(map(len, sets))
    x = activations(tokens, k)
    ys = [torch.full((tokens, n), float("nan"), device=device(), dtype=F16) for n in ns]
    rows = sum(cdiv(n, bn) for n in ns)
    tiles = rows * cdiv(tokens, bt)
    part = torch.empty(parts * tiles * bn * bt, device=device())
    arrived = torch.zeros(tiles, dtype=torch.int32, device=device())
    fast = [is_fast(f, "float16", p["nb"]) for f in p["formats"]]

    def go(i: int) -> None:
        a, b, c = (s[i] for s in sets)
        launch(
            matmul.batch_three, (rows, cdiv(tokens, bt), parts), *ys, x, *a.planes, *b.planes, *c.planes, *ys, part,
            arrived, tokens, *ns, K=k, FORMAT0=a.format, FORMAT1=b.format, FORMAT2=c.format, FAST0=fast[0], FAST1=fast[1],
            FAST2=fast[2], COMPUTE=TL_TYPES["float16"], BIAS=False, PARTS=parts, BN=bn, BT=bt, NB=p["nb"],
            STAGES=p["stages"], warps=p["warps"], stages=p["stages"], early=True,
        )  # fmt: skip

    def error() -> float:
        wanted = (x.float() @ exact(f, n, k).T for f, n in zip(p["formats"], ns, strict=True))
        return max(relative(y.float(), want) for y, want in zip(ys, wanted, strict=True))

    return go, count, error, {"gb": sum(s[0].nbytes for s in sets) / 1e9}


def make_rows_three(p: dict[str, Any], small: bool) -> Made:
    """rows_three: query, key and value."""
    k, tokens, ns = p["k"], p["tokens"], p["ns"]
    sets = [turns(packed(f, n, k), small) for f, n in zip(p["formats"], ns, strict=True)]
    count = min(map(len, sets))
    x = activations(tokens, k)
    there = arranged(x, p["bt"])
    ys = [torch.full((tokens, n), float("nan"), device=device(), dtype=F16) for n in ns]

    def go(i: int) -> None:
        a, b, c = (s[i] for s in sets)
        launch(
            rows.rows_three, (sum(cdiv(n, p["bm"]) for n in ns),), *ys, there, *a.planes, *b.planes, *c.planes, *ys, tokens,
            *ns, K=k, FORMAT0=a.format, FORMAT1=b.format, FORMAT2=c.format, BIAS=False, W=p["turns"], M=p["tall"],
            BM=p["bm"], BT=p["bt"], DEEP=p["deep"], warps=p["tall"] * p["turns"], stages=1, early=True,
        )  # fmt: skip

    def error() -> float:
        wanted = (x.float() @ exact(f, n, k).T for f, n in zip(p["formats"], ns, strict=True))
        return max(relative(y.float(), want) for y, want in zip(ys, wanted, strict=True))

    return go, count, error, {"gb": sum(s[0].nbytes for s in sets) / 1e9}


def cache_for(seqs: int, keys: int, n_kv: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and a block table of shuffled blocks of 32."""
    width = cdiv(keys, 32)
    torch.manual_seed(3)
    shape = (seqs * width + 1, n_kv, 32, dim)
    k, v = (torch.randn(shape, device=device()).to(F16) for _ in range(2))
    table = torch.randperm(seqs * width, device=device()).to(torch.int32)
    return k, v, table


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, keys: int, scale: float) -> torch.Tensor:
    """One sequence's attention in float32: q `[T, heads, dim]`, its newest key last."""
    blocks = table[: cdiv(keys, 32)].long()
    n_kv, dim = k.shape[1], k.shape[3]
    ks, vs = (c[blocks].permute(1, 0, 2, 3).reshape(n_kv, -1, dim)[:, :keys].float() for c in (k, v))
    group = q.shape[1] // n_kv
    out = torch.empty(q.shape, device=device())
    seen = torch.ones(q.shape[0], keys, dtype=torch.bool, device=device()).tril(keys - q.shape[0])
    for h in range(q.shape[1]):
        score = (q[:, h].float() @ ks[h // group].T * scale).masked_fill(~seen, float("-inf"))
        out[:, h] = score.softmax(-1) @ vs[h // group]
    return out


def make_attend(p: dict[str, Any], small: bool) -> Made:
    tokens, heads, n_kv, dim = p["tokens"], p["heads"], p["n_kv"], p["dim"]
    keys = p.get("keys", tokens)
    k, v, table = cache_for(1, keys, n_kv, dim)
    q = activations(tokens, heads * dim)
    out = torch.full_like(q, float("nan"))
    ints = {"start": [0, tokens], "len": [keys], "width": [cdiv(keys, 32)]}
    start, length, width = (torch.tensor(x, dtype=torch.int32, device=device()) for x in ints.values())
    share = heads // n_kv
    scale = dim**-0.5

    def go(i: int) -> None:
        launch(
            attention.attend_many, (tokens // (p["bm"] // share) + 1, n_kv), out, q, k, v, k, v, k, start, length, table,
            width, 1, scale * attention.LOG2E, 0.0, 0, HEADS=heads, KV_HEADS=n_kv, DIM=dim, WIDE=dim, SIZE=32, WINDOW=False,
            CAP=False, SINKS=False, SHARE=share, BLOCK_M=p["bm"], BLOCK_N=p["bn"], KIND="plain",
            COMPUTE=TL_TYPES["float16"], LEAST=2, warps=p["warps"], stages=p["stages"],
        )  # fmt: skip

    def error() -> float:
        few = min(tokens, 1024)
        want = naive(q.view(tokens, heads, dim)[-few:], k, v, table, keys, scale)
        return relative(out.view(tokens, heads, dim)[-few:].float(), want)

    pairs = tokens * (keys - tokens) + tokens * tokens / 2
    return go, 1, error, {"tflop": 4e-12 * pairs * heads * dim}


def make_experts(p: dict[str, Any], small: bool) -> Made:
    """grouped_tiles over packed stacks (`decoded` False) or float16 ones, as after decoding."""
    name, experts, used, n, k, tokens = (p[x] for x in ("format", "experts", "used", "n", "k", "tokens"))
    gated = p["gated"]
    at_once = p["at_once"]
    if p["decoded"]:
        stacks = [torch.randn(at_once * n, k, device=device()).div(k**0.5).to(F16) for _ in range(1 + gated)]
        planes = [(s, s, s, s) for s in stacks]
        format = "F16"
    else:
        w = packed(name, experts * n, k)
        planes = [c.planes for c in copies(w, 1 + gated)]
        format = name
    x = activations(tokens, k)
    pairs = tokens * used
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(experts)[:used] for _ in range(tokens)]).astype(np.int32)
    d_ids = torch.tensor(ids, device=device()).reshape(-1)
    order = torch.empty(pairs, dtype=torch.int32, device=device())
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device())
    launch(group_pairs, (experts,), order, starts, d_ids, pairs, EXPERTS=experts, BLOCK=1024)
    y = torch.full((pairs, n), float("nan"), device=device(), dtype=F16)
    bn, bt = p["bn"], p["bt"]

    def go(i: int) -> None:
        for first in range(0, experts, at_once) if p["decoded"] else (0,):
            count = min(at_once, experts - first) if p["decoded"] else experts
            launch(
                grouped_tiles, ((pairs // bt + count + 1) * cdiv(n, bn),), y, x, *planes[0], *planes[-1], y, y, order,
                starts, first, count, n, K=k, FORMAT=format,
                FAST=is_fast(format, "float16", p["nb"]), EXPERTS=experts, PER_TOKEN=used,
                GATED=gated, KIND="silu" if gated else "none", BIAS=False, COMPUTE=TL_TYPES["float16"], BN=bn, BT=bt,
                NB=p["nb"], STAGES=p["stages"], warps=p["warps"], stages=p["stages"],
            )  # fmt: skip

    def error() -> float:
        worst = 0.0
        for t in (0, tokens - 1):
            for j in (0, used - 1):
                e = int(ids[t, j])
                if p["decoded"]:
                    at = e % at_once * n
                    parts = [x[t].float() @ s[at : at + n].float().T for s in stacks]
                else:
                    parts = [x[t].float() @ exact(name, experts * n, k)[e * n : (e + 1) * n].T] * (1 + gated)
                want = torch.nn.functional.silu(parts[0]) * parts[1] if gated else parts[0]
                worst = max(worst, relative(y[t * used + j].float(), want))
        return worst

    return go, 1, error, {"tflop": 2e-12 * pairs * n * k * (1 + gated)}


MAKERS = {
    "decode": make_decode, "library": make_library, "batch": make_batch, "three": make_three, "attend": make_attend,
    "rows": make_rows, "rows_three": make_rows_three, "experts": make_experts,
}  # fmt: skip


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def variants() -> list[dict[str, Any]]:
    """What is timed, the most wanted first."""
    found: list[dict[str, Any]] = []

    def add(part: str, names: str, *rows: tuple[Any, ...], **rest: Any) -> None:
        found.extend({"part": part, **dict(zip(names.split(), row, strict=True)), **rest} for row in rows)

    big: dict[str, Any] = {"n": 14336, "k": 4096}
    add("decode", "r b warps fast", (2, 128, 4, True), (4, 64, 4, True), (1, 128, 2, True), format="Q4_K", **big)
    add("decode", "format", ("Q6_K",), ("Q8_0",), r=2, b=128, warps=4, fast=True, **big)
    maps = ((14336, 4096, False), (4096, 14336, True), (4096, 4096, True), (4096, 4096, False), (1024, 4096, False))
    for tokens in (4096, 512):
        add("library", "n k add", *maps, tokens=tokens)
    add("library", "tokens", (256,), (128,), add=False, **big)
    attend = ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3))
    heads = {"heads": 32, "n_kv": 8, "dim": 128}
    for tokens in (4096, 512):
        add("attend", "bm bn warps stages", *attend, tokens=tokens, **heads)
    names = "bn warps nb stages parts"
    down, out = {"n": 4096, "k": 14336, "add": True}, {"n": 4096, "k": 4096, "add": True}
    warp = "turns bm tall deep"
    for name in ("Q4_K", "Q6_K"):
        one: dict[str, Any] = {"format": name, "tokens": 8, "bt": 8}
        every = ((2, 16, 1, False), (1, 16, 1, False), (2, 16, 1, True), (1, 16, 1, True), (4, 16, 1, True))
        add("rows", warp, *every, (2, 32, 2, False), (2, 32, 2, True), (2, 64, 4, False), **one, **big)
        add("rows", warp, *every, (4, 16, 1, False), (2, 32, 2, True), gated=True, **one, **big)
        every = ((8, 16, 1, False), (8, 16, 1, True), (4, 16, 1, True), (8, 32, 2, False), (8, 32, 2, True))
        add("rows", warp, *every, **one, **down)
        every = ((4, 16, 1, False), (4, 16, 1, True), (8, 16, 1, True), (4, 32, 2, False), (4, 32, 2, True))
        add("rows", warp, *every, **one, **out)
        add("rows", warp, (2, 16, 1, False), (1, 16, 1, True), (1, 16, 1, False), n=32000, k=4096, **one)
        for tokens in (16, 32):
            one = {"format": name, "tokens": tokens, "bt": tokens}
            every = ((2, 32, 1, False), (2, 32, 2, False), (2, 32, 2, True), (1, 32, 2, False), (4, 32, 2, False))
            wide = ((2, 64, 2, False), (1, 64, 4, False), (2, 64, 4, False), (2, 64, 4, True))
            add("rows", warp, *every, *wide, **one, **big)
            add("rows", warp, (2, 32, 1, False), (2, 32, 2, False), (2, 64, 4, False), gated=True, **one, **big)
            add("rows", warp, (4, 32, 1, False), (4, 32, 2, False), (8, 32, 2, False), **one, **down)
            add("rows", warp, (4, 32, 1, False), (4, 32, 2, False), (8, 16, 1, False), **one, **out)
    some: dict[str, Any] = {"format": "Q4_K", "tokens": 8, "bt": 16}
    add("batch", names, (64, 4, 8, 3, 1), add=False, **some, **big)
    add("batch", names, (64, 4, 8, 3, 4), **some, **down)
    add("batch", names, (64, 4, 8, 3, 4), **some, **out)
    add("batch", names, (64, 4, 4, 3, 1), gated=True, add=False, **some, **big)
    some = {"format": "Q4_K", "tokens": 32, "bt": 32}
    deep = ((64, 4, 8, 3, 1), (128, 8, 4, 3, 2), (128, 8, 4, 4, 1), (128, 8, 8, 2, 2), (128, 4, 4, 3, 2), (64, 4, 4, 4, 2))
    add("batch", names, *deep, add=False, **some, **big)
    gates = ((64, 4, 4, 3, 1), (128, 8, 4, 4, 1), (128, 8, 4, 3, 2), (64, 4, 4, 3, 2))
    add("batch", names, *gates, gated=True, add=False, **some, **big)
    add("batch", names, (64, 4, 8, 3, 4), (128, 8, 4, 3, 4), (128, 8, 4, 3, 8), **some, **down)
    add("batch", names, (64, 4, 8, 3, 4), (128, 8, 4, 3, 4), **some, **out)
    some = {"format": "Q4_K", "tokens": 128, "bt": 128}
    wide = ((128, 8, 4, 3, 1), (128, 8, 4, 2, 1), (128, 8, 2, 4, 1), (128, 4, 4, 3, 1), (64, 4, 4, 3, 1), (256, 8, 2, 3, 1))
    add("batch", names, *wide, add=False, **some, **big)
    gates = ((128, 8, 4, 2, 1), (128, 8, 2, 2, 1), (128, 8, 2, 3, 1), (64, 4, 4, 2, 1))
    add("batch", names, *gates, gated=True, add=False, **some, **big)
    add("batch", names, (128, 8, 4, 3, 4), (128, 8, 2, 4, 4), (128, 8, 4, 3, 2), **some, **down)
    add("batch", names, (128, 8, 4, 3, 4), (128, 8, 4, 3, 2), **some, **out)
    some = {"format": "Q4_K", "tokens": 64, "bt": 64}
    add("batch", names, (128, 8, 4, 3, 1), (128, 8, 4, 3, 2), (64, 4, 4, 3, 1), add=False, **some, **big)
    add("batch", names, (128, 8, 4, 2, 1), (128, 8, 2, 3, 1), gated=True, add=False, **some, **big)
    three = {"formats": ("Q4_K", "Q4_K", "Q6_K"), "ns": (4096, 1024, 1024), "k": 4096}
    add("three", names, (64, 4, 8, 3, 4), (32, 4, 8, 3, 2), tokens=8, bt=16, **three)
    add("three", names, (128, 8, 4, 3, 4), (64, 4, 4, 3, 4), tokens=64, bt=64, **three)
    add("three", names, (64, 4, 4, 3, 4), (64, 4, 4, 3, 2), (128, 8, 4, 2, 4), (128, 8, 2, 3, 4), tokens=32, bt=32, **three)
    add(
        "three",
        names,
        (64, 4, 4, 3, 4),
        (64, 4, 4, 2, 4),
        (128, 8, 4, 2, 4),
        (128, 8, 2, 3, 4),
        tokens=128,
        bt=128,
        **three,
    )
    mixtral = {"format": "Q4_K", "experts": 8, "used": 2, "n": 14336, "k": 4096, "gated": True}
    small = {"format": "Q4_K", "experts": 64, "used": 6, "n": 512, "k": 1536, "gated": True}
    tiles4 = ((128, 128, 2, 8, 3), (128, 128, 2, 8, 4), (64, 128, 2, 4, 3), (64, 256, 2, 8, 3))
    add("experts", "bn bt nb warps stages", *tiles4, tokens=4096, decoded=True, at_once=1, **mixtral)
    add("experts", "bn bt nb warps stages", *tiles4, tokens=4096, decoded=True, at_once=64, **small)
    add(
        "experts",
        "tokens bt",
        (8, 16),
        (32, 16),
        (128, 64),
        bn=64,
        nb=8,
        warps=4,
        stages=2,
        decoded=False,
        at_once=8,
        **mixtral,
    )
    add(
        "experts",
        "tokens bt",
        (8, 16),
        (128, 16),
        (512, 64),
        bn=64,
        nb=4,
        warps=4,
        stages=3,
        decoded=False,
        at_once=64,
        **small,
    )
    return found


def checks() -> list[tuple[str, Case, str]]:
    """Cases of the contracts, against their NumPy references."""
    found: list[tuple[str, Case, str]] = []
    for type in draw.NATIVE:
        found.append(("linear", Case(LinearSpec(type, 200, 1024), {"T": 5}), "float16"))
    for type in (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q5_0, GGMLType.IQ4_XS, GGMLType.F16):
        found.append(("linear", Case(LinearSpec(type, 200, 1024, True), {"T": 130}), "float16"))
    for type, n, k in ((GGMLType.Q4_K, 4096, 14336), (GGMLType.Q6_K, 1000, 4096), (GGMLType.F16, 576, 1536)):
        for tokens in (2, 70, 129):
            found.append(("linear_add", Case(LinearAddSpec(LinearSpec(type, n, k, True), 0.5), {"T": tokens}), "float16"))
    found += [("linear", Case(LinearSpec(GGMLType.Q4_K, 300, 1024, True), {"T": t}), "bfloat16") for t in (20, 130)]
    found += [("linear", Case(LinearSpec(GGMLType.Q8_0, 3000, 1024, False, "f32"), {"T": t}), "float16") for t in (20, 130)]
    for name in ("attention", "expert_up", "expert_down"):
        found += [(name, case, "float16") for case in OPS[name].cases()]
        found += [(name, case, "bfloat16") for case in OPS[name].cases()[1:2]]
    found += [("attention", case, "float32") for case in ATTENTION.cases()[1:6:2]]
    long = {"S": 3, "Q": 1, "KV": 3000, "block_size": 32}
    found.append(("attention", Case(AttentionSpec(32, 8, 128, 0.088), long), "float16"))
    found.append(("attention", Case(AttentionSpec(32, 8, 128, 0.088, window=700, sinks=True), long), "float16"))
    wide = {"S": 2, "Q": 400, "KV": 500, "block_size": 32}
    found.append(("attention", Case(AttentionSpec(32, 8, 128, 0.088), wide), "float16"))
    found.append(("attention", Case(AttentionSpec(8, 2, 64, 0.125, window=200, sinks=True), wide), "float16"))
    for type in (GGMLType.Q4_K, GGMLType.MXFP4, GGMLType.Q6_K):
        for tokens in (100, 500):
            found.append(("expert_up", Case(ExpertUpSpec(type, 4, 2, 200, 512, "silu"), {"T": tokens}), "float16"))
        found.append(("expert_down", Case(ExpertDownSpec(type, 4, 2, 200, 512), {"T": 500}), "float16"))
    return found


OPS = {**ALL_OPS, **EXTRA_OPS}


def work(queue: Any, results: Any) -> None:
    """A process that compiles and checks."""
    torch.cuda.set_device(0)
    torch.set_num_threads(1)
    backend = create()
    while (task := queue.get()) is not None:
        kind, item = task
        began = time.perf_counter()
        try:
            if kind == "check":
                name, case, compute = item
                op = OPS[name]
                error = case_error(backend, op, case, compute)
                row = {"check": name, "case": str(case.spec), "dims": dict(case.dims), "compute": compute}
                row |= {"error": error, "limit": op.tolerance[compute], "ok": bool(error <= op.tolerance[compute])}
            else:
                go, *_ = MAKERS[item["part"]](item, True)
                go(0)
                torch.cuda.synchronize()
                row = {"compiled": item["part"]}
        except Exception as failure:
            row = {"failed": str(item)[:300], "raised": f"{type(failure).__name__}: {failure}"[:1500]}
        results.put(row | {"seconds": round(time.perf_counter() - began, 2)})


def timed(go: Go, count: int) -> float:
    """Seconds of one turn: a graph of all of them, the median of 7."""
    for i in range(count):
        go(i)
    torch.cuda.synchronize()
    repeat = 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for i in range(count):
                go(i)
    graph.replay()
    found = []
    for _ in range(7):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b) * 1e-3 / (repeat * count))
    return statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", default="batch.jsonl")
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--parts", default="check,decode,library,batch,rows,three,attend,experts")
    parser.add_argument("--once", default="", help="launch these variants (their numbers) once each, for a profiler")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    args = parser.parse_args()
    began = time.perf_counter()
    parts = args.parts.split(",")
    todo = [v for v in variants() if v["part"] in parts]
    if args.once:
        for variant in (todo[int(i)] for i in args.once.split(",")):
            print(variant, flush=True)
            MAKERS[variant["part"]](variant, True)[0](0)
        torch.cuda.synchronize()
        return 0
    file = Path(args.out).open("w", encoding="utf-8")  # noqa: SIM115 (held until the end)

    def note(row: dict[str, Any]) -> None:
        file.write(json.dumps(row) + "\n")
        file.flush()

    context = multiprocessing.get_context("fork")  # before this process touches the device
    queue, results = context.Queue(), context.Queue()
    tasks = [("compile", v) for v in todo if v["part"] != "library"]
    tasks = [*tasks, *(("check", c) for c in checks())] if "check" in parts else tasks
    for task in tasks:
        queue.put(task)
    for _ in range(args.jobs):
        queue.put(None)
    workers = [context.Process(target=work, args=(queue, results)) for _ in range(args.jobs)]
    for worker in workers:
        worker.start()
    done, bad = 0, 0
    warm = began + args.seconds * 0.75
    while done < len(tasks) and time.perf_counter() < warm:
        try:
            row = results.get(timeout=0.5)
        except Exception:  # the queue's Empty: nothing came yet
            continue
        done += 1
        if "compiled" not in row:
            note(row)
        bad += row.get("ok") is False or "raised" in row
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()
    torch.cuda.set_device(0)
    note({"prepared": done, "of": len(tasks), "bad": bad, "at": round(time.perf_counter() - began, 1)})
    source = torch.empty(1 << 29, dtype=torch.uint8, device=device()).random_()
    target = torch.empty_like(source)
    copy = timed(lambda i: target.copy_(source), 1)
    note({"device": torch.cuda.get_device_name(), "triton": triton.__version__, "copy_gb_s": round((1 << 30) / copy / 1e9)})
    for variant in todo:
        if time.perf_counter() - began > args.seconds:
            break
        try:
            go, count, error, units = MAKERS[variant["part"]](variant, False)
            go(0) if count == 1 else [go(i) for i in range(count)]
            torch.cuda.synchronize()
            row = {"error": error(), "us": timed(go, count) * 1e6}
            row |= {f"{unit}_s": round(amount / (row["us"] * 1e-6), 1) for unit, amount in units.items()}
        except Exception as failure:
            row = {"raised": f"{type(failure).__name__}: {failure}"[:600]}
        note(variant | row)
    note({"ended": round(time.perf_counter() - began, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
