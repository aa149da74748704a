"""Things that meet: put out and guided, forked and cancelled, guessed for and asked for log probabilities. Whatever it is,
a request gets what it gets alone."""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quarrel.engine import CacheRules, Chunk, Engine, Result, SamplingParams, Scoring, Service, Stream, start
from quarrel.engine.generation import Generation
from tests.engine.simulation import Simulation
from tests.engine.test_engine import Rows
from tests.engine.toys import VOCABULARY, HistoryStep, Toy, limits, request

PROMPT = [3, 1, 4, 1, 5]
LONG = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
GUESSED = Service(speculate=4, draft=4)


class Steps:
    """A grammar: each token is 1 to 5 more than the one before, in a circle of 40; behind 30 tokens nothing follows."""

    ends: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.last, self.taken = 0, 0

    def allowed(self) -> npt.NDArray[Any]:
        mask = np.zeros(VOCABULARY, bool)
        mask[[1 + (self.last + i) % 40 for i in range(1, 6)]] = True
        return mask

    def take(self, token: int) -> bool:
        assert self.allowed()[token]
        self.last, self.taken = token - 1, self.taken + 1
        return self.taken == 30


def begin(toy: Toy, prompt: Sequence[int], params: SamplingParams, guided: bool, service: Service) -> Stream:
    asked = request(prompt, params, service=service, drafts=toy.drafts)
    return start(toy.loop, replace(asked, guide=Steps if guided else None), stream=False)


def facts(result: Result) -> list[tuple[Any, ...]]:
    return [(r.text, r.token_ids, r.finish_reason, r.logprobs, r.stopped_by) for r in (result, *result.alternatives)]


CASES: dict[str, tuple[SamplingParams, bool]] = {
    "seeded": (LONG, False),
    "log probabilities": (replace(LONG, logprobs=3), False),
    "mirostat": (replace(LONG, mirostat=2), False),
    "repetition": (replace(LONG, dry_multiplier=1.0, presence_penalty=0.5, penalty_last_n=-1), False),
    "stop text": (replace(LONG, stop=("ab", "ĠĤ", "qq")), False),
    "forked": (replace(LONG, n=2), False),
    "grammar": (LONG, True),
    "grammar, forked, log probabilities": (replace(LONG, n=2, logprobs=1, temperature=0.0), True),
}


@pytest.mark.parametrize("case", CASES)
def test_preempted_or_guessed_for_everyone_gets_what_he_gets_alone(case: str) -> None:
    params, guided = CASES[case]
    prompts = [[i, *PROMPT] for i in range(4)]
    with Toy(limits(n_blocks=60), reuse=False) as toy:
        alone = [facts(begin(toy, p, params, guided, Service()).wait()) for p in prompts]
    with Toy(limits(n_blocks=20), late=True) as toy:
        with toy.paused():
            streams = [begin(toy, p, params, guided, Service()) for p in prompts]
        assert [facts(s.wait()) for s in streams] == alone
        assert toy.engine.scheduler.preempted
        toy.assert_all_returned()
    with Toy(limits(max_tokens=32, n_blocks=24), late=True, draft=lambda: HistoryStep(limits(), late=True)) as toy:
        with toy.paused():
            streams = [begin(toy, p, params, guided, GUESSED) for p in prompts]
        assert [facts(s.wait()) for s in streams] == alone
        assert toy.engine.scheduler.preempted
        assert toy.engine.stats.drafted_tokens
        toy.assert_all_returned()


