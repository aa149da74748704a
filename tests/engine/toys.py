"""A step whose logits are a hash of the whole history that its cache holds: one wrong slot anywhere changes the text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from quarrel.engine import CacheRules, Engine, Loop, Request, Result, SamplingParams, Service, Stream, start
from quarrel.engine.draft import Drafter
from quarrel.engine.mtp import BlockDrafter
from quarrel.engine.rng import mix
from quarrel.ops.adjust import AdjustSpec, adjust_reference
from quarrel.ops.contract import Compute
from quarrel.ops.logprobs import MOST_LOGPROBS, LogprobsSpec, logprobs_reference
from quarrel.ops.sample import draw_token
from quarrel.ops.step import (
    LIST_INPUTS,
    MASK_INPUTS,
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

VOCABULARY = 48
STOP = 0
UNWRITTEN = (-1, -1)


class HistoryStep:
    """Slot i of a sequence holds (hash of tokens[:i], hash of tokens[:i + 1]). `late`: launches return before their step is
    over, as a device's do. `recurrent`: each state slot holds the hash of its sequence, which must be that of its past.
    `window`: so many slots back are looked at, no more."""

    compute: Compute = "float32"

    def __init__(
        self, limits: Limits, scale: float = 2.0, *, late: bool = False, recurrent: bool = False, window: int = 0
    ) -> None:
        self.limits, self.scale, self.late, self.recurrent, self.window = limits, scale, late, recurrent, window
        self.states = [-1] * limits.states
        self.flying = self.most_flying = 0
        self.slots: list[tuple[int, int]] = [UNWRITTEN] * (limits.n_blocks * limits.block_size)
        self.wants: list[Want] = []
        self.sizes: list[tuple[int, int]] = []  # tokens and sequences of each step
        self.bad_tokens: set[int] = set()  # behind these no logit is finite
        self.fail: Exception | None = None
        self.failing: Callable[[int], Exception | None] = lambda step: None  # by the number of the launch
        self.launches = 0
        self.forced: int | None = None  # the token that every draw gives
        self.turns: threading.Semaphore | None = None  # each step takes one, and waits where there is none
        self.closed = 0
        self.streams = False
        self.hashes: list[int] = []
        self._last: np.ndarray[Any, Any] | None = None

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        outputs = self._outputs(inputs, want)
        return replace(outputs, stream=self.stream(inputs)) if self.streams else outputs

    def stream(self, inputs: StepInputs) -> np.ndarray[Any, Any]:
        """The hash behind each token."""
        return np.array(self.hashes, np.uint64)[:, None]

    def _outputs(self, inputs: StepInputs, want: Want) -> StepOutputs:
        assert not self.closed
        if self.turns is not None:
            assert self.turns.acquire(timeout=60)
        inputs = with_ids(inputs, self._last)
        inputs.check(self.limits, VOCABULARY)
        self.launches += 1
        fault = self.fail or self.failing(self.launches)
        if fault is not None:
            raise fault
        self.wants.append(want)
        self.sizes.append((len(inputs.ids), len(inputs.kv_len)))
        hashes = self.hashes = [h for s in range(len(inputs.kv_len)) for h in self._run(inputs, s)]
        rows = [(hashes[r], int(inputs.ids[r])) for r in inputs.out_rows]
        if want == "hidden":
            return StepOutputs(hidden=np.array([[h % 1000, id] for h, id in rows], np.float32))
        logits = np.stack([self.logits(h, id) for h, id in rows])
        if want == "logits":
            return StepOutputs(logits=logits)
        assert "tokens" in outputs_of(want)
        s = inputs.sample
        assert s is not None
        assert len(s.uniform) == len(rows)
        columns = (s.temperature, s.top_k, s.top_p, s.min_p, s.uniform)
        lists = [inputs.named(name) for name in (*LIST_INPUTS, *MASK_INPUTS)]
        (adjusted,) = adjust_reference(AdjustSpec(VOCABULARY), logits, inputs.ids, inputs.out_rows, *lists)
        drawn = [draw_token(x, *(c[i].item() for c in columns)) for i, x in enumerate(adjusted)]
        self._last = np.array(drawn if self.forced is None else [self.forced] * len(drawn), np.int32)
        outputs = StepOutputs(tokens=self._last, logits=logits if "logits" in outputs_of(want) else None)
        if "logprobs" not in outputs_of(want):
            return outputs
        told, best = logprobs_reference(LogprobsSpec(VOCABULARY, MOST_LOGPROBS), logits, self._last)
        return replace(outputs, logprobs=told, best=best)

    def logits(self, history: int, last: int) -> np.ndarray[Any, Any]:
        if last in self.bad_tokens:
            return np.full(VOCABULARY, np.nan, np.float32)
        return np.random.default_rng(history).standard_normal(VOCABULARY, np.float32) * self.scale

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        if not self.late:
            return Done(self(inputs, want))
        self.flying += 1
        self.most_flying = max(self.flying, self.most_flying)
        try:
            return Late(self, self(inputs, want))
        except Exception as error:
            return Late(self, error)  # what a device does wrong is seen when its result is waited for

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        assert self.recurrent
        for source, destination in pairs:
            self.states[destination] = self.states[source]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        size = self.limits.block_size
        for source, destination in pairs:
            self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]

    def explain(self) -> list[ExplainLine]:
        return []

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0)

    def close(self) -> None:
        self.closed += 1

    def _run(self, inputs: StepInputs, s: int) -> list[int]:
        first, end = int(inputs.query_start[s]), int(inputs.query_start[s + 1])
        length, size = int(inputs.kv_len[s]), self.limits.block_size
        table = [int(inputs.block_table[s, i // size]) * size + i % size for i in range(length)]
        assert list(inputs.slots[first:end]) == table[length - (end - first) :]
        assert list(inputs.positions[first:end]) == list(range(length - (end - first), length))
        past = table[: length - (end - first)]
        history = 0 if not (self.window and past) else self.slots[past[max(0, len(past) + 1 - self.window)]][0]
        for slot in past[max(0, len(past) + 1 - self.window) if self.window else 0 :]:
            before, after = self.slots[slot]
            assert before == history, "the cache does not hold this sequence's past"
            history = after
        if self.window and past:
            history = self.slots[past[-1]][1]
        if self.recurrent:
            assert inputs.state_slots is not None
            slot = int(inputs.state_slots[s])
            assert 0 <= slot < self.limits.max_seqs
            assert not past or self.states[slot] == history, "the state is not that of this sequence's past"
        made = []
        for i in range(first, end):
            before, history = history, extend(history, int(inputs.ids[i]))
            self.slots[int(inputs.slots[i])] = (before, history)
            made.append(history)
        if self.recurrent:
            self.states[slot] = history
        return made


class BlockStep(HistoryStep):
    """A block that knows from a hash of the large model and the token behind it what that model will draw. Its own cache
    holds the tokens that it has read."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.streams = True

    def stream(self, inputs: StepInputs) -> np.ndarray[Any, Any]:
        return np.array([self.hashes[row] for row in inputs.out_rows], np.uint64)[:, None]

    def _run(self, inputs: StepInputs, s: int) -> list[int]:
        super()._run(inputs, s)
        assert inputs.stream is not None
        mine = range(int(inputs.query_start[s]), int(inputs.query_start[s + 1]))
        return [extend(int(inputs.stream[i, 0]), int(inputs.ids[i])) for i in mine]


