"""Limits that servers count together, against fakeredis over TCP on a clock of the tests; without it each for itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from quarrel.errors import ConfigError
from quarrel.server import Rates, Settings, shared_limits
from quarrel.server.errors import Refused
from quarrel.server.limits import Limiter
from quarrel.server.shared_limits import Limits
from tests.server.conftest import running

fakeredis = pytest.importorskip("fakeredis", reason="fakeredis is not installed: shared limits are not tried")


class Store:
    """A store on a port of its own, which can be stopped and started again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fakeredis.commands_mixins import server_mixin

        self.now = 1000.0
        monkeypatch.setattr(server_mixin, "time", SimpleNamespace(time=lambda: self.now))
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._server = fakeredis.TcpFakeServer(("127.0.0.1", self.port))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(shared_limits, "SECONDS", 60.0)  # a busy machine is no store that is gone
    made = Store(monkeypatch)
    yield made
    made.stop()


async def wait_of(limits: Limits, kind: str, cost: float, caller: str = "a") -> float:
    """Seconds that a charge has to wait; 0 where it was taken."""
    try:
        await limits.charge(caller, kind, cost)
    except Refused as refused:
        assert (refused.status, refused.code) == (429, "rate_limited")
        assert refused.retry_after is not None
        return refused.retry_after
    return 0.0


def two(store: Store, rates: Rates, seconds: float = 300.0) -> list[Limits]:
    """Of two servers. What each counts for itself lets more through than both may: its clock is far ahead."""
    clock = iter(range(0, 1 << 40, 1 << 20)).__next__
    return [Limits(rates, store.url, seconds, Limiter(rates, clock)) for _ in range(2)]


def test_servers_share_a_callers_buckets(store: Store) -> None:
    async def work() -> None:
        one, other = both = two(store, Rates(requests=60, prompt_tokens=600, output_tokens=0))
        taken = [await wait_of(both[i % 2], "requests", 1) for i in range(61)]
        assert taken == [0.0] * 60 + [pytest.approx(1.0)]
        assert await wait_of(other, "requests", 1, "b") == 0  # each caller has its own
        assert await wait_of(one, "prompt_tokens", 590) == 0  # and each kind
        assert await wait_of(other, "prompt_tokens", 20) == pytest.approx(1.0)
        assert await wait_of(other, "output_tokens", 1e9) == 0  # which has no rate
        store.now += 0.5
        assert await wait_of(other, "requests", 1) == pytest.approx(0.5)
        store.now += 0.5
        assert [await wait_of(limits, "requests", 1) for limits in both] == [0.0, pytest.approx(1.0)]
        store.now += 3600  # never more than a minute's worth
        assert [await wait_of(both[i % 2], "requests", 1) for i in range(61)][-2:] == [0.0, pytest.approx(1.0)]
        store.now -= 1000  # a clock that is set back takes nothing away
        assert await wait_of(one, "requests", 1) == pytest.approx(1.0)
        for limits in both:
            await limits.close()

    asyncio.run(work())


def test_what_was_not_used_comes_back_and_a_debt_waits_for_all(store: Store) -> None:
    async def work() -> None:
        one, other = both = two(store, Rates(output_tokens=60))
        assert await wait_of(one, "output_tokens", 150) == 0  # more than a bucket: passes when it is full
        assert await wait_of(other, "output_tokens", 1) == pytest.approx(91)
        one.refund("a", "output_tokens", 120)
        await one.close()
        assert await wait_of(other, "output_tokens", 30) == 0
        other.refund("a", "output_tokens", -60)  # taken without a question
        await other.close()
        assert await wait_of(one, "output_tokens", 1) == pytest.approx(61)
        one.refund("a", "output_tokens", 1e6)  # up to a full bucket
        await one.close()
        assert [await wait_of(limits, "output_tokens", 60) for limits in (other, one)] == [0, pytest.approx(60)]
        for limits in both:
            await limits.close()

    asyncio.run(work())


