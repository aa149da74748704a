"""A model in a process of its own says what one in this process says, and leaves nobody waiting when it is gone."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

import quarrel
from quarrel.engine import Chunk, Histogram, Result, SamplingParams, Service, Stats, TokenLogprob
from quarrel.engine.queue import retry_after
from quarrel.errors import ContextOverflow, EngineLost, ModelNotFound, QuarrelError, QueueFull, RequestError
from quarrel.llm import LLM, LoadOptions, Model, Structure
from quarrel.process import RemoteLLM, open_remote, worker
from quarrel.process.values import chunk_of, chunk_row, plain, typed
from quarrel.server.rest import expert_shares
from tests.paths import need_cases
from tests.slowly import SLOW, started_with

T = TypeVar("T")
OPTIONS = LoadOptions(backend="cpu", threads=2, max_seqs=4, max_waiting=8)
LONG: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}


class Recorder:
    """What was sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, *message: object) -> None:
        self.sent.append(message)


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module", name="far")
def _far() -> Iterator[RemoteLLM]:
    made = open_remote("demo", OPTIONS)
    yield made
    made.close()
    assert not made.running


@pytest.fixture(scope="module", name="near")
def _near() -> Iterator[LLM]:
    with quarrel.load("demo", backend="cpu", threads=2, max_seqs=4) as made:
        yield made


ASKED: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "logprobs": 2, "seed": 4},
    {"prompt": "A king", "max_tokens": 2, "temperature": 0, "logprobs": 1, "prompt_logprobs": True, "n": 2, "seed": 1},
    {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "n": 3, "logit_bias": {9: -100.0, 8: 1.5}, "stop": ["the"]},
    {"messages": [{"role": "user", "content": "\U0001f600 a \u0000"}], "template": "chatml", "max_tokens": 4, "seed": 1},
    {"prompt": "A", "structure": Structure.regex("[0-9]{3}"), "service": Service(cache_salt="x"), "seed": 9},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda a: str(a)[:30])
@pytest.mark.parametrize("stream", [True, False])
def test_it_says_what_the_model_says(far: RemoteLLM, near: LLM, asked: dict[str, Any], stream: bool) -> None:
    async def said(llm: Model) -> tuple[list[Chunk], Result]:
        request = await asyncio.to_thread(lambda: llm.prepare(**asked))
        work = llm.submit(request, stream=stream)
        chunks = [c async for c in work]
        assert work.result is not None
        assert not asked.get("prompt_logprobs") or work.result.prompt_logprobs
        return sorted((replace(c, result=None) for c in chunks), key=lambda c: c.index), work.result

    def bare(result: Result) -> Result:
        return replace(result, timings=None, usage=None, alternatives=tuple(map(bare, result.alternatives)))  # type: ignore[arg-type]

    (chunks, there), (wanted, here) = go(said(far)), go(said(near))
    assert chunks == wanted
    assert bare(there) == bare(here)


def test_refusals_are_of_their_own_kind(far: RemoteLLM) -> None:
    for asked, kind in (
        ({"prompt": "word " * 2000}, ContextOverflow),
        ({"prompt": "a", "temperature": -1}, RequestError),
        ({"prompt": "a", "structure": Structure.regex("(")}, RequestError),
        ({"prompt": "a", "messages": []}, RequestError),
    ):
        with pytest.raises(kind):
            far.prepare(**asked)
    with pytest.raises(ModelNotFound):
        open_remote("/no/such.gguf", OPTIONS)

    async def too_many() -> None:
        streams = [far.submit(far.prepare("a", n=4, **LONG)) for _ in range(3)]
        with pytest.raises(QueueFull, match="12 requests run or wait already, of at most 12: try again in") as refusal:
            far.submit(far.prepare("a"))
        assert refusal.value.retry_after == retry_after(far.stats(), 1)
        for each in streams:
            await each.aclose()
        await asyncio.sleep(0)
        await far.submit(far.prepare("a", max_tokens=1)).wait()

    go(too_many())


