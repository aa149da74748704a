"""On a GPU: all experts of a layer for the tokens of a prompt, by kernel; checked against float32 before they are timed.

python -m bench.ops.grouped_prompt --out RESULTS.jsonl [--models gpt-oss,mixtral,...] [--tokens 512,1024,2048,4096]

Weights and rows are drawn on the spot; the experts of a token follow a router with favourites. "kept" multiplies with
stacks that are decoded already, "decoded" decodes them each time, "ring" and "grouped" decode tiles. Microseconds,
TFLOP/s (two for each value of an expert that a token has chosen) and errors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from bench.shared import graph_us
from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Compute
from quarrel.triton_backend.experts import decoded, grouped, ring
from quarrel.triton_backend.experts.experts import group_launch, mix_pairs
from quarrel.triton_backend.experts.maps import ExpertMaps, Product
from quarrel.triton_backend.formats.pack import blank, put
from quarrel.triton_backend.linear.dequant_matmul import decoder
from quarrel.triton_backend.runtime.arrays import Decoded, Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, Launcher, cdiv, launch

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
RIGHT = 2e-3
"""Of the norm of what is wanted: x is rounded to float16, and so are decoded weights."""


@dataclass(frozen=True)
class Model:
    """The experts of a layer: k columns, n rows of gate and up."""

    experts: int
    used: int
    k: int
    n: int
    kind: str
    format: GGMLType
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"


MODELS = {
    "gpt-oss": Model(32, 4, 2880, 2880, "oai", GGMLType.MXFP4, bias=True),
    "mixtral": Model(8, 2, 4096, 14336, "silu", GGMLType.Q4_K),
    "nemotron": Model(128, 6, 2688, 1856, "relu2", GGMLType.Q5_0),
    "h-tiny": Model(64, 6, 1536, 512, "silu", GGMLType.Q4_K),
    "qwen3-30b": Model(128, 8, 2048, 768, "silu", GGMLType.Q4_K),
}


class Site:
    """What the kernels of experts ask of a plan."""

    compute: Compute = "float16"
    deterministic = float8 = False
    generation = 0 if INTERPRETED else 9
    launch: Launcher = staticmethod(launch)

    def __init__(self, tokens: int, keeps: bool = False) -> None:
        self._tokens, self._keeps = tokens, keeps

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return Slot(torch.empty(width * (self._tokens if dim == "T" else 1), dtype=dtype, device=DEVICE))

    def decoded(self, weights: Sequence[Packed]) -> Decoded | None:
        return Decoded(weights, sum(w.n * w.k for w in weights), torch.float16) if self._keeps else None


class Case:
    """Pairs of a token and an expert, and one product's operands on the device."""

    def __init__(self, m: Model, tokens: int, which: str, stacks: Sequence[Packed]) -> None:
        up = which == "up"
        self.m, self.tokens, self.pairs, self.per_token = m, tokens, tokens * m.used, m.used if up else 1
        rng = np.random.default_rng(tokens)
        logits = rng.standard_normal((tokens, m.experts)) + 0.7 * rng.standard_normal(m.experts)
        ids = np.argsort(-logits, axis=1)[:, : m.used].astype(np.int32).reshape(-1)
        self.ids = torch.from_numpy(np.ascontiguousarray(ids)).to(DEVICE)
        self.order = torch.empty(self.pairs, dtype=torch.int32, device=DEVICE)
        self.starts = torch.empty(m.experts + 1, dtype=torch.int32, device=DEVICE)
        n = stacks[0].n // m.experts
        biases = [torch.randn(m.experts, n, device=DEVICE) for _ in stacks] if m.bias else []
        self.maps = ExpertMaps(stacks, biases, m.experts, m.used, m.kind if up else "none")
        self.x = torch.randn(tokens if up else self.pairs, stacks[0].k, device=DEVICE).half()
        self.y = torch.empty(self.pairs, n, dtype=torch.float16 if up else torch.float32, device=DEVICE)
        self.group()

    def group(self) -> None:
        group_launch(launch, self.order, self.starts, self.ids, self.pairs, self.m.experts)

    def run(self, product: Product) -> Callable[[], None]:
        slots = Slot(self.y), Slot(self.x), Slot(self.order), Slot(self.starts)
        return lambda: product(*slots, self.pairs, self.per_token, None)

    def error(self) -> float:
        """Of y, against sums in float32 with the exact weights."""
        maps, k = self.maps, self.maps.k
        starts, order, difference, whole = self.starts.tolist(), self.order.long(), 0.0, 0.0
        exact = type("Exact", (Site,), {"compute": "float32"})(1)
        for e in range(maps.n_experts):
            mine = order[starts[e] : starts[e + 1]]
            sums = []
            for i, stack in enumerate(maps.stacks):
                w = torch.empty(maps.n * k, device=DEVICE)
                decoder(exact, stack)(e * maps.n, (e + 1) * maps.n, w)  # type: ignore[arg-type]
                s = self.x[mine // self.per_token].float() @ w.view(maps.n, k).T
                sums.append(s + maps.biases[i][e] if maps.biases else s)
            if maps.activation == "oai":
                gate, up = sums[0].clamp(max=7.0), sums[1].clamp(-7.0, 7.0) + 1.0
                want = gate * torch.sigmoid(1.702 * gate) * up
            elif maps.activation == "silu":
                want = torch.nn.functional.silu(sums[0]) * sums[1]
            else:
                want = sums[0].clamp(min=0).square() if maps.activation == "relu2" else sums[0]
            difference += float((self.y[mine].float() - want).square().sum())
            whole += float(want.square().sum())
        return (difference / whole) ** 0.5


def ways(case: Case, names: Sequence[str]) -> dict[str, Product]:
    """Kernels by name, for any number of pairs."""
    ring.MOST_PAIRS = case.pairs
    ring.DECODE_FROM = grouped.DECODE_FROM = 1 << 30
    made: dict[str, Product] = {}
    for name in names:
        site: Any = Site(case.tokens, name == "kept")
        module = {"kept": decoded, "decoded": decoded, "ring": ring, "grouped": grouped}[name]
        if module.declines(site, case.maps) is None:
            made[name] = module.build(site, case.maps).run
    return made


def packed(m: Model, which: str) -> list[Packed]:
    """Stacks of drawn blocks, the same 256 rows again and again."""
    n, k = (m.n, m.k) if which == "up" else (m.k, m.n)
    stacks = []
    for i in range(2 if which == "up" and m.gated else 1):
        made = blank(m.format, m.experts * n, k, DEVICE)
        drawn = np.ascontiguousarray(draw.weight(np.random.default_rng(i), m.format, 256, k, k**-0.5).raw)
        raw = torch.from_numpy(drawn).reshape(256, -1)
        for first in range(0, made.n, 256):
            put(made, m.format, first, raw[: min(256, made.n - first)].contiguous())
        stacks.append(made)
    return stacks


def compile_one(name: str, which: str, kernel: str) -> None:
    """Compiles kernels into Triton's cache, with few experts and tokens."""
    m = MODELS[name]
    few = replace(m, experts=8)
    case = Case(few, 64, which, packed(few, which))
    for run in ways(case, [kernel]).values():
        case.run(run)()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="512,1024,2048,4096")
    parser.add_argument("--kernels", default="kept,decoded,ring,grouped")
    parser.add_argument("--seconds", type=float, default=80)
    args = parser.parse_args()
    began = time.monotonic()
    models, kernels, lines = args.models.split(","), args.kernels.split(","), []

    def say(**line: Any) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        if args.out:
            args.out.write_text("".join(json.dumps(x) + "\n" for x in lines))

    if not INTERPRETED:
        with ProcessPoolExecutor(min(14, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            jobs = [
                pool.submit(compile_one, n, w, k) for n in models for w in ("up", "down") for k in kernels if k != "kept"
            ]
            for job in jobs:
                if (error := job.exception()) is not None:
                    say(failed=str(error)[:300])
    say(triton=triton.__version__, torch=torch.__version__, compiled_s=round(time.monotonic() - began, 1))
    for name in models:
        m = MODELS[name]
        for which in ("up", "down"):
            stacks = packed(m, which)
            for tokens in map(int, args.tokens.split(",")):
                if time.monotonic() - began > args.seconds:
                    say(left_out=[name, which, tokens])
                    continue
                say(model=name, product=which, tokens=tokens, **measured(Case(m, tokens, which, stacks), kernels))
            del stacks
    say(seconds=round(time.monotonic() - began, 1))


def measured(case: Case, kernels: Sequence[str]) -> dict[str, Any]:
    """Microseconds, TFLOP/s and error by kernel; of what is beside the products, microseconds."""
    flops = 2.0 * case.pairs * len(case.maps.stacks) * case.maps.n * case.maps.k
    line: dict[str, Any] = {}
    for name, product in ways(case, kernels).items():
        try:
            run = case.run(product)
            case.y.fill_(float("nan"))
            run()
            line[name] = [None, None, round(error := case.error(), 6)]
            if not error < RIGHT:
                line[name] = f"wrong: {error:.2e}"
            elif not INTERPRETED:
                us = graph_us(run, 3, 3)
                line[name] = [us, round(flops / us / 1e6), round(error, 6)]
        except Exception as error:
            line[name] = f"{type(error).__name__}: {str(error)[:200]}"
            if "CUDA error" in str(error):
                print(json.dumps(line))
                sys.exit("a kernel failed")
    if not INTERPRETED:
        line["group_us"] = graph_us(case.group, 5, 3)
        if case.maps.activation == "none":
            out = torch.empty(case.tokens, case.maps.n, device=DEVICE)
            shares = torch.rand(case.tokens, case.m.used, device=DEVICE)
            mix = partial(
                launch, mix_pairs, (case.tokens, cdiv(case.maps.n, 512)), out, case.y, shares, out, 1.0, out, case.maps.n,
                ADD=False, RATED=False, PDL=False,
            )  # fmt: skip
            line["mix_us"] = graph_us(lambda: mix(USED=case.m.used, C=512), 5, 3)
    return line


if __name__ == "__main__":
    main()
