"""Generation on a step whose tokens depend on the whole past: the same request gives the same tokens whatever else happens,
and every ending gives every block back."""

from __future__ import annotations

import queue
import random
import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from quarrel.engine import Chunk, Deliver, Result, Sampling, SamplingParams, Scoring, merged, rng, start
from quarrel.errors import EngineFault, QuarrelError
from quarrel.ops.sample import draw_token
from tests.engine.toys import STOP, VOCABULARY, Toy, extend, letter, limits, request

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]


def params(**options: Any) -> SamplingParams:
    return merged(GREEDY, options)  # type: ignore[arg-type]


def text_of(result: Result) -> str:
    return "".join(map(letter, result.token_ids))


def test_greedy_takes_the_best_token_each_time() -> None:
    with Toy() as toy:
        result = toy.generate(PROMPT, GREEDY)
        assert len(result.token_ids) == 12
        history = 0
        for token in PROMPT:
            history = extend(history, token)
        for token in result.token_ids:
            assert token == toy.step.logits(history, token).argmax()
            history = extend(history, token)
        assert result.text == text_of(result)
        assert (result.finish_reason, result.stopped_by, result.error) == ("length", None, None)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (5, 12, 0)
        assert result.usage.total_tokens == 17
        toy.assert_all_returned()


SETTINGS: list[Sampling] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_k": 5},
    {"temperature": 1.2, "seed": 3, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "mirostat": 2},
    {"temperature": 1.0, "seed": 6, "dry_multiplier": 1.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "xtc_probability": 0.5, "typical_p": 0.9},
]


@pytest.mark.parametrize("reuse", [True, False])
def test_in_a_batch_each_request_gets_the_tokens_that_it_gets_alone(reuse: bool) -> None:
    shape = limits(max_tokens=6, max_seqs=3, n_blocks=60)
    prompts = [random.Random(i).choices(range(1, VOCABULARY), k=1 + 5 * i) for i in range(len(SETTINGS))]
    alone = []
    for prompt, options in zip(prompts, SETTINGS):
        with Toy(shape, reuse=reuse) as toy:
            alone.append(toy.generate(prompt, merged(GREEDY, options)).token_ids)
    with Toy(shape, reuse=reuse) as toy:
        streams = [toy.start(p, merged(GREEDY, o)) for p, o in zip(prompts, SETTINGS)]
        assert [s.wait().token_ids for s in streams] == alone
        assert max(seqs for _, seqs in toy.step.sizes) == 3
        toy.assert_all_returned()


def test_chunked_prefill_gives_what_whole_prefill_gives() -> None:
    prompt = random.Random(1).choices(range(1, VOCABULARY), k=40)
    results = []
    for max_tokens in (4, 7, 64):
        with Toy(limits(max_tokens=max_tokens)) as toy:
            results.append(toy.generate(prompt, GREEDY).token_ids)
            assert toy.step.sizes[0] == (min(40, max_tokens), 1)
    assert results[0] == results[1] == results[2]


def test_a_conversation_that_goes_on_runs_only_what_is_new() -> None:
    with Toy() as toy, Toy(reuse=False) as fresh:
        first = toy.generate(PROMPT, GREEDY)
        longer = [*PROMPT, *first.token_ids, 9, 9]
        again = toy.generate(longer, GREEDY)
        assert again.usage.cached_tokens == 5 + 12 - 1  # the last token drawn never ran
        assert toy.step.sizes[12] == (3, 1)
        assert again.timings.prefill_tokens == 3
        assert again.token_ids == fresh.generate(longer, GREEDY).token_ids
        assert fresh.generate(longer, GREEDY).usage.cached_tokens == 0
        toy.assert_all_returned()


def test_the_same_prompt_again_runs_its_last_token_only() -> None:
    with Toy() as toy:
        first, again = toy.generate(PROMPT, GREEDY), toy.generate(PROMPT, GREEDY)
        assert again.usage.cached_tokens == 4
        assert again.token_ids == first.token_ids