def test_places_in_flight_are_shared_and_those_of_a_dead_server_are_given_up(store: Store) -> None:
    async def work() -> None:
        one, other = both = two(store, Rates(requests=0, streams=2), seconds=50)
        async with one.stream("a"), other.stream("a"), other.stream("b"):
            with pytest.raises(Refused, match="2 requests are in flight already, of at most 2"):
                async with other.stream("a"):
                    pass
        await asyncio.gather(*(limits.close() for limits in both))
        async with AsyncExitStack() as dead:
            for _ in range(2):
                await dead.enter_async_context(one.stream("a"))
            store.now += 49
            with pytest.raises(Refused):
                async with other.stream("a"):
                    pass
            store.now += 2
            async with other.stream("a"):
                pass
        await asyncio.gather(*(limits.close() for limits in both))

    asyncio.run(work())


def test_without_the_store_each_counts_for_itself_and_says_so_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        rates = Rates(requests=2, output_tokens=100, streams=1)
        one, other = both = [Limits(rates, store.url, local=Limiter(rates, lambda: 0.0)) for _ in range(2)]
        assert [await wait_of(limits, "requests", 1) for limits in both] == [0, 0]
        store.stop()
        for _ in range(3):
            async with one.stream("a"):
                one.refund("a", "output_tokens", 5)
        assert [await wait_of(one, "requests", 1) for _ in range(2)] == [0, 30]  # one was taken here before
        await one.close()
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "the store of shared limits is gone, and this server counts for itself" in caplog.text
        store.start()  # and has forgotten everything
        monkeypatch.setattr(one, "_back", 0.0)
        assert await wait_of(one, "requests", 1, "c") == 0
        assert await wait_of(other, "requests", 2, "c") > 0
        assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
        for limits in both:
            await limits.close()

    with caplog.at_level(logging.INFO, "quarrel.server"):
        asyncio.run(work())


def test_a_store_that_says_nothing_holds_no_request_up_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_limits, "SECONDS", 0.05)
    monkeypatch.setattr(shared_limits, "PAUSE", 1e6)
    waited = []

    async def work() -> None:
        rates = Rates(requests=100)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            limits = Limits(rates, f"redis://127.0.0.1:{silent.getsockname()[1]}", local=Limiter(rates, lambda: 0.0))
            ask = limits._store.eval

            async def counted(*words: Any) -> Any:
                waited.append(words)
                return await ask(*words)

            monkeypatch.setattr(limits._store, "eval", counted)
            for _ in range(20):
                await limits.charge("a", "requests", 1)
            await limits.close()

    asyncio.run(work())
    assert len(waited) == 1
    assert len(caplog.records) == 1


def test_two_servers_over_http_refuse_what_both_have_let_through(store: Store, tmp_path: Any) -> None:
    settings = Settings(data_dir=tmp_path, rates=Rates(requests=5), shared_limits=store.url)
    with running(settings) as one, running(settings) as other:
        answers = [(one, other)[i % 2].client.get("/v1/models") for i in range(7)]
        assert [a.status_code for a in answers] == [200] * 5 + [429] * 2
        assert int(answers[-1].headers["retry-after"]) in (12, 13)
        assert one.client.get("/healthz").status_code == 200


@pytest.mark.parametrize("url", ["http://a", "redis://h:x/0", "redis://h/0?foo=1", "nothing", "redis://h?db=x"])
def test_an_address_that_is_none_is_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="the store of shared limits is no address .*wanted redis://HOST:PORT/DATABASE"):
        Limits(Rates(), url)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(Rates(), "valkeys://cache:6379/1")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    Limits(Rates())  # without a store nothing is needed
    with pytest.raises(ConfigError, match=r"need the package redis: pip install 'longbow-quarrel\[redis\]'"):
        Limits(Rates(), "redis://cache")
