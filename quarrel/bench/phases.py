"""Where the time of a token goes: seconds of each phase beside the bytes and the operations that the phase needs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from statistics import median

from quarrel.bench.gpu import ABSENT, GpuLoad, Watch, reader
from quarrel.bench.measure import run
from quarrel.bench.subject import Subject
from quarrel.bench.work import Work, work_of
from quarrel.bench.workload import Test
from quarrel.errors import UnsupportedOp
from quarrel.ops.profile import PHASES, Phase, Profiled, Profiles
from quarrel.ops.step import StepInputs, Want

BAR = 40
"""Characters of the longest bar."""
SVG_WIDTH, ROW, LEFT = 640, 22, 150


@dataclass(frozen=True)
class PhaseRow:
    """One phase, per token: of a prompt's tokens, or of all that a batch decodes. Only decoding has its bytes: a prompt
    reads the weights once for all of its tokens."""

    phase: Phase
    us: float
    share: float
    """Of the phases' sum."""
    bytes: float
    flops: float
    gb_s: float
    gflop_s: float


@dataclass(frozen=True)
class KernelRow:
    """One kernel, per token."""

    kernel: str
    phase: Phase
    us: float
    launches: float


@dataclass(frozen=True)
class Phased:
    """A test's phases. Their sum is without the gaps between launches; `clock_us` is a step that is not timed inside."""

    model: str
    backend: str
    device: str
    compute: str
    test: str
    phases: tuple[PhaseRow, ...]
    kernels: tuple[KernelRow, ...]
    sum_us: float
    clock_us: float
    gpu: GpuLoad | None
    note: str
    checked: str


def measure_phases(subject: Subject, test: Test, rounds: int, name: str, checked: str) -> Phased:
    """Runs a test once to warm up, `rounds` times by the clock, then as often with its parts timed; medians of both."""
    step, backend = subject.step, subject.backend
    if not isinstance(step, Profiles):
        raise UnsupportedOp(backend.name, "--phases", "timed steps", ["take --backend cpu or triton"])
    if test.depth:
        run(subject, subject.layout.prefill(0, test.depth, test.batch))
    want: Want = "hidden" if subject.source.encodes else "tokens"
    for inputs in _steps(subject, test):
        step.profile(inputs, want)
    run(subject, _steps(subject, test))
    seconds = []
    with Watch(reader() if backend.name == "triton" else None) as watch:
        for _ in range(rounds):
            began = time.perf_counter()
            run(subject, _steps(subject, test))
            seconds.append(time.perf_counter() - began)
    profiles = [[step.profile(inputs, want) for inputs in _steps(subject, test)] for _ in range(rounds)]
    rows, kernels = phase_rows(profiles, test, work_of(subject.source.program, step.compute))
    load = watch.load()
    return Phased(
        model=name,
        backend=backend.name,
        device=backend.device(),
        compute=step.compute,
        test=test.name,
        phases=rows,
        kernels=kernels,
        sum_us=sum(row.us for row in rows),
        clock_us=1e6 * median(seconds) / test.work,
        gpu=load,
        note="" if load or backend.name != "triton" else ABSENT,
        checked=checked,
    )


def _steps(subject: Subject, test: Test) -> Iterator[StepInputs]:
    if test.kind == "prefill":
        return subject.layout.prefill(test.depth, test.tokens, test.batch)
    return (subject.layout.decode(test.depth + i, test.batch, from_last=i > 0) for i in range(test.tokens))


