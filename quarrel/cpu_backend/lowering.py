"""What the builders of ops share while a program becomes the stages of a plan.

A builder `build(e: Lowering, node: Node)` adds the stages of one node. It names a kernel, the value whose rows the kernel
runs over, and the kernel's fields; operands among the fields become addresses here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quarrel.cpu_backend.attention.cache import Cache
from quarrel.cpu_backend.experts.counts import ExpertCounts
from quarrel.cpu_backend.linear.activations import quantize, row_bytes, to_bfloat16
from quarrel.cpu_backend.plan import Arg, Header, Job, Live, Plan, Slot
from quarrel.cpu_backend.runtime.abi import KernelDef
from quarrel.cpu_backend.weights import Weights
from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, ConstRef, StateRef, Value, WeightRef

T = TypeVar("T")
Field = Arg | Value | WeightRef | ConstRef | StateRef | np.ndarray | None
"""What may be given for a kernel's field: a value's buffer, a small tensor as float32, an array to keep; None is 0."""


class Lowering:
    """One plan, and what its nodes refer to."""

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        caches: Sequence[Cache],
        states: Sequence[np.ndarray],
        counts: ExpertCounts,
        group: Group | None = None,
    ) -> None:
        self.group = group
        self.plan, self.weights, self.caches, self.states, self.counts = plan, weights, caches, states, counts
        self.notes: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        """By node: the kernels that a table chose, and why others declined."""
        self._once: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What several nodes of a step share, made by the first of them."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def note(self, kernels: str, declined: tuple[str, ...]) -> None:
        """What a table chose for the current node, for `explain`."""
        self.notes.setdefault(self.plan.node, []).append((kernels, declined))

    def address(self, x: Field) -> Arg:
        """A field's word."""
        if isinstance(x, int | float | Slot | Live):
            return x
        if isinstance(x, Value):
            return self.plan.place(x)
        if isinstance(x, WeightRef):
            x = self.weights.vector(x)
        elif isinstance(x, ConstRef):
            x = self.weights.const(x)
        elif isinstance(x, StateRef):
            x = self.states[x.index]
        elif x is None:
            return 0
        else:
            self.plan.keep.append(x)
        return int(x.ctypes.data)

    def cache(self, ref: CacheRef) -> Mapping[str, int]:
        """The fields that say where a layer's keys and values are."""
        cache = self.caches[ref.layer]
        return {"k_cache": int(cache.k.ctypes.data), "v_cache": int(cache.v.ctypes.data)}

    def job(self, kernel: KernelDef, over: Value | int, fields: Mapping[str, Field], every: int = 1, times: int = 1) -> Job:
        """A kernel over the rows of a value, or over the count in a header word."""
        word = Header.axis(self.plan.rows(over)) if isinstance(over, Value) else over
        return Job(kernel, {name: self.address(x) for name, x in fields.items()}, word, every, times)

    def stage(self, kernel: KernelDef, over: Value | int, /, times: int = 1, **fields: Field) -> None:
        """A stage of one job: `times` chunks a row."""
        self.plan.stage(self.job(kernel, over, fields, times=times))

    def shared_stage(
        self, source: Value | None, kernel: KernelDef, over: Value | int, /, times: int = 1, **fields: Field
    ) -> None:
        """A stage that later nodes rely on too: it runs whenever the source's producer does, or always without one."""
        self.plan.shared_stage(source, self.job(kernel, over, fields, times=times))

    def quantized(self, x: Value) -> Arg:
        """x rounded to 8 bits, by a stage of its own unless its producer did so."""
        p = self.plan
        if not p.has(x, "q"):
            k, between = p.row(x)
            self.shared_stage(x, quantize(), x, times=between, x=x, out=p.place(x, "q"), k=k, out_stride=row_bytes(k))
        return p.place(x, "q")

    def in_bfloat16(self, x: Value) -> Arg:
        """x rounded to bfloat16, by a stage of its own."""
        p = self.plan
        if not p.has(x, "bf16"):
            k, between = p.row(x)
            self.shared_stage(x, to_bfloat16(), x, times=between, x=x, out=p.place(x, "bf16"), k=k)
        return p.place(x, "bf16")
