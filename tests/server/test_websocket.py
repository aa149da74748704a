"""The WebSocket: the page's messages, one request among others, and hostile frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from quarrel.engine import Chunk
from quarrel.server import Keyring, Rates, Settings, answers
from quarrel.server import websocket as server_socket
from quarrel.server.dispatch import Generation
from quarrel.server.errors import Refused
from tests.server.conftest import Live, running
from tests.slowly import step_slowly


def address(live: Live) -> str:
    return f"ws://127.0.0.1:{live.port}/ws"


def test_a_plain_request_is_told_to_upgrade(live: Live) -> None:
    answer = live.client.get("/ws")
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert "is a WebSocket" in answer.json()["error"]["message"]


def say(socket: ClientConnection, kind: str, **payload: Any) -> None:
    socket.send(json.dumps({"type": kind, "payload": payload}))


def hear(socket: ClientConnection, kind: str, timeout: float = 10) -> dict[str, Any]:
    """The next message of a kind."""
    end = time.monotonic() + timeout
    while True:
        message = json.loads(socket.recv(timeout=max(0.01, end - time.monotonic())))
        if message["type"] == kind:
            payload: dict[str, Any] = message["payload"]
            return payload


def test_a_greeting_then_tokens_then_the_end(live: Live) -> None:
    with connect(address(live)) as socket:
        assert hear(socket, "status") == {"connected": True, "models": ["demo"]}
        say(socket, "inference", prompt="Once upon a time", topk=5, topp=0.9, max_tokens=6, temperature=0, stream=True)
        assert hear(socket, "status")["state"] in ("loading", "generating")
        rows = []
        while not rows or not rows[-1]["complete"]:
            rows.append(hear(socket, "inference"))
        assert len({r["request_id"] for r in rows}) == 1
        assert [r["token_id"] is not None for r in rows].count(True) == 6
        assert rows[-1]["finish_reason"] == "length"
        whole = live.client.post("/api/generate", json={"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0})
        assert "".join(r["token"] for r in rows) == whole.json()["text"]


def test_stop_ends_one_request_and_not_the_connection(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.02)
    with connect(address(live)) as socket:
        for id, count in (("a", 480), ("b", 60)):
            say(socket, "inference", prompt="Once", max_tokens=count, ignore_eos=True, request_id=id, stream=id == "a")
        while hear(socket, "inference")["request_id"] != "a":
            pass
        say(socket, "stop", request_id="a")
        ends: dict[str, str] = {}
        while len(ends) < 2:
            row = hear(socket, "inference", 30)
            if row["complete"]:
                ends[row["request_id"]] = row["finish_reason"]
        assert ends == {"a": "cancelled", "b": "length"}


def test_a_stop_in_the_same_breath_as_the_request_ends_it(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.01)
    with connect(address(live)) as socket:
        for i in range(20):
            say(socket, "inference", prompt="Once", max_tokens=480, ignore_eos=True, request_id=f"r{i}")
            say(socket, "stop", request_id=f"r{i}")
            row = hear(socket, "inference", 60)
            while not row["complete"]:
                row = hear(socket, "inference", 60)
            assert (row["request_id"], row["finish_reason"]) == (f"r{i}", "cancelled")


def test_many_tokens_at_once_are_no_slow_reader(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    real = server_socket.chunks

    async def held_up(generation: Generation, which: int, timeout: float) -> AsyncIterator[Chunk]:
        for chunk in [chunk async for chunk in real(generation, which, timeout)]:
            yield chunk

    monkeypatch.setattr(server_socket, "chunks", held_up)
    monkeypatch.setattr(server_socket, "OUT_QUEUE", 16)
    with connect(address(live)) as socket:
        say(socket, "inference", prompt="Once", max_tokens=60, ignore_eos=True, stream=True)
        rows = [hear(socket, "inference", 30)]
        while not rows[-1]["complete"]:
            rows.append(hear(socket, "inference", 30))
        assert rows[-1]["tokens_generated"] == 60 == sum(r["token_id"] is not None for r in rows)


BAD = [
    (b"\x00\x01", "INVALID_REQUEST"),
    ("{", "INVALID_REQUEST"), ("[]", "UNKNOWN_TYPE"), ("7", "UNKNOWN_TYPE"), ('{"type": "zap"}', "UNKNOWN_TYPE"),
    ('{"type": "inference"}', "INVALID_REQUEST"), ('{"type": "inference", "payload": 3}', "INVALID_REQUEST"),
    ('{"type": "inference", "payload": {"prompt": "a", "temperature": 1e999}}', "INVALID_REQUEST"),
    ('{"type": "inference", "payload": {"prompt": "a", "model": "none"}}', "MODEL_NOT_FOUND"),
    ('{"type": "inference", "payload": {"prompt": "a", "max_tokens": -1}}', "INVALID_REQUEST"),
    ("[" * 3000, "INVALID_REQUEST"), ('{"type": {}}', "UNKNOWN_TYPE"),
    ('{"type": "stop", "payload": {"request_id": {}}}', None),
]  # fmt: skip


def test_what_is_no_message_gets_an_error_and_the_next_one_is_served(live: Live) -> None:
    with connect(address(live)) as socket:
        for text, code in BAD:
            socket.send(text)
            if code is not None:
                assert hear(socket, "error")["code"] == code, text
        say(socket, "ping")
        assert hear(socket, "pong") == {}


def test_a_refused_request_is_told_by_the_id_that_it_came_with(live: Live) -> None:
    with connect(address(live)) as socket:
        for id, told in (("mine", "mine"), (5, None), ("\x07", None)):
            say(socket, "inference", prompt="a", temperature=-1, request_id=id)
            error = hear(socket, "error")
            assert (error["code"], error.get("request_id")) == ("INVALID_REQUEST", told)
            assert error["message"] == "temperature is -1, wanted 0 or more"


def test_a_frame_over_the_limit_closes_the_connection(live: Live) -> None:
    with connect(address(live)) as socket:
        with contextlib.suppress(ConnectionClosed):
            socket.send("x" * (9 << 20))
        with contextlib.suppress(ConnectionClosed):
            for _ in range(20):
                socket.recv(timeout=60)
        with pytest.raises(ConnectionClosed):
            socket.send("still there?")


def test_a_foreign_page_and_a_keyless_one_are_kept_out(live: Live, tmp_path: Path) -> None:
    with pytest.raises(InvalidStatus):
        connect(address(live), origin="https://evil.example")  # type: ignore[arg-type]
    _, secret = Keyring(tmp_path).create("page")
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as made:
        with pytest.raises(InvalidStatus):
            connect(address(made))
        with connect(address(made), subprotocols=["quarrel", f"quarrel-key.{secret}"]) as socket:  # type: ignore[list-item]
            assert socket.subprotocol == "quarrel"
            assert hear(socket, "status")["connected"]


def test_a_page_that_goes_ends_its_work(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.02)
    live.client.post("/api/models/demo")
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    ends = loaded.llm.stats().ends["cancelled"]
    with connect(address(live), max_queue=None) as socket:
        say(socket, "inference", prompt="Once", max_tokens=480, ignore_eos=True)
        hear(socket, "inference")
    end = time.monotonic() + 60
    while loaded.llm.activity().running and time.monotonic() < end:
        time.sleep(0.01)
    assert loaded.llm.stats().ends["cancelled"] == ends + 1, "it was not run to its end"


def test_a_kept_answer_is_found_again_and_read_to_its_end(live: Live) -> None:
    with connect(address(live)) as socket:
        say(
            socket, "inference", prompt="Once", max_tokens=120, ignore_eos=True, temperature=0, request_id="kept", keep=True
        )
        begun = hear(socket, "inference")["token"]
    with connect(address(live)) as socket:
        say(socket, "resume", request_id="kept")
        text = hear(socket, "resume")["text"]
        assert text.startswith(begun)
        row: dict[str, Any] = {"complete": False}
        while not row["complete"]:
            row = hear(socket, "inference", 60)
            text += row["token"]
        assert row["finish_reason"] == "length"
        say(socket, "inference", prompt="Once", request_id="kept", keep=True)
        assert "known already" in hear(socket, "error")["message"]
    body = {"prompt": "Once", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    assert live.client.post("/api/generate", json=body).json()["text"] == text
    with connect(address(live)) as socket:  # its end is kept too
        say(socket, "resume", request_id="kept")
        assert hear(socket, "resume")["text"] == text
        end = hear(socket, "inference")
        assert (end["token"], end["complete"], end["tokens_generated"]) == ("", True, 120)
        for id in ("never", 7, None):
            say(socket, "resume", request_id=id)
            assert hear(socket, "error")["code"] == "NOT_RUNNING"


def test_a_kept_answer_that_nobody_follows_ends(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEPT_SECONDS", 0.0)
    with connect(address(live)) as socket:
        say(socket, "inference", prompt="Once", max_tokens=480, ignore_eos=True, request_id="left", keep=True)
        hear(socket, "inference")
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    end = time.monotonic() + 60
    while loaded.llm.activity().running and time.monotonic() < end:
        time.sleep(0.01)
    assert not loaded.llm.activity().running


def test_no_caller_finds_anothers_answer_nor_keeps_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = answers.Answers()
    for i in range(answers.MAX_KEPT):
        kept.keep(answers.Answer(f"{i}", "ann", kept=True))
    with pytest.raises(Refused, match="run already"):
        kept.keep(answers.Answer("more", "ann", kept=True))
    kept.keep(answers.Answer("more", "bob", kept=True))
    with pytest.raises(Refused):
        kept.find("bob", "1")
    done = kept.find("ann", "1")
    done.say("inference", {"token": "x" * 10, "complete": True})
    kept.keep(answers.Answer("more", "ann", kept=True))  # in place of what has ended
    with pytest.raises(Refused):
        kept.find("ann", "1")

    async def ended() -> None:
        monkeypatch.setattr(answers, "MAX_TEXT", 15)
        for id in ("2", "3"):
            answer = kept.find("ann", id)
            answer.say("inference", {"token": "x" * 10, "complete": True})
            kept.ended(answer)

    asyncio.run(ended())
    assert kept.find("ann", "3").text == "x" * 10
    with pytest.raises(Refused):
        kept.find("ann", "2")


def test_a_schema_binds_the_answer_and_the_result_of_a_tool_goes_on(tmp_path: Path) -> None:
    with running(
        Settings(data_dir=tmp_path, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    ) as live:
        with connect(address(live)) as socket:
            form = {"type": "json_schema", "json_schema": {"schema": {"const": {"name": "now", "arguments": {}}}}}
            tool = {"type": "function", "function": {"name": "now"}}
            say(socket, "inference", prompt="time?", chat=True, response_format=form, tools=[tool], stream=True)
            row = hear(socket, "inference", 30)
            while not row["complete"]:
                row = hear(socket, "inference", 30)
            (call,) = row["tool_calls"]
            assert (call["function"]["name"], row["text"]) == ("now", "")
            turns = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "noon", "tool_call_id": call["id"]}]  # fmt: skip
            say(socket, "inference", prompt="", chat=True, messages=turns, max_tokens=2)
            while not hear(socket, "inference", 30)["complete"]:
                pass
            say(socket, "inference", prompt="", messages=[])
            assert hear(socket, "error")["message"] == "prompt is missing"


def test_a_conversation_that_is_too_long_is_summed_up_and_says_so(live: Live) -> None:
    turns = [{"role": r, "content": "The king rode out. " * 12} for _ in range(9) for r in ("user", "assistant")]
    more = {"messages": turns, "max_tokens": 2, "temperature": 0, "request_id": "long"}
    with connect(address(live)) as socket:
        hear(socket, "status")
        say(socket, "inference", prompt="Who?", overflow="summary", **more)
        states = [hear(socket, "status", 60)["state"] for _ in range(3)]
        assert states[-2:] == ["summarising", "generating"]
        while not (row := hear(socket, "inference", 60))["complete"]:
            pass
        assert row["dropped"] >= 8
        assert row["prompt_tokens"] <= 510
        say(socket, "inference", prompt="The king rode out. " * 200, overflow="summary", request_id="plain")
        assert "sums up messages" in hear(socket, "error")["message"]


def test_a_large_message_is_read_beside_others(live: Live) -> None:
    with connect(address(live), max_size=None) as socket:
        hear(socket, "status")
        say(socket, "inference", prompt="a", note="b" * (1 << 20), max_tokens=1, request_id="large")
        while not hear(socket, "inference", 60)["complete"]:
            pass
        say(socket, "inference", prompt=7, note="b" * (1 << 20), request_id="wrong")
        assert hear(socket, "error")["request_id"] == "wrong"
        socket.send('{"type": "ping", "payload": {"a": [' + "1," * (3 << 20) + "1]}}")
        assert "commas" in hear(socket, "error")["message"]
