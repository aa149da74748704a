"""Who is let in: hosts, origins, keys, sizes, rates, and connections that say nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from websockets.sync.client import connect

from quarrel.errors import ConfigError
from quarrel.server import Keyring, Rates, Settings, build
from quarrel.server.errors import Refused
from quarrel.server.limits import MAX_CALLERS, Limiter
from quarrel.server.listening import bound
from quarrel.server.middleware import OPEN, PAGE
from tests.server.conftest import Live, load, running


def get(path: str, *lines: str, host: str | None = "127.0.0.1") -> bytes:
    head = [f"GET {path} HTTP/1.1", *([f"Host: {host}"] if host is not None else []), "Connection: close", *lines]
    return ("\r\n".join(head) + "\r\n\r\n").encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


@pytest.fixture(scope="module", name="locked")
def _locked(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("locked")
    Keyring(folder).create("test")
    with running(Settings(data_dir=folder, rates=Rates(requests=0), origins=("https://friend.example",))) as made:
        yield made


def routes(live: Live) -> list[tuple[str, str]]:
    found = []
    for path, item in live.server.api.openapi()["paths"].items():
        found += [(method.upper(), path.replace("{name}", "demo")) for method in item]
    return [*found, ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/docs")]


TRICKS = [
    "{}",
    "{}/",
    "//{}",
    "{}?a=/healthz",
    "{}%00",
    "{}#/healthz",
    "/healthz/..{}",
    "/static/..{}",
    "/./{}",
    "{};/healthz",
]
HEADERS = [
    (), ("Authorization: Bearer",), ("Authorization: Bearer qk-wrong",), ("Authorization: Basic cXVhcnJlbDp4",),
    ("X-API-Key: x",), ("X-Forwarded-For: 127.0.0.1",),
]  # fmt: skip


def test_without_a_key_no_route_answers_but_health_and_the_page(locked: Live) -> None:
    tried = 0
    for (method, path), trick, headers in itertools.product(routes(locked), TRICKS, HEADERS):
        if path in OPEN | PAGE:
            continue
        raw = get(trick.format(path), *headers).replace(b"GET", method.encode(), 1)
        answer = locked.raw(raw)
        assert status_of(answer) in (400, 401, 404, 405), (method, trick, path, headers, answer[:100])
        assert b"demo" not in answer.split(b"\r\n\r\n", 1)[1]
        tried += 1
    assert tried > 900


def test_with_a_key_it_answers(locked: Live) -> None:
    _, secret = Keyring(locked.settings.data_dir).create("second")
    for header in ({"Authorization": f"Bearer {secret}"}, {"Authorization": f"ApiKey {secret}"}, {"X-API-Key": secret}):
        assert locked.client.get("/v1/models", headers=header).status_code == 200
    assert locked.client.get("/v1/models").status_code == 401
    assert [locked.client.get(p).status_code for p in ("/", "/healthz", "/health", "/static/app.css")] == [200] * 4


def test_a_key_of_the_environment_is_good_and_is_written_nowhere(tmp_path: Path) -> None:
    secret = "a key of the environment"
    ring = Keyring(tmp_path, [secret])
    ring.create("another")
    assert (made := ring.find(secret)) is not None
    assert made.id not in ring.path.read_text("utf-8")
    stored = Keyring(tmp_path).keys()
    assert [k.name for k in stored] == ["another"]
    ring.path.unlink()  # whoever takes the file away opens nothing
    with pytest.raises(ConfigError, match="has gone"):
        ring.keys()
    with running(Settings(data_dir=tmp_path, api_keys=(secret,))) as made_live:
        assert made_live.client.get("/v1/models").status_code == 401
        assert made_live.client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    assert secret not in repr(made_live.settings)


KEY = {"id": "a", "name": "a", "hash": "0" * 64, "created": 0.0, "expires": None, "revoked": False}


WRONG = ({"hash": 5}, {"hash": "\u00e9"}, {"expires": "x"}, {"revoked": 0})
UNUSABLE = ["{", "", "[]", "{}", '""', "null", "0", "[[]]", "[" * 99_999, *(json.dumps([{**KEY, **w}]) for w in WRONG)]


@pytest.mark.parametrize("text", UNUSABLE, ids=range(len(UNUSABLE)))
def test_an_unusable_key_file_closes_the_server(tmp_path: Path, text: str) -> None:
    _, secret = Keyring(tmp_path).create("a")
    with running(Settings(data_dir=tmp_path)) as made:
        (tmp_path / "keys.json").write_text(text)
        assert made.client.get("/healthz").status_code == 200
        for headers in ({}, {"Authorization": f"Bearer {secret}"}):
            assert made.client.get("/v1/models", headers=headers).status_code == 503
            assert made.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 503
    with pytest.raises(ConfigError, match=r"is not a list of API keys"):
        build(Settings(data_dir=tmp_path, api_keys=("k" * 16,)), load)


def test_a_key_file_that_has_gone_closes_the_server_and_the_next_one(tmp_path: Path) -> None:
    Keyring(tmp_path).create("a")
    with running(Settings(data_dir=tmp_path)) as made:
        (tmp_path / "keys.json").unlink()
        assert made.client.get("/v1/models").status_code == 503
    with pytest.raises(ConfigError, match=r"has gone: put the API keys back, or remove .*keys\.made"):
        build(Settings(data_dir=tmp_path), load)
    (tmp_path / "keys.made").unlink()
    assert not build(Settings(data_dir=tmp_path), load).keys.keys()


def test_prompts_and_keys_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary = "canary 7f3a"
    few: dict[str, object] = dict.fromkeys(("max_tokens", "max_output_tokens", "n_predict"), 2)
    few |= {"options": {"num_predict": 2}}  # by whatever name a route knows it
    _, secret = Keyring(tmp_path).create("a")
    bodies: list[object] = [
        {"prompt": canary, "messages": [{"role": "user", "content": canary}], "input": canary, "text": canary, **few},
        {"prompt": canary, **few},
        {"prompt": canary, **few, "stream": True},
        {"prompt": canary, **few, "top_p": 9},
        {"prompt": [canary], **few},
        {"messages": [{"role": canary, "content": canary}], **few, "tools": canary},
        {"prompt": "a", "model": "demo", **few, "stop": canary, "response_format": {"type": canary}},
        canary,
    ]
    caplog.set_level(1)
    with running(Settings(data_dir=tmp_path)) as live:
        headers = {"Authorization": f"Bearer {secret}", "X-API-Key": canary}
        for (method, path), body in itertools.product(routes(live), bodies):
            if method == "POST" and "models" not in path:
                raw = body if isinstance(body, str) else json.dumps(body)
                status = live.client.post(path, content=raw, headers=headers).status_code
                assert status < 500 or (status == 501 and path in ("/infill", "/slots/{id_slot}"))  # as llama-server has it
        assert live.client.get("/v1/models", headers={"Authorization": f"Bearer {canary}"}).status_code == 401
        with connect(f"ws://127.0.0.1:{live.port}/ws", subprotocols=["quarrel", f"quarrel-key.{secret}"]) as page:  # type: ignore[list-item]
            page.send(canary)
            page.send(json.dumps({"type": "inference", "payload": {"prompt": canary, "max_tokens": 1}}))
            while 'complete": true' not in str(page.recv(10)):
                pass
    mine = [r for r in caplog.records if r.name.partition(".")[0] not in ("httpx", "httpcore", "websockets")]
    assert len(mine) > 40
    told = "\n".join(str(r.__dict__) for r in mine)
    assert canary not in told
    assert secret not in told


def test_other_machines_are_let_in_with_keys_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached by other machines and there is no API key"):
        Settings(host="0.0.0.0", data_dir=tmp_path).check(has_keys=False)
    Settings(host="0.0.0.0", data_dir=tmp_path).check(has_keys=True)


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "a/b", "127.0.0.1@evil.example", "127.0.0.1:x"]
)
def test_a_host_that_is_not_ours_is_refused(live: Live, host: str) -> None:
    assert status_of(live.raw(get("/v1/models", host=host))) in (400, 421)


def test_two_hosts_or_none_are_refused(live: Live) -> None:
    assert status_of(live.raw(get("/v1/models", host=None))) == 400
    assert status_of(live.raw(get("/v1/models", "Host: localhost"))) == 400
    assert status_of(live.raw(get("/healthz", host="localhost:99"))) == 200


def test_a_foreign_page_is_kept_out_and_a_known_one_let_in(locked: Live, live: Live) -> None:
    assert live.client.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403
    assert live.client.get("/v1/models", headers={"Origin": "null"}).status_code == 403
    assert live.client.get("/v1/models", headers={"Origin": live.url}).status_code == 200
    preflight = {"Origin": "https://friend.example", "Access-Control-Request-Method": "POST"}
    answer = locked.client.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://friend.example"
    assert "access-control-allow-credentials" not in answer.headers


def test_every_answer_carries_the_security_headers(live: Live) -> None:
    for path in ("/", "/v1/models", "/nowhere", "/static/app.js"):
        headers = live.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-request-id"].startswith("req-")


def test_a_body_that_claims_too_much_is_refused_before_it_comes(live: Live) -> None:
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000000\r\n\r\n"
    began = time.monotonic()
    assert status_of(live.raw(raw, 60)) == 413
    assert time.monotonic() - began < 25, "a body is waited for, for 30 seconds"


def test_a_body_in_pieces_is_counted(live: Live) -> None:
    def pieces():  # type: ignore[no-untyped-def]
        for _ in range(50):
            yield b" " * (1 << 20)

    assert live.client.post("/v1/completions", content=pieces()).status_code == 413


def test_a_body_may_hold_a_photograph(live: Live) -> None:
    said = b'{"model":"demo","prompt":"a","max_tokens":1}'
    assert live.client.post("/v1/completions", content=b" " * (16 << 20) + said).status_code == 200


def test_half_a_request_costs_a_socket_and_is_closed(tmp_path: Path) -> None:
    for seconds in (60.0, 0.3):
        with ExitStack() as stack:
            settings = Settings(data_dir=tmp_path, header_timeout=seconds, connections_per_address=200)
            made = stack.enter_context(running(settings))
            addresses = [("127.0.0.1", made.port)] * 150
            held = [stack.enter_context(socket.create_connection(address)) for address in addresses]
            for each in held:
                each.sendall(b"GET / HTTP/1.1\r\nHost: local")
            assert made.client.get("/healthz").status_code == 200
            for each in held if seconds < 1 else ():
                each.settimeout(60)
                assert each.recv(10) == b""


def test_a_caller_over_its_rate_is_told_when_to_come_back(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=3))) as made:
        answers = [made.client.get("/v1/models") for _ in range(4)]
        assert [a.status_code for a in answers] == [200, 200, 200, 429]
        assert 1 <= int(answers[3].headers["retry-after"]) <= 21
        assert answers[3].json()["error"]["type"] == "rate_limit_error"
        assert made.client.get("/healthz").status_code == 200


def test_buckets_fill_evenly_and_callers_are_forgotten() -> None:
    now = 0.0
    limiter = Limiter(Rates(requests=60, prompt_tokens=100, streams=2), clock=lambda: now)
    for _ in range(60):
        limiter.charge("a", "requests", 1)
    with pytest.raises(Refused) as caught:
        limiter.charge("a", "requests", 1)
    assert caught.value.retry_after == pytest.approx(1.0)
    now = 1.0
    limiter.charge("a", "requests", 1)
    limiter.charge("a", "prompt_tokens", 1000)  # more than a bucket holds: let through once, owed afterwards
    with pytest.raises(Refused):
        limiter.charge("a", "prompt_tokens", 1)
    with pytest.raises(Refused):
        limiter.charge("a", "prompt_tokens", 0)  # whose cost is known behind it
    with limiter.stream("a"), limiter.stream("a"), pytest.raises(Refused), limiter.stream("a"):
        pass
    for i in range(3 * MAX_CALLERS):
        limiter.charge(f"bogus {i}", "requests", 1)
    assert len(limiter) == MAX_CALLERS


def test_the_openapi_document_names_every_body(live: Live) -> None:
    paths = live.client.get("/openapi.json").json()["paths"]
    bodies = {p for p, item in paths.items() if "requestBody" in item.get("post", {})}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/api/generate", "/api/stream"} <= bodies
    assert json.dumps(paths)


def test_a_reader_that_does_not_read_is_cut_off_and_its_work_ends(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, idle_timeout=1.0, rates=Rates(requests=0))) as made:
        made.client.post("/api/models/demo")
        body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 8, "stream": True, "logprobs": 20})
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", made.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            deaf.sendall((head + body).encode())
            held = made.server.dispatcher.models.entry("demo").loaded
            assert held is not None
            end = time.monotonic() + 60
            while not held.users and time.monotonic() < end:
                time.sleep(0.01)
            while held.users and time.monotonic() < end:
                time.sleep(0.02)
            assert not held.users
        assert made.client.get("/healthz").status_code == 200


def test_answers_are_sent_at_once() -> None:
    """Nagle's algorithm would hold each body back until the header is acknowledged, 40 ms later."""

    async def set_on_accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            made = writer.get_extra_info("socket")
            found.set_result(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bound("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                async with asyncio.timeout(5):
                    on = await found
                writer.close()
                return on

    assert asyncio.run(set_on_accepted())
