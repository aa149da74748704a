"""Requests and WebSocket messages with changed fields and changed bytes, to a real server: an answer or a clear refusal.

    python -m fuzz.http [--seconds 60] [--seed 0]

The server runs in this process, on a random model of a few kilobytes. Bodies of every route have fields put in, taken out
and exchanged for what hurts; requests as bytes are cut, spliced and repeated; WebSockets get both. No answer may be a
server's failure (500) or a traceback in its log, every refusal must be JSON that says why, a WebSocket must answer a ping
whatever came before it, and behind each round no request runs, no cache block is lost, and a sound request is answered.
"""

from __future__ import annotations

import copy
import json
import logging
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st
from websockets.sync.client import connect

import quarrel
from fuzz.running import arguments, examples, rounds
from quarrel.llm import LLM
from quarrel.server import Rates, Settings
from tests.server.conftest import Live, running
from tests.tiny_model import CHATML, write_tiny_model

SECONDS = 30.0
"""For one answer, on a busy machine; `--timeout` of the server is a fifth of it."""
FAILED = (500, 501, 502)
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "once", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "once"}], "max_tokens": 4},
    "/v1/responses": {"input": "once", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "once"}]}], "max_tokens": 4},
    "/v1/embeddings": {"input": ["once", "upon"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}]},
    "/api/generate": {"model": "tiny", "prompt": "once", "options": {"num_predict": 4}},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 4}},
    "/api/embed": {"model": "tiny", "input": "a"},
    "/api/embeddings": {"model": "tiny", "prompt": "a"},
    "/api/show": {"model": "tiny"},
    "/api/stream": {"prompt": "once", "max_tokens": 4},
    "/api/tokenize": {"text": "a b"},
    "/api/detokenize": {"tokens": [270, 271]},
}
PATHS = (
    *SEEDS, "/", "/healthz", "/metrics", "/api/metrics", "/api/models", "/api/models/tiny", "/ws", "/openapi.json",
    "/static/..",
)  # fmt: skip
FIELDS: tuple[str, ...] = (
    "model", "prompt", "messages", "max_tokens", "stream", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop",
    "logprobs", "top_logprobs", "echo", "logit_bias", "response_format", "tools", "tool_choice", "stream_options",
    "adapter", "repetition_penalty", "dry_multiplier", "xtc_probability", "mirostat", "options", "keep_alive", "format",
    "system", "context", "raw", "suffix", "images", "input", "instructions", "text", "dimensions", "encoding_format",
    "query", "documents", "top_n", "tokens", "add_special", "priority", "chat", "request_id", "user",
    "max_completion_tokens", "num_predict", "role", "content",
)  # fmt: skip
HURTFUL: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 1.5, -0.5, 1e300, 5e-324, 2**31 - 1, 2**31, 2**63, 2**64, 10**40, "", "a", "\0",
    "\ud800", "\u2028", "tiny", "tiny:x", "a" * 5000, [], {}, [[]], [None], {"a": None}, ["a"] * 70, [0] * 600,
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a|b)*c{3}"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"5": 100}, [{"role": "tool", "content": None}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "required", -1.0, "1e5",
)  # fmt: skip
METHODS = (b"POST", b"POST", b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"PUT", b"BREW", b"post", b"")
LINES = (
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999", b"Transfer-Encoding: chunked",
    b"Expect: 100-continue", b"Connection: close", b"Connection: Upgrade", b"Upgrade: websocket", b"Host: evil", b"Host:",
    b"X: " + b"y" * 9000, b": x", b"Authorization: Bearer \xff", b"Content-Encoding: gzip", b"Content-Type: text/plain",
    b"traceparent: 00-zz", b"Accept: */*;q=x", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13", b"Origin: null",
    b"Range: bytes=0-", b"\x00", b" folded",
)  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body for it, with one to three edits of its JSON and, one in five, of its bytes."""
    route = draw(st.sampled_from([*SEEDS]))
    body: Any = json.loads(json.dumps(SEEDS[route]))
    for _ in range(draw(st.integers(0, 3))):
        inner = [r for v in body.values() for r in (v if isinstance(v, list) else [v])]
        at = draw(st.sampled_from([body, *(p for p in inner if isinstance(p, dict))]))
        name = draw(st.sampled_from([*at, *FIELDS]) | st.text(max_size=5))
        if draw(st.integers(0, 5)):
            numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
            at[name] = copy.deepcopy(draw(st.sampled_from(HURTFUL) | numbers | st.text(max_size=9)))
        else:
            at.pop(name, None)
    data = bytearray(json.dumps(body).encode())
    if not draw(st.integers(0, 4)):
        for _ in range(draw(st.integers(1, 3))):
            at_byte = draw(st.integers(0, len(data)))
            match draw(st.integers(0, 3)):
                case 0:
                    data[at_byte : at_byte + 1] = draw(st.binary(max_size=4))
                case 1:
                    del data[at_byte:]
                case 2:
                    data[at_byte:at_byte] = b"[" * draw(st.sampled_from([1, 50, 20_000]))
                case 3:
                    data[at_byte:at_byte] = data[:at_byte]
    return route, bytes(data)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request's bytes, and now and then a second one behind it."""
    whole = b""
    for _ in range(draw(st.integers(1, 2))):
        route, body = draw(bodies())
        ending = draw(st.sampled_from([b"", b"", b"", b"?a=%ff", b"/..", b"%00", b"#"]))
        target = draw(st.sampled_from(PATHS) | st.just(route)).encode() + ending
        method = draw(st.sampled_from(METHODS))
        version = draw(st.sampled_from([b"HTTP/1.1"] * 3 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]))
        chosen = draw(st.lists(st.sampled_from(LINES), max_size=3))
        usual = [b"Host: localhost", b"Content-Length: %d" % len(body)]
        if draw(st.integers(0, 3)) == 0:
            usual = [b"Host: localhost", b"Transfer-Encoding: chunked"]
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (draw(st.sampled_from([len(body), len(body), 0, 1 << 40])), body)
        whole += b"\r\n".join([b" ".join([method, target, version]), *usual, *chosen, b"", b""]) + body
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 2)):
            case 0:
                data[at : at + 1] = draw(st.binary(max_size=3))
            case 1:
                del data[at : at + draw(st.integers(1, 40))]
            case 2:
                data[at:at] = data[max(0, at - 30) : at]
    return bytes(data)