def test_a_branch_reuses_what_it_shares_and_spoils_nothing() -> None:
    with Toy(limits(n_blocks=60)) as toy, Toy(reuse=False) as fresh:
        toy.generate(PROMPT, GREEDY)
        for branch, known in (([*PROMPT, 8], 5), ([*PROMPT[:3], 8, 8], 3), (PROMPT, 4), ([7], 0), ([7, 8], 1)):
            result = toy.generate(branch, GREEDY)
            assert result.token_ids == fresh.generate(branch, GREEDY).token_ids
            assert result.usage.cached_tokens == known
        toy.assert_all_returned()


def test_kept_prefixes_make_room_for_new_requests() -> None:
    with Toy(limits(n_ctx=32, n_blocks=9)) as toy, Toy(limits(n_ctx=32), reuse=False) as fresh:
        for first in range(1, 9):
            prompt = [first] * 15
            assert toy.generate(prompt, GREEDY).token_ids == fresh.generate(prompt, GREEDY).token_ids
        toy.assert_all_returned()


def test_a_stop_token_ends_and_is_no_part() -> None:
    with Toy() as toy:
        free = toy.generate(PROMPT, GREEDY)
        stop = free.token_ids[4]
        at = free.token_ids.index(stop)
        result = toy.generate(PROMPT, params(stop_token_ids=[stop]))
        assert result.token_ids == free.token_ids[:at]
        assert (result.finish_reason, result.stopped_by) == ("stop", stop)
        assert result.usage.completion_tokens == at
        toy.assert_all_returned()


def test_the_model_s_own_stop_token_ends_unless_it_is_ignored() -> None:
    seeds = range(60)
    with Toy(scale=0.5) as toy:
        results = [toy.generate(PROMPT, params(temperature=1, top_p=1, top_k=0, min_p=0, seed=s)) for s in seeds]
        seed, ignoring = next((r.seed, r) for r in results if STOP in r.token_ids)
        assert ignoring.finish_reason == "length"
        stopped = toy.generate(PROMPT, params(temperature=1, top_p=1, top_k=0, min_p=0, seed=seed, ignore_eos=False))
        assert stopped.token_ids == ignoring.token_ids[: ignoring.token_ids.index(STOP)]
        assert stopped.stopped_by == STOP


def test_before_min_tokens_nothing_stops_it() -> None:
    with Toy() as toy:
        free = toy.generate(PROMPT, GREEDY)
        stop = free.token_ids[0]
        result = toy.generate(PROMPT, params(stop_token_ids=[stop], min_tokens=5))
        assert len(result.token_ids) >= 5
        assert stop not in result.token_ids[:5]
        early = letter(free.token_ids[1])
        assert toy.generate(PROMPT, params(stop=early)).text == letter(free.token_ids[0])
        assert len(toy.generate(PROMPT, params(stop=early, min_tokens=6)).token_ids) >= 6


def test_a_stop_string_across_tokens_ends_and_is_not_shown() -> None:
    with Toy() as toy:
        free = toy.generate(PROMPT, GREEDY).text
        stream = toy.start(PROMPT, params(stop=[free[5:8]]))
        chunks = list(stream)
        result = stream.result
        assert result is not None
        at = free.find(free[5:8])
        assert result.text == free[:at] == "".join(c.text for c in chunks)
        assert (result.finish_reason, result.stopped_by) == ("stop", free[5:8])
        assert len(result.token_ids) == at + 3
        toy.assert_all_returned()


