"""Seconds and weight bytes a second of the linear kernels on a CUDA device, beside a plain copy; the last line is JSON.

python bench/triton_linear.py [--formats Q4_K,Q8_0,F16] [--tokens 1,4,16,64,512]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import triton
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.linear import LINEAR, LinearSpec
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend.backend import REGISTRY, create
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime import Live, Slot, Work
from quarrel.triton_backend.weights import Weights

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
COPIES = 8  # distinct weights in turn, so that no run finds its weight in the cache


class _Random:
    def raw(self, ref: WeightRef) -> object:
        return draw.weight(np.random.default_rng(len(ref.name)), ref.type, ref.rows, ref.k)


def plans(type: GGMLType, n: int, k: int, tokens: int, device: torch.device) -> list[Plan]:
    """The same map over different weights."""
    x = Value(0, "act", ("T", k), "x")
    made = []
    for i in range(COPIES):
        y = Value(1, "act", ("T", n), "y")
        node = Node(LINEAR, LinearSpec(type, n, k), (x, WeightRef("w" * (i + 1), type, n, k)), (y,), "linear")
        inputs = {0: Slot(torch.randn(tokens * k, device=device, dtype=torch.float16))}
        none = Slot(torch.zeros(1, dtype=torch.int32, device=device))
        weights = Weights(_Random(), device, "float16")  # type: ignore[arg-type]
        rows = {"T": tokens, "S": 1, "R": 1, "items": 1}
        choices = lower(Program((node,), {"x": x}, {}, ()), REGISTRY)
        made.append(Plan(choices, inputs, {1}, rows, weights, [], [], Work(none, none), "float16", device))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--formats", default="Q4_K,Q6_K,Q8_0,F16")
    parser.add_argument("--tokens", default="1,16,64,512")
    args = parser.parse_args()
    device = torch.device("cuda")
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)
    rows = []
    for name in args.formats.split(","):
        for n, k in SHAPES:
            for tokens in map(int, args.tokens.split(",")):
                turn = plans(GGMLType[name], n, k, tokens, device)
                live = Live(tokens, 1, tokens, tokens == 1, tokens > 1, 1)

                def once(turn: list[Plan] = turn, live: Live = live) -> None:
                    for plan in turn:
                        plan.launches[0](live)

                once()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    once()
                seconds = do_bench(graph.replay, return_mode="median") * 1e-3 / COPIES
                nbytes = turn[0].weights.nbytes()
                rows.append(
                    {"format": name, "n": n, "k": k, "tokens": tokens, "us": round(seconds * 1e6, 2),
                     "gb_s": round(nbytes / seconds / 1e9, 1), "of_copy": round(nbytes / seconds / copy, 3),
                     "tflop_s": round(2 * n * k * tokens / seconds / 1e12, 1)}
                )  # fmt: skip
                print(rows[-1], flush=True)
    print(
        json.dumps(
            {"device": create().device(), "triton": triton.__version__, "copy_gb_s": round(copy / 1e9), "rows": rows}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
