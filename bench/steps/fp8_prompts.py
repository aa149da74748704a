"""On a GPU: prompts of a quantised model with `compute="fp8"` beside float16: errors, products, speeds, kernels.

python -m bench.steps.fp8_prompts --out RESULTS.jsonl [--model mistral-7b:Q4_K_M] [--part right ops prompts kernels]

right: logits of a model's first layers against float32 (relative error, KL in nats a token). ops: products of the model's
dense shapes by our kernel in each of its tiles and by the library, checked first, in CUDA graphs over weights that rotate.
prompts: both sides in turns, the median of five. kernels: microseconds of each kernel of one step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.shared import FOLDER, Notes, command_line, graph_us, synthetic
from quarrel.bench.measure import run as run_steps
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.llm.memory import decoded_room
from quarrel.ops.contract import rel_error
from quarrel.ops.registry import backend
from quarrel.ops.step import ComputeChoice
from quarrel.triton_backend.linear.e4m3 import NARROW, WIDE, Tile
from quarrel.triton_backend.linear.e4m3_kernels import e4m3_products
from quarrel.triton_backend.runtime.launch import cdiv, launch

Say = Callable[..., None]
SHAPES = {"q, k and v": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
"""Rows and columns of a layer of Mistral-7B."""
LONG, ROWS = 4096, 64
SIDES: tuple[ComputeChoice, ...] = ("float16", "fp8")


class Product:
    """Random rows in E4M3, in our kernel's tiles and as the library takes them; `copies` of the weight in turn."""

    def __init__(self, name: str, tokens: int, copies: int) -> None:
        self.n, self.k = SHAPES[name]
        self.tokens, self.gated, self.adds = tokens, name == "gate and up", name in ("o", "down")
        draw = torch.Generator("cuda").manual_seed(tokens)

        def codes(rows: int) -> torch.Tensor:
            return (
                torch.randn(rows, self.k, device="cuda", generator=draw).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            )

        def scale(rows: int) -> torch.Tensor:
            return torch.rand(rows, device="cuda", generator=draw) * 1e-4 + 1e-4

        self.x, self.sx = codes(tokens), scale(tokens)
        self.w, self.sw = [codes(self.n) for _ in range(copies)], scale(self.n)
        width = self.n // 2 if self.gated else self.n
        self.residual = torch.randn(tokens, width, device="cuda", generator=draw) if self.adds else None
        self.y = torch.empty(tokens, width, device="cuda", dtype=torch.float32 if self.adds else torch.float16)

    def own(self, tile: Tile, w: torch.Tensor) -> None:
        x = TensorDescriptor.from_tensor(self.x, [tile.tokens, tile.columns])
        rows = TensorDescriptor.from_tensor(w, [tile.rows, tile.columns])
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        launch(
            e4m3_products, (programs,), self.y, self.y, self.y, x, rows, self.sx, self.sw, self.y,
            self.y if self.residual is None else self.residual, self.tokens, self.n, self.n, self.n,
            cdiv(self.k, tile.columns), 1.0, GATED=self.gated, KIND="silu" if self.gated else "none", BIAS=False,
            ADD=self.adds, MAPS=1, BT=tile.tokens, BN=tile.rows, BK=tile.columns, early=True, warps=tile.warps,
            stages=tile.stages,
        )  # fmt: skip

    def library(self, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y: torch.Tensor = torch._scaled_mm(
            self.x, w.t(), scale_a=self.sx[:, None], scale_b=self.sw[None, :], out_dtype=dtype, use_fast_accum=True
        )
        return y

    def error(self) -> float:
        """Of what our kernel left, against sums in float32."""
        want = (self.x.float() * self.sx[:, None]) @ (self.w[0].float() * self.sw[:, None]).T
        if self.gated:
            want = torch.nn.functional.silu(want[:, ::2]) * want[:, 1::2]
        want = want if self.residual is None else want + self.residual
        return float((self.y.float() - want).norm() / want.norm())

    def rotating(self, call: Callable[[torch.Tensor], Any]) -> float:
        def all() -> None:
            for w in self.w:
                call(w)

        return graph_us(all, calls=max(1, 12 // len(self.w)), rounds=3) / len(self.w)


def ops(say: Say) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    tiles = [WIDE, replace(WIDE, stages=3), NARROW, replace(NARROW, warps=4)]
    for tokens in (512, 4096):
        for name in SHAPES:
            p = Product(name, tokens, 4)
            flops = 2 * tokens * p.n * p.k
            found: dict[str, Any] = {}
            for tile in tiles:
                key = f"{tile.tokens}x{tile.rows}x{tile.columns} {tile.warps}w {tile.stages}s"
                try:
                    p.own(tile, p.w[0])
                    wrong = p.error()
                    us = p.rotating(lambda w, t=tile, p=p: p.own(t, w))  # type: ignore[misc]
                    found[key] = {"us": round(us, 1), "tflops": round(flops / us / 1e6), "error": wrong}
                except Exception as error:
                    found[key] = f"{type(error).__name__}: {str(error)[:90]}"
            for dtype in (torch.float16, torch.bfloat16):
                try:
                    us = p.rotating(lambda w, d=dtype, p=p: p.library(w, d))  # type: ignore[misc]
                    found[f"library {dtype}"] = {"us": round(us, 1), "tflops": round(flops / us / 1e6)}
                except Exception as error:
                    found[f"library {dtype}"] = f"{type(error).__name__}: {str(error)[:90]}"
            say(what="a product in E4M3", map=name, tokens=tokens, found=found)


@contextmanager
def subjects(path: Path, tests: list[Test], sides: tuple[ComputeChoice, ...]) -> Iterator[dict[str, Subject]]:
    """A model on each side; all matrices are kept decoded."""
    with GGUFFile.open(path) as file:
        source = Source.of(file, max(t.length for t in tests))
        limits = limits_for(tests, LONG, False)
        limits = replace(limits, decoded_bytes=decoded_room(source.program, 1 << 40))
        made = {side: Subject(source, backend("triton"), limits, side) for side in sides}
        yield made
        for subject in made.values():
            subject.close()


def right(say: Say, path: Path) -> None:
    tests = [Test("prefill", LONG)]
    with subjects(path, tests, ("float32", *SIDES)) as made:
        found = {}
        for side, subject in made.items():
            *before, last = subject.layout.prefill(0, LONG)
            run_steps(subject, before)
            inputs = replace(last, out_rows=np.arange(len(last.ids), dtype=np.int32)[-ROWS:], sample=None)
            found[side] = np.array(subject.step(inputs, "logits").logits)
        exact = torch.from_numpy(found["float32"]).double().log_softmax(-1)
        for side in SIDES:
            mine = torch.from_numpy(found[side]).double().log_softmax(-1)
            kl = float((exact.exp() * (exact - mine)).sum(-1).mean())
            error = rel_error(found[side], found["float32"])
            same = float((mine.argmax(-1) == exact.argmax(-1)).double().mean())
            say(what="logits against float32", model=path.stem, compute=side, error=error, kl=kl, same_top=same)


def prompts(say: Say, path: Path, sides: tuple[ComputeChoice, ...], kernels: bool) -> None:
    tests = [Test("prefill", n) for n in (LONG, 512)]
    with subjects(path, tests, sides) as made:
        for side, subject in made.items():
            taken = {c.implementation for c in subject.step.explain()}
            memory = subject.step.memory()
            say(what="taken", model=path.stem, compute=side, kernels=sorted(taken), decoded_gib=memory.decoded / 2**30)
        for test in tests:
            seconds: dict[str, list[float]] = {side: [] for side in made}
            for _ in range(3):
                for subject in made.values():
                    run_steps(subject, subject.layout.prefill(0, test.tokens))
            for _ in range(5):
                for side, subject in made.items():
                    began = time.perf_counter()
                    run_steps(subject, subject.layout.prefill(0, test.tokens))
                    seconds[side].append(time.perf_counter() - began)
            speeds = {side: round(test.tokens / median(all), 1) for side, all in seconds.items()}
            ms = {side: [round(s * 1e3, 3) for s in all] for side, all in seconds.items()}
            say(what="a prompt", model=path.stem, test=test.name, tokens_per_second=speeds, ms=ms)
        for test in tests if kernels else []:
            for side, subject in made.items():
                say(what="kernels", model=path.stem, test=test.name, compute=side, us=profiled(subject, test))


def profiled(subject: Subject, test: Test) -> list[tuple[str, int, float]]:
    """Each kernel of a prompt: its name, launches, and microseconds in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run_steps(subject, subject.layout.prefill(0, test.tokens))
        torch.cuda.synchronize()
    found = [(e.key[:60], e.count, round(e.device_time_total, 1)) for e in prof.key_averages()]
    return sorted(found, key=lambda each: -each[2])[:16]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="mistral-7b:Q4_K_M", help="of tools/synthetic_shapes.toml, or a file")
    parser.add_argument("--part", nargs="*", default=["right", "ops", "prompts", "kernels"])
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES, help="of prompts, where both do not fit")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    say = Notes(args.out).say
    if "right" in args.part:
        right(say, synthetic(args.model, args.folder, 2))
    if "ops" in args.part:
        ops(say)
    if {"prompts", "kernels"} & set(args.part):
        prompts(say, synthetic(args.model, args.folder), tuple(args.sides), "kernels" in args.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
