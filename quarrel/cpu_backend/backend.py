"""The CPU backend: kernels emitted as LLVM IR for the best feature level, run by a pool of threads."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from quarrel.cpu_backend.attention.cache import kind_of, new_cache
from quarrel.cpu_backend.run_op import run_op
from quarrel.cpu_backend.runtime import features
from quarrel.cpu_backend.runtime.numa import Placement, memory_nodes
from quarrel.cpu_backend.runtime.pool import Pool
from quarrel.cpu_backend.step import Compiled, CpuStep
from quarrel.errors import UnsupportedOp
from quarrel.ops.adjust import MOST_LISTED
from quarrel.ops.collective import Group
from quarrel.ops.contract import Compute, Concrete, Op
from quarrel.ops.embedding import vocabulary
from quarrel.ops.program import Program
from quarrel.ops.step import ComputeChoice, Limits, Step, WeightSource

_LEVEL_NAMES = {
    "avx512bf16": "AVX-512 VNNI and BF16",
    "avx512vnni": "AVX-512 VNNI",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
    "neon": "NEON dot product",
    "generic": "portable vectors",
}


class CpuBackend:
    """See `ops.step.Backend`. `level` and `threads` override what the CPU suggests."""

    name = "cpu"
    step_tokens = 512
    peer_sums = None

    def __init__(self, level: str | None = None, threads: int | None = None) -> None:
        self._level = features.level(level)
        self._threads = features.threads(threads)
        self._placement = Placement(memory_nodes(features.allowed_cores()))
        self._made: Pool | None = None
        self._group: Group | None = None

    @property
    def _pool(self) -> Pool:
        if self._made is None:
            self._made = Pool(self._level, self._threads, self._placement)
        return self._made

    def unavailable(self) -> str | None:
        return None

    def device(self) -> str:
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        if len(self._placement.nodes) > 1:
            threads += f" on {len(self._placement.nodes)} memory nodes"
        return f"{platform.machine()}, {_LEVEL_NAMES[self._level.name]}, {threads}"

    def free_bytes(self) -> int:
        try:
            with open("/proc/meminfo") as file:
                fields = dict(line.split(":", 1) for line in file)
            free = int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            free = _total_memory() // 2
        left = container_free(Path("/sys/fs/cgroup"))
        return free if left is None else min(free, left)

    def compute_of(self, choice: ComputeChoice) -> Compute:
        return "float32" if choice == "float32" else "int8"

    def join(self, group: Group) -> None:
        """See `ops.collective.Joins`."""
        self._group = group

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
        kind = kind_of(limits.kv_cache, exact)
        caches = [new_cache(layer, limits.n_blocks, limits.block_size, kind) for layer in program.caches]
        sizes = {
            "T": limits.max_tokens,
            "R": limits.max_tokens,
            "S": limits.max_seqs,
            "B": limits.max_blocks_per_seq,
            "L": limits.max_tokens * MOST_LISTED,
            "M": limits.max_seqs,
        }
        states = [np.zeros((limits.states, *layer.shape), np.float32) for layer in program.states]
        compiled = Compiled(program, weights, caches, states, sizes, exact, self._pool, progress, self._group)
        compiled.load_cached()
        return CpuStep(compiled, limits, arithmetic, vocabulary(program))

    def part(self, program: Program, weights: WeightSource, rows: int, compute: Compute) -> Compiled:
        """See `ops.host.ComputesParts`: float32 exactly, else with activations of 8 bits."""
        sizes = {"T": rows} | dict.fromkeys("RSBLM", 0)
        return Compiled(program, weights, (), (), sizes, compute == "float32", self._pool)

    def _arithmetic(self, choice: ComputeChoice) -> Compute:
        if choice in ("float16", "bfloat16", "fp8"):
            raise UnsupportedOp(
                "cpu", "any op", f"compute={choice}", ["leave it out (8-bit activations), or take float32"], "compute"
            )
        return self.compute_of(choice)

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        return run_op(op, spec, inputs, self._arithmetic(compute) == "float32", self._pool)

    def close(self) -> None:
        """Ends the threads; the next use starts them again."""
        if self._made is not None:
            self._made.close()
            self._made = None


def container_free(folder: Path) -> int | None:
    """Bytes that this container may still take, file pages that can go among them; None where it has no limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(kept["active_file"]) + int(kept["inactive_file"]))
    except (OSError, KeyError, ValueError):  # no cgroup v2, or the limit is "max"
        return None


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def create(threads: int | None = None) -> CpuBackend:
    """The backend as `quarrel.ops.registry` makes it; `threads`, or one for each core."""
    return CpuBackend(threads=threads)
