"""Measures tests of models one after the other and hands out each figure as soon as it is known."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from quarrel import __version__
from quarrel.bench.bandwidth import read_bandwidth
from quarrel.bench.check import Checked, check
from quarrel.bench.measure import Samples, measure
from quarrel.bench.phases import Phased, measure_phases
from quarrel.bench.report import Figure, statistics
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile, resolve
from quarrel.llm.memory import decoded_room, step_bytes
from quarrel.ops.step import Backend, ComputeChoice


@dataclass(frozen=True)
class How:
    """What holds for every test of a session."""

    compute: ComputeChoice = "auto"
    rounds: int = 5
    step_tokens: int | None = None
    """Rows of a prefill step; None is the backend's own choice."""
    checked: bool = True
    keep_going: bool = False
    """Measure even if the check failed; every figure then says so."""
    deadline: float | None = None
    """On the clock of `time.perf_counter`."""
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))

    @property
    def late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline


ROOM = 12 << 30
"""Bytes beside weights, caches and values of a step, for checks and graphs: weights are kept decoded for prompts in what
remains, as they are in `LLM`."""


class Session:
    """One backend; keeps its read bandwidth and what `explain` said of each model."""

    def __init__(self, backend: Backend, how: How) -> None:
        self.backend, self.how = backend, how
        self.explained: dict[str, object] = {}
        self._speeds: list[float] = []

    @contextmanager
    def _loaded(self, name: str, tests: Sequence[Test]) -> Iterator[tuple[Subject, Checked | str, list[Test]]]:
        """A model that was loaded and checked, and the tests that it can run."""
        say = self.how.say
        with GGUFFile.open(resolve(name).paths) as file:
            source = Source.of(file, max(t.length for t in tests))
            tests = [t for t in tests if t.kind == "prefill" or not source.encodes]
            rows = self.how.step_tokens or self.backend.step_tokens
            limits = limits_for(tests, rows, source.encodes)
            sixteen = self.backend.compute_of(self.how.compute) != "float32"
            if self.backend.name == "triton" and sixteen and not source.encodes:
                taken = sum(t.nbytes for t in file.tensors.values()) + step_bytes(source.program, limits)
                left = self.backend.free_bytes() - taken - ROOM
                limits = replace(limits, decoded_bytes=decoded_room(source.program, left))
            subject = Subject(source, self.backend, limits, self.how.compute)
            say(f"{name}: loaded in {subject.load_seconds:.2f} s")
            try:
                batch = max([1, *(t.batch for t in tests)])
                checked = self._check(name, subject, batch)
                self.explained[f"{Path(name).stem} on {self.backend.name}"] = {
                    "memory": asdict(subject.step.memory()),
                    "calls": [asdict(taken) for taken in subject.step.explain()],
                    "checked": asdict(checked) if isinstance(checked, Checked) else checked,
                }
                yield subject, checked, tests
            finally:
                subject.close()

    def model(self, name: str, tests: Sequence[Test]) -> Iterator[Figure]:
        """Loads, checks, and runs the tests in order, until the deadline."""
        with self._loaded(name, tests) as (subject, checked, fitting):
            self._measure_memory()
            for test in (t for t in fitting if t.kind != "engine"):
                if self.how.late:
                    return
                samples = measure(subject, test, self.how.rounds, self.how.deadline)
                yield self._figure(name, subject, test, samples, checked)
        for test in (t for t in fitting if t.kind == "engine"):
            if self.how.late:
                return
            # Imported here: it brings in tokenizers, which a machine for kernels may lack.
            from quarrel.bench.engine import measure_engine

            samples = measure_engine(name, self.backend, self.how.compute, test, self.how.rounds)
            yield self._figure(name, subject, test, samples, checked)

    def phases(self, name: str, tests: Sequence[Test]) -> Iterator[Phased]:
        """Loads, checks, and times the parts of each test, until the deadline."""
        with self._loaded(name, tests) as (subject, checked, fitting):
            for test in (t for t in fitting if t.kind != "engine"):
                if self.how.late:
                    return
                yield measure_phases(subject, test, self.how.rounds, Path(name).stem, _said(checked))

    def _figure(self, name: str, subject: Subject, test: Test, samples: Samples, checked: Checked | str) -> Figure:
        numbers: dict[str, Any] = statistics(test.work, samples.seconds)
        bandwidth = self._measure_memory()
        decodes = test.kind != "prefill"
        read = subject.traffic.step(test.batch, test.depth + test.tokens / 2) if decodes else 0.0
        return Figure(
            model=Path(name).stem,
            architecture=subject.source.spec.architecture,
            model_bytes=sum(t.nbytes for t in subject.source.file.tensors.values()),
            backend=self.backend.name,
            device=self.backend.device(),
            compute=self.backend.compute_of(self.how.compute),
            test=test.name,
            kind=test.kind,
            tokens=test.tokens,
            depth=test.depth,
            batch=test.batch,
            **numbers,
            warm_up_s=round(samples.warm_up, 3),
            load_s=round(subject.load_seconds, 3),
            step_tokens=subject.limits.max_tokens,
            bytes_per_step=int(read),
            read_gb_s=bandwidth / 1e9,
            share=read * numbers["speed"] / test.batch / bandwidth,
            checked=_said(checked),
            quarrel=__version__,
        )

    def _check(self, name: str, subject: Subject, batch: int) -> Checked | str:
        if not self.how.checked:
            return "no"
        try:
            checked = check(subject, self.how.compute, batch, os.cpu_count() or 1)
        except Exception as error:
            if not self.how.keep_going:
                raise
            self.how.say(f"{name}: the check FAILED: {error}")
            return f"FAILED: {error}"
        self.how.say(f"{name}: checked in {checked.seconds:.1f} s: {checked.ops} ops, {_errors(checked)}")
        if wide := checked.too_wide:
            self.how.say(
                f"{name}: roundings alone change this model's results so much that these steps show no error: "
                + ", ".join(wide)
            )
        return checked

    def _measure_memory(self) -> float:
        """Once a model and once a figure, so that a change of the machine's load falls on both sides of the share."""
        self._speeds = [*self._speeds, *read_bandwidth(self.backend, 2)[1]][-10:]
        return median(self._speeds)


def _said(checked: Checked | str) -> str:
    if isinstance(checked, str):
        return checked
    steps, wide = len(checked.errors), len(checked.too_wide)
    return f"{checked.ops} ops, {f'{steps - wide} of ' if wide else ''}{steps} steps"


def _errors(checked: Checked) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in checked.errors.items())