def check_body(live: Live, drawn: tuple[str, bytes]) -> int:
    """The status of the answer."""
    route, data = drawn
    answer = live.client.post(route, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code not in FAILED, f"{route} {data[:300]!r}: {answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400:
        assert answer.json()["error"], "a refusal that does not say why"
    if answer.status_code == 503:
        assert "retry-after" in answer.headers
    return answer.status_code


def check_bytes(live: Live, data: bytes) -> int:
    """The first status of what comes back, 0 for none."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=SECONDS) as made:
        got = b""
        try:
            made.sendall(data)
            made.shutdown(socket.SHUT_WR)
            while piece := made.recv(65536):
                got += piece
        except ConnectionError:  # it was closed while more was being sent
            pass
    assert not got or got.startswith(b"HTTP/1.1 "), f"{data[:300]!r}: {got[:100]!r}"
    status = int(got[9:12] or 0) if got else 0
    assert status not in FAILED, f"{data[:300]!r}: {got[:300]!r}"
    return status


def check_socket(live: Live, drawn: list[tuple[str, tuple[str, bytes]]]) -> int:
    """How many messages came back before the answer to the ping."""
    count = 0
    with connect(f"ws://127.0.0.1:{live.port}/ws", max_size=None) as ws:
        for kind, (_, data) in drawn:
            text = data.decode("utf-8", "replace")
            message: str | bytes = {"raw": text, "binary": data}.get(kind) or json.dumps(
                {"type": kind, "payload": _json(data)}
            )
            ws.send(message)
        ws.send('{"type": "stop"}')
        ws.send('{"type": "ping"}')
        end = time.monotonic() + SECONDS
        while (message := json.loads(ws.recv(end - time.monotonic())))["type"] != "pong":
            assert message["type"] in ("inference", "status", "error", "metrics"), message
            assert message["payload"].get("code") != "INTERNAL_ERROR", f"{drawn}: {message}"
            count += 1
    return count


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("latin-1")


class Faults(logging.Handler):
    """What the server's log has of failures; the first one is raised where the next answer is checked."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record)[-3000:])

    def check(self) -> None:
        found, self.found = self.found, []
        assert not found, found[0]


def settled(live: Live) -> None:
    """Nothing runs, nothing is lost, and a sound request is answered."""
    end = time.monotonic() + SECONDS
    while True:
        (model,) = live.client.get("/api/metrics").json()["models"]
        if model["state"] != "loaded" or not (model["running"] or model["waiting"]):
            break
        assert time.monotonic() < end, "a request runs on"
        time.sleep(0.05)
    if model["state"] == "loaded":
        lost = model["kv_blocks"] - model["kv_blocks_free"] - model["kv_blocks_kept"]
        assert not lost, f"{lost} cache blocks are lost"
    answer = live.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 2


def fuzz(live: Live, count: int, number: int) -> Counter[str]:
    """`count` bodies, half as many requests as bytes and a tenth as many WebSockets; how they were answered."""
    found: Counter[str] = Counter()
    faults = Faults()
    logging.getLogger().addHandler(faults)

    def body(drawn: tuple[str, bytes]) -> None:
        found[f"body {check_body(live, drawn)}"] += 1
        faults.check()

    def raw(data: bytes) -> None:
        found[f"bytes {check_bytes(live, data)}"] += 1
        faults.check()

    def page(drawn: list[tuple[str, tuple[str, bytes]]]) -> None:
        check_socket(live, drawn)
        found["sockets"] += 1
        faults.check()

    examples(bodies(), count, number, body)
    examples(requests(), count // 2, number, raw)
    kinds = st.sampled_from(["inference", "inference", "inference", "raw", "binary", "stop", "status", "ping", "zap"])
    examples(st.lists(st.tuples(kinds, bodies()), min_size=1, max_size=6), max(1, count // 10), number, page)
    settled(live)
    logging.getLogger().removeHandler(faults)
    faults.check()
    return found


def serving(folder: Path) -> Any:
    """The server, as a context."""
    model = write_tiny_model(folder / "tiny.gguf", template=CHATML)

    def load(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=1, max_seqs=8)

    settings = Settings(
        models=(str(model),), data_dir=folder, rates=Rates(requests=0), ollama=True, timeout=SECONDS / 5, body_timeout=0.5
    )
    return running(settings, load)


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__).parse_args(given)
    logging.disable(logging.WARNING)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as live:
        live.client.timeout = httpx.Timeout(SECONDS)

        def one(number: int) -> None:
            total.update(fuzz(live, 200, number))

        count = rounds(args.seconds, args.seed, one)
    seeds = f"seeds {args.seed} to {args.seed + count - 1}"
    print(f"{sum(total.values())} requests over HTTP and WebSockets, {seeds}, none did harm: {dict(sorted(total.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
