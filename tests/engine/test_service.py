"""How requests are served: launched ahead or not, ranked, timed, refused, guessed for, and through faults; the tokens are
always those that the request gets alone."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from quarrel.engine import Chunk, SamplingParams, Service, start
from quarrel.engine.generation import Generation
from quarrel.engine.queue import retry_after
from quarrel.engine.speculate import MAX_PAUSE, Lookup
from quarrel.engine.stats import Stats
from quarrel.errors import DeadlineExceeded, Diverged, EngineFault, QuarrelError, QueueFull, RequestError
from tests.engine.simulation import drawn, extend, history_of
from tests.engine.toys import VOCABULARY, Toy, letter, limits, request

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=3, max_tokens=12, ignore_eos=True)
HOST = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, dry_multiplier=1.0, dry_allowed_length=1 << 30)
TOLD = SamplingParams(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPT = [3, 1, 4, 1, 5]


def alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    with Toy(reuse=False) as toy:
        return toy.generate(prompt, params).token_ids


def test_the_next_step_is_launched_before_the_last_one_is_over() -> None:
    with Toy(late=True) as toy:
        everyone = list(enumerate((GREEDY, DRAWN, TOLD, GREEDY)))
        results = [toy.start([i, *PROMPT], p) for i, p in everyone]
        assert [r.wait().token_ids for r in results] == [alone([i, *PROMPT], p) for i, p in everyone]
        assert toy.step.most_flying == 2
        assert set(toy.step.wants) <= {"tokens", "logprobs"}
        toy.assert_all_returned()


def test_one_who_stops_is_in_one_step_too_many_and_no_more() -> None:
    stop = alone(PROMPT, GREEDY)[6]
    with Toy(late=True) as toy:
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], ignore_eos=True)
        result = toy.generate(PROMPT, params)
        assert result.token_ids == alone(PROMPT, GREEDY)[:6]
        toy.generate([7], GREEDY)
        assert toy.made[0].sizes[:8] == [(5, 1)] + [(1, 1)] * 7
        # The stop token itself has run, so a conversation that goes on behind it begins there.
        again = toy.generate([*PROMPT, *result.token_ids, stop, 9], GREEDY)
        assert again.usage.cached_tokens == 5 + 6 + 1
        assert again.token_ids == alone([*PROMPT, *result.token_ids, stop, 9], GREEDY)
        toy.assert_all_returned()


def test_what_ends_by_length_runs_no_step_too_many() -> None:
    with Toy(late=True) as toy:
        toy.generate(PROMPT, GREEDY)
        assert len(toy.step.sizes) == 12


@pytest.mark.parametrize("late", [False, True])
def test_host_and_device_draws_share_each_step(late: bool) -> None:
    with Toy(late=late) as toy:
        free = toy.hold()
        streams = [toy.start([i, *PROMPT], p) for i, p in enumerate((DRAWN, HOST, GREEDY))]
        free()
        assert [s.wait().token_ids for s in streams] == [
            alone([i, *PROMPT], p) for i, p in enumerate((DRAWN, HOST, GREEDY))
        ]
        assert "both" in toy.step.wants
        assert len(toy.step.wants) <= 16  # 12 draws, and a few more until all three are in
        toy.assert_all_returned()


@pytest.mark.parametrize("late", [False, True])
def test_a_recurrent_model_goes_on_where_a_turn_ended(late: bool) -> None:
    with Toy(limits(n_states=12), recurrent=True, late=late) as toy, Toy(recurrent=True, reuse=False) as fresh:
        first = toy.generate(PROMPT, GREEDY)
        longer = [*PROMPT, *first.token_ids, 9, 9]
        again = toy.generate(longer, GREEDY)
        assert again.usage.cached_tokens == 5 + 12 - 1  # the last token drawn never ran
        assert again.token_ids == fresh.generate(longer, GREEDY).token_ids
        # From the end of the first prompt, where the answer is another one.
        other = toy.generate([*PROMPT, 8, 8], GREEDY)
        assert other.usage.cached_tokens == 5
        assert other.token_ids == fresh.generate([*PROMPT, 8, 8], GREEDY).token_ids
        forked = toy.generate(PROMPT[::-1], SamplingParams(temperature=1, seed=1, n=3, max_tokens=5))
        assert [r.usage.cached_tokens for r in (forked, *forked.alternatives)] == [0, 4, 4]
        toy.assert_all_returned()


def test_a_recurrent_model_without_room_for_copies_begins_again() -> None:
    with Toy(recurrent=True) as toy:
        assert toy.generate(PROMPT, GREEDY).token_ids == toy.generate(PROMPT, GREEDY).token_ids
        assert toy.generate(PROMPT, GREEDY).usage.cached_tokens == 0
        toy.assert_all_returned()


def test_behind_a_window_blocks_are_given_back() -> None:
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with Toy(limits(n_blocks=20), window=6, reuse=False) as toy:
        free = toy.hold(30)
        stream = toy.start(PROMPT, long)
        for _ in range(29):
            next(stream)
        used = toy.step.limits.n_blocks - toy.engine.cache.pool.free
        free()
        assert used <= 4
        assert stream.wait().finish_reason == "length"
        toy.assert_all_returned()


def test_with_few_blocks_some_are_preempted_and_get_the_same_tokens() -> None:
    prompts = [[i, *PROMPT] for i in range(6)]
    long = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    with Toy(limits(n_blocks=20)) as toy:
        with toy.paused():
            streams = [toy.start(p, long) for p in prompts]
        assert [s.wait().token_ids for s in streams] == [alone(p, long) for p in prompts]
        assert toy.engine.scheduler.preempted
        toy.assert_all_returned()


def test_callers_with_salts_of_their_own_share_nothing() -> None:
    with Toy() as toy:
        one, two = Service(cache_salt="one"), Service(cache_salt="two")
        assert [toy.generate(PROMPT, GREEDY, s).usage.cached_tokens for s in (one, two, one)] == [0, 0, 4]


def test_a_request_that_waits_too_long_fails_with_its_own_type() -> None:
    with Toy(limits(max_seqs=1)) as toy:
        free = toy.hold()
        first = toy.start(PROMPT, GREEDY)
        late = toy.start([1], GREEDY, service=Service(queue_seconds=0.01))
        patient = toy.start([2], GREEDY)
        threading.Timer(0.1, free).start()
        result = late.wait()
        assert result.finish_reason == "error"
        assert isinstance(result.failure, DeadlineExceeded)
        assert "had not begun" in str(result.error)
        assert [s.wait().finish_reason for s in (first, patient)] == ["length", "length"]
        toy.assert_all_returned()


def test_a_deadline_counts_while_a_step_keeps_the_engine_from_seeing_the_request() -> None:
    with Toy() as toy:
        with toy.paused():
            stream = toy.start(PROMPT, GREEDY, service=Service(queue_seconds=0.02))
            time.sleep(0.04)
        assert isinstance(stream.wait().failure, DeadlineExceeded)
        toy.assert_all_returned()


def test_a_request_that_takes_too_long_keeps_what_it_has() -> None:
    with Toy() as toy:
        free = toy.hold(3)
        stream = toy.start(PROMPT, GREEDY, service=Service(total_seconds=0.5))
        threading.Timer(0.8, free).start()
        result = stream.wait()
        assert isinstance(result.failure, DeadlineExceeded)
        assert result.token_ids == alone(PROMPT, GREEDY)[: len(result.token_ids)]
        assert 3 <= len(result.token_ids) < 12
        toy.assert_all_returned()


def test_a_full_queue_refuses_with_a_hint_and_takes_again() -> None:
    with Toy(limits(max_seqs=1), max_waiting=2) as toy:
        free = toy.hold()
        streams = [toy.start([i], GREEDY) for i in range(3)]
        with pytest.raises(QueueFull, match="3 requests run or wait already, of at most 3") as refusal:
            toy.start([9], GREEDY)
        assert 0 < refusal.value.retry_after <= 60
        assert f"try again in {refusal.value.retry_after:.2g} seconds" in str(refusal.value)
        free()
        assert [s.wait().finish_reason for s in streams] == ["length"] * 3
        assert toy.generate([9], GREEDY).finish_reason == "length"
        with pytest.raises(QueueFull):
            toy.start([9], SamplingParams(n=4))  # all of them or none
        toy.assert_all_returned()


@pytest.mark.parametrize(("interval", "missing", "after"), [(0, 1, 1), (2, 3, 6), (1e-9, 1, 0.05), (50, 2, 60), (2, -5, 2)])
def test_the_time_to_come_back_has_bounds(interval: float, missing: int, after: float) -> None:
    assert retry_after(Stats(end_interval=interval), missing) == after


def test_two_models_have_two_clocks() -> None:
    with Toy(limits(max_seqs=1), max_waiting=1) as fast, Toy(limits(max_seqs=1), max_waiting=1) as slow:
        after = []
        for toy, interval in ((fast, 0.25), (slow, 8.0)):
            free = toy.hold()
            streams = [toy.start([i], GREEDY) for i in range(2)]
            toy.engine.stats.end_interval = interval
            with pytest.raises(QueueFull) as refusal:
                toy.start([9], SamplingParams(n=2))
            after.append(refusal.value.retry_after)
            free()
            assert [s.wait().finish_reason for s in streams] == ["length"] * 2
        assert after == [0.5, 16.0]


def test_time_without_requests_does_not_count() -> None:
    stats = Stats()
    stats.ended(10.0, submitted=7.0)
    assert stats.end_interval == 3.0
    stats.ended(1010.0, submitted=1007.0)
    assert stats.end_interval == pytest.approx(3.0)
    stats.ended(1011.0, submitted=1007.0)
    assert stats.end_interval == pytest.approx(2.8)


def test_two_thousand_at_once_are_served_in_little_memory() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with Toy(limits(max_tokens=128, max_seqs=64, n_blocks=400), max_waiting=2000) as toy:
        row = np.arange(VOCABULARY, dtype=np.float32)
        toy.step.logits = lambda history, last: row  # type: ignore[method-assign]
        done: list[Chunk] = []
        everyone = threading.Semaphore(0)

        def sink(chunk: Chunk) -> None:
            done.append(chunk)
            everyone.release()

        def round_of(count: int) -> int:
            free = toy.hold()
            for i in range(count):
                toy.loop.add(Generation(request([i % 40, i % 7, 3], params), 0, sink, stream=False))
            assert toy.loop.places.used == count
            free()
            for _ in range(count):
                assert everyone.acquire(timeout=60)
            done.clear()
            toy.assert_all_returned()
            gc.collect()  # what a round leaves for the collector differs by 100 KB
            return tracemalloc.get_traced_memory()[0]

        round_of(200)
        tracemalloc.start()
        try:
            first, second = round_of(2000), round_of(1000)
        finally:
            tracemalloc.stop()
        assert second - first < 200_000


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["exception", "memory", "refused"])
def test_a_step_that_breaks_now_and_then_loses_only_who_is_in_it(kind: str, late: bool) -> None:
    faults: dict[str, Exception] = {
        "exception": RuntimeError("the device"),
        "memory": MemoryError(),
        "refused": QuarrelError("refused"),
    }
    prompts = [[i, *PROMPT] for i in range(40)]
    wanted = [alone(p, GREEDY) for p in prompts]
    with Toy(limits(max_seqs=3, n_blocks=60), late=late) as toy:
        toy.step.failing = lambda launch: faults[kind] if launch % 17 == 0 else None
        streams = [toy.start(p, GREEDY) for p in prompts]
        results = [s.wait() for s in streams]
        lost = [r for r in results if r.finish_reason == "error"]
        assert all(r.token_ids == w for r, w in zip(results, wanted) if r.finish_reason == "length")
        assert len(lost) + sum(r.finish_reason == "length" for r in results) == len(prompts)
        if kind == "memory" and not late:
            assert not lost
        else:
            assert lost
            assert len(lost) <= 3 * toy.engine.stats.faults
        if kind == "exception":
            assert {type(r.failure) for r in lost} == {EngineFault}
            assert len(toy.made) == 1 + toy.engine.stats.restarts > 1
            assert all(step.closed for step in toy.made[:-1])
        toy.assert_all_returned()


def test_a_device_that_is_gone_for_good_ends_the_engine_with_a_sentence() -> None:
    with Toy() as toy:
        toy.step.fail = RuntimeError("no such device")
        for _ in range(3):
            assert isinstance(toy.generate(PROMPT, GREEDY).failure, EngineFault)
        toy.generate(PROMPT, GREEDY)
        toy.loop.close()
        with pytest.raises(QuarrelError, match="internal error"):
            toy.generate(PROMPT, GREEDY)


@pytest.mark.parametrize("params", [GREEDY, HOST])
@pytest.mark.parametrize("late", [False, True])
def test_a_row_without_numbers_fails_one_request_and_is_not_reused(params: SamplingParams, late: bool) -> None:
    with Toy(limits(n_blocks=60), late=late) as toy:
        toy.step.bad_tokens = {40}
        prompts = [[5, 5, 5, 5, 5], [5, 5, 5, 5, 40], [6]]
        results = [s.wait() for s in [toy.start(p, params) for p in prompts]]
        assert [r.finish_reason for r in results] == ["length", "error", "length"]
        assert isinstance(results[1].failure, Diverged)
        toy.step.bad_tokens = set()
        assert toy.generate([*prompts[1], 7], params).token_ids == alone([*prompts[1], 7], params)
        toy.assert_all_returned()


class Parrot:
    """A text whose continuation is easy to guess: the step says the alphabet over and over."""

    def __init__(self, toy: Toy) -> None:
        made = toy.step.logits

        def logits(history: int, last: int) -> Any:
            row = made(history, last) * 0.01
            row[last % 26 + 1] += 9.0
            return row

        toy.step.logits = logits  # type: ignore[method-assign]


@pytest.mark.parametrize("params", [GREEDY, DRAWN, HOST])
@pytest.mark.parametrize("late", [False, True])
def test_guessing_changes_no_token_and_saves_steps(params: SamplingParams, late: bool) -> None:
    prompt = [*range(1, 27), *range(1, 5)]
    found = []
    for guesses in (0, 6):
        with Toy(late=late) as toy:
            Parrot(toy)
            result = toy.generate(prompt, params, Service(speculate=guesses))
            found.append((result.token_ids, result.text, len(toy.step.sizes)))
            if guesses and params is not DRAWN:
                assert toy.engine.stats.right_tokens >= 8
            again = toy.generate([*prompt, *result.token_ids, 3], params, Service(speculate=guesses))
            assert again.usage.cached_tokens == len(prompt) + len(result.token_ids) - 1
            toy.assert_all_returned()
    assert found[0][:2] == found[1][:2]
    assert found[0][2] - found[1][2] >= (6 if params is not DRAWN else 0)
    assert found[0][1].startswith("".join(map(letter, range(5, 8))))


def test_a_guess_is_what_followed_the_last_time() -> None:
    lookup = Lookup(4)
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert lookup.draft(text, 9) == [4, 5, 6, 1]
    assert lookup.draft(text, 2) == [4, 5]
    lookup.observe(0)
    assert lookup.draft(text, 9) == ()
    assert lookup.draft(text, 9) == [4, 5, 6, 1]
    for _ in range(20):
        lookup.observe(0)
    assert [lookup.draft(text, 1) for _ in range(MAX_PAUSE + 1)] == [()] * MAX_PAUSE + [[4]]
    assert Lookup(4).draft([1, 2, 3], 4) == ()
    assert Lookup(4).draft([7, 7, 7, 7], 4) == [7]


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "soon"},
        {"queue_seconds": 0},
        {"queue_seconds": float("nan")},
        {"total_seconds": True},
        {"total_seconds": 1e9},
        {"cache_salt": 5},
        {"cache_salt": "x" * 300},
        {"speculate": -1},
        {"speculate": 17},
        {"speculate": True},
    ],
)
def test_a_service_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        Service(**options)


def test_the_simulation_s_hashes_are_a_chain() -> None:
    assert history_of([1, 2]) == extend(extend(0, 1), 2)
    assert drawn(5 << 20, 0.0, True) == 5


def test_several_continuations_may_be_started_in_one_call() -> None:
    with Toy() as toy:
        stream = start(toy.loop, request(PROMPT, SamplingParams(n=2, seed=1, max_tokens=3)), stream=False)
        assert len(stream.wait().alternatives) == 1


def test_a_prompt_that_is_read_in_parts_says_how_far_it_is_where_that_is_wanted() -> None:
    prompt = [1 + i % 7 for i in range(20)]
    with Toy(limits(max_tokens=8)) as toy:
        for service, wanted in ((Service(progress=True), [8, 16, 20]), (Service(), [])):
            chunks = list(toy.start([len(wanted), *prompt[1:]], GREEDY, service=service))
            assert [c.read for c in chunks if c.read] == wanted
            assert [c.token_id for c in chunks if not c.read and c.result is None] != []
        toy.assert_all_returned()
    with pytest.raises(RequestError, match="progress is 1"):
        Service(progress=1)  # type: ignore[arg-type]
