"""What a step of an encoder costs on one GPU, by its number of tokens: the host's time and the device's.

    python -m bench.steps.encoder_steps MODEL.gguf [--tokens 1024,4096,..] [--products]

Texts of 16 to 128 tokens, packed. `share`: the products of the matrices and of attention, at the rate of a product of 8192
by 8192 in the same run. `--products` times the library's products of the model's shapes. The last line is JSON. The time of
each kernel: `python -m quarrel.bench --phases`.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shared import command_line
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.backend import create

LONGEST, SIZE = 128, 32
ROUNDS = 8


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", default="1024,4096,16384,32768")
    parser.add_argument("--compute", default="float16")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="full steps (the largest of --tokens) as captured graphs")
    args = parser.parse_args()
    sizes = [int(n) for n in args.tokens.split(",")]
    peak = rate(8192, 8192, 8192)
    found: dict[str, Any] = {"peak_tflop_s": round(peak / 1e12), "steps": []}
    with GGUFFile.open([args.model]) as file:
        spec, tensors = read_spec(file, LONGEST), Tensors(file)
        program = assemble(spec, tensors)
        per_token = 2 * sum(
            t.dims[0] * t.dims[1] for n, t in file.tensors.items() if n.startswith("blk.") and len(t.dims) > 1
        )
        seqs = max(sizes) // 16
        blocks = LONGEST // SIZE
        limits = Limits(max(sizes), seqs, blocks, seqs * blocks, SIZE)
        step: Any = create(args.graphs).compile(program, tensors, limits, args.compute)
        want = "mean" if "mean" in program.outputs else "hidden"
        for tokens in sorted(set(sizes)):
            inputs = packed(tokens)
            lengths = np.diff(inputs.query_start).astype(np.int64)
            work = per_token * tokens + 4 * spec.n_layers * spec.n_embd * int((lengths**2).sum())  # type: ignore[union-attr]
            row = {"tokens": tokens, "texts": len(lengths), **timed(step, inputs, want)}
            row["tflop_s"] = round(work / row["step_ms"] / 1e9, 1)
            row["share"] = round(work / row["step_ms"] * 1e3 / peak, 3)
            row["tokens_s"] = round(tokens / row["step_ms"] * 1e3)
            found["steps"].append(row)
            print(row, flush=True)
        if args.products:
            found["products"] = products(max(sizes), spec.n_embd, spec.ffn.width, peak)  # type: ignore[union-attr]
        step.close()
    print(json.dumps(found))


def packed(tokens: int) -> StepInputs:
    """Texts of 16 to 128 tokens, the longest first, exactly so many tokens in all."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens - LONGEST:
        lengths.append(int(rng.integers(16, LONGEST + 1)))
    lengths.append(tokens - sum(lengths))
    new = np.array(sorted(lengths, reverse=True), np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    positions = np.arange(tokens, dtype=np.int32) - np.repeat(starts[:-1], new).astype(np.int32)
    ids = rng.integers(1000, 20000, tokens).astype(np.int32)
    table = np.zeros((len(new), LONGEST // SIZE), np.int32)
    return StepInputs(ids, positions, np.zeros(tokens, np.int32), starts, new, table, starts[:-1].copy())


def timed(step: Any, inputs: StepInputs, want: str) -> dict[str, Any]:
    """Milliseconds a step when several follow each other, of the host alone, and of one that is waited for."""
    rows = len(inputs.out_rows)
    for _ in range(3):
        step.launch(inputs, want).result()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        step._start(inputs, want, rows)
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    waited = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        step.launch(inputs, want).result()
        waited.append(time.perf_counter() - start)
    return {
        "step_ms": round(whole / ROUNDS * 1e3, 3),
        "host_ms": round(host / ROUNDS * 1e3, 3),
        "waited_ms": round(statistics.median(waited) * 1e3, 3),
    }


def products(tokens: int, width: int, hidden: int, peak: float) -> list[dict[str, Any]]:
    """The library's products of a layer, alone and merged, out in float16 or float32."""
    rows = []
    shapes = {"q": (width, width), "qkv": (3 * width, width), "up": (hidden, width), "gate up": (2 * hidden, width)}
    for name, (n, k) in {**shapes, "down": (width, hidden)}.items():
        for wide in (False, True):
            share = rate(tokens, n, k, wide) / peak
            rows.append({"product": name, "n": n, "k": k, "float32_out": wide, "share": round(share, 3)})
            print(f"  {name:8} {n:5} x {k:5} {'float32' if wide else 'float16'} out: {share:.3f} of the peak", flush=True)
    return rows


def rate(m: int, n: int, k: int, wide: bool = False) -> float:
    """FLOP/s of one product, many of them in a row."""
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(n, k, device="cuda", dtype=torch.float16).T
    out = torch.empty(m, n, device="cuda", dtype=torch.float32 if wide else torch.float16)
    count = min(60, max(4, int(2e13 / (2 * m * n * k))))

    def go() -> None:
        if wide:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out=out)

    go()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        go()
    torch.cuda.synchronize()
    return 2 * m * n * k * count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
