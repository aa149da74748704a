"""The CPU backend: kernels emitted as LLVM IR for the best feature level, run by a pool of threads."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quarrel.cpu_backend import features
from quarrel.cpu_backend.lowering import Cache
from quarrel.cpu_backend.pool import Pool
from quarrel.cpu_backend.step import Compiled, CpuStep, vocabulary
from quarrel.errors import UnsupportedOp
from quarrel.ops.contract import (
    Array,
    Compute,
    Concrete,
    ConstRef,
    KVArrays,
    Op,
    Operand,
    RawWeight,
    Value,
    WeightRef,
)
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.step import ComputeChoice, Limits, Step, WeightSource

_LEVEL_NAMES = {
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
    "neon": "NEON dot product",
    "generic": "portable vectors",
}


class CpuBackend:
    """See `ops.step.Backend`. `level` and `threads` override what the CPU suggests."""

    name = "cpu"

    def __init__(self, level: str | None = None, threads: int | None = None) -> None:
        self._level = features.level(level)
        self._threads = features.threads(threads)
        self._made: Pool | None = None

    @property
    def _pool(self) -> Pool:
        if self._made is None:
            self._made = Pool(self._level, self._threads)
        return self._made

    def unavailable(self) -> str | None:
        return None

    def device(self) -> str:
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        return f"{platform.machine()}, {_LEVEL_NAMES[self._level.name]}, {threads}"

    def free_bytes(self) -> int:
        try:
            with open("/proc/meminfo") as file:
                fields = dict(line.split(":", 1) for line in file)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            return _total_memory() // 2

    def compute_of(self, choice: ComputeChoice) -> Compute:
        return "float32" if choice == "float32" else "int8"

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> Step:
        arithmetic = self._arithmetic(compute)
        exact = arithmetic == "float32"
        caches = [_cache(layer, limits.n_blocks, limits.block_size, exact) for layer in program.caches]
        sizes = {
            "T": limits.max_tokens,
            "R": limits.max_tokens,
            "S": limits.max_seqs,
            "B": limits.max_blocks_per_seq,
        }
        compiled = Compiled(program, weights, caches, sizes, exact, self._pool, progress)
        return CpuStep(compiled, limits, arithmetic, vocabulary(program))

    def _arithmetic(self, choice: ComputeChoice) -> Compute:
        if choice in ("float16", "bfloat16"):
            raise UnsupportedOp(
                "cpu", "compile", f"compute={choice}", ["the CPU computes in auto (8-bit activations) or float32"]
            )
        return self.compute_of(choice)

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        exact = self._arithmetic(compute) == "float32"
        builder, source, arrays = Builder(), _Given(), {}
        operands: list[Operand] = []
        values: dict[str, Value] = {}
        caches: list[Cache] = []
        sizes = {"T": 0, "S": 0, "R": 0, "B": 0}
        for i, (param, given) in enumerate(zip(op.params(spec), inputs, strict=True)):
            dims = param.dims(spec)
            if isinstance(given, KVArrays):
                layer = KVLayer(given.k.shape[2], given.k.shape[3])
                operands.append(builder.cache(layer))
                caches.append(_cache(layer, given.k.shape[0], given.k.shape[1], exact, given))
            elif isinstance(given, RawWeight):
                operands.append(source.add(f"{param.name}.{i}", given))
            elif param.kind == "const":
                operands.append(ConstRef(param.name, tuple(float(x) for x in given)))
            else:
                value = Value(-1000 - i, param.kind, dims, param.name)
                operands.append(value)
                values[param.name], arrays[param.name] = value, given
                sizes |= {d: max(n, sizes[d]) for d, n in zip(dims, given.shape) if d in sizes}
        results = builder.emit(op, spec, *operands)
        traced = builder.program(**{r.name: r for r in results})
        program = Program(traced.nodes, values, traced.outputs, traced.caches)
        compiled = Compiled(program, source, caches, sizes, exact, self._pool)
        out: list[Any] = list(compiled.run(arrays, tuple(program.outputs)).values())
        if op.consumes:
            (cache,) = caches
            out.append(KVArrays(cache.k.astype(np.float32), cache.v.astype(np.float32)))
        return tuple(out)

    def close(self) -> None:
        """Ends the threads; the next use starts them again."""
        if self._made is not None:
            self._made.close()
            self._made = None


class _Given:
    """Weights handed to `run_op`."""

    def __init__(self) -> None:
        self._by_name: dict[str, RawWeight] = {}

    def add(self, name: str, weight: RawWeight) -> WeightRef:
        self._by_name[name] = weight
        return WeightRef(name, weight.type, len(weight.raw), weight.k)

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._by_name[ref.name]


def _cache(layer: KVLayer, blocks: int, block_size: int, exact: bool, given: KVArrays | None = None) -> Cache:
    """Zeroed (so that memory is only taken when written), or filled."""
    dtype = np.float32 if exact else np.float16
    shape = (blocks, block_size, layer.n_kv, layer.head_dim)

    def array(x: Array | None) -> np.ndarray:
        out = np.zeros(shape, dtype)
        if x is not None:
            out[...] = x
        return out

    return Cache(array(given.k if given else None), array(given.v if given else None))


def _total_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def create(threads: int | None = None) -> CpuBackend:
    """The backend as `quarrel.ops.registry` makes it; a thread for each core unless told otherwise."""
    return CpuBackend(threads=threads)
