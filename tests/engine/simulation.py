"""The engine on a clock of its own and a step that computes nothing but hashes: any seed replays to the last bit.

The step holds in every cache slot what it must hold, so a wrong slot, block, state or id is seen where it is read; and a
token is a function of all tokens before it and of its number, so that every text can be checked when it ends, whatever
happened on the way. Faults are injected at random: exceptions, too little memory, rows that are no numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from quarrel.engine import CacheRules, Chunk, Deliver, Engine, Request, Result, SamplingParams, Scoring, Service, rng
from quarrel.engine.draft import Drafter
from quarrel.engine.generation import Generation
from quarrel.errors import QuarrelError
from quarrel.ops.contract import Compute
from quarrel.ops.program import group_input
from quarrel.ops.step import (
    Done,
    ExplainLine,
    Limits,
    MemoryPlan,
    Pending,
    StepInputs,
    StepOutputs,
    Want,
    outputs_of,
    with_ids,
)
from tests.engine.toys import Letters

VOCABULARY = 24
MASK = (1 << 61) - 1
PERIOD = 0.01
"""Seconds of the simulation's clock that a step takes."""


def extend(history: int, token: int) -> int:
    return (history * 0x5851F42D4C957F2D + token + 0x14057B7EF767814F) & MASK


def drawn(history: int, uniform: float, greedy: bool) -> int:
    return (history >> 20) % VOCABULARY if greedy else ((history >> 20) ^ int(uniform * (1 << 24))) % VOCABULARY


class Wrong(BaseException):
    """The engine asked for what is not so; no engine may live on from that."""


