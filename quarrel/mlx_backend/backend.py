"""The MLX backend: what the machine offers, and how a program becomes a step."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence

import mlx.core as mx

from quarrel.errors import BackendUnavailable, OutOfMemory, RequestError, UnsupportedOp
from quarrel.mlx_backend.plan import Plan, Resident
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.cache import allocate, allocate_state, cache_bytes, refuse_type
from quarrel.mlx_backend.runtime.kernel import emulated, runs_metal
from quarrel.mlx_backend.runtime.launch import DTYPES, Cache
from quarrel.mlx_backend.step import MlxStep
from quarrel.mlx_backend.warm import largest, warm
from quarrel.mlx_backend.weights import Weights, device_bytes
from quarrel.ops.contract import CacheRef, Compute, Concrete, Op, StateRef
from quarrel.ops.program import Program
from quarrel.ops.registry import Choice, lower
from quarrel.ops.step import ComputeChoice, Limits, WeightSource
from quarrel.ops.weights import weights_of

log = logging.getLogger("quarrel")

_MOST_FLOAT16 = 65504 / 8
"""What measured values may reach in float16: other texts reach more."""
_LEAST_CACHE = 256 << 20
"""Bytes of freed buffers that MLX may keep, however full the memory is."""


class MlxBackend:
    """Metal through MLX (`ops.step.Backend`); where a test has put an emulator in Metal's place, the same code on that."""

    name = "mlx"
    step_tokens = 512

    def unavailable(self) -> str | None:
        """Why this machine cannot run it, or None."""
        if runs_metal():
            return None
        return "MLX finds no Metal device: use an Apple silicon Mac, or the cpu backend"

    def device(self) -> str:
        """The device in words."""
        if emulated():
            return f"MLX {mx.__version__} on the CPU, Metal emulated"
        name = mx.device_info().get("device_name", "Apple GPU")
        return f"{name}, MLX {mx.__version__}"

    def free_bytes(self) -> int:
        """Memory that a cache may be planned into."""
        if emulated():
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(0, _working_set() - mx.get_active_memory())

    def compute_of(self, choice: ComputeChoice) -> Compute:
        """float16: every Apple GPU computes with it, while bfloat16 is emulated by M1 and M2. With "auto", `compile` takes
        bfloat16 for a model whose values reach more than float16 holds."""
        if choice == "fp8":
            raise RequestError("Metal has no products in FP8: ask for float16")
        return "float16" if choice == "auto" else choice

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> MlxStep:
        """Chooses implementations, packs weights, allocates caches, builds kernels."""
        self._need_device()
        if limits.deterministic:
            reason = "Metal kernels are chosen by how many rows a sequence brings: leave it out, or use the cpu backend"
            raise UnsupportedOp("mlx", "any op", "deterministic=True", [reason], "deterministic")
        arithmetic = self.compute_of(compute)
        refuse_type(limits.kv_cache, arithmetic)
        choices = lower(program, REGISTRY)
        refs = weights_of(c.node for c in choices)
        needed = device_bytes(refs, arithmetic), cache_bytes(program.caches, limits, DTYPES[arithmetic])
        self._check_memory(*needed)
        if not emulated():
            # Weights that the system may page out are read from disk at every token.
            mx.set_wired_limit(_working_set())
            # MLX keeps freed buffers for the next ones of their size, and prompts differ in theirs.
            mx.set_cache_limit(max(_LEAST_CACHE, (_working_set() - sum(needed)) // 4))
        loading = _Bar(progress)
        packed = Weights(weights, arithmetic, refs, loading.weights)
        step = _step(program, choices, packed, limits, arithmetic)
        if compute == "auto" and limits.kv_cache != arithmetic:
            reached = largest(step)
            if reached > _MOST_FLOAT16:
                log.warning(
                    "values of this model reach %s: it is computed in bfloat16, for float16 ends at 65504",
                    f"{reached:.3g}" if reached < math.inf else "more than float16 holds",
                )
                step.close()
                step = _step(program, choices, packed, limits, "bfloat16")
        mx.clear_cache()  # what packing left
        if not emulated():
            warm(step, loading.kernels)
        loading.end()
        return step

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        """One op on concrete host arrays; caches are consumed and returned."""
        self._need_device()
        return run_op(REGISTRY, op, spec, inputs, self.compute_of(compute))

    def _need_device(self) -> None:
        reason = self.unavailable()
        if reason is not None:
            raise BackendUnavailable(f"the mlx backend cannot run here: {reason}")

    def _check_memory(self, weights: int, cache: int) -> None:
        free = self.free_bytes()
        if weights + cache > free:
            sizes = ", ".join(f"{what} {n / 2**30:.2f} GiB" for what, n in (("weights", weights), ("cache", cache)))
            raise OutOfMemory(
                f"{sizes} do not fit the {free / 2**30:.2f} GiB free on {self.device()}: use a smaller context or model"
            )


class _Bar:
    """One bar for both: weights by bytes, then kernels as the last tenth of it."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress, self._whole = progress, 0

    def weights(self, done: int, whole: int) -> None:
        """Bytes of weights that are loaded."""
        self._whole = whole
        self._tell(done, 0.0)

    def kernels(self, done: int, whole: int) -> None:
        """Steps that have built theirs."""
        self._tell(self._whole, done / whole)

    def end(self) -> None:
        """All is there."""
        self._tell(self._whole, 1.0)

    def _tell(self, loaded: int, built: float) -> None:
        if self._progress is not None and self._whole:
            self._progress(int(0.9 * loaded + 0.1 * self._whole * built), self._whole)


def _step(program: Program, choices: Sequence[Choice], weights: Weights, limits: Limits, arithmetic: Compute) -> MlxStep:
    plan, dtype = Plan(choices, weights, arithmetic), DTYPES[arithmetic]
    resident: Resident = {CacheRef(i): allocate(c, limits, dtype) for i, c in enumerate(program.caches)}
    resident |= {StateRef(i): allocate_state(s, limits.states) for i, s in enumerate(program.states)}
    weights.finish()
    mx.eval([list(h) if isinstance(h, Cache) else h for h in resident.values()])
    return MlxStep(plan, resident, program.inputs, program.outputs, limits)


def _working_set() -> int:
    return int(mx.device_info()["max_recommended_working_set_size"])


def create() -> MlxBackend:
    """The backend."""
    return MlxBackend()