def test_embeddings_counters_and_tokens(far: RemoteLLM, near: LLM) -> None:
    made = go(far.aembed(["a king", "a"], dimensions=8))
    wanted = near.embed(["a king", "a"], dimensions=8)
    np.testing.assert_array_equal(made.vectors, wanted.vectors)
    assert far.tokenize("The king") == near.tokenize("The king")
    assert far.explain().memory == near.explain().memory
    end = time.monotonic() + 60
    while not far.stats().steps and time.monotonic() < end:
        time.sleep(0.02)
    assert far.stats().ends["length"] == far.stats().ends.total() - far.stats().ends["cancelled"] - far.stats().ends["stop"]


def test_texts_are_saved_and_restored_there(far: RemoteLLM, near: LLM, tmp_path: Path) -> None:
    text = near.tokenize("Seven grey geese flew over the harbour")[1:]  # other texts begin with the same token
    near.generate(text, max_tokens=1)
    saved = near.prefixes.save(text, tmp_path / "here")
    assert far.prefixes.restore(tmp_path / "here") == (text, saved[1])
    assert far.prefixes.save(text, tmp_path / "there") == saved
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    far.prefixes.forget(text)
    with pytest.raises(RequestError, match="nothing of this text is in the cache any more"):
        far.prefixes.save(text, tmp_path / "more")


def test_the_load_of_experts_comes_over() -> None:
    far = open_remote(str(need_cases("qwen3moe", "model-q4_0x.gguf")), LoadOptions(backend="cpu", threads=1))
    try:

        async def work() -> None:
            await far.submit(far.prepare([1, 2, 3], max_tokens=4, ignore_eos=True)).wait()

        go(work())
        end = time.monotonic() + 60
        while not far.expert_counts() and time.monotonic() < end:
            time.sleep(0.05)
        assert all(sum(layer) > 0 for layer in far.expert_counts().values())
        assert sum(expert_shares(far)) == pytest.approx(1, abs=1e-3)
    finally:
        far.close()


def test_what_is_cancelled_or_dropped_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch, SLOW)
    far = open_remote("demo", OPTIONS)

    async def work() -> None:
        request = await asyncio.to_thread(lambda: far.prepare("Once", **LONG))
        stream = far.submit(request)
        await anext(stream)
        stream.cancel()
        result = await stream.wait()
        assert result.finish_reason == "cancelled"
        assert 1 <= result.usage.completion_tokens < 400
        dropped = far.submit(request)
        await anext(dropped)
        del dropped
        task = asyncio.create_task(far.aembed(["a king"] * 60))
        await asyncio.sleep(0.05)
        task.cancel()
        end = time.monotonic() + 30
        while (far.activity().running or far.activity().waiting) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert not far.activity().running
        assert not far._streams

    go(work())
    far.close()


def test_when_its_process_is_killed_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch, SLOW)
    far, told = open_remote("demo", OPTIONS), threading.Event()
    far.when_lost(told.set)

    async def work() -> None:
        stream = far.submit(far.prepare("Once", n=2, **LONG))
        whole = asyncio.create_task(far.submit(far.prepare("Once", **LONG), stream=False).wait())
        await anext(stream)
        vectors = asyncio.create_task(far.aembed(["a king"] * 50))
        await asyncio.sleep(0)
        os.kill(far.pid, signal.SIGKILL)
        for result in (await stream.wait(), await whole):
            assert isinstance(result.failure, EngineLost)
            assert "by signal 9" in str(result.failure)
        with pytest.raises(EngineLost):
            await vectors
        for call in (lambda: far.prepare("a"), lambda: far.submit(far_request)):
            with pytest.raises(EngineLost):
                call()

    far_request = far.prepare("a")
    go(work())
    assert told.wait(60)
    late = threading.Event()
    far.when_lost(late.set)
    assert late.is_set()
    far.close()