def test_what_a_decoder_holds_behind_a_stop_string_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first bytes of a character in the token whose text ended with the stop."""
    monkeypatch.setattr("tests.engine.toys._LetterDetokenizer.flush", lambda self: "half")
    with Toy() as toy:
        free = toy.generate(PROMPT, GREEDY).text
        assert free.endswith("half")
        assert toy.generate(PROMPT, params(stop=[free[5:8]])).text == free[: free.find(free[5:8])]


def test_what_was_held_back_for_a_stop_that_never_came_is_shown_at_the_end() -> None:
    with Toy() as toy:
        free = toy.generate(PROMPT, GREEDY)
        held = toy.generate(PROMPT, params(stop=[free.text[-2:] + "never"]))
        assert (held.text, held.finish_reason) == (free.text, "length")


def test_chunks_add_up_to_the_result() -> None:
    with Toy() as toy:
        stream = toy.start(PROMPT, params(logprobs=1))
        chunks = list(stream)
        result = stream.result
        assert result is not None
        assert "".join(c.text for c in chunks) == result.text
        assert tuple(c.token_id for c in chunks if c.token_id is not None) == result.token_ids
        assert tuple(c.logprob for c in chunks if c.logprob is not None) == result.logprobs
        assert [c.result for c in chunks] == [None] * (len(chunks) - 1) + [result]
        assert next(stream, None) is None


def test_log_probabilities_are_those_of_the_tokens() -> None:
    with Toy() as toy:
        result = toy.generate(PROMPT, params(logprobs=2))
        assert result.logprobs is not None
        assert [p.token_id for p in result.logprobs] == list(result.token_ids)
        for token, p in zip(result.token_ids, result.logprobs):
            assert p.top[0] == (token, p.logprob)  # greedy
            assert p.top[1][1] <= p.logprob < 0
        assert set(toy.step.wants) == {"logprobs"}
        assert toy.generate(PROMPT, GREEDY).logprobs is None


def test_a_draw_s_number_is_that_of_its_position_in_the_text() -> None:
    plain = params(temperature=1.0, top_k=0, top_p=1, min_p=0, seed=9, max_tokens=3)
    with Toy() as toy:
        drawn = toy.generate(PROMPT, plain).token_ids
        history = 0
        for i, token in enumerate([*PROMPT, *drawn]):
            if i >= len(PROMPT):
                assert token == draw_token(toy.step.logits(history, 0), 1.0, 0, 1.0, 0.0, rng.uniform(9, i))
            history = extend(history, token)


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    with Toy() as toy:
        drawn = [toy.generate(PROMPT, params(temperature=1.0, seed=s)).token_ids for s in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


def test_host_and_device_draw_the_same_tokens_by_the_same_seed() -> None:
    with Toy() as toy:
        device = toy.generate(PROMPT, params(temperature=1.0, seed=5))
        host = toy.generate(PROMPT, params(temperature=1.0, seed=5, dry_multiplier=1.0, dry_allowed_length=1 << 30))
        assert device.token_ids == host.token_ids
        assert {"tokens", "logits"} == set(toy.step.wants)


def test_host_and_device_tell_the_same_log_probabilities() -> None:
    asked = params(temperature=1.0, seed=5, logprobs=20)
    with Toy() as toy:
        device, host = (
            toy.generate(PROMPT, asked),
            toy.generate(PROMPT, replace(asked, dry_multiplier=1.0, dry_allowed_length=1 << 30)),
        )
        assert {"logprobs", "logits"} == set(toy.step.wants)
        assert device.token_ids == host.token_ids
        assert device.logprobs is not None
        assert host.logprobs is not None
        for ours, wanted in zip(device.logprobs, host.logprobs, strict=True):
            assert (ours.token_id, [id for id, _ in ours.top]) == (wanted.token_id, [id for id, _ in wanted.top])
            numbers = [[p.logprob, *(value for _, value in p.top)] for p in (ours, wanted)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
            assert len(ours.top) == 20


def test_log_probabilities_are_the_same_beside_those_who_ask_for_none_and_those_drawn_here() -> None:
    asked = params(temperature=1.0, seed=5, logprobs=3)
    with Toy() as toy:
        alone = toy.generate(PROMPT, asked).logprobs
        free = toy.hold()
        others = (GREEDY, params(dry_multiplier=1.0, dry_allowed_length=1 << 30))
        streams = [toy.start(PROMPT, p) for p in (others[0], asked, others[1])]
        free()
        assert [s.wait().logprobs for s in streams] == [None, alone, None]
        assert "all" in toy.step.wants


def test_alternatives_share_the_prompt_and_differ_by_seed() -> None:
    with Toy(limits(n_blocks=80)) as toy:
        result = toy.generate(PROMPT, params(temperature=1.0, seed=5, n=3))
        everyone = [result, *result.alternatives]
        assert len({r.token_ids for r in everyone}) == 3
        assert [r.seed for r in everyone] == [rng.alternative_seed(5, i) for i in range(3)]
        assert [r.usage.cached_tokens for r in everyone] == [0, 4, 4]
        alone = [toy.generate(PROMPT, params(temperature=1.0, seed=r.seed)).token_ids for r in everyone]
        assert alone == [r.token_ids for r in everyone]
        chunks = list(toy.start(PROMPT, params(temperature=1.0, seed=5, n=3)))
        for i, r in enumerate(everyone):
            assert tuple(c.token_id for c in chunks if c.index == i and c.token_id is not None) == r.token_ids
        toy.assert_all_returned()


def test_the_context_ends_a_continuation_by_length() -> None:
    with Toy() as toy:
        result = toy.generate([1] * 60, params(max_tokens=None))
        assert (len(result.token_ids), result.finish_reason) == (4, "length")
        assert len(toy.generate([1] * 60, params(max_tokens=100)).token_ids) == 4
        assert toy.generate([1] * 64, GREEDY).token_ids == ()
        assert toy.generate([1] * 63, GREEDY).finish_reason == "length"
        toy.assert_all_returned()


def test_zero_tokens_only_fill_the_cache() -> None:
    with Toy() as toy:
        result = toy.generate(PROMPT, params(max_tokens=0))
        assert (result.text, result.finish_reason) == ("", "length")
        assert toy.generate(PROMPT, GREEDY).usage.cached_tokens == 4


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"dry_multiplier": 1.0, "dry_allowed_length": 1 << 30}])
def test_where_no_token_can_be_drawn_that_request_alone_fails(options: Sampling) -> None:
    with Toy() as toy:
        healthy = toy.generate([5, 5], GREEDY).token_ids
        toy.step.bad_tokens = {40}
        streams = [toy.start(p, merged(GREEDY, options)) for p in ([5, 5], [5, 40], [5, 5])]
        results = [s.wait() for s in streams]
        assert [r.finish_reason for r in results] == ["length", "error", "length"]
        assert results[1].error is not None
        assert "no token can be drawn" in results[1].error
        assert results[0].token_ids == healthy
        toy.assert_all_returned()


def test_banning_every_token_fails_with_a_sentence() -> None:
    with Toy() as toy:
        ban = dict.fromkeys(range(VOCABULARY), -float("inf"))
        result = toy.generate(PROMPT, params(logit_bias=ban))
        assert result.finish_reason == "error"
        assert result.error is not None
        assert "logit_bias" in result.error


def test_a_token_outside_the_vocabulary_is_the_backend_s_fault() -> None:
    with Toy() as toy:
        toy.step.forced = VOCABULARY
        result = toy.generate(PROMPT, GREEDY)
        assert result.error is not None
        assert "a fault in the backend" in result.error


def test_a_step_that_fails_ends_its_batch_and_the_next_one_runs() -> None:
    with Toy() as toy:
        toy.step.fail = QuarrelError("the device is on fire; use another")
        first = toy.generate(PROMPT, GREEDY)
        assert (first.finish_reason, first.error) == ("error", "the device is on fire; use another")
        toy.step.fail = ZeroDivisionError("x / 0")
        result = toy.generate(PROMPT, GREEDY)
        assert result.error == "the step failed: ZeroDivisionError: x / 0"
        assert isinstance(result.failure, EngineFault)
        toy.step.fail = None
        free = toy.hold(3)
        stream = toy.start(PROMPT, GREEDY)
        next(stream)
        toy.step.fail = QuarrelError("late")
        free()
        assert stream.wait().error == "late"
        toy.step.fail = None
        after = toy.generate(PROMPT, GREEDY)
        assert after.finish_reason == "length"
        assert after.usage.cached_tokens == 0  # what the broken step left is not trusted
        toy.assert_all_returned()


def test_a_sink_that_raises_harms_nobody_else() -> None:
    from quarrel.engine.generation import Generation

    def sink(chunk: Chunk) -> None:
        raise RuntimeError("nobody listens")

    with Toy() as toy:
        toy.loop.add(Generation(request(PROMPT, GREEDY), 0, sink, stream=True))
        assert toy.generate([5, 5], GREEDY).finish_reason == "length"
        toy.assert_all_returned()


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancelling_ends_with_what_there_is(after: int) -> None:
    with Toy() as toy:
        whole = toy.generate(PROMPT, params(max_tokens=50))
        free = toy.hold(after)
        stream = toy.start(PROMPT, params(max_tokens=50))
        for _ in range(after):
            next(stream)
        stream.cancel()
        free()
        result = stream.wait()
        assert result.finish_reason == "cancelled"
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert after <= len(result.token_ids) < 50
        toy.assert_all_returned()


def test_one_who_waits_can_be_cancelled() -> None:
    with Toy(limits(max_seqs=1)) as toy:
        free = toy.hold()
        first, second, third = (toy.start([i], GREEDY) for i in (1, 2, 3))
        second.cancel()
        free()
        assert [s.wait().finish_reason for s in (first, second, third)] == ["length", "cancelled", "length"]
        assert second.result is not None
        assert second.result.token_ids == ()
        toy.assert_all_returned()


def test_closing_leaving_or_dropping_a_stream_cancels_it() -> None:
    with Toy() as toy:
        toy.hold_until_cancelled()
        stream = toy.start(PROMPT, params(max_tokens=50))
        stream.close()
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"
        stream.close()
        toy.hold_until_cancelled()
        with toy.start(PROMPT, params(max_tokens=50)) as inner:
            pass
        assert inner.result is not None
        assert inner.result.finish_reason == "cancelled"
        free = toy.hold()
        dropped = toy.start(PROMPT, params(max_tokens=50))
        sequence = dropped._sequences[0]
        del dropped
        free()
        toy.generate([1], GREEDY)
        toy.assert_all_returned()
        assert sequence.finished
        assert sequence.generated < 50


def test_an_interrupt_while_waiting_cancels() -> None:
    with Toy() as toy:
        free = toy.hold()
        stream = toy.start(PROMPT, GREEDY)
        real, stream._chunks = stream._chunks, Mock(get=Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.wait()
        stream._chunks = real
        free()
        for _ in stream:
            pass
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"


def test_cancelling_what_is_over_changes_nothing() -> None:
    with Toy() as toy:
        stream = toy.start(PROMPT, GREEDY)
        result = stream.wait()
        toy.loop.cancel(*stream._sequences)
        stream.cancel()
        assert stream.result is result
        toy.assert_all_returned()


def test_closing_the_loop_ends_what_runs_and_waits_and_frees_the_step_once() -> None:
    toy = Toy(limits(max_seqs=1))
    toy.hold_until_closed()
    streams = [toy.start([i], params(max_tokens=50)) for i in range(1, 4)]
    toy.loop.close()
    assert [s.wait().finish_reason for s in streams] == ["cancelled"] * 3
    assert toy.step.closed == 1
    assert toy.engine.cache.pool.free == toy.step.limits.n_blocks
    toy.loop.close()
    with pytest.raises(QuarrelError, match="the model is closed"):
        toy.start([1], GREEDY)


def test_who_comes_while_it_closes_is_told_and_a_program_that_never_closes_can_end() -> None:
    with Toy() as toy:
        free = toy.hold()
        first = toy.start([1], GREEDY)
        while not toy.engine.scheduler.running:
            time.sleep(0.001)
        late = toy.start([2], GREEDY)  # heard of behind the step that runs
        toy.loop.close(timeout=0)
        free()
        assert [s.wait().finish_reason for s in (first, late)] == ["cancelled"] * 2
        assert toy.loop._thread.daemon


def test_many_threads_get_what_they_get_alone() -> None:
    with Toy(limits(max_tokens=8, max_seqs=4, n_blocks=100)) as toy:
        prompts = [[i, i + 1, 7] for i in range(1, 25)]
        alone = [toy.generate(p, GREEDY).token_ids for p in prompts]
        found: dict[int, tuple[int, ...]] = {}

        def work(i: int) -> None:
            found[i] = toy.generate(prompts[i], GREEDY).token_ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(len(prompts))] == alone
        toy.assert_all_returned()


def test_an_engine_that_breaks_leaves_nobody_waiting() -> None:
    with Toy() as toy:
        with toy.paused():
            streams = [toy.start(PROMPT, params(max_tokens=50)), toy.start([1], GREEDY)]
            toy.engine.scheduler.next = lambda: 1 / 0  # type: ignore[assignment, return-value, method-assign]
        results = [s.wait() for s in streams]
        assert [r.finish_reason for r in results] == ["error", "error"]
        assert "internal error" in str(results[0].error)
        toy.loop.close()
        with pytest.raises(QuarrelError, match="internal error"):
            toy.start([1], GREEDY)


class Rows(Deliver):
    """Hidden rows of a `HistoryStep`: a hash and the token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.starts: list[int] = []
        self.ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def rows(self, start: int, rows: Any) -> None:
        self.starts.append(start)
        self.tokens += [int(t) for _, t in rows]

    def end(self, failure: QuarrelError | None) -> None:
        self.ended.put(None if failure is None else str(failure))


