"""The same from an event loop: chunks arrive while other tasks run, and cancelling a task stops its work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from quarrel.engine import AsyncStream, SamplingParams, start_async
from tests.engine.toys import Toy, request

T = TypeVar("T")
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPT = [3, 1, 4]


def test_a_job_returns_or_raises_to_who_sent_it() -> None:
    def broken() -> None:
        raise KeyError("mine")

    with Toy() as toy:
        assert toy.loop.run(lambda: 5) == 5
        answered = threading.Event()

        def ask() -> None:
            with pytest.raises(KeyError, match="mine"):
                toy.loop.run(broken)
            answered.set()

        threading.Thread(target=ask, daemon=True).start()
        assert answered.wait(60)
        assert toy.loop.run(threading.current_thread).name == "quarrel-engine"  # which lives on
        assert toy.loop.run(toy.loop.phase.read)[0] == "stepping"
        until = time.monotonic() + 60
        while toy.loop.phase.read()[0] != "idle":
            assert time.monotonic() < until
            time.sleep(0.001)
        assert toy.loop.fault is None


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def open_stream(toy: Toy, params: SamplingParams = LONG) -> AsyncStream:
    return start_async(toy.loop, request(PROMPT, params), stream=True)


def test_chunks_come_as_they_come_without_a_loop() -> None:
    async def work(toy: Toy) -> None:
        stream = open_stream(toy)
        chunks = [chunk async for chunk in stream]
        wanted = toy.generate(PROMPT, LONG)
        assert tuple(c.token_id for c in chunks) == wanted.token_ids
        assert stream.result is not None
        assert stream.result.text == wanted.text == "".join(c.text for c in chunks)

    with Toy() as toy:
        go(work(toy))


def test_tasks_share_the_engine() -> None:
    async def work(toy: Toy) -> list[tuple[int, ...]]:
        return [r.token_ids for r in await asyncio.gather(*(open_stream(toy).wait() for _ in range(5)))]

    with Toy() as toy:
        assert len(set(go(work(toy)))) == 1
        toy.assert_all_returned()


def test_an_event_loop_is_called_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(toy: Toy) -> int:
        events, calls = asyncio.get_running_loop(), 0
        call = events.call_soon_threadsafe

        def counted(*args: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return call(*args)

        monkeypatch.setattr(events, "call_soon_threadsafe", counted)
        free = toy.hold()  # until all four are there: one that came late would take further steps
        streams = [open_stream(toy) for _ in range(4)]
        free()
        await asyncio.gather(*(stream.wait() for stream in streams))
        return calls

    with Toy() as toy:
        assert 40 <= go(work(toy)) <= toy.engine.stats.steps + 1 < 60  # not 160


@pytest.mark.parametrize("chunks", [0, 3])
def test_cancelling_the_task_stops_the_work(chunks: int) -> None:
    streams: list[AsyncStream] = []

    async def read(toy: Toy, ready: asyncio.Event) -> None:
        streams.append(open_stream(toy))
        for _ in range(chunks):
            await anext(streams[0])
        ready.set()
        async for _ in streams[0]:
            pass

    async def work(toy: Toy) -> None:
        ready, free = asyncio.Event(), toy.hold(chunks)
        task = asyncio.create_task(read(toy, ready))
        await ready.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        free()
        result = await streams[0].wait()
        assert result.finish_reason == "cancelled"
        assert chunks <= len(result.token_ids) < 40

    with Toy() as toy:
        go(work(toy))
        toy.assert_all_returned()


def test_leaving_the_block_cancels() -> None:
    async def work(toy: Toy) -> None:
        toy.hold_until_cancelled(1)
        async with open_stream(toy) as stream:
            await anext(stream)
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"

    with Toy() as toy:
        go(work(toy))
        toy.assert_all_returned()


def test_a_dropped_stream_stops() -> None:
    async def work(toy: Toy) -> None:
        free = toy.hold(1)
        stream = open_stream(toy)
        await anext(stream)
        sequence = stream._work.sequences[0]
        del stream
        free()
        await start_async(toy.loop, request([1], LONG), stream=False).wait()
        assert sequence.finished
        assert sequence.generated < 40

    with Toy() as toy:
        go(work(toy))
        toy.assert_all_returned()


def test_an_event_loop_that_is_gone_stops_the_work_and_hurts_nobody() -> None:
    async def leave(toy: Toy) -> AsyncStream:
        return open_stream(toy)

    with Toy() as toy:
        free = toy.hold()
        stream = go(leave(toy))
        free()
        assert toy.generate([1], LONG).finish_reason == "length"
        assert stream._work.sequences[0].finished
        toy.assert_all_returned()


@pytest.mark.parametrize(("broken", "reason"), [(False, "cancelled"), (True, "error")])
def test_an_engine_that_ends_tells_those_who_wait(broken: bool, reason: str) -> None:
    async def work(toy: Toy) -> None:
        if broken:
            free = toy.hold(2)
        else:
            toy.hold_until_closed(2)
        stream = open_stream(toy)
        await anext(stream)
        if broken:
            toy.engine.scheduler.next = lambda **_: 1 / 0  # type: ignore[assignment, return-value, method-assign]
            free()
        else:
            await asyncio.to_thread(toy.loop.close)
        result = await asyncio.wait_for(stream.wait(), 10)
        assert result.finish_reason == reason
        assert 0 < len(result.token_ids) < 40

    with Toy() as toy:
        go(work(toy))
