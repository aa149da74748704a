"""The check before a speed is reported: the same kernels, at the model's shapes and with its weights, against references.

A model is cut down to one layer of each kind. Each of its ops runs on the backend, whole, and in NumPy, on some of its
rows, for a prompt, a single token and a small batch. Then the compiled step of the cut model must give the logits that
those checked ops gave, long prompts and large batches must agree with short ones, as closely as the arithmetic lets two
ways through this model agree (`limit.py`), and the whole model's logits must be finite.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quarrel.bench.inputs import Layout
from quarrel.bench.limit import DRAWS, MOST, ShakenStep
from quarrel.bench.rows import some_rows
from quarrel.bench.subject import Source, Subject
from quarrel.errors import QuarrelError
from quarrel.ops.check import CheckedStep
from quarrel.ops.compare import NOTHING
from quarrel.ops.contract import Array, Concrete, rel_error
from quarrel.ops.program import Node, Program
from quarrel.ops.step import Backend, ComputeChoice, Limits, Step, StepInputs, Want, WeightSource

PROMPT, BATCH = 33, 8
ROUTED_PROMPT, ROUTED_BATCH = 4, 4
"""Fewer tokens where experts are chosen: NumPy dequantises every expert that one of them takes."""
FINITE = "the whole model's values are finite"


@dataclass(frozen=True)
class Checked:
    """What was compared, with the largest error of each comparison of steps."""

    layers: tuple[int, ...]
    ops: int
    errors: dict[str, float]
    allowed: dict[str, float]
    seconds: float

    @property
    def too_wide(self) -> list[str]:
        """Comparisons whose limit is so wide, as roundings alone change this model's results by half, that a wrong step may
        pass; each op alone was still compared."""
        return [name for name, limit in self.allowed.items() if limit >= NOTHING]


class UncheckedStep(CheckedStep):
    """Op by op through `run_op`."""

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        """Nothing."""


class _Checker(CheckedStep):
    """Compares some rows of each map, on other threads while the backend goes on: a whole layer of a 7B model would take
    NumPy half a minute."""

    def __init__(
        self,
        backend: Backend,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice,
        threads: ThreadPoolExecutor,
    ) -> None:
        super().__init__(backend, program, weights, limits, compute)
        self._threads = threads
        self._waiting: list[Future[None]] = []
        self.ops = 0

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        self.ops += 1
        self._waiting.append(self._threads.submit(super().verify, *some_rows(node, inputs, got)))

    def wait(self) -> None:
        for future in self._waiting:
            future.result()
        self._waiting.clear()


def check(whole: Subject, compute: ComputeChoice, batch: int, threads: int) -> Checked:
    """Checks a model; raises QuarrelError with the first error above its limit."""
    began = time.perf_counter()
    ways = Ways.of(whole, compute, batch)
    references, allowed, ops = ways.op_by_op(threads)
    errors = ways.compiled(references)
    # What is compared with itself was not shaken: it may be off by what any of the others may.
    allowed = dict.fromkeys(errors, max(allowed.values())) | allowed
    errors[FINITE], allowed[FINITE] = _finite(whole, ways.want), 0.0
    for name, error in errors.items():
        if not error <= allowed[name]:
            raise QuarrelError(
                f"{ways.backend.name}: {name}: off by {error:.3g}, allowed {allowed[name]:.3g}; no speed is reported"
            )
    return Checked(ways.layers, ops, errors, allowed, time.perf_counter() - began)


@dataclass(frozen=True)
class Ways:
    """The cut model, and the ways to compute its logits that are compared."""

    source: Source
    layers: tuple[int, ...]
    backend: Backend
    compute: ComputeChoice
    layout: Layout
    batch: int

    @classmethod
    def of(cls, whole: Subject, compute: ComputeChoice, batch: int) -> Ways:
        source, layers = whole.source.cut()
        return cls(source, tuple(layers), whole.backend, compute, whole.layout, batch)

    @property
    def want(self) -> Want:
        return "hidden" if self.source.encodes else "logits"

    def _small(self) -> Layout:
        """`run_op` sends the whole cache at each call: the checked ops get a small one."""
        prompt, count = _sizes(self.source, self.batch)
        size = self.layout.limits.block_size
        wide = -(-(prompt + 1) // size)
        return Layout(Limits(max(prompt, 2 * count), count, wide, count * wide, size), self.layout.vocab)

    def _model(self, layout: Layout) -> tuple[Backend, Program, WeightSource, Limits, ComputeChoice]:
        return self.backend, self.source.program, self.source.tensors, layout.limits, self.compute

    def unchecked(self) -> None:
        """The ops one by one with nothing compared, for their kernels' sake."""
        small = self._small()
        self._runs(UncheckedStep(*self._model(small)), small)

    def op_by_op(self, threads: int) -> tuple[dict[str, Array], dict[str, float], int]:
        """Logits of checked ops, what a step may be away from them, and how many ops were checked."""
        small = self._small()
        model = self._model(small)
        with ThreadPoolExecutor(threads) as pool:
            checker = _Checker(*model, threads=pool)
            references = self._runs(checker, small)
            checker.wait()
        allowed = dict.fromkeys(references, 0.0)
        for seed in range(DRAWS):
            for name, values in self._runs(ShakenStep(*model, found=checker.errors, seed=seed), small).items():
                allowed[name] = max(allowed[name], min(rel_error(values, references[name]), MOST))
        return references, allowed, checker.ops

    def compiled(self, references: Mapping[str, Array]) -> dict[str, float]:
        """How far the compiled step is away from the references, and from itself."""
        step = self.backend.compile(self.source.program, self.source.tensors, self.layout.limits, self.compute)
        try:
            for _ in range(2):  # the first run of a shape may be plain launches, the second a graph
                values = self._runs(step, self.layout)
            errors = {name: rel_error(values[name], references[name]) for name in references}
            return errors if self.source.encodes else errors | _against_itself(step, self.layout, self.want, self.batch)
        finally:
            step.close()

    def _runs(self, step: Step, layout: Layout) -> dict[str, Array]:
        """Values of a prompt, of one token after it, and of one token after each prompt of a small batch."""
        prompt, count = _sizes(self.source, self.batch)
        found = {"prompt": _last(step, layout.prefill(0, prompt), self.want)}
        if self.source.encodes:
            return found
        found["token"] = _last(step, [layout.decode(prompt, 1, False)], self.want)
        if count > 1:
            _last(step, layout.prefill(0, 2, count), self.want)
            found[f"batch of {count}"] = _last(step, [layout.decode(2, count, False)], self.want)
        return found


