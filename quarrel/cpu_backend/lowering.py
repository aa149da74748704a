"""What the lowering of ops shares: linear maps, norms, activations rounded once for all readers, planned queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.cpu_backend import attention as attention_kernels
from quarrel.cpu_backend.cache import Cache
from quarrel.cpu_backend.choices import Choices
from quarrel.cpu_backend.dot_row import dot_row
from quarrel.cpu_backend.float_linear import ROWS, float_linear
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.cpu_backend.norm import norm
from quarrel.cpu_backend.plan import Arg, Header, Job, Plan
from quarrel.cpu_backend.quantize import padded, quantize, row_bytes
from quarrel.cpu_backend.tile import LANES, T_BLOCK, shapes, tile
from quarrel.cpu_backend.weights import Packed, Weights
from quarrel.ops.collective import Group
from quarrel.ops.contract import ConstRef, Operand, Value, WeightRef
from quarrel.ops.linear import LinearSpec
from quarrel.ops.norm import NormSpec

CHUNK_BYTES = 32768
"""Weight bytes of the shortest chunk of the decode path: about 3 us of one core's share of memory bandwidth."""


def guided_bounds(rows: int, row_bytes: int, threads: int) -> np.ndarray:
    """Where chunks of weight rows begin and end: long ones first, so that memory is read in long runs, short ones last.

    A chunk takes half of a thread's share of what is left. Rows are computed alike in any chunk, so the cut has no
    influence on results.
    """
    least = max(2, CHUNK_BYTES // row_bytes)
    bounds = [0]
    while bounds[-1] < rows:
        size = max(least, (rows - bounds[-1]) // (2 * threads))
        bounds.append(min(rows, bounds[-1] + size + size % 2))
    return np.array(bounds, np.int64)


class Lowering:
    """Turns nodes into stages of one plan."""

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        caches: Sequence[Cache],
        states: Sequence[np.ndarray],
        choices: Choices,
        group: Group | None = None,
    ) -> None:
        self.group = group
        self.plan, self.weights, self.caches, self.states, self.choices = plan, weights, caches, states, choices
        self._items: dict[int, tuple[int, int]] = {}
        self.gathered: dict[tuple[int, int], tuple[dict[str, Arg], int]] = {}

    # Forms of activations

    def packs(self, spec: Any) -> bool:
        """Whether this map reads its activations rounded to 8 bits."""
        return not self.plan.exact and self.weights.stored_type(spec.type) in BLOCKS

    def quantised(self, x: Value) -> Arg:
        """x rounded to 8 bits, by a stage of its own unless its producer did so."""
        p = self.plan
        if not p.has(x, "q"):
            k, between = p.row(x)
            args: dict[str, Arg] = {"x": p.place(x), "out": p.place(x, "q"), "k": k, "out_stride": row_bytes(k)}
            p.shared_stage(x, Job(quantize(p.level), args, Header.axis(p.rows(x)), times=between))
        return p.place(x, "q")

    # Linear maps

    def linear_jobs(
        self,
        x: Value,
        s: LinearSpec,
        weight: WeightRef,
        bias: WeightRef | None,
        y: Arg,
        residual: Arg = 0,
        scale: float = 1.0,
    ) -> list[Job]:
        """The jobs of one map; for packed weights one for a single row and one for many."""
        w = self.weights.matrix(weight)
        common: dict[str, Arg] = {
            "w": w.address,
            "n": s.n,
            "row_bytes": w.row_bytes,
            "y": y,
            "y_stride": 4 * s.n,
            "bias": self.weights.vector(bias) if bias else 0,
            "residual": residual,
            "scale": float(scale),
        }
        return self._packed_jobs(x, w, common) if self.packs(s) else self._float_jobs(x, w, common)

    def _packed_jobs(self, x: Value, w: Packed, common: Mapping[str, Arg]) -> list[Job]:
        p, axis = self.plan, self.plan.rows(x)
        fmt, level = BLOCKS[w.type], self.plan.level
        tail = w.k % 256 // fmt.elements
        q = self.quantised(x)
        shared = {**common, "x": q, "p": padded(w.k), "blocks": w.k // 256, "tail": tail}
        bounds = guided_bounds(w.rows, w.row_bytes, p.threads)
        p.keep.append(bounds)
        per_row = {**shared, "bounds": int(bounds.ctypes.data)}
        one = Job(dot_row(fmt, level, tail > 0), per_row, Header.single(axis), times=len(bounds) - 1)
        n_tiles = -(-w.rows // (LANES * shapes(level)[0].vectors))
        args = {**shared, "live_rows": p.live(axis), "x_stride": row_bytes(w.k), "n_tiles": n_tiles}
        return [one, Job(tile(fmt, level, tail > 0, padded(w.k)), args, Header.many(axis), T_BLOCK, n_tiles)]

    def _float_jobs(self, x: Value, w: Packed, common: Mapping[str, Arg]) -> list[Job]:
        axis = self.plan.rows(x)
        rows = ROWS if w.type in BLOCKS else max(4, min(256, CHUNK_BYTES // w.row_bytes))
        n_tiles = -(-w.rows // rows)
        args = {
            **common,
            "live_rows": self.plan.live(axis),
            "x": self.plan.place(x),
            "k": w.k,
            "n_tiles": n_tiles,
            "chunk_rows": rows,
        }
        return [Job(float_linear(w.type, self.plan.level, w.k), args, Header.axis(axis), T_BLOCK, n_tiles)]

    # Norms

    def norm_stage(self, x: Value, s: NormSpec, gains: Sequence[Operand], y: Arg, q: Arg | None) -> None:
        """Normalises x into y, and into q rounded to 8 bits."""
        addresses = [self.weights.vector(g) for g in gains if isinstance(g, WeightRef)]
        args: dict[str, Arg] = {
            "x": self.plan.place(x),
            "gain": addresses[0],
            "bias": addresses[1] if s.kind == "layer" else 0,
            "y": y,
            "n": s.k,
            "groups": s.groups,
            "eps": float(s.eps),
        }
        if q is not None:
            args |= {"q": q, "q_stride": row_bytes(s.width)}
        self.plan.stage(Job(norm(s.kind, q is not None), args, Header.axis(self.plan.rows(x))))

    def normed(self, x: Value, s: NormSpec, gains: Sequence[Operand], linears: Sequence[LinearSpec]) -> Value:
        """A value that only the current node reads: the norm of x, in the forms that its linear maps want."""
        value = Value(-1 - self.plan.node, "act", (self.plan.rows(x), s.width), "normed")
        wants_q = any(self.packs(lin) for lin in linears)
        self.norm_stage(x, s, gains, self.plan.place(value), self.plan.place(value, "q") if wants_q else None)
        return value

    # Attention

    def items(self, queries: int, query_start: Value, kv_len: Value | None) -> tuple[int, int]:
        """The planned blocks of queries (address, header word of their count), planned once per step for every block size.

        Without `kv_len` every sequence's keys are its own queries' rows.
        """
        if queries not in self._items:
            p = self.plan
            memory, word = np.zeros(4 * (p.sizes["T"] + p.sizes["S"]), np.int64), p.header.new()
            p.keep.append(memory)
            args: dict[str, Arg] = {
                "live_seqs": p.live("S"),
                "query_start": p.place(query_start),
                "items": int(memory.ctypes.data),
                "count": p.header.address(word),
            }
            if kv_len is not None:
                args["kv_len"] = p.place(kv_len)
            p.shared_stage(None, Job(attention_kernels.plan(queries, kv_len is not None), args, Header.ONE))
            self._items[queries] = int(memory.ctypes.data), word
        return self._items[queries]

    def constant(self, ref: ConstRef) -> int:
        """Address of a table as float32."""
        data = np.zeros(len(ref.data) + 16, np.float32)
        data[: len(ref.data)] = ref.data
        self.plan.keep.append(data)
        return int(data.ctypes.data)