class NullStep:
    """Slot i of a sequence holds the hashes of tokens[:i] and of tokens[:i + 1]; a state slot holds the hash of all. Hashes
    begin with the number of the adapter; those in blocks of a group with a window are told from others by its number."""

    compute: Compute = "float32"

    def __init__(
        self,
        limits: Limits,
        chance: random.Random,
        *,
        late: bool,
        recurrent: bool,
        window: int,
        faults: float,
        drafts: bool = False,
    ) -> None:
        self.drafts = drafts  # it is a draft model: launched several times at once, and wrong now and then
        self.limits, self.chance, self.late = limits, chance, late
        self.recurrent, self.window, self.faults = recurrent, window, faults
        # Lists: a step of a few tokens takes numpy longer than Python.
        self.before = [-1] * (limits.n_blocks * limits.block_size)
        self.behind = self.before.copy()
        self.states = [-1] * limits.states
        self.poisoned: set[int] = set()  # histories behind which there are no numbers
        self.last: np.ndarray[Any, Any] | None = None
        self.flying = 0
        self.computed = 0
        self.broken: Exception | None = None

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        if self.chance.random() < self.faults:
            fault = self.chance.choice([RuntimeError("device"), MemoryError(), QuarrelError("refused")])
            if not (self.late and isinstance(fault, RuntimeError)):
                raise fault
            self.broken = fault  # seen when its result is waited for, and so is all that is launched behind it
        if not self.late:
            return Done(self(inputs, want))
        self.flying += 1
        assert self.drafts or self.flying <= 2
        return _Late(self, self.broken if self.broken is not None else self(inputs, want))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        try:
            return self._compute(inputs, want)
        except Exception as error:
            raise Wrong(str(error)) from error

    def _compute(self, inputs: StepInputs, want: Want) -> StepOutputs:
        inputs = with_ids(inputs, self.last)
        if self.computed % 4 == 0:  # a tenth of the time, for what is mostly compared below, too
            inputs.check(self.limits, VOCABULARY)
        self.computed += 1
        made: list[int] = []
        groups: list[tuple[list[list[int]], list[int]]] = []
        for group in range(self.limits.window_groups + 1):
            blocks, slots = inputs.named(group_input("block_table", group)), inputs.named(group_input("slots", group))
            assert blocks is not None
            assert slots is not None
            groups.append((blocks.tolist(), slots.tolist()))
        starts, positions = inputs.query_start.tolist(), inputs.positions.tolist()
        for s, length in enumerate(inputs.kv_len.tolist()):
            first, end = starts[s : s + 2]
            assert positions[first:end] == [*range(length - (end - first), length)]
            made += self._run(inputs, s, range(first, end), length, [(blocks[s], slots) for blocks, slots in groups])
        rows = [made[r] for r in inputs.out_rows]
        if want == "hidden":
            return StepOutputs(hidden=np.array([[h % 1009] for h in rows], np.float32))
        sample, tokens, logits, told, wanted = inputs.sample, None, None, None, outputs_of(want)
        if "tokens" in wanted:
            assert sample is not None
            assert len(sample.uniform) == len(rows)
            columns = zip(rows, sample.uniform.tolist(), (sample.temperature == 0).tolist())
            tokens = np.array([-1 if h in self.poisoned else drawn(h, u, g) for h, u, g in columns], np.int32)
            if self.drafts:
                tokens[[h % 5 == 0 for h in rows]] = 1
            self.last = tokens
        if "logprobs" in wanted:
            told = np.zeros((len(rows), 1), np.float32)
        if "logits" in wanted:
            logits = np.zeros((len(rows), VOCABULARY), np.float32)
            for row, h in zip(logits, rows):
                row[drawn(h, 0.0, True)] = np.nan if h in self.poisoned else 1.0
        return StepOutputs(tokens=tokens, logits=logits, logprobs=told, best=None if told is None else told[:, 1:])

    def _run(
        self, inputs: StepInputs, s: int, mine: range, length: int, groups: list[tuple[list[int], list[int]]]
    ) -> list[int]:
        """Sequence `s`, whose tokens of this step are `mine`. groups: its blocks and all slots of each group of layers."""
        size, known = self.limits.block_size, length - len(mine)
        start = 0 if inputs.adapter is None else int(inputs.adapter[mine.start])
        if inputs.adapter is not None:
            assert (inputs.adapter[mine.start : mine.stop] == start).all()
        history = start
        for group, (blocks, slots) in enumerate(groups):
            wanted = [blocks[i // size] * size + i % size for i in range(known, length)]
            assert slots[mine.start : mine.stop] == wanted
            if known:
                low = max(0, known + 1 - self.window) if self.window and (group or not self.limits.window_groups) else 0
                before: list[int] = []
                behind: list[int] = []
                for block in blocks[low // size : -(-known // size)]:
                    before += self.before[block * size : (block + 1) * size]
                    behind += self.behind[block * size : (block + 1) * size]
                past = slice(low % size, low % size + known - low)
                before, behind = before[past], behind[past]
                assert before[1:] == behind[:-1], "the cache does not hold this sequence's past"
                assert low or not before or before[0] == start ^ (group << 61)
                if not group:
                    history = behind[-1]
                assert not behind or behind[-1] == history ^ (group << 61)
        if self.recurrent:
            assert inputs.state_slots is not None
            slot = int(inputs.state_slots[s])
            assert 0 <= slot < self.limits.max_seqs
            assert not known or self.states[slot] == history, "the state is not that of this sequence's past"
        made = []
        for i, token in zip(mine, inputs.ids[mine.start : mine.stop].tolist()):
            before_it, history = history, extend(history, token)
            for group, (_, slots) in enumerate(groups):
                self.before[slots[i]], self.behind[slots[i]] = before_it ^ (group << 61), history ^ (group << 61)
            made.append(history)
        if self.recurrent:
            self.states[slot] = history
        return made

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.limits.block_size
        for source, destination in pairs:
            for values in (self.before, self.behind):
                values[destination * size : (destination + 1) * size] = values[source * size : (source + 1) * size]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self.recurrent
        for source, destination in pairs:
            self.states[destination] = self.states[source]

    def explain(self) -> list[ExplainLine]:
        return []

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0)

    def close(self) -> None:
        self.before[:] = self.behind[:] = [-1] * len(self.before)


@dataclass
class _Late:
    step: NullStep
    made: StepOutputs | Exception

    def result(self) -> StepOutputs:
        self.step.flying -= 1
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


class Simulation:
    """One engine and its callers. `run` raises where an invariant does not hold."""

    def __init__(self, seed: int, *, faults: float = 0.0, at_most: int = 24) -> None:
        chance = self.chance = random.Random(seed)
        self.now = 0.0
        self.at_most = at_most
        # Of numbers of their own, so that what a seed was before there were adapters it still is.
        self.adapted = random.Random(~seed)
        adapters = self.adapted.choice([0, 0, 3])
        self.recurrent, self.late = chance.random() < 0.4, chance.random() < 0.6
        window = chance.choice([0, 0, 0, 5, 9]) if not self.recurrent else 0
        self.groups = random.Random(100 * seed + 15).choice([0, 0, 1, 3])
        if self.groups:
            window = window or 7
        size, self.n_ctx = chance.choice([2, 4, 8]), 48
        blocks = -(-self.n_ctx // size)
        seqs = chance.randint(1, 8)
        least = blocks + self.groups * min(blocks, (window - 2) // size + 2)
        self.rollback = self.recurrent and not window and random.Random(100 * seed + 16).random() < 0.5
        limits = Limits(
            max_tokens=seqs + chance.randint(0, 24),
            max_seqs=seqs,
            max_blocks_per_seq=blocks,
            n_blocks=least + 1 + chance.choice([0, 0, 2, blocks, 4 * blocks]),
            block_size=size,
            n_states=seqs * (1 + self.rollback) + chance.choice([0, 1, 5, 20]),
            n_adapters=adapters,
            window_groups=self.groups,
        )
        reuse = chance.random() < 0.85
        kept = chance.choice([None, None, 0, 4])

        def make() -> NullStep:
            return NullStep(limits, chance, late=self.late, recurrent=self.recurrent, window=window, faults=faults)

        rules = CacheRules(reuse, self.recurrent, window, kept, self.groups, self.rollback)
        self.drafts = self.rollback or (not self.recurrent and chance.random() < 0.4)
        few = replace(limits, n_blocks=least + chance.choice([0, 3 * blocks]), n_states=0, n_adapters=0)
        wrong = 0.0 if not faults else 0.002

        def drafter() -> Drafter:
            step = NullStep(few, chance, late=self.late, recurrent=False, window=window, faults=wrong, drafts=True)
            return Drafter(step, CacheRules(reuse, window=window, window_groups=self.groups), VOCABULARY, VOCABULARY)

        self.engine = Engine(
            make,
            VOCABULARY,
            rules,
            clock=lambda: self.now,
            ended=self._ended,
            make_drafter=drafter if self.drafts else None,
        )
        self.alive: dict[int, Any] = {}
        self.texts: list[list[int]] = [[]]
        self.results: Counter[str] = Counter()
        self.ended_now: list[Any] = []
        self.arrived_at: dict[int, float] = {}
        self.longest = 0.0

    def run(self, steps: int) -> None:
        """So many steps with arrivals, then as many as it takes to end all."""
        for i in range(steps):
            self._callers()
            self.engine.advance()
            self._after(i)
        left = 20_000
        while self.engine.advance():
            self._after(left)
            left -= 1
            assert left, "it does not come to an end"
        assert not self.alive
        self._check_blocks()
        self.engine.cache.prefixes.clear()
        cache = self.engine.cache
        assert cache.pool.free == cache.pool.n_blocks
        assert cache.prefixes.kept == len(cache.prefixes) == len(cache.snapshots) == 0
        if self.engine.drafter is not None:
            self.engine.drafter.propose({})
            shadows = self.engine.drafter.cache
            shadows.prefixes.clear()
            assert shadows.pool.free == shadows.pool.n_blocks

    def _after(self, step: int) -> None:
        self.now += PERIOD
        for sequence in self.ended_now:
            self._check_text(sequence)
        self.ended_now.clear()
        if step % 16 == 0:
            self._check_blocks()

    def _callers(self) -> None:
        chance = self.chance
        while len(self.alive) < self.at_most and chance.random() < 0.35:
            self._arrive()
        if self.alive and chance.random() < 0.04:
            sequence = chance.choice(list(self.alive.values()))
            self.engine.cancel(sequence)
            assert not sequence.cache.blocks
            assert not sequence.cache.window_blocks
            assert not sequence.cache.snapshots
        if chance.random() < 0.01 and isinstance(self.engine.step, NullStep) and self.alive:
            sequence = chance.choice(list(self.alive.values()))
            self.engine.step.poisoned = {history_of(sequence.tokens, sequence.adapter)}

    def _arrive(self) -> None:
        chance = self.chance
        prompt = list(chance.choice(self.texts)[: chance.randint(0, self.n_ctx)])
        prompt += chance.choices(range(1, VOCABULARY), k=chance.choice([1, 1, 2, 3, 20]))
        prompt = prompt[: self.n_ctx]
        adapter = self.adapted.randint(0, self.engine.step.limits.n_adapters)
        if chance.random() < 0.08:
            self._enter(Scoring(prompt, "hidden", _Hidden(), adapter=adapter))
            return
        host = chance.random() < 0.2
        params = _params(
            temperature=0.0 if host or chance.random() < 0.5 else 1.0,
            max_tokens=chance.choice([0, 1, 5, 20, None]),
            dry_multiplier=1.0 if host else 0.0,
            dry_allowed_length=1 << 30,
            logprobs=0 if chance.random() < 0.2 else None,
            ignore_eos=chance.random() < 0.5,
            stop=chance.choice([(), (), ("ab",)]),
            n=chance.choice([1, 1, 1, 1, 3]),
        )
        service = Service(
            priority=chance.choice(["interactive", "batch"]),
            queue_seconds=chance.choice([None, None, None, 0.5]),
            total_seconds=chance.choice([None, None, None, 0.3, 3.0]),
            cache_salt=chance.choice(["", "", "a"]),
            speculate=chance.choice([0, 0, 4]) if not self.recurrent else 4 * self.rollback,
            draft=chance.choice([0, 1, 8]),
        )
        stops = frozenset() if params.ignore_eos else frozenset({0})
        request = Request(
            tuple(prompt),
            params,
            chance.getrandbits(40),
            stops,
            self.n_ctx,
            VOCABULARY,
            Letters(),
            service=service,
            drafts=self.drafts,
            adapter=adapter,
        )
        for i in range(params.n):
            self._enter(Generation(request, i, self._sink, stream=False))

    def _enter(self, sequence: Any) -> None:
        self.engine.add(sequence)
        self.alive[sequence.order] = sequence
        self.arrived_at[sequence.order] = self.now

    def _sink(self, chunk: Chunk) -> None:
        assert isinstance(chunk.result, Result)

    def _ended(self, sequence: Any) -> None:
        del self.alive[sequence.order]
        self.longest = max(self.longest, self.now - self.arrived_at.pop(sequence.order))
        self.ended_now.append(sequence)

    def _check_text(self, sequence: Any) -> None:
        self.results[type(sequence.failure).__name__ if sequence.failure else str(sequence.outcome)] += 1
        if isinstance(sequence, Scoring):
            received = sequence._deliver.received  # type: ignore[attr-defined]
            wanted, history = [], sequence.adapter
            for token in sequence.tokens:
                history = extend(history, token)
                wanted.append(float(history % 1009))
            assert received == wanted[: len(received)]
            return
        assert isinstance(sequence, Generation)
        history = history_of(sequence.request.tokens, sequence.adapter)
        greedy = sequence.request.params.temperature == 0.0
        for at in range(sequence.n_prompt, len(sequence.tokens)):
            token = sequence.tokens[at]
            assert token == drawn(history, float(np.float32(rng.uniform(sequence.seed, at))), greedy)
            history = extend(history, token)
        if len(self.texts) < 64:
            self.texts.append(list(sequence.tokens))
        else:
            self.texts[self.chance.randrange(64)] = list(sequence.tokens)

    def _check_blocks(self) -> None:
        scheduler, cache = self.engine.scheduler, self.engine.cache
        owners = Counter(b for s in scheduler.running for b in s.cache.blocks if b >= 0)
        owners.update(n.block for n in cache.prefixes.nodes())
        owners.update(b for s in scheduler.running for blocks in s.cache.window_blocks for b in blocks)
        owners.update(b for n in cache.prefixes.nodes() for b in n.window_blocks)
        pool = cache.pool
        assert [pool.ref_count(b) for b in range(pool.n_blocks)] == [owners[b] for b in range(pool.n_blocks)]
        assert pool.free == pool.n_blocks - len(owners)
        kept = sum(pool.ref_count(b) == 1 for n in cache.prefixes.nodes() for b in (n.block, *n.window_blocks))
        assert cache.prefixes.kept == kept
        limit = cache.rules.kept_blocks
        assert limit is None or kept <= limit
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots)
        copies = [x for s in scheduler.running for x in s.cache.snapshots.values()]
        copies += [x for n in cache.prefixes.nodes() for x in n.snapshots.values()]
        assert len(set(copies)) == len(copies) == len(cache.snapshots)
        assert {s.order for s in (*scheduler.running, *scheduler.waiting)} == self.alive.keys()


@cache
def _params(**fields: Any) -> SamplingParams:
    """Some hundred combinations, each checked once."""
    return SamplingParams(**fields)


class _Hidden(Deliver):
    def __init__(self) -> None:
        self.received: list[float] = []

    def rows(self, start: int, rows: Any) -> None:
        assert start == len(self.received)
        self.received += [float(r[0]) for r in rows]

    def end(self, failure: QuarrelError | None) -> None:
        pass


def history_of(tokens: Sequence[int], adapter: int = 0) -> int:
    history = adapter
    for token in tokens:
        history = extend(history, token)
    return history
