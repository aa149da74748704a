"""Which pages of other origins may call, and what they read when they may not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quarrel.errors import ConfigError
from quarrel.server import Rates, Settings
from quarrel.server.origins import LOCAL, Origins
from tests.server.conftest import Live, running

HEADERS = "authorization, content-type, openai-beta, user-agent, x-stainless-arch, x-stainless-retry-count, x-stainless-os"


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    origins = ("https://*.example.org", "chrome-extension://*")
    settings = Settings(data_dir=tmp_path_factory.mktemp("o"), rates=Rates(requests=0), origins=origins, ollama=True)
    with running(settings) as made:
        yield made


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("http://localhost:*", ["http://localhost:1", "HTTP://LOCALHOST:99"], ["http://localhost", "https://localhost:1"]),
        ("https://*.example.org", ["https://a.b.example.org"], ["https://example.org", "https://x.example.org.evil.com"]),
        ("https://example.org/", ["https://example.org"], ["https://example.org/", "https://exampleXorg"]),
        ("app://*", ["app://obsidian.md", "app://"], ["apps://x", "app://a/b"]),
        ("file://", ["file://"], ["file://a", "null"]),
        ("null", ["null"], ["nulls", ""]),
        ("*", ["https://a", "null", "chrome-extension://abc"], []),
    ],
)
def test_a_pattern_matches_whole_origins(pattern: str, inside: list[str], outside: list[str]) -> None:
    origins = Origins([pattern])
    assert all(o in origins for o in inside)
    assert not any(o in origins for o in outside)


def test_what_is_no_pattern_is_refused_at_the_start() -> None:
    for wrong in ("", "example.org", "https://", "https://a/b", "http://a b", "://x", "h*p://x"):
        with pytest.raises(ConfigError, match="is no origin: wanted one such as"):
            Settings(origins=(wrong,)).check(has_keys=False)
    Settings(origins=("*", "null", *LOCAL)).check(has_keys=False)
    assert "https://evil.example" not in Origins(LOCAL)
    assert "http://localhost" not in Origins(())


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "https://127.0.0.1:1", "app://obsidian.md", "file://", "tauri://localhost",
     "vscode-webview://1a", "https://a.example.org", "chrome-extension://abc"],
)  # fmt: skip
def test_a_page_that_may_call_is_let_in_with_the_headers_of_its_client(made: Live, origin: str) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": HEADERS}
    answer = made.client.options("/v1/chat/completions", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (204, origin)
    assert answer.headers["access-control-allow-headers"] == HEADERS
    assert made.client.get("/api/tags", headers={"Origin": origin}).headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://["])
def test_a_page_that_may_not_call_reads_why(made: Live, origin: str) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x\u00ff"}
    preflight = made.client.options("/v1/models", headers={k: v.encode("latin-1") for k, v in asked.items()})
    assert (preflight.status_code, "\u00ff" in preflight.headers["access-control-allow-headers"]) == (204, False)
    answer = made.client.get("/v1/models", headers={"Origin": origin})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (403, origin)
    assert "--origin" in answer.json()["error"]["message"]