HANGS = """
import time
from quarrel.engine.engine import Engine
launch = Engine._launch
Engine._launch = lambda self, batch: time.sleep(99) if self.stats.steps > 40 else launch(self, batch)
"""
"""In a step, while the other threads go on."""


@pytest.mark.parametrize("how", ["hangs in a step", "stands still"])
def test_one_that_does_not_get_on_is_ended(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    started_with(monkeypatch, HANGS if how == "hangs in a step" else SLOW)
    far, told = open_remote("demo", OPTIONS, step_seconds=3.0), threading.Event()
    far.when_lost(told.set)

    async def work() -> Result:
        stream = far.submit(far.prepare("Once", **LONG))
        await anext(stream)
        if how == "stands still":
            os.kill(far.pid, signal.SIGSTOP)
        return await asyncio.wait_for(stream.wait(), 50)

    result = go(work())
    assert isinstance(result.failure, EngineLost)
    assert "made no progress for" in str(result.failure)
    assert told.wait(60)
    far.close()
    assert not far.running


def test_one_that_is_closed_cancels_and_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    started_with(monkeypatch, SLOW)
    far, told = open_remote("demo", OPTIONS), threading.Event()
    far.when_lost(told.set)

    async def work() -> None:
        stream = far.submit(far.prepare("Once", **LONG))
        await anext(stream)
        await asyncio.to_thread(far.close)
        assert (await stream.wait()).finish_reason == "cancelled"
        with pytest.raises(QuarrelError, match="the model is closed"):
            far.prepare("a")

    go(work())
    assert not told.is_set()
    assert not far.running


def test_its_methods_are_those_of_a_model_here() -> None:
    for name in ("prepare", "submit", "aembed", "tokenize", "detokenize", "explain", "stats", "activity", "expert_counts"):
        mine, theirs = inspect.signature(getattr(RemoteLLM, name)), inspect.signature(getattr(LLM, name))
        assert list(mine.parameters) == list(theirs.parameters), name


def test_values_come_over_as_they_are() -> None:
    params = SamplingParams(logit_bias={3: float("-inf")}, stop=("a",), seed=2**64 - 1, max_tokens=None)
    assert typed(SamplingParams, plain(params)) == params
    stats = Stats(steps=3)
    stats.ends["stop"] += 2
    stats.step_seconds.add(0.3)
    made = typed(Stats, plain(stats))
    assert (made.steps, made.ends, made.step_seconds.counts) == (3, stats.ends, stats.step_seconds.counts)
    assert isinstance(made.step_seconds, Histogram)
    for chunk in (Chunk("a"), Chunk("", read=9), Chunk("", 5, 2, TokenLogprob(5, -0.5, ((1, -1.0), (2, -2.0))))):
        assert chunk_of(chunk_row(7, chunk)) == chunk
    with pytest.raises(TypeError, match="cannot travel between processes"):
        typed(object, {})


class _JustEnded(dict[int, Any]):
    """Deliveries of which the engine's thread says that they have ended as soon as somebody looks whether they have not."""

    def __contains__(self, number: object) -> bool:
        return self.pop(number, None) is not None


class _Ending:
    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def test_what_ends_while_it_is_cancelled_ends_nothing_else() -> None:
    made = worker._Worker(LLM.__new__(LLM), cast("Any", Recorder()))
    ending = _Ending()
    made._running = _JustEnded({7: ending})
    made.handle(["cancel", 7])
    made.handle(["cancel", 8])
    assert ending.cancelled == 1
    made._events.close()


def test_a_call_that_is_taken_back_before_it_begins_leaves_nothing() -> None:
    made = worker._Worker(LLM.__new__(LLM), cast("Any", Recorder()))
    made.handle(["embed", 3, ["a"], {}, None])
    made.handle(["abort", 3])
    made._events.run_until_complete(asyncio.sleep(0.01))
    assert not made._calls
    made._events.close()
