"""Images by their addresses: what is fetched, from where, and how much of it."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

import quarrel
from quarrel.errors import RequestError
from quarrel.vision import fetch
from quarrel.vision.fetch import fetched, is_public
from tests.paths import need_cases

PIXELS = np.random.default_rng(3).integers(0, 256, (64, 96, 3), np.uint8)


def png() -> bytes:
    Image.fromarray(PIXELS).save(data := io.BytesIO(), "PNG")
    return data.getvalue()


class Handler(BaseHTTPRequestHandler):
    hosts: list[str | None] = []  # noqa: RUF012
    go_on = threading.Event()

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        kind, _, rest = self.path.partition("/to/")
        if kind == "/moved" or self.path == "/round":
            self.send_response(302)
            self.send_header("Location", rest or "/round")
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/large", "/endless", "/slow", "/a%20b.png?x=1") else 404)
        if self.path == "/large":
            self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        self.wfile.write(png() if "png" in self.path else bytes(1 if self.path == "/slow" else 1 << 17))
        self.wfile.flush()
        if self.path == "/slow":
            self.go_on.wait(60)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(name="port")
def _port() -> Iterator[int]:
    Handler.hosts.clear()
    Handler.go_on.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        Handler.go_on.set()
        server.shutdown()


Leading = Callable[..., list[tuple[str, int]]]


@pytest.fixture(name="names")
def _names(monkeypatch: pytest.MonkeyPatch) -> Leading:
    """Names with the addresses that they lead to, one look after the other; what is connected to is this machine."""
    made: list[tuple[str, int]] = []

    def leading(*looks: list[str]) -> list[tuple[str, int]]:
        left = list(looks)

        def look(host: str, port: int, **more: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in left.pop(0)]

        def connecting(address: tuple[str, int], *more: object) -> socket.socket:
            made.append(address)
            link = socket.socket()
            link.connect(("127.0.0.1", address[1]))
            return link

        monkeypatch.setattr(fetch.socket, "getaddrinfo", look)
        monkeypatch.setattr(fetch.socket, "create_connection", connecting)
        return made

    return leading


def test_a_picture_is_fetched_by_the_address_that_was_checked(port: int, names: Leading) -> None:
    made = names(["93.184.216.34", "1.1.1.1"], ["127.0.0.1"])  # a second look would lead elsewhere
    assert fetched(f"http://pictures.example:{port}/a b.png?x=1#here", 1 << 20) == png()
    assert made == [("93.184.216.34", port)]
    assert Handler.hosts == [f"pictures.example:{port}"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/none", "says 404"),
        ("/round", "redirected more than 3 times"),
        ("/large", "1099511627776 bytes"),
        ("/endless", "more than"),
        ("/moved/to/file:///etc/passwd", "no address of http or https"),
        ("/moved/to/http://inside.example/x.png", "private network or of this machine"),
    ],
)
def test_what_is_not_fetched_and_why(port: int, names: Leading, path: str, sentence: str) -> None:
    made = names(["8.8.8.8"], *[["10.0.0.7"] if "inside" in path else ["8.8.8.8"]] * 4)
    with pytest.raises(RequestError, match=sentence):
        fetched(f"http://pictures.example:{port}{path}", 1 << 16)
    assert {address for address, _ in made} == {"8.8.8.8"}


def test_a_slow_server_is_left(port: int, names: Leading) -> None:
    names(["8.8.8.8"])
    with pytest.raises(RequestError, match=r"longer than 0\.2 seconds"):
        fetched(f"http://pictures.example:{port}/slow", 1 << 20, 0.2)


PRIVATE = """
127.0.0.1 127.9.9.9 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200 224.0.0.1
255.255.255.255 192.0.0.192 198.18.0.1 168.63.129.16 ::1 :: ::127.0.0.1 fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254
::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b:1::1 2002:7f00:1:: ff02::1 2001:db8::1 x
"""


def test_only_public_addresses_are_reached(names: Leading) -> None:
    assert [text for text in PRIVATE.split() if is_public(text)] == []
    for text in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "2002:808:808::"):
        assert is_public(text)
    made = names(["8.8.8.8", "127.0.0.1"])
    with pytest.raises(RequestError, match="private network or of this machine"):
        fetched("http://half.example/x.png", 1 << 20)
    assert made == []


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "localhost", "[::ffff:7f00:1]", "0", "", "[::1]:x", "a\0b", "\ud800", "[", "a" * 300]
)
def test_no_spelling_of_a_name_leads_to_this_machine(host: str) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(RequestError, match="is not fetched"):
            fetched(f"{scheme}://{host}:9/x.png", 1 << 20)


def test_a_model_fetches_where_it_was_told_to(port: int, names: Leading) -> None:
    url = f"http://pictures.example:{port}/a b.png?x=1"
    asking = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    pixels = [{"role": "user", "content": [{"type": "image", "image": PIXELS}]}]
    template, path = "{{ messages[0].content }}", need_cases("qwen3vl") / "model-q4_0x.gguf"
    with quarrel.load(path, backend="cpu", n_ctx=128, allow_image_urls=True) as llm:
        names(["8.8.8.8"])
        seen, own = (llm.prepare(messages=messages, template=template).sight for messages in (asking, pixels))
        assert seen is not None
        assert own is not None
        assert seen.images[0].digest == own.images[0].digest
    with quarrel.load(path, backend="cpu", n_ctx=128) as llm, pytest.raises(RequestError, match="URL is not fetched"):
        llm.prepare(messages=asking, template=template)