class Late:
    """What a launch will have made."""

    def __init__(self, step: HistoryStep, made: StepOutputs | Exception) -> None:
        self._step, self._made = step, made

    def result(self) -> StepOutputs:
        self._step.flying -= 1
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


def extend(history: int, token: int) -> int:
    return mix(history * 31 + token + 1)


class Letters:
    """Token i is one letter; 0 stops and has no text."""

    def detokenizer(self) -> _LetterDetokenizer:
        return _LetterDetokenizer()

    def token_bytes(self, id: int) -> bytes:
        return letter(id).encode()


class _LetterDetokenizer:
    def push(self, id: int) -> str:
        return letter(id)

    def flush(self) -> str:
        return ""


def letter(id: int) -> str:
    return chr(96 + id) if 0 < id <= 26 else "" if id == 0 else chr(0x100 + id)


def limits(
    max_tokens: int = 16,
    max_seqs: int = 4,
    n_ctx: int = 64,
    n_blocks: int = 40,
    block_size: int = 4,
    n_states: int = 0,
) -> Limits:
    return Limits(max_tokens, max_seqs, -(-n_ctx // block_size), n_blocks, block_size, n_states)


PLAIN = Service()


def request(
    tokens: Sequence[int],
    params: SamplingParams | None = None,
    *,
    n_ctx: int = 64,
    stop_ids: Sequence[int] = (STOP,),
    service: Service = PLAIN,
    drafts: bool = False,
) -> Request:
    params = params or SamplingParams(temperature=0, max_tokens=12)
    ids = frozenset(() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
    seed = 7 if params.seed is None else params.seed
    return Request(tuple(tokens), params, seed, ids, n_ctx, VOCABULARY, Letters(), service=service, drafts=drafts)


class Toy:
    """A loop on a `HistoryStep`. A step that broke is made anew, with the same faults to come."""

    def __init__(
        self,
        shape: Limits | None = None,
        *,
        reuse: bool = True,
        scale: float = 2.0,
        late: bool = False,
        recurrent: bool = False,
        window: int = 0,
        max_waiting: int = 1000,
        draft: Callable[[], HistoryStep] | None = None,
    ) -> None:
        """draft: makes a draft model's step, or that of a block of this model."""
        self.loop = Loop()
        self.made: list[HistoryStep] = []

        def make() -> HistoryStep:
            step = HistoryStep(shape or limits(), scale, late=late, recurrent=recurrent, window=window)
            if self.made:
                old = self.made[-1]
                step.fail, step.failing, step.turns, step.bad_tokens = old.fail, old.failing, old.turns, old.bad_tokens
                step.launches = old.launches
            step.streams = draft is not None
            self.made.append(step)
            return step

        def drafter() -> Drafter:
            assert draft is not None
            step = draft()
            if isinstance(step, BlockStep):
                return BlockDrafter(step, CacheRules(reuse=False), VOCABULARY)
            return Drafter(step, CacheRules(), VOCABULARY, VOCABULARY)

        rules = CacheRules(reuse, recurrent, window, rollback=recurrent and draft is not None)
        make_drafter = None if draft is None else drafter
        self.drafts = draft is not None
        self.loop.serve(make, VOCABULARY, rules, max_waiting=max_waiting, make_drafter=make_drafter)

    @property
    def step(self) -> HistoryStep:
        return self.made[-1]

    @property
    def engine(self) -> Engine:
        assert self.loop.engine is not None
        return self.loop.engine

    def start(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        service: Service = PLAIN,
    ) -> Stream:
        return start(self.loop, request(tokens, params, service=service, drafts=self.drafts), stream=stream)

    def generate(self, tokens: Sequence[int], params: SamplingParams | None = None, service: Service = PLAIN) -> Result:
        return self.start(tokens, params, stream=False, service=service).wait()

    def hold(self, steps: int = 0) -> Callable[[], None]:
        """Lets so many steps run, and further ones only once what it returns is called."""
        turns = self.step.turns = threading.Semaphore(steps)
        return lambda: turns.release(1000)

    def hold_until_cancelled(self, steps: int = 0) -> None:
        """Lets so many steps run, and further ones once something has been cancelled."""
        free, cancel = self.hold(steps), self.loop.cancel

        def cancel_and_free(*sequences: Any) -> None:
            cancel(*sequences)
            free()

        self.loop.cancel = cancel_and_free  # type: ignore[method-assign]

    def hold_until_closed(self, steps: int = 0) -> None:
        """Lets so many steps run, and further ones once the loop is to close."""
        free = self.hold(steps)

        def wait() -> None:
            while not self.loop._closing:  # its condition wakes one thread alone, the engine's
                time.sleep(1e-3)
            free()

        threading.Thread(target=wait, daemon=True).start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step begins within: what is started here is seen by the scheduler at once."""
        stopped, go = threading.Event(), threading.Event()

        def wait() -> None:
            stopped.set()
            assert go.wait(60)

        thread = threading.Thread(target=self.loop.run, args=(wait,))
        thread.start()
        assert stopped.wait(60)
        try:
            yield
        finally:
            go.set()
            thread.join()

    def assert_all_returned(self) -> None:
        """Every block is free but those of kept prefixes, and those go when they are asked to."""

        def look() -> None:
            scheduler = self.engine.scheduler
            assert not scheduler.running
            assert not scheduler.waiting
            cache = self.engine.cache
            cache.prefixes.clear()
            assert cache.pool.free == cache.pool.n_blocks
            assert cache.prefixes.kept == len(cache.prefixes) == len(cache.snapshots) == 0

        self.loop.run(look)

    def __enter__(self) -> Toy:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