def test_cancelled_behind_any_step_a_request_leaves_nothing_and_changes_nothing_for_others() -> None:
    """A fork, one that is guessed for, one that waits; each is cancelled in turn, after every number of steps."""
    asked = [
        request(PROMPT, replace(LONG, n=2, max_tokens=6)),
        request([7, *PROMPT, *PROMPT], replace(LONG, max_tokens=8), service=GUESSED),
        request([8, 8, 8], replace(LONG, max_tokens=8, logprobs=1), service=Service(priority="batch")),
    ]

    def run(victim: int, after: int) -> tuple[list[tuple[int, ...]], int, bool]:
        engine = Engine(lambda: HistoryStep(limits(n_blocks=8, max_seqs=3), late=True), VOCABULARY, CacheRules())
        results: list[list[Result]] = []
        everyone: list[Generation] = []
        for one in asked:
            results.append([])

            def sink(chunk: Chunk, told: list[Result] = results[-1]) -> None:
                assert chunk.result is not None
                told.append(chunk.result)

            everyone += [Generation(one, i, sink, stream=False) for i in range(one.params.n)]
        for sequence in everyone:
            engine.add(sequence)
        for _ in range(after):
            engine.advance()
        was_over = victim < 0 or everyone[victim].finished
        if victim >= 0:
            engine.cancel(everyone[victim])
            assert not everyone[victim].cache.blocks
            held = {b for s in engine.scheduler.running for b in s.cache.blocks} | {
                n.block for n in engine.cache.prefixes.nodes()
            }
            assert engine.cache.pool.free == engine.cache.pool.n_blocks - len(held)
        steps = after
        while engine.advance():
            steps += 1
        engine.cache.prefixes.clear()
        assert engine.cache.pool.free == engine.cache.pool.n_blocks
        assert [len(told) for told in results] == [one.params.n for one in asked]
        return [tuple(s.tokens) for s in everyone], steps, was_over

    whole, steps, _ = run(-1, 0)
    cut = Counter[int]()
    for victim in range(4):
        for after in range(steps):
            found, _, was_over = run(victim, after)
            assert all(found[i] == whole[i] for i in range(4) if i != victim)
            assert whole[victim][: len(found[victim])] == found[victim]
            assert found[victim] == whole[victim] or not was_over
            cut[victim] += not was_over
    assert min(cut[victim] for victim in range(4)) >= 6


def test_prompt_scores_neither_take_nor_leave_anything_in_the_cache() -> None:
    with Toy() as toy:
        text = list(range(1, 20))

        def rows() -> list[int]:
            found = Rows()
            toy.loop.add(Scoring(text, "hidden", found))
            assert found.ended.get(timeout=60) is None
            return found.tokens

        before = rows()
        assert toy.generate(text, LONG).usage.cached_tokens == 0
        assert toy.generate([*text, 5], LONG).usage.cached_tokens == len(text)
        hits = toy.engine.cache.hits
        assert rows() == before == text
        assert toy.engine.cache.hits == hits
        toy.assert_all_returned()


def held(root: object) -> int:
    """How many objects `root` leads to, and entries in their containers."""
    seen: dict[int, object] = {}
    left = [root]
    while left:
        value = left.pop()
        # Functions and classes lead to all that there is.
        if id(value) in seen or isinstance(value, type | random.Random) or callable(value):
            continue
        seen[id(value)] = value
        left += gc.get_referents(value)
    return sum(1 + len(v) for v in seen.values() if isinstance(v, list | dict | set | deque | tuple))


@pytest.mark.parametrize("seed", [3, 5, 10])
def test_a_long_load_leaves_no_more_than_a_short_one(seed: int) -> None:
    """By request, block, prefix, deadline, outcome or guess: when all are over, nothing has grown."""

    def after(steps: int) -> int:
        simulation = Simulation(seed, faults=0.003)
        simulation.run(steps)
        engine = simulation.engine
        # What is over may be held for a while in three places, by so many at most.
        assert len(engine._deadlines) <= 64 + 2 * 4 * simulation.at_most
        assert len(engine.scheduler.waiting._heap) <= 64
        engine._deadlines.clear()
        engine.scheduler.waiting._heap.clear()
        engine._inputs._slot_owners.clear()
        return held(engine)

    assert after(2000) <= after(300) + 100


def test_what_a_step_in_flight_may_be_writing_is_told_from_the_rest() -> None:
    engine = Engine(lambda: HistoryStep(limits(), late=True), VOCABULARY, CacheRules())
    generation = Generation(request(PROMPT, replace(LONG, max_tokens=3)), 0, lambda chunk: None, stream=False)
    engine.add(generation)
    assert not engine.computes([0])
    engine.advance()
    own = list(generation.cache.blocks)
    others = sorted({*range(engine.cache.pool.n_blocks)} - {*own})
    assert engine.computes(own[:1])
    assert engine.computes([*others, own[-1]])
    assert not engine.computes(others)
    engine.cancel(generation)  # whose blocks are anybody's now, and a step with them in flight
    assert engine.computes(others)
    engine.finish()
    assert not engine.computes(own)
    engine.close()
