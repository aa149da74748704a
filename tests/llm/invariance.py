"""A probe whose logits are compared bit for bit, and all that may happen around it: neighbours, prefills, preemption."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from quarrel.engine import Engine, Scoring
from quarrel.engine.results import FinishReason
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.gguf import GGUFFile
from quarrel.llm.compile import cache_rules
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.step import Backend, ComputeChoice, Limits, StepOutputs
from quarrel.ops.windows import by_window

MORE = 6
RNG = np.random.default_rng(5)
PROMPT = [int(t) for t in RNG.integers(0, 256, 300)]
OTHERS = [[int(t) for t in RNG.integers(0, 256, n)] for n in (1, 7, 40, 130, 33, 64, 2)]


class Probe(Sequence):
    """Takes the best token each time, and keeps the bits of each row that it drew from."""

    want = "logits"
    waits = True
    keeps_prefix = True

    def __init__(self, prompt: list[int], more: int = MORE) -> None:
        super().__init__(prompt, len(prompt) + more)
        self.seen: list[bytes] = []
        self._more = more

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: object) -> int:
        assert outputs.logits is not None
        row = outputs.logits[first]
        self.seen.append(row.tobytes())
        self.tokens.append(int(row.argmax()))
        self.finished = len(self.seen) == self._more
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        assert failure is None


class Nothing:
    """Where rows go that nobody asked for."""

    def rows(self, start: int, rows: object) -> None: ...

    def end(self, failure: QuarrelError | None) -> None:
        assert failure is None


class Bench:
    """Engines of one model, each with a step of its own size."""

    def __init__(
        self, file: GGUFFile, backend: Backend, compute: ComputeChoice = "auto", *, seqs: int = 8, **limits: bool | str
    ) -> None:
        self._tensors, spec = Tensors(file), read_spec(file, 512)
        self._plain = assemble(spec, self._tensors)
        self._program = by_window(self._plain)
        self._backend, self._compute, self._seqs, self._limits = backend, compute, seqs, limits

    @contextmanager
    def engine(self, chunk: int, *, plain: bool = False) -> Iterator[Engine]:
        """plain: with one block table, whatever windows the layers have."""
        program, seqs = self._plain if plain else self._program, min(self._seqs, chunk)
        groups = program.window_groups
        blocks = 30 + 5 * seqs + groups * (4 + seqs)
        limits = Limits(chunk, seqs, 16, blocks, 32, n_states=2 * seqs, window_groups=groups, **self._limits)  # type: ignore[arg-type]
        rules = cache_rules(program, True)
        engine = Engine(lambda: self._backend.compile(program, self._tensors, limits, self._compute), 1 << 12, rules)
        try:
            yield engine
        finally:
            engine.step.close()


def finish(engine: Engine, probe: Probe) -> list[bytes]:
    while not probe.finished:
        assert engine.advance()
    return probe.seen


def run(engine: Engine, prompt: list[int] = PROMPT, more: int = MORE) -> Probe:
    probe = Probe(prompt, more)
    engine.add(probe)
    return probe


def alone(engine: Engine) -> list[bytes]:
    return finish(engine, run(engine))


def with_neighbours(engine: Engine, count: int = len(OTHERS)) -> list[bytes]:
    for i in range(count):
        other = OTHERS[i % len(OTHERS)]
        run(engine, [i % 250, *other] if i >= len(OTHERS) else other, 40)
    for _ in range(3):
        engine.advance()
    return finish(engine, run(engine))


def beside_prefills(engine: Engine) -> list[bytes]:
    probe = run(engine)
    while not probe.seen:
        engine.advance()
    for other in OTHERS[:5]:
        run(engine, other[::-1] * 3, 1)
        engine.add(Scoring(other, "hidden", Nothing()))  # type: ignore[arg-type]
    return finish(engine, probe)


def preempted(engine: Engine) -> list[bytes]:
    probe = run(engine)
    while len(probe.seen) < 3:
        engine.advance()
    engine.scheduler.preempt(probe)
    run(engine, OTHERS[3], 3)
    return finish(engine, probe)


def preempted_and_forgotten(engine: Engine) -> list[bytes]:
    probe = run(engine)
    while len(probe.seen) < 2:
        engine.advance()
    engine.scheduler.preempt(probe)
    engine.cache.prefixes.clear()
    return finish(engine, probe)


def with_a_known_prefix(engine: Engine) -> list[bytes]:
    for known in (PROMPT[:201], [*PROMPT[:150], 3, 3, 3]):
        finish(engine, run(engine, known, 2))
    probe = run(engine)
    seen = finish(engine, probe)
    assert probe.reused > 100
    return seen


def twice(engine: Engine) -> list[bytes]:
    finish(engine, run(engine))
    return finish(engine, run(engine))


Case = tuple[int, Callable[[Engine], list[bytes]]]
CASES: dict[str, Case] = {
    "chunks of 64": (64, alone),
    "chunks of 256": (256, alone),
    "neighbours": (256, with_neighbours),
    "beside prefills": (128, beside_prefills),
    "preempted": (256, preempted),
    "preempted and forgotten": (100, preempted_and_forgotten),
    "known prefix": (256, with_a_known_prefix),
    "twice": (128, twice),
}
"""The size of a step, and what happens."""


def unlike(bench: Bench, cases: dict[str, Case] = CASES) -> list[str]:
    """The cases in which a bit differs from what one step of 1024 rows gives a request alone."""
    with bench.engine(1024, plain=True) as engine:
        wanted = alone(engine)
    assert len(set(wanted)) == MORE
    found = []
    for name, (chunk, case) in cases.items():
        with bench.engine(chunk) as engine:
            if case(engine) != wanted:
                found.append(name)
    return found


def distinct(bench: Bench, runs: int) -> int:
    """Different answers to one prompt in so many runs, under a load of others that come and go."""
    rng, mine = random.Random(3), []
    answers: set[tuple[bytes, ...]] = set()
    with bench.engine(256) as engine:
        left = runs
        while left or mine:
            while left and engine.activity().waiting == 0:
                if rng.random() < 0.5:
                    mine.append(run(engine, PROMPT[:40], 12))
                    left -= 1
                else:
                    run(engine, [*rng.choice(OTHERS)[::-1], rng.randrange(250)], rng.randrange(1, 20))
            assert engine.advance()
            answers |= {tuple(p.seen) for p in mine if p.finished}
            mine = [p for p in mine if not p.finished]
        while engine.advance():
            pass
    return len(answers)