def test_texts_scored_together_get_their_own_rows() -> None:
    with Toy(limits(max_tokens=10)) as toy:
        free = toy.hold()
        texts = [[5, 6, 7], list(range(20)), [8]]
        found = [Rows() for _ in texts]
        toy.loop.add(*(Scoring(text, "hidden", rows) for text, rows in zip(texts, found)))
        free()
        assert [rows.ended.get(timeout=60) for rows in found] == [None] * 3
        assert [rows.tokens for rows in found] == texts
        assert found[1].starts[0] == 0
        assert len(found[1].starts) > 1
        toy.assert_all_returned()


def test_texts_that_run_whole_are_never_cut_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.engine.engine.ROW_BUDGET", 8 * VOCABULARY)
    with Toy(limits(max_tokens=10)) as toy:
        texts = [list(range(n)) for n in (7, 10, 1, 2, 1, 4, 6)]
        found = [Rows() for _ in texts]
        toy.loop.add(*(Scoring(text, "hidden", rows, whole=True) for text, rows in zip(texts, found)))
        assert [rows.ended.get(timeout=60) for rows in found] == [None] * len(texts)
        assert [rows.tokens for rows in found] == texts
        assert [rows.starts for rows in found] == [[0]] * len(texts)
        assert toy.step.sizes == [(10, 3), (10, 1), (5, 2), (6, 1)]
        toy.assert_all_returned()


