"""The deployment for Ray Serve, on a Ray of this machine. Skipped (counted) where Ray is not installed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.parallel.clusters import PATIENCE, cluster, processes, read

pytest.importorskip("ray", reason="Ray is not installed: replicas are not tried")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

FOLDER = Path(__file__).resolve().parents[2] / "deploy"
ANSWER: dict[str, Any] = {"model": "demo", "temperature": 0}
FRESH = 1.0
"""Seconds for which a router believes what a replica has said of its queue."""


@pytest.fixture(name="at", scope="module")
def _at() -> Iterator[str]:
    """An address whose port nobody else gets meanwhile: Ray's proxy listens at one that is bound already."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(name="app", scope="module")
def _app(at: str) -> Iterator[Any]:
    import ray
    from ray import serve

    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent)])
    environment = {"PYTHONPATH": path, "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": str(FRESH)}
    with pytest.MonkeyPatch.context() as patch, cluster(1, **environment) as made:
        patch.syspath_prepend(str(FOLDER))
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        serve.start(http_options={"host": "127.0.0.1", "port": int(at.rpartition(":")[2])})
        try:
            app = importlib.import_module("ray_serve").app
            serve.run(app({"model": "demo", "replicas": "2", "gpus": "0"}))
            yield app
        finally:
            serve.shutdown()


def chat(at: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    made = httpx.post(
        f"http://{at}/v1/chat/completions", json={**ANSWER, "messages": messages, "max_tokens": 8, **more}, timeout=PATIENCE
    )
    assert made.status_code == 200, made.text
    return made.json()  # type: ignore[no-any-return]


def test_the_turns_of_a_conversation_find_their_beginning_in_the_cache(app: Any, at: str) -> None:
    for i in range(6):
        messages = [{"role": "user", "content": f"{i}: tell me of the king and of his {'very ' * 20}old castle"}]
        for turn in range(3):
            made = chat(at, messages)
            cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or cached > 16, (i, turn, made["usage"])
            messages += [made["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def test_a_replica_that_answers_late_keeps_its_conversations(app: Any, at: str) -> None:
    assert len(replicas()) == 2
    for i in range(2):
        messages = [{"role": "user", "content": f"{i}: tell me of the queen and of her {'very ' * 20}old garden"}]
        chat(at, messages)
        for stopped in replicas():  # of which one has the conversation
            time.sleep(1.2 * FRESH)
            os.kill(stopped, signal.SIGSTOP)
            try:
                with ThreadPoolExecutor(1) as pool:
                    answer = pool.submit(chat, at, messages)
                    time.sleep(0.5)
                    os.kill(stopped, signal.SIGCONT)
                    usage = answer.result()["usage"]
            finally:
                os.kill(stopped, signal.SIGCONT)
            assert usage["prompt_tokens_details"]["cached_tokens"] > 16, (i, usage)


def test_errors_and_other_routes_pass_through(app: Any, at: str) -> None:
    assert httpx.get(f"http://{at}/v1/models", timeout=PATIENCE).json()["data"][0]["id"] == "demo"
    wrong = httpx.post(f"http://{at}/v1/chat/completions", content=b"{", timeout=PATIENCE)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"]
    assert httpx.post(f"http://{at}/v1/chat/completions", content=b" " * (49 << 20), timeout=PATIENCE).status_code == 413


def test_a_websocket_stays_with_a_replica(app: Any, at: str) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    def generated(socket: Any) -> str:
        asked = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "stream": True}
        socket.send(json.dumps({"type": "inference", "payload": asked}))
        text = ""
        while True:
            message = json.loads(socket.recv(timeout=PATIENCE))
            assert message["type"] != "error", message
            if message["type"] == "inference":
                text += message["payload"]["token"] or ""
                if message["payload"]["complete"]:
                    return text

    url = f"ws://{at}/ws"
    slowly: dict[str, Any] = {"open_timeout": PATIENCE}
    with connect(url, subprotocols=["quarrel"], **slowly) as one, connect(url, **slowly) as other:  # type: ignore[list-item]
        assert one.subprotocol == "quarrel"
        texts = [generated(socket) for socket in (one, other, one)]
        assert texts[0]
        assert texts == [texts[0]] * 3
    with pytest.raises(InvalidStatus), connect(url, origin="https://elsewhere.example", **slowly):  # type: ignore[arg-type]
        pass


def test_a_replica_that_is_killed_loses_no_request_without_a_word(app: Any, at: str) -> None:
    """Whole answers come from the other one; a stream that had begun there breaks off, and is no clean end."""
    asked = {"max_tokens": 120, "ignore_eos": True}
    stories = [[{"role": "user", "content": f"tale {i}"}] for i in range(8)]
    begun = threading.Event()

    def whole(i: int) -> tuple[bool, str]:
        return True, chat(at, stories[i], **asked)["choices"][0]["message"]["content"]

    def streamed(i: int) -> tuple[bool, str]:
        text = ""
        try:
            with httpx.stream(
                "POST",
                f"http://{at}/v1/chat/completions",
                json={**ANSWER, "messages": stories[i], **asked, "stream": True},
                timeout=PATIENCE,
            ) as made:
                assert made.status_code == 200
                for line in made.iter_lines():
                    begun.set()
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return False, text
        return True, text

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(whole if i % 2 else streamed, i) for i in range(8)]
        assert begun.wait(120)
        os.kill(replicas()[0], signal.SIGKILL)
        found = [answer.result() for answer in answers]
    wanted = [whole(i)[1] for i in range(8)]
    assert all(ended for ended, _ in found[1::2])
    for (ended, text), right in zip(found, wanted):
        assert text == right if ended else right.startswith(text)


def replicas() -> list[int]:
    """Their processes."""
    return [pid for pid, folder in processes() if b"ServeReplica:default:Replica" in read(folder / "cmdline")]


def test_no_answer_is_lost_when_a_replica_goes(app: Any, at: str) -> None:
    from ray import serve

    def streamed(i: int) -> str:
        body = {**ANSWER, "messages": [{"role": "user", "content": f"story {i}"}], "max_tokens": 120, "stream": True}
        text, ends = "", 0
        with httpx.stream(
            "POST", f"http://{at}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=PATIENCE
        ) as made:
            assert made.status_code == 200
            begun.append(i)
            for line in made.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["delta"].get("content") or ""
                    ends += choice["finish_reason"] is not None
        assert ends == 1
        return text

    begun: list[int] = []
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(streamed, i) for i in range(8)]
        while not begun:
            time.sleep(0.01)
        serve.run(app({"model": "demo", "replicas": "1", "gpus": "0"}))
        texts = [answer.result() for answer in answers]
    assert all(texts)
    assert texts == [
        chat(at, [{"role": "user", "content": f"story {i}"}], max_tokens=120, ignore_eos=True)["choices"][0]["message"][
            "content"
        ]
        for i in range(8)
    ]
