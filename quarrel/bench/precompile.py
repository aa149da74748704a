"""Compiles a model's kernels in several processes, through the compiler's cache on disk, before the first figure.

Compiling for a GPU takes a second a kernel on one core; a fresh machine with many cores is ready in a fraction of the
time. Each process runs its share of the tests on the model cut down to one layer of each kind, with the whole's limits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quarrel.bench.check import Ways
from quarrel.bench.measure import run
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.registry import backend
from quarrel.ops.step import ComputeChoice

Part = Literal["ops", "steps"]
"""What `check` runs, in two parts that share few kernels: the cut model op by op, and compiled."""


@dataclass(frozen=True)
class Job:
    """A share of the tests of a model and of what its check runs."""

    path: str
    backend: str
    compute: ComputeChoice
    step_tokens: int
    tests: tuple[Test, ...]
    mine: tuple[Test | Part, ...]
    deterministic: bool = False


def jobs_for(
    path: str, backend: str, compute: ComputeChoice, step_tokens: int, tests: Sequence[Test], check: bool, count: int
) -> list[Job]:
    """At most `count` shares of nearly the same size."""
    parts: tuple[Part, ...] = ("ops", "steps") if check else ()
    work = [*parts, *(t for t in tests if t.kind != "engine")]
    return [
        Job(path, backend, compute, step_tokens, tuple(tests), tuple(work[i::count]))
        for i in range(count)
        if work[i::count]
    ]


def precompile(jobs: Sequence[Job], processes: int, limit: float | None = None) -> float:
    """Runs them all, so many at a time, for `limit` seconds at most; returns the seconds it took.

    What fails here fails again, and louder, when it is measured.
    """
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(jobs)), maxtasksperchild=1) as pool:
        waiting = pool.imap_unordered(_quietly, jobs)
        with contextlib.suppress(multiprocessing.TimeoutError):
            for _ in jobs:
                waiting.next(None if limit is None else max(0.0, began + limit - time.perf_counter()))
    return time.perf_counter() - began


def _quietly(job: Job) -> None:
    try:
        _run(job)
    except Exception as error:
        print(f"warm-up of {os.path.basename(job.path)}: {type(error).__name__}: {error}", flush=True)


def _run(job: Job) -> None:
    with GGUFFile.open(job.path) as file:
        source = Source.of(file, max(t.length for t in job.tests)).cut()[0]
        limits = replace(limits_for(job.tests, job.step_tokens, source.encodes), deterministic=job.deterministic)
        subject = Subject(source, backend(job.backend), limits, job.compute)
        for test in job.mine:
            layout = subject.layout
            if isinstance(test, str):
                ways = Ways.of(subject, job.compute, max(t.batch for t in job.tests))
                ways.unchecked() if test == "ops" else ways.compiled({})
            elif test.kind == "prefill":
                run(subject, layout.prefill(test.depth, test.tokens, test.batch))
            else:
                # The prompt's kernels, and both ends of the keys; a shape's second run may make a graph.
                run(subject, layout.prefill(0, min(test.depth, limits.max_tokens) or 1, test.batch))
                for at in (test.depth, test.depth + test.tokens - 1):
                    run(subject, (layout.decode(at, test.batch, i > 0) for i in range(2)))
        subject.close()
