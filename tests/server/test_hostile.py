# ruff: noqa: E501
"""Every field of every generating route with every hostile value: 200 for what is in range, 400 for all else, never 5xx."""

from __future__ import annotations

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quarrel.server import body
from tests.server.conftest import Live

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1"

# Field: whether whole, lowest, highest, whether the lowest is out.
RANGES: dict[str, tuple[bool, float, float, bool]] = {
    "temperature": (False, 0, 100, False), "top_k": (True, -1, 2**31 - 1, False), "top_p": (False, 0, 1, False),
    "min_p": (False, 0, 1, False), "typical_p": (False, 0, 1, True), "seed": (True, -(2**63), 2**64 - 1, False),
    "presence_penalty": (False, -100, 100, False), "frequency_penalty": (False, -100, 100, False),
    "repetition_penalty": (False, 0, 100, True), "dry_multiplier": (False, 0, 100, False), "dry_base": (False, 1, 100, False),
    "dry_allowed_length": (True, 1, 2**31 - 1, False), "xtc_probability": (False, 0, 1, False),
    "xtc_threshold": (False, 0, 1, False), "mirostat_tau": (False, 0, 100, True), "mirostat_eta": (False, 0, 1, True),
    "top_n_sigma": (False, 0, 100, False), "dynatemp_range": (False, 0, 100, False),
    "dynatemp_exponent": (False, 0, 100, False), "adaptive_target": (False, -1, 1, False), "adaptive_decay": (False, 0, 0.99, False),
    "penalty_last_n": (True, -1, 2**31 - 1, False), "dry_last_n": (True, -1, 2**31 - 1, False), "repeat_penalty": (False, 0, 100, True),
    "repeat_last_n": (True, -1, 2**31 - 1, False), "dry_penalty_last_n": (True, -1, 2**31 - 1, False),
}  # fmt: skip
ONLY_V1 = {"n": (True, 1, 8, False)}
VALUES: list[Any] = [
    None, 5e-324, 0, 1, -1, 0.5, 1.0, 1.5, -0.5, 2, 5, 9, 100, 101, 1e-9, 1e9, 1e300, -1e300, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, True,
    False, "", "0.5", "1", "a" * 10_000, "\u0000", [], [1], {}, {"a": 1}, [[[]]], "NaN", "null", "\U0001f600",
    -(2**63), "1e5", [None],
]  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"prompt": "a"},
}


def in_range(value: Any, rule: tuple[bool, float, float, bool]) -> bool:
    whole, low, high, above = rule
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return low <= value <= high and not (above and value == low)


def test_what_is_in_range_is_served_and_all_else_refused(live: Live) -> None:
    tried = 0
    for route, base in ROUTES.items():
        rules = {**RANGES, **(ONLY_V1 if route.startswith("/v1") else {})}
        values = VALUES if EVERYTHING or route == "/v1/completions" else VALUES[::3]  # the same code serves them all
        for (field, rule), value in itertools.product(rules.items(), values):
            wanted = 200 if in_range(value, rule) else 400
            body = json.dumps({**base, "max_tokens": 1, field: value})
            answer = live.client.post(route, content=body)
            assert answer.status_code == wanted, (route, field, value, answer.status_code, answer.text[:300])
            tried += 1
    assert tried > 900


OTHERS: list[tuple[str, list[Any]]] = [
    ("stop", [5, [""], [1], ["a"] * 17, "", {"a": 1}, ["x" * 300], [None]]),
    ("stream", ["yes", 1, [], {}]),
    ("logit_bias", [[], "a", {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": 1e9}, {"1": None}, {"9" * 30: 1}, {"1.0": 1}]),
    ("logprobs", [-1, 21, 1.5, "many", [], {}]),
    ("response_format", ["json", {"type": "zap"}, {}, {"type": "json_schema", "json_schema": {"schema": 1}}]),
    ("stream_options", [1, [], {"include_usage": "x"}]),
    ("model", [5, [], {}, True]),
    ("prompt", [None, 5, {}, [], [[]], [None], [True], [1.5], [-1], [10**9], ["a", 1], [["a"]]]),
    ("n", [0, -1, 9, 1.5, "2", True]),
    ("max_tokens", [-1, 1.5, "5", True, [], 10**20]),
    ("echo", ["x", 2, []]),
]


def test_fields_of_other_shapes(live: Live) -> None:
    for field, values in OTHERS:
        for value in values:
            body = {"prompt": "a", "max_tokens": 1, field: value}
            answer = live.client.post("/v1/completions", content=json.dumps(body))
            assert answer.status_code == 400, (field, value, answer.status_code, answer.text[:300])


def test_names_of_fields_that_are_no_text(live: Live) -> None:
    """Found by fuzz.http: a name has no place that an error could tell, which was a 500."""
    for name in (b"\\ud802", b"a\\udd74", b"\\ud800udc00"):
        for at in (
            b'{"prompt": "a", "%b": 2}',
            b'{"prompt": "a", "stream_options": {"%b": 1}}',
            b'{"prompt": "a", "logit_bias": {"%b": 1}}',
        ):
            answer = live.client.post("/v1/completions", content=at % name)
            assert answer.status_code == 400, (at % name, answer.text)
            assert answer.json()["error"]["message"].endswith(
                ("wanted texts in UTF-8", "wanted a text in UTF-8", "wanted a whole number")
            )


@pytest.mark.parametrize("route", ["/api/generate", "/v1/completions", "/v1/messages"])
def test_half_a_character_in_the_name_of_a_model(live: Live, route: str) -> None:
    """The answer says which model is not there; of Ollama's words see `test_ollama.py`."""
    body = b'{"model": "a\\ud800", "prompt": "a", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}'
    answer = live.client.post(route, content=body)
    assert answer.status_code in (400, 404), answer.text
    assert "\\ud800" in answer.text


MESSAGES: list[Any] = [
    None, 5, {}, [], [None], ["a"], [{}], [{"role": "user"}, 1], [{"role": 5, "content": "a"}], [{"content": "a"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["a"]}], [{"role": "user", "content": "a" * 9000}],
    [{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "a", "tool_calls": 5}],
]  # fmt: skip


def test_messages_of_other_shapes(live: Live) -> None:
    for messages in MESSAGES:
        answer = live.client.post("/v1/chat/completions", content=json.dumps({"messages": messages, "max_tokens": 1}))
        assert answer.status_code == 400, (messages, answer.status_code, answer.text[:300])
    fine = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert live.client.post("/v1/chat/completions", json={"messages": fine, "max_tokens": 1}).status_code == 200


def test_raw_bytes_that_are_no_request(live: Live) -> None:
    for raw in (
        b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 100,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 9000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):  # fmt: skip
        answer = live.raw(raw, wait=0.4)
        assert not answer or answer.split(b" ")[1][:1] in (b"4",), (raw[:60], answer[:100])
    assert live.client.get("/healthz").status_code == 200


def test_a_large_body_is_read_beside_others(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, real = threading.Event(), threading.Event(), body.parse_body

    def slow(raw: bytes, *more: Any) -> Any:
        if len(raw) > body.LARGE:
            began.set()
            go.wait(60)
        return real(raw, *more)

    monkeypatch.setattr(body, "parse_body", slow)
    large = {"prompt": "a", "max_tokens": 1, "user": "x" * 2 * body.LARGE}
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(live.client.post, "/v1/completions", json=large) for _ in range(4)]
        try:
            assert began.wait(60)
            assert live.client.get("/healthz", timeout=20).status_code == 200
        finally:
            go.set()
        assert [a.result().status_code for a in answers] == [200] * 4
