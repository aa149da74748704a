"""On an H100 or H200: decode attention by the ring of TMA copies and by today's kernels, in turns.

python -m bench.ops.attention_ring --out RESULTS.jsonl [--seqs 1 8 32 128] [--depths 512 4096 8192 32000] [--kinds ...]

A layer of Mistral-7B over blocks in random order, in CUDA graphs, as a step launches it: microseconds of each, the share of
the read bandwidth, and how far both are from sums in float32. `attention/ring.py: serves` should say what gains here.
First run `python -m pytest -n 0 tests/triton_backend/test_attention_ring.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shared import Notes, command_line, graph_us
from quarrel.bench.bandwidth import read_bandwidth
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import CacheRef, Value
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import backend, lower
from quarrel.triton_backend.attention import ring
from quarrel.triton_backend.attention.paged import splits_for
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.inputs import item_bucket, item_starts
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import Cache, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC, SIZE = AttentionSpec(32, 8, 128, 128**-0.5), 32
KINDS = ("plain", "int8", "fp8")
ROTATING = 256 << 20
"""Bytes of all caches together: more than the L2."""
MOST_CACHES = 32
FORMS = ("today", "ring")


class Layer:
    """Attention of sequences with one new token over some caches, which take turns."""

    def __init__(self, seqs: int, keys: int, kind: str) -> None:
        torch.manual_seed(0)
        width = cdiv(keys, SIZE)
        blocks = seqs * width
        self.nbytes = 2 * seqs * keys * SPEC.n_kv * (2 * SPEC.head_dim if kind == "plain" else SPEC.head_dim + 4)
        self.seqs, self.keys, self.kind = seqs, keys, kind
        count = min(MOST_CACHES, cdiv(ROTATING, self.nbytes)) if DEVICE.type == "cuda" else 1
        self.caches = [self._cache((blocks + 1, SPEC.n_kv, SIZE)) for _ in range(count)]
        self.table = torch.randperm(blocks, device=DEVICE).int()
        self.q = torch.randn(seqs * SPEC.width, device=DEVICE, dtype=torch.float16)
        starts, lengths = np.arange(seqs + 1, dtype=np.int32), np.full(seqs, keys, np.int32)
        most = splits_for([SPEC], "float16", kind, 9, multiprocessors(DEVICE)) if DEVICE.type == "cuda" else 4
        items = item_starts(starts, lengths, most=most)
        self.batch = Batch(seqs, seqs, seqs, True, False, item_bucket(int(items[-1]), seqs, most))
        ints = (starts, lengths, self.table.cpu().numpy(), items, np.array([width], np.int32))
        self._ints = [Slot(torch.from_numpy(x.astype(np.int32)).to(DEVICE)) for x in ints]
        self._values = [
            Value(i, kind, dims, name)  # type: ignore[arg-type]
            for i, (kind, dims, name) in enumerate(
                (("act", ("T", SPEC.width), "q"), *(("i32", ("S",), n) for n in ("query_start", "kv_len", "block_table")))
            )
        ]
        self._y = Value(9, "act", ("T", SPEC.width), "y")

    def _cache(self, shape: tuple[int, int, int]) -> Cache:
        x = [torch.randn((*shape, SPEC.head_dim), device=DEVICE, dtype=torch.float16) for _ in "kv"]
        if self.kind == "plain":
            return Cache(*x)
        made = [(y * 40).clamp(-127, 127).to(torch.int8) if self.kind == "int8" else y.to(torch.float8_e4m3fn) for y in x]
        wider = 128 / 40 if self.kind == "int8" else 256
        scales = tuple((0.5 + torch.rand(shape, device=DEVICE)) * wider for _ in "kv")
        return Cache(*(y.view(torch.uint8) for y in made), self.kind, scales)

    def plans(self) -> list[Plan]:
        """One for each cache."""
        made = []
        for cache in self.caches:
            node = Node(ATTENTION, SPEC, (*self._values, CacheRef(0)), (self._y,), "attention")
            slots = {v.id: slot for v, slot in zip(self._values, (Slot(self.q), *self._ints[:3]), strict=True)}
            rows = {"T": self.seqs, "S": self.seqs, "R": self.seqs, "items": self.batch.items}
            choices = lower(Program((node,), {v.name: v for v in self._values}, {}, ()), REGISTRY)
            work = Tables(self._ints[3], self._ints[4])
            made.append(Plan(choices, slots, {9}, rows, None, [cache], [], work, "float16", DEVICE))  # type: ignore[arg-type]
            made[-1].fill(255)
        return made

    def want(self, seq: int) -> torch.Tensor:
        """Of the first cache and one sequence, `[heads, head_dim]` in float32, by PyTorch."""
        cache, width = self.caches[0], cdiv(self.keys, SIZE)
        rows = self.table[seq * width : (seq + 1) * width].long()
        k, v = (self._floats(x, s, rows) for x, s in zip((cache.k, cache.v), cache.both_scales, strict=True))
        q = self.q.view(self.seqs, SPEC.n_kv, -1, SPEC.head_dim)[seq].float()
        p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * SPEC.scale, 2)
        return torch.einsum("hgn,nhd->hgd", p, v).reshape(SPEC.n_heads, SPEC.head_dim)

    def _floats(self, x: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        part = x[rows]
        if self.kind == "int8":
            part = part.view(torch.int8).float() * (scale[rows] / 128)[..., None]
        elif self.kind == "fp8":
            part = part.view(torch.float8_e4m3fn).float() * (scale[rows] / 256)[..., None]
        return part.float().transpose(1, 2).reshape(-1, SPEC.n_kv, SPEC.head_dim)[: self.keys]

    def measure(self, form: str) -> tuple[float, float]:
        """Error and microseconds."""
        kept = ring.serves
        ring.serves = lambda batch, spec, kind: form == "ring"
        try:
            plans = self.plans()

            def turn() -> None:
                for plan in plans:
                    for go in plan.launches:
                        go(self.batch)

            turn()
            got = plans[0].slots[9].tensor.view(self.seqs, SPEC.n_heads, SPEC.head_dim).float()
            error = 0.0
            for seq in {0, self.seqs - 1}:
                want = self.want(seq)
                error = max(error, float((got[seq] - want).norm() / want.norm()))
            if DEVICE.type != "cuda":
                return error, 1.0
            return error, graph_us(turn, max(1, 24 // len(plans))) / len(plans)
        finally:
            ring.serves = kept


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seqs", nargs="*", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--depths", nargs="*", type=int, default=[512, 4096, 8192, 32000])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    say, speed = Notes(args.out).say, 1e12
    if not INTERPRETED:
        speed, _ = read_bandwidth(backend("triton"), 5)
        say(what="read bandwidth", device=torch.cuda.get_device_name(), TB_per_s=round(speed / 1e12, 3))
    wrong = 0
    for kind, depth, seqs in ((k, d, s) for k in args.kinds for d in args.depths for s in args.seqs):
        layer = Layer(seqs, depth + 1, kind)
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        errors: dict[str, float] = {}
        for form in FORMS * 3:
            errors[form], us = layer.measure(form)
            times[form].append(us)
        least = {form: min(times[form]) for form in FORMS}
        ok = all(e < 2e-3 for e in errors.values())
        wrong += not ok
        row: dict[str, Any] = {"kind": kind, "depth": depth, "seqs": seqs, "items": layer.batch.items, "ok": ok}
        row |= {f"{form}_us": round(least[form], 2) for form in FORMS}
        row |= {f"{form}_error": errors[form] for form in FORMS}
        row |= {"to_today": round(least["today"] / least["ring"], 3)}
        say(what="alone", **row, share=round(layer.nbytes / least["ring"] * 1e6 / speed, 3))
        del layer
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
