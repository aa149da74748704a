"""Buckets on a clock of the test's own: what a caller may use, when it may come again, and what is forgotten of it."""

from __future__ import annotations

import pytest

from quarrel.server import Rates, limits
from quarrel.server.errors import Refused
from quarrel.server.limits import Limiter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def wait_of(limiter: Limiter, kind: str, cost: float, caller: str = "a") -> float:
    """Seconds that a charge has to wait; 0 where it was taken."""
    try:
        limiter.charge(caller, kind, cost)
    except Refused as refused:
        assert (refused.status, refused.code) == (429, "rate_limited")
        assert refused.retry_after is not None
        assert f"try again in {refused.retry_after:.1f} s" in str(refused)
        return refused.retry_after
    return 0.0


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    clock = Clock()
    limiter = Limiter(Rates(requests=60, prompt_tokens=600), clock)
    assert [wait_of(limiter, "requests", 1) for _ in range(61)] == [0.0] * 60 + [1.0]
    assert wait_of(limiter, "requests", 1, "b") == 0  # each caller has its own
    assert wait_of(limiter, "prompt_tokens", 590) == 0  # and each kind
    assert wait_of(limiter, "prompt_tokens", 20) == pytest.approx(1.0)
    assert wait_of(limiter, "output_tokens", 1e9) == 0  # which has no rate
    clock.now += 0.5
    assert wait_of(limiter, "requests", 1) == pytest.approx(0.5)
    clock.now += 0.5
    assert [wait_of(limiter, "requests", 1) for _ in range(2)] == [0.0, pytest.approx(1.0)]
    clock.now += 3600  # never more than a minute's worth
    assert [wait_of(limiter, "requests", 1) for _ in range(61)] == [0.0] * 60 + [1.0]


def test_what_costs_more_than_a_bucket_passes_when_it_is_full_and_leaves_a_debt() -> None:
    clock = Clock()
    limiter = Limiter(Rates(prompt_tokens=60), clock)
    assert wait_of(limiter, "prompt_tokens", 150) == 0
    assert wait_of(limiter, "prompt_tokens", 1) == pytest.approx(91)
    clock.now += 90
    assert wait_of(limiter, "prompt_tokens", 1) == pytest.approx(1)
    assert wait_of(limiter, "prompt_tokens", 150) == pytest.approx(60)


def test_what_was_not_used_comes_back_up_to_a_full_bucket() -> None:
    limiter = Limiter(Rates(output_tokens=60), Clock())
    limiter.refund("a", "requests", 5)  # without a rate there is nothing to give back
    assert wait_of(limiter, "output_tokens", 50) == 0
    limiter.refund("a", "output_tokens", 20)
    assert wait_of(limiter, "output_tokens", 31) == pytest.approx(1)
    limiter.refund("a", "output_tokens", -10)  # taken without a question
    assert wait_of(limiter, "output_tokens", 21) == pytest.approx(1)
    limiter.refund("a", "output_tokens", 1000)
    assert wait_of(limiter, "output_tokens", 60) == 0
    assert wait_of(limiter, "output_tokens", 1) == pytest.approx(1)


def test_places_for_requests_in_flight() -> None:
    limiter = Limiter(Rates(requests=0, streams=2), Clock())
    with limiter.stream("a"):
        with limiter.stream("a"), limiter.stream("b"):
            with (
                pytest.raises(Refused, match="2 requests are in flight already, of at most 2") as refused,
                limiter.stream("a"),
            ):
                pass
            assert (refused.value.status, refused.value.retry_after) == (429, 1.0)
        with pytest.raises(KeyError), limiter.stream("a"):  # one that failed gives its place back, too
            raise KeyError
        with limiter.stream("a"), pytest.raises(Refused), limiter.stream("a"):
            pass
    without = Limiter(Rates(streams=0), Clock())
    with without.stream("a"), without.stream("a"):
        pass


def test_callers_cannot_grow_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CALLERS", 3)
    limiter = Limiter(Rates(requests=1), Clock())
    with limiter.stream("held"):
        for caller in "abcd":
            assert wait_of(limiter, "requests", 1, caller) == 0
            assert wait_of(limiter, "requests", 1, caller) > 0
        assert len(limiter) == 3
        assert wait_of(limiter, "requests", 1, "c") > 0  # seen again: "d" is now the older
        assert wait_of(limiter, "requests", 1, "e") == 0
        assert wait_of(limiter, "requests", 1, "c") > 0
        assert wait_of(limiter, "requests", 1, "d") == 0  # forgotten, which gives it a full bucket again
        assert len(limiter) == 3
        with limiter.stream("held"):  # one with requests in flight is not
            assert limiter._callers["held"].streams == 2