def _routed(source: Source) -> bool:
    return any(node.op.name == "route" for node in source.program.nodes)


def _sizes(source: Source, batch: int) -> tuple[int, int]:
    """Tokens of the prompt, and sequences of the small batch."""
    return (ROUTED_PROMPT, min(ROUTED_BATCH, batch)) if _routed(source) else (PROMPT, min(BATCH, batch))


def _against_itself(step: Step, layout: Layout, want: Want, batch: int) -> dict[str, float]:
    """The compiled step: one long chunk of a prompt against short ones, and rows of the largest batch against the same
    sequences alone."""
    long = min(layout.limits.max_tokens, layout.width(1) * layout.limits.block_size - 1)
    whole = _last(step, [layout.step([(0, 0, long)], 1)], want)
    pieces = [layout.step([(0, at, min(PROMPT, long - at))], 1) for at in range(0, long, PROMPT)]
    errors = {f"{long} tokens at once": rel_error(whole, _last(step, pieces, want))}
    if batch > 1:
        alone = []
        for s in range(min(batch, BATCH)):
            _last(step, [layout.step([(s, 0, 2)], batch)], want)
            alone.append(_last(step, [layout.step([(s, 2, 1)], batch)], want))
        _last(step, layout.prefill(0, 2, batch), want)
        together = _last(step, [layout.decode(2, batch, False)], want)
        errors[f"rows of a batch of {batch}"] = rel_error(together[: len(alone)], np.concatenate(alone))
    return errors


def _last(step: Step, inputs: Iterable[StepInputs], want: Want) -> Array:
    out: Array | None = None
    for one in inputs:
        out = getattr(step(one, want), want)
    assert out is not None
    return out


def _finite(subject: Subject, want: Want) -> float:
    """0, or infinity."""
    out = _last(subject.step, subject.layout.prefill(0, PROMPT), want)
    if not subject.source.encodes:
        out = np.concatenate([out, _last(subject.step, [subject.layout.decode(PROMPT, 1, False)], want)])
    return 0.0 if np.isfinite(out).all() else float("inf")
