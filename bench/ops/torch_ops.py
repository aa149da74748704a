"""The custom operators `torch.ops.quarrel` on a GPU: errors, times, and calls that follow kernels that write their inputs.

python -m bench.ops.torch_ops --out RESULTS.jsonl [--part ops ordered]
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bench.shared import Notes, command_line, graph_us
from quarrel.gguf import GGMLType
from quarrel.interop import torch_ops
from quarrel.ops import draw
from quarrel.ops.contract import rel_error
from quarrel.ops.linear import LinearSpec, linear_reference

OPS = torch.ops.quarrel


def ops(say: Callable[..., None]) -> None:
    rng = np.random.default_rng(1)
    errors = {}
    for name in torch_ops.FORMATS_TAKEN:
        weight = draw.weight(rng, GGMLType[name], 96, 512)
        held = OPS.pack(torch.from_numpy(np.array(weight.raw)).cuda(), name, 512)
        for rows in (1, 5, 200):
            x = draw.activations(rng, rows, 512)
            (want,) = linear_reference(LinearSpec(weight.type, 96, 512), x, weight)
            got = OPS.linear(torch.from_numpy(x).half().cuda(), held, name, 96)
            errors[f"{name} x{rows}"] = float(rel_error(got.float().cpu().numpy(), want))
    worst = max(errors, key=errors.__getitem__)
    say(what="linear in every format, float16", worst=worst, error=errors[worst], ok=errors[worst] < 4e-3)
    n, k = 14336, 4096
    raw = draw.weight(rng, GGMLType.Q4_K, 512, k)
    held = OPS.pack(torch.from_numpy(np.array(raw.raw)).cuda().repeat(n // 512, 1), "Q4_K", k)
    gain = torch.ones(k, device="cuda")

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.silu(OPS.linear(OPS.rms_norm(x, gain, 1e-5), held, "Q4_K", n)) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    for rows in (1, 16, 2048):
        x = torch.randn(rows, k, device="cuda", dtype=torch.float16)
        same = float((compiled(x) - block(x)).abs().max())
        eager = time.perf_counter()
        for _ in range(50):
            OPS.linear(x, held, "Q4_K", n)
        host = (time.perf_counter() - eager) / 50 * 1e6
        torch.cuda.synchronize()
        graph = graph_us(lambda x=x: OPS.linear(x, held, "Q4_K", n))
        whole = torch.randn(n, k, device="cuda", dtype=torch.float16)
        say(
            what="torch.compile, and a linear map of 14336 x 4096 in a graph",
            rows=rows,
            apart=same,
            q4_k_us=graph,
            float16_us=graph_us(lambda x=x, w=whole: F.linear(x, w)),
            eager_host_us=round(host, 1),
        )


def ordered(say: Callable[..., None]) -> None:
    """Calls whose tables and weights the kernel just ahead of them writes, back to back in a graph, against one by one."""
    seqs, heads, kv, dim, size, blocks, n, turns = 24, 32, 8, 128, 32, 64, 4096, 50
    half = {"device": "cuda", "dtype": torch.float16}
    q, x = torch.randn(seqs, heads, dim, **half), torch.randn(1, 1024, **half)
    caches = [torch.randn(seqs * blocks, kv, size, dim, **half) for _ in range(2)]
    # Of two widths, and of a type that is converted in the call.
    tables = [torch.randperm(seqs * blocks, device="cuda")[: seqs * w].view(seqs, w) for w in (blocks, blocks // 2)]
    length = torch.full((seqs,), blocks // 2 * size, device="cuda", dtype=torch.int32)
    weights = [torch.randn(n, 1024, **half).view(torch.uint8).flatten() for _ in range(2)]
    weight = weights[0].clone()

    def call(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen = OPS.attention_decode(q, *caches, tables[turn], length, dim**-0.5)
        weight.copy_(weights[turn])
        return seen, OPS.linear(x, weight, "F16", n)

    want = []
    for turn in (0, 1, 0, 1):
        torch.cuda.synchronize()
        want.append(call(turn))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(turn % 2) for turn in range(turns)]
    wrong = 0
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        pairs = [pair for i, got in enumerate(found) for pair in zip(got, want[2 + i % 2], strict=True)]
        wrong += sum(not torch.equal(*pair) for pair in pairs)
    say(what="calls behind the kernels that write their tables and weights", of=20 * 2 * turns, wrong=wrong, ok=wrong == 0)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", choices=["ops", "ordered"], default=["ops", "ordered"])
    args = parser.parse_args()
    failed, say = 0, Notes(args.out).say
    for part in args.part:
        try:
            {"ops": ops, "ordered": ordered}[part](say)
        except Exception:
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
