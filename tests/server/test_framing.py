"""Requests whose ends two servers could see in different places, and callers that vanish in the middle of one."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import time
from pathlib import Path

import pytest

from quarrel.server import Rates, Settings
from quarrel.server.connections import fault_of_head
from tests.server.conftest import Live, running

POST = b"POST /api/tokenize HTTP/1.1\r\nHost: localhost\r\n"
HIDDEN = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
BOTH = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (POST + BOTH + HIDDEN, b"400"),
        (b"POST /api/tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/1.1\nHost: localhost\n\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\n\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: y\rZ: a\r\n\r\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: y\r\n folded\r\n\r\n" + HIDDEN, b"400"),
        (b"GET /version HTTP/9.9\r\nHost: localhost\r\n\r\n" + HIDDEN, b"505"),
        (b"GET /version HTTP/0.9\r\nHost: localhost\r\n\r\n" + HIDDEN, b"505"),
    ],
)
def test_what_may_hide_a_second_request_is_refused_and_ends_the_connection(live: Live, raw: bytes, status: bytes) -> None:
    answer = live.raw(raw)
    assert answer.split(b" ")[1] == status
    assert answer.count(b"HTTP/1.1 ") == 1
    behind = live.raw(HIDDEN + raw)  # the second of a connection is looked at as well
    assert [part.split(b" ")[0] for part in behind.split(b"HTTP/1.1 ")[1:]] == [b"200", status]


def test_what_is_whole_passes(live: Live) -> None:
    body = b'{"text": "a\\n b"}\n\r \n'
    fine = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert live.raw(fine + chunked + fine + last).count(b"HTTP/1.1 200") == 4
    for cut in range(len(last)):  # in whatever pieces it comes
        assert fault_of_head(last[:cut]) == ""


def test_a_caller_that_vanishes_while_it_sends_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as made:
        for path in (b"/v1/completions", b"/api/tokenize", b"/v1/embeddings"):
            with socket.create_connection(("127.0.0.1", made.port)) as caller:
                caller.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{" % path)
                end = time.monotonic() + 60
            while path.decode() not in caplog.text:
                assert time.monotonic() < end
                made.client.get("/healthz")
        counted = made.client.get("/metrics").text
    assert 'status="500"' not in counted
    assert len([1 for line in counted.splitlines() if "requests_total" in line and 'status="499"' in line]) == 3
    assert "Traceback" not in caplog.text


def test_a_body_that_breaks_off_in_nonsense_is_refused_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Found by fuzz.http: a route that needs no body answered behind the refusal, which was a traceback in the log."""
    for path in (b"/healthz", b"/nowhere", b"/v1/completions"):
        answer = live.raw(b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" % path)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
    head = b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert live.raw(head + b"nonsense\r\n\r\n").count(b"HTTP/1.1 ") == 2  # found likewise: the second has a body again
    assert live.client.get("/healthz").status_code == 200
    assert "Traceback" not in caplog.text


def test_a_head_that_is_far_too_long_is_answered_and_then_dropped(live: Live) -> None:
    """Who still sends reads the answer, and no reset in its place."""
    for path, form in ((b"/v1/models", dict), (b"/api/models", dict)):
        with socket.create_connection(("127.0.0.1", live.port), timeout=20) as made:
            made.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + b"A: " + b"b" * 200_000 + b"\r\n\r\n")
            answer = b""
            while piece := made.recv(65536):
                answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert isinstance(json.loads(body)["error"], form)
        assert b"headers are over 32768 bytes" in body


def test_the_answer_before_a_head_that_is_too_long_arrives(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Both are answered in one turn of the loop."""
    answers = live.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nA: " + b"b" * 40_000)
    first, _, second = answers.partition(b"HTTP/1.1 431 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"headers are over 32768 bytes" in second
    assert "Exception in callback" not in caplog.text


def test_a_body_in_a_coding_is_refused_by_its_name(live: Live) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    for coding, status in (("gzip", 415), ("br", 415), ("identity", 400), ("", 400)):
        answer = live.client.post("/v1/completions", content=body, headers={"Content-Encoding": coding})
        assert answer.status_code == status
        assert status == 400 or coding in answer.json()["error"]["message"]


def test_http_1_0_has_no_host(live: Live) -> None:
    assert live.raw(b"GET /version HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert live.raw(b"GET /version HTTP/1.0\r\nHost: evil.example\r\n\r\n").startswith(b"HTTP/1.1 421")
    assert live.raw(b"GET /version HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_who_never_closes_after_a_head_that_is_too_long_is_closed(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, header_timeout=2.0, rates=Rates(requests=0))) as made:
        with socket.create_connection(("127.0.0.1", made.port), timeout=20) as kept:
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert kept.recv(65536).startswith(b"HTTP/1.1 200")
            kept.sendall(b"GET / HTTP/1.1\r\nA: " + b"b" * 40_000)
            answer = b""
            while piece := kept.recv(65536):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 431")
            end, closed = time.monotonic() + 20, False
            while not closed and time.monotonic() < end:
                time.sleep(0.01)
                try:
                    kept.sendall(b"b")
                except OSError:  # a reset, or a broken pipe
                    closed = True
            assert closed