def test_scoring_can_be_cancelled_and_can_fail() -> None:
    with Toy() as toy:
        rows = [Rows(), Rows()]
        runs = [Scoring(range(40), "hidden", r) for r in rows]
        with toy.paused():
            toy.loop.add(*runs)
            toy.loop.cancel(runs[0])
        assert [r.ended.get(timeout=60) for r in rows] == ["the run was cancelled", None]
        assert [r.tokens for r in rows] == [[], list(range(40))]
        toy.step.fail = QuarrelError("late")
        late = Rows()
        toy.loop.add(Scoring([1], "hidden", late))
        assert late.ended.get(timeout=60) == "late"
        toy.assert_all_returned()


def test_times_are_measured() -> None:
    with Toy() as toy:
        t = toy.generate(PROMPT, GREEDY).timings
        assert min(t.queued, t.prefill, t.decode) > 0
        assert (t.prefill_tokens, t.decode_tokens) == (5, 11)
        assert t.decode_rate == pytest.approx(11 / t.decode)
        assert t.prefill_rate == pytest.approx(5 / t.prefill)


def test_activity_is_told() -> None:
    with Toy(limits(max_seqs=2)) as toy:
        free = toy.hold()
        streams = [toy.start([i], params(max_tokens=2)) for i in (1, 2, 3)]
        free()
        for stream in streams:
            stream.wait()
        activity = toy.loop.run(toy.engine.activity)
        assert (activity.running, activity.waiting, activity.n_blocks) == (0, 0, 40)
        assert activity.kept_blocks == 3
        assert activity.free_blocks == 37


def test_continuations_of_different_requests_can_be_started_at_once() -> None:
    with Toy() as toy:
        one, two = (start(toy.loop, request([i], GREEDY), stream=False) for i in (1, 2))
        assert one.wait().token_ids != two.wait().token_ids
