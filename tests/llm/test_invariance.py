"""A request's logits are bitwise the same alone, with neighbours, beside prefills, put out and let in again, with a prefix
in the cache or without, in one piece or many: on the CPU, with real models of several architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.engine import Engine, Scoring
from quarrel.engine.results import FinishReason
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.gguf import GGUFFile
from quarrel.llm.caching import cache_rules
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.step import Limits, StepOutputs
from tests.paths import need_cases

MODELS = {
    "llama32": "model-q4_k_m.gguf",
    "gemma3": "model-q4_0x.gguf",
    "gptoss": "model-mxfp4_moe.gguf",
    "mixtral": "model-q4_k_m.gguf",
    "granitehybrid": "model-q4_k_m.gguf",
    "nemotron_h_moe": "model-q4_k_m.gguf",
    "mamba": "model-q4_0x.gguf",
    "mamba2": "model-q4_k_m.gguf",
}
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

    def settle(self, outputs: StepOutputs, first: int, count: int, draft: object) -> int:
        assert outputs.logits is not None
        row = outputs.logits[first]
        self.seen.append(row.tobytes())
        self.tokens.append(int(row.argmax()))
        self.over = len(self.seen) == self._more
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

    def __init__(self, file: GGUFFile) -> None:
        self._tensors, spec = Tensors(file), read_spec(file, 512)
        self._program = assemble(spec, self._tensors)
        self._backend = CpuBackend(threads=2)

    @contextmanager
    def engine(self, chunk: int) -> Iterator[Engine]:
        limits = Limits(chunk, 8, 16, 70, 32, n_states=16)
        rules = cache_rules(self._program, True)
        engine = Engine(lambda: self._backend.compile(self._program, self._tensors, limits), 1 << 12, rules)
        try:
            yield engine
        finally:
            engine.step.close()

    def close(self) -> None:
        self._backend.close()


def finish(engine: Engine, probe: Probe) -> list[bytes]:
    while not probe.over:
        assert engine.advance()
    return probe.seen


def run(engine: Engine, prompt: list[int] = PROMPT, more: int = MORE) -> Probe:
    probe = Probe(prompt, more)
    engine.add(probe)
    return probe


def alone(engine: Engine) -> list[bytes]:
    return finish(engine, run(engine))


def with_neighbours(engine: Engine) -> list[bytes]:
    for other in OTHERS:
        run(engine, other, 40)
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


def put_out(engine: Engine) -> list[bytes]:
    probe = run(engine)
    while len(probe.seen) < 3:
        engine.advance()
    engine.scheduler.preempt(probe)
    run(engine, OTHERS[3], 3)
    return finish(engine, probe)


def put_out_and_forgotten(engine: Engine) -> list[bytes]:
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


CASES: dict[str, tuple[int, Callable[[Engine], list[bytes]]]] = {
    "chunks of 64": (64, alone),
    "chunks of 256": (256, alone),
    "neighbours": (256, with_neighbours),
    "beside prefills": (128, beside_prefills),
    "put out": (256, put_out),
    "put out and forgotten": (100, put_out_and_forgotten),
    "known prefix": (256, with_a_known_prefix),
    "twice": (128, twice),
}


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_same_bits_whatever_else_happens(model: str) -> None:
    path = need_cases(model, MODELS[model])
    with GGUFFile.open([path]) as file:
        bench = Bench(file)
        try:
            with bench.engine(1024) as engine:
                wanted = alone(engine)
            assert len(set(wanted)) == MORE
            unlike = []
            for name, (chunk, case) in CASES.items():
                with bench.engine(chunk) as engine:
                    if case(engine) != wanted:
                        unlike.append(name)
            assert not unlike
        finally:
            bench.close()
