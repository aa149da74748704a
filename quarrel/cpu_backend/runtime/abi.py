"""The one signature of every kernel, `void kernel(args, chunk, scratch)`, and how arguments get from Python into it.

`args` points at an argument block: 64-bit words, one per declared field, floats as float64 bits. Fields that start with
`live_` are addresses of words in the step's header, read anew on every call, because they change from step to step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quarrel.cpu_backend.runtime import jit
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, F64, I64, Kernel, Val


class Fields:
    """Reads a kernel's argument block by field name, once each and on demand."""

    def __init__(self, k: Kernel, names: tuple[str, ...], base: Val) -> None:
        self._k, self._names, self._base = k, names, base

    def __getattr__(self, name: str) -> Val:
        word = self._k.load(self._base, I64, 8 * self._names.index(name), align=8)
        return self._k.load(word, I64, align=8) if name.startswith("live_") else word

    def f32(self, name: str) -> Val:
        """A float field."""
        return self._k.load(self._base, F64, 8 * self._names.index(name), align=8).to(F32)


Body = Callable[[Kernel, Fields, Val, Val], None]
"""Emits a kernel's body from its fields, the chunk number and the address of this thread's scratch memory."""


@dataclass(frozen=True)
class KernelDef:
    """A kernel before compilation: a name that says everything it depends on, its fields, and its emitter."""

    name: str
    fields: tuple[str, ...]
    body: Body
    scratch: int = 0
    """Bytes of scratch memory that a thread must bring."""

    @property
    def function(self) -> jit.Function:
        """What is compiled."""
        return jit.Function(self.name, self.emit)

    def address(self, level: Level) -> int:
        """Compiled for `level`, or loaded from the cache."""
        return jit.addresses([self.function], level)[0]

    def emit(self, k: Kernel) -> None:
        args, chunk, scratch = k.params
        self.body(k, Fields(k, self.fields, args), chunk, scratch)
        k.finish()

    def pack(self, values: Mapping[str, int | float]) -> np.ndarray:
        """The argument block; `values` has every field and nothing else."""
        assert set(values) == set(self.fields), (self.name, set(values) ^ set(self.fields))
        words = [_word(values[name]) for name in self.fields]
        return np.array(words, dtype=np.int64)


def _word(x: int | float) -> int:
    if isinstance(x, float):
        return int(struct.unpack("q", struct.pack("d", x))[0])
    return int(x)