def phase_rows(
    profiles: list[list[Profiled]], test: Test, work: dict[Phase, Work]
) -> tuple[tuple[PhaseRow, ...], tuple[KernelRow, ...]]:
    """Medians over the rounds of the time a token, and what each phase needs for it; kernels, the slowest first."""
    rounds: dict[Phase, list[float]] = defaultdict(list)
    kernels: dict[tuple[str, Phase], list[float]] = defaultdict(list)
    launches: dict[tuple[str, Phase], int] = defaultdict(int)
    for steps in profiles:
        spent: dict[Phase, float] = defaultdict(float)
        by_kernel: dict[tuple[str, Phase], float] = defaultdict(float)
        launches.clear()
        for profiled in steps:
            for phase, seconds in profiled.by_phase().items():
                spent[phase] += seconds
            for part, seconds in zip(profiled.parts, profiled.seconds, strict=True):
                key = part.kernel.partition("(")[0] or part.op or "host", part.phase
                by_kernel[key] += seconds
                launches[key] += 1
        for phase, total in spent.items():
            rounds[phase].append(total)
        for key, total in by_kernel.items():
            kernels[key].append(total)
    us = {phase: 1e6 * median(totals) / test.work for phase, totals in rounds.items()}
    every = sum(us.values()) or 1.0
    rows = []
    for phase in PHASES:
        if phase not in us:
            continue
        parts = [work[p] for p in (phase, *_within(phase, us)) if p in work]
        context = test.depth + test.tokens / 2
        nbytes, flops = 0.0, sum(w.flops(context) for w in parts)
        if test.kind == "decode":
            nbytes = sum(w.nbytes(test.batch, context) for w in parts) / test.batch
        elif phase in ("head", "sampling"):  # of a prompt, only the last token has them
            flops /= test.tokens
        seconds = us[phase] * 1e-6 or float("inf")
        rates = nbytes / seconds / 1e9, flops / seconds / 1e9
        rows.append(PhaseRow(phase, us[phase], us[phase] / every, nbytes, flops, *rates))
    table = [
        KernelRow(kernel, phase, 1e6 * median(totals) / test.work, launches[kernel, phase] / test.work)
        for (kernel, phase), totals in kernels.items()
    ]
    return tuple(rows), tuple(sorted(table, key=lambda row: -row.us))


def _within(phase: Phase, timed: dict[Phase, float]) -> tuple[Phase, ...]:
    """Phases without a time of their own whose work this one does: a fused kernel's."""
    return ("convolution",) if phase == "scan" and "convolution" not in timed else ()


def text(found: Phased) -> str:
    """A table with a bar for each phase, and what the clock and the driver say."""
    heads = ["phase", "us a token", "share", "bytes a token", "GB/s", "MFLOP a token", "GFLOP/s", ""]
    longest = max((row.us for row in found.phases), default=1.0) or 1.0
    rows = [
        [
            row.phase, f"{row.us:.2f}", f"{100 * row.share:.1f}%", f"{row.bytes:,.0f}" if row.bytes else "",
            f"{row.gb_s:.1f}" if row.bytes else "", f"{row.flops / 1e6:.2f}" if row.flops else "",
            f"{row.gflop_s:.1f}" if row.flops else "", "█" * max(1, round(BAR * row.us / longest)),
        ]
        for row in found.phases
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in [heads, *rows]]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    title = f"{found.model}: {found.test} on {found.device}, {found.compute}, checked: {found.checked}"
    return "\n".join([title, "", *lines, "", _summary(found)])


def _summary(found: Phased) -> str:
    line = f"The phases take {found.sum_us:.2f} us a token; by the clock a token takes {found.clock_us:.2f} us."
    if found.gpu is not None:
        load = found.gpu
        power = f"{load.watts:.0f} W (peak {load.peak_watts:.0f} W)"
        line += f" The GPU was busy {load.utilisation:.0f}% of the time at {power}."
    return f"{line} There is {found.note}." if found.note else line


def svg(found: list[Phased]) -> str:
    """A bar for each phase of each test."""
    parts, y = list[str](), 10
    for one in found:
        parts.append(
            f'<text x="8" y="{y + 15}" font-weight="bold">{escape(f"{one.model}: {one.test}, {one.device}")}</text>'
        )
        y += ROW + 4
        longest = max((row.us for row in one.phases), default=1.0) or 1.0
        for row in one.phases:
            wide = round((SVG_WIDTH - LEFT - 160) * row.us / longest, 1)
            parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{row.phase}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y + 3}" width="{wide}" height="{ROW - 6}" fill="#0b5fa5"/>')
            label = f"{row.us:.2f} us, {100 * row.share:.1f}%"
            parts.append(f'<text x="{LEFT + wide + 6}" y="{y + 15}">{label}</text>')
            y += ROW
        y += 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SVG_WIDTH} {y}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
