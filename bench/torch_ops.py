"""On a GPU: the custom operators as PyTorch uses them; products in E4M3 and PyTorch's attention, held against our own.

python bench/torch_ops.py --out RESULTS.jsonl [--part ops|ordered|float8|attention ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quarrel.gguf import GGMLType, GGUFFile  # noqa: E402
from quarrel.interop import torch_ops  # noqa: E402
from quarrel.models import Tensors, assemble, read_spec  # noqa: E402
from quarrel.ops import draw  # noqa: E402
from quarrel.ops.contract import rel_error  # noqa: E402
from quarrel.ops.linear import LinearSpec, linear_reference  # noqa: E402
from quarrel.ops.registry import backend  # noqa: E402
from quarrel.ops.step import Limits, StepInputs  # noqa: E402
from quarrel.triton_backend import float8  # noqa: E402
from quarrel.triton_backend.runtime import launch  # noqa: E402

OPS = torch.ops.quarrel


def seconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """Microseconds of a call within a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            run()
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) * 1000 / rounds / 3, 2)


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
        graph = seconds(lambda x=x: OPS.linear(x, held, "Q4_K", n))
        whole = torch.randn(n, k, device="cuda", dtype=torch.float16)
        say(
            what="torch.compile, and a linear map of 14336 x 4096 in a graph",
            rows=rows,
            apart=same,
            q4_k_us=graph,
            float16_us=seconds(lambda x=x, w=whole: F.linear(x, w)),
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


def fp8(say: Callable[..., None]) -> None:
    rng = torch.Generator("cuda").manual_seed(1)
    for n, k in ((14336, 4096), (4096, 14336), (6144, 4096), (4096, 4096)):
        w = torch.randn(n, k, device="cuda", dtype=torch.float16, generator=rng)
        for rows in (256, 2048, 4096):
            x = torch.randn(rows, k, device="cuda", dtype=torch.float16, generator=rng)
            w8, x8 = float8.rounded(w, launch), float8.rounded(x, launch)
            want = x.float() @ w.float().t()
            got = float8.product(x8, w8).float()
            say(
                what="E4M3 product",
                n=n,
                k=k,
                rows=rows,
                error=float((got - want).norm() / want.norm()),
                float16_us=seconds(lambda x=x, w=w: torch.mm(x, w.t())),
                product_us=seconds(lambda a=x8, b=w8: float8.product(a, b)),
                round_x_us=seconds(lambda x=x: float8.rounded(x, launch)),
                round_w_us=seconds(lambda w=w: float8.rounded(w, launch)),
            )


def quality(say: Callable[..., None], cases: Path) -> None:
    """What E4M3 does to reference models: logits of 64 tokens, each a row, against the truth."""
    for name, variant in (("llama32", "f16"), ("nemotron", "q8_0"), ("qwen3", "q8_0"), ("zoo", "q8_0")):
        path = cases / name / f"model-{variant}.gguf"
        if not path.exists():
            continue
        ids = np.load(path.parent / "tokens.npy").reshape(-1).astype(np.int32)
        # More rows than the exact kernels take: the text several times over, each in blocks of its own.
        copies = 8
        limits = Limits(len(ids) * copies, copies, 8, 8 * copies, 16)
        found = {}
        with GGUFFile.open(path) as file:
            for compute in ("float16", "fp8"):
                tensors = Tensors(file)
                step = backend("triton").compile(assemble(read_spec(file), tensors), tensors, limits, compute)  # type: ignore[arg-type]
                n = len(ids)
                each = np.arange(n, dtype=np.int32)
                table = np.arange(8 * copies, dtype=np.int32).reshape(copies, 8)
                inputs = StepInputs(
                    ids=np.tile(ids, copies),
                    positions=np.tile(each, copies),
                    slots=np.concatenate([each + s * 8 * 16 for s in range(copies)]).astype(np.int32),
                    query_start=np.arange(copies + 1, dtype=np.int32) * n,
                    kv_len=np.full(copies, n, np.int32),
                    block_table=table,
                    out_rows=each,
                    state_slots=np.arange(copies, dtype=np.int32),
                )
                found[compute] = torch.from_numpy(step(inputs, "logits").logits).double()
                step.close()
        exact = path.parent / f"logits_{variant}_deq.npy"
        truth = torch.from_numpy(np.load(exact if exact.exists() else path.parent / "logits_hf.npy")).double()
        row: dict[str, Any] = {}
        for compute, logits in found.items():
            p, q = truth.log_softmax(-1), logits[-len(truth) :].log_softmax(-1)
            row[f"{compute}_error"] = float((logits[-len(truth) :] - truth).norm() / truth.norm())
            row[f"{compute}_kl"] = float((p.exp() * (p - q)).sum(-1).mean())
            row[f"{compute}_same_top"] = float((p.argmax(-1) == q.argmax(-1)).double().mean())
        say(what="reference model in E4M3", model=f"{name}-{variant}", **row)


def attention(say: Callable[..., None]) -> None:
    heads, kv, dim, size = 32, 8, 128, 32
    for tokens in (512, 2048, 4096):
        q = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.float16)
        blocks = tokens // size
        k_cache, v_cache = (torch.randn(blocks, kv, size, dim, device="cuda", dtype=torch.float16) for _ in range(2))
        table = torch.arange(blocks, device="cuda", dtype=torch.int32).view(1, -1)
        starts, length = (torch.tensor(v, device="cuda", dtype=torch.int32) for v in ([0, tokens], [tokens]))
        ours = OPS.attention_prefill(q, k_cache, v_cache, table, starts, length, dim**-0.5)
        found: dict[str, Any] = {
            "ours_us": seconds(lambda a=(q, k_cache, v_cache, table, starts, length): OPS.attention_prefill(*a, dim**-0.5))
        }
        k, v = (c.transpose(0, 1).reshape(1, kv, tokens, dim) for c in (k_cache, v_cache))
        k, v = k.contiguous(), v.contiguous()
        rows = q.transpose(0, 1).unsqueeze(0)
        for name, which in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                with sdpa_kernel(which):

                    def call(a: Any = (rows, k, v)) -> torch.Tensor:
                        return F.scaled_dot_product_attention(*a, is_causal=True, enable_gqa=True)

                    apart = call()[0].transpose(0, 1)
                    found[f"{name}_error"] = float((apart - ours).float().norm() / ours.float().norm())
                    found[f"{name}_us"] = seconds(call)
                    # What it needs first: keys and values out of the blocks.
                    gather = seconds(lambda c=k_cache, t=table: c[t[0].long()].transpose(0, 1).contiguous())
                    found["gather_us"] = 2 * gather
            except Exception as error:
                found[f"{name}_failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        say(what="attention of a prompt, 32 heads over 8 of 128", tokens=tokens, **found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", default=["float8", "attention", "quality", "ops", "ordered"])
    parser.add_argument("--cases", type=Path, default=Path(os.environ.get("QUARREL_CASES", ROOT / ".cases")))
    args = parser.parse_args()
    failed = 0

    def say(**row: Any) -> None:
        text = json.dumps(row)
        print(text, flush=True)
        with args.out.open("a") as out:
            print(text, file=out)

    for part in args.part:
        try:
            if part == "quality":
                quality(say, args.cases)
            else:
                {"ops": ops, "ordered": ordered, "float8": fp8, "attention": attention}[part](say)
        except Exception:
            failed += 1
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main())
