"""The models of a machine: listed, shown, renamed, deleted and fetched from an Ollama registry."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quarrel.cli import main
from tests.sight import EYES


def put(store: Path, name: str, model: Path, **texts: str) -> None:
    """A model in an Ollama store."""
    layers = []
    kinds = {"model": model.read_bytes(), **{kind: text.encode() for kind, text in texts.items()}}
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    for kind, data in kinds.items():
        digest = hashlib.sha256(data).hexdigest()
        (store / "blobs" / f"sha256-{digest}").write_bytes(data)
        layers.append(
            {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}
        )
    path = store / "manifests" / "registry.ollama.ai" / "library" / name.replace(":", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def in_hub(cache: Path, base: str, *names: str) -> Path:
    folder = cache / "models--owner--repo"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for name in names:
        shutil.copy(base, folder / "blobs" / name)
        (snapshot / f"{name}.gguf").symlink_to(folder / "blobs" / name)
    return folder


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_are_listed_shown_copied_and_deleted(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "ollama"
    put(store, "tiny:1b", Path(base), system="Be brief.")
    folder = in_hub(tmp_path / "hub", base, "q4", "q8")
    (store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "broken").write_text("{")

    def names(*words: str) -> list[str]:
        return [row["name"] for row in rows(capsys, "list", *words)]

    assert names() == ["demo", "demo-chat", "tiny:1b", "hf://owner/repo:q4.gguf", "hf://owner/repo:q8.gguf"]
    assert names("TINY") == ["tiny:1b"]
    assert rows(capsys, "show", "tiny:1b")["system"] == "Be brief."
    (store / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "broken").unlink()

    size = Path(base).stat().st_size
    for line in (["cp", "tiny:1b", "mine"], ["cp", base, "me/file"], ["cp", "owner/repo:q8", "eight:q8"]):
        assert main(line) == 0
    assert sorted(names("latest")) == ["me/file:latest", "mine:latest"]
    assert rows(capsys, "show", "mine")["system"] == "Be brief."
    assert len(list((store / "blobs").glob("*"))) == 3, "one file of weights, one text and an empty configuration"

    assert rows(capsys, "rm", "tiny:1b", "hf://owner/repo:q4.gguf") == [
        {"name": "tiny:1b", "bytes": 0},
        {"name": "hf://owner/repo:q4.gguf", "bytes": size},
    ]
    assert [path.name for path in (folder / "blobs").iterdir()] == ["q8"]
    assert names("mine") == ["mine:latest"], "what another name uses stays"
    assert main(["rm", "mine", "me/file", "eight:q8"]) == 0
    assert not list((store / "blobs").glob("*"))
    assert main(["list"]) == 0
    assert "MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rm demo", "is a part of Quarrel"),
        ("rm demo-chat", "is a part of Quarrel"),
        ("rm nothing", "there is no model 'nothing'"),
        ("rm BASE", "is a file"),
        ("rm ../../x", "there is no model '../../x'"),
        ("cp nothing mine", "no model 'nothing' was found"),
        ("cp demo ../up", "'../up' is no name"),
        ("pull mistral:7b", "say --registry https://registry.ollama.ai"),
        ("pull mistral:7b --registry ftp://x", "wanted a URL"),
        ("ps --url http://127.0.0.1:1", "there is no server at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(line: str, said: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("BASE", base) for word in line.split()]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said in sentence


class Registry:
    """Of one model, `owner/tiny:1b`; `wrong` changes its bytes, `cut` breaks its first transfer off there."""

    def __init__(self, model: bytes) -> None:
        self.model, self.wrong, self.cut, self.ranges = model, False, 0, list[str | None]()
        self.digest = "sha256:" + hashlib.sha256(model).hexdigest()
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": self.digest, "size": len(model)}
        self.manifest = json.dumps({"schemaVersion": 2, "layers": [layer]}).encode()

    def answer(self, path: str, bytes_from: str | None) -> tuple[int, bytes, int]:
        """Status, body, and the length that is promised."""
        if path == "/v2/library/tiny/manifests/1b":
            return 200, self.manifest, len(self.manifest)
        if path != f"/v2/library/tiny/blobs/{self.digest}":
            return 404, b"", 0
        self.ranges.append(bytes_from)
        start = int(bytes_from.removeprefix("bytes=").removesuffix("-")) if bytes_from else 0
        whole = self.model[::-1] if self.wrong else self.model
        body = whole[start : self.cut or None]
        self.cut = 0
        return 206 if start else 200, body, len(whole) - start


@pytest.fixture(name="registry")
def _registry(base: str) -> Iterator[tuple[Registry, str]]:
    registry = Registry(Path(base).read_bytes())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            status, body, length = registry.answer(self.path, self.headers.get("Range"))
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
    yield registry, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_model_of_a_registry_goes_on_where_it_broke_off(
    registry: tuple[Registry, str], base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, url = registry
    there.cut = 1000
    assert main(["pull", "tiny:1b", "--registry", url]) == 1
    said = capsys.readouterr().err
    assert "1000" in said or "broke off" in said or "could not be downloaded" in said
    assert not list((tmp_path / "ollama" / "manifests").rglob("1b")), "a name comes behind its files"
    found = rows(capsys, "pull", "tiny:1b", "--registry", url)
    assert there.ranges == [None, "bytes=1000-"]
    assert Path(found["files"][0]).read_bytes() == Path(base).read_bytes()
    assert rows(capsys, "pull", "tiny:1b")["files"] == found["files"], "what is here needs no registry"
    assert main(["pull", "other:1b", "--registry", url]) == 1
    assert "has no other:1b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (None, "arrived with"),
        (b"no JSON", "malformed"),
        (b'{"layers": [{"mediaType": "x", "digest": "sha256:../../../etc/passwd", "size": 1}]}', "64 hexadecimal digits"),
        (b'{"layers": []}', "names no model layer"),
    ],
)
def test_what_a_registry_sends_is_not_trusted(
    manifest: bytes | None, said: str, registry: tuple[Registry, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, url = registry
    there.wrong = manifest is None
    there.manifest = manifest or there.manifest
    assert main(["pull", "tiny:1b", "--registry", url]) == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said in sentence
    assert not list((tmp_path / "ollama").rglob("sha256-*")), "nothing of it is left"


def test_ps_says_what_a_server_has_in_memory(
    registry: tuple[Registry, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, url = registry
    body = {"models": [{"name": "tiny:1b", "size": 5 << 20, "context_length": 512, "expires_at": "2999-01-01T00:00:00Z"}]}
    monkeypatch.setattr(there, "answer", lambda path, _: (200, json.dumps(body).encode(), len(json.dumps(body))))
    assert main(["ps", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=4) == ["tiny:1b", "5.0", "MiB", "512", "unloaded by hand"]
    monkeypatch.setattr(there, "answer", lambda path, _: (401, b"", 0))
    assert main(["ps", "--url", url]) == 1
    assert "WEBUI_API_KEY" in capsys.readouterr().err
    for other in (b'{"models": [{"name": "a"}]}', b'{"models": [5]}', b'{"models": 5}', b"[]", b"[" * 99_999):
        monkeypatch.setattr(there, "answer", lambda path, _, other=other: (200, other, len(other)))
        assert main(["ps", "--url", url]) == 1
        assert "there is no server at" in capsys.readouterr().err


def test_a_model_with_eyes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    folder = EYES / "trained"
    assert rows(capsys, "show", str(folder / "model.gguf"))["images"] == str(folder / "mmproj.gguf")
    assert main(["show", str(folder / "model.gguf")]) == 0
    assert f"seen by {folder / 'mmproj.gguf'}" in capsys.readouterr().out
    assert rows(capsys, "show", "demo")["images"] is None
