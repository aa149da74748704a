"""Requests of one conversation go to one replica, as long as it has room."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from quarrel.server.affinity import prefix_of, ranked, routed

SYSTEM = {"role": "system", "content": "You answer."}
FIRST = [SYSTEM, {"role": "user", "content": "How tall is a giraffe?"}]
LATER = [*FIRST, {"role": "assistant", "content": "Five metres."}, {"role": "user", "content": "And a house?"}]


def digest(**fields: Any) -> bytes | None:
    return prefix_of(json.dumps(fields).encode())


def test_turns_of_a_conversation_have_one_prefix_and_other_conversations_another() -> None:
    first = digest(model="m", messages=FIRST, temperature=1)
    assert first is not None
    assert digest(model="m", messages=LATER, stream=True) == first
    others = [
        digest(model="n", messages=FIRST),
        digest(model="m", messages=FIRST[1:]),
        digest(model="m", messages=[SYSTEM, {"role": "user", "content": "Hello"}]),
        digest(model="m", system="You answer.", messages=FIRST),
        digest(model="m", instructions="You answer.", input="How tall"),
        digest(model="m", input="How tall"),
        digest(model="m", prompt=[1, 2, 3]),
        digest(model="m", prompt=[1, 2, 4]),
    ]
    assert None not in others
    assert len({first, *others}) == len(others) + 1
    long = "x" * 2000
    assert digest(prompt=long + "a") == digest(prompt=long + "b")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"{}", b'{"messages": []}', b'{"prompt": null}', b"[" * 100_000, b"\xff\xfe"]
)
def test_a_body_without_a_prompt_has_no_prefix(body: bytes) -> None:
    assert prefix_of(body) is None


def test_hostile_bodies_have_some_prefix_or_none() -> None:
    for messages in (
        [1, 2],
        ["a"],
        [{"role": []}],
        [{"role": "user", "content": {"a": [None]}}],
        {"role": "user"},
        5,
        True,
    ):
        assert prefix_of(json.dumps({"messages": messages}).encode()) is not None


def test_a_replica_that_goes_moves_its_own_share_alone() -> None:
    names = [f"replica-{i}" for i in range(8)]
    prefixes = [i.to_bytes(16, "big") for i in range(2000)]
    before = {p: ranked(p, names)[0] for p in prefixes}
    shares = Counter(before.values())
    assert min(shares.values()) > 180
    assert max(shares.values()) < 320
    after = {p: ranked(p, names[:-1])[0] for p in prefixes}
    assert all(after[p] == before[p] for p in prefixes if before[p] != names[-1])


def test_a_replica_without_room_is_passed_over_and_the_least_loaded_comes_first_of_those() -> None:
    prefix = bytes(16)
    first, second, third = ranked(prefix, ["a", "b", "c"])
    assert routed(prefix, {first: 3, second: 0, third: 0}, room=4) == [first, second, third]
    assert routed(prefix, {first: 4, second: 0, third: 0}, room=4) == [second, third, first]
    assert routed(prefix, {first: 40, second: 38, third: 39}, room=4) == [first, second, third]  # all have about the same
    assert routed(prefix, {first: 90, second: 60, third: 0}, room=4)[:1] == [second]
    assert routed(prefix, {first: 9, second: 0, third: 9}, room=2) == [second, first, third]
    assert routed(prefix, {third: 9, second: 9, first: 9}, room=2) == [first, second, third]
    assert routed(prefix, {}, room=2) == []
