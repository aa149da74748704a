"""Names of models as Ollama's clients handle them: listed, shown, copied, created, pulled, deleted."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

import quarrel
from quarrel.engine import SamplingParams
from quarrel.gguf.digest import Digests
from quarrel.gguf.download import Report
from quarrel.llm import LLM
from quarrel.server import Rates, Settings
from quarrel.server.ollama_facts import _count, registered, tagged
from tests.paths import need_cases
from tests.server.conftest import Live, running
from tests.server.test_rest import DEMO

FEW = {"num_predict": 4, "temperature": 0}


@pytest.fixture(name="made")
def _made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    with running(Settings(data_dir=tmp_path / "data", rates=Rates(requests=0))) as live:
        yield live


@pytest.fixture(name="client")
def _client(made: Live) -> Iterator[ollama.Client]:
    client = ollama.Client(host=made.url)
    yield client
    client._client.close()


def names(made: Live) -> list[str]:
    return [m["name"] for m in made.client.get("/api/tags").json()["models"]]


def test_a_model_is_listed_with_the_digest_of_its_file_before_it_is_loaded(made: Live, client: ollama.Client) -> None:
    (row,) = made.client.get("/api/tags").json()["models"]
    assert (row["name"], row["model"], row["size"]) == ("demo:latest", "demo:latest", DEMO.stat().st_size)
    assert row["digest"] == hashlib.sha256(DEMO.read_bytes()).hexdigest()
    assert row["details"] == {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "10.88M",
        "quantization_level": "Q8_0", "context_length": 512, "embedding_length": 256,
    }  # fmt: skip
    assert client.list().models[0].details is not None
    assert made.client.get("/api/ps").json() == {"models": []}
    client.generate("demo")
    (row,) = made.client.get("/api/ps").json()["models"]
    assert (row["name"], row["context_length"], row["size_vram"]) == ("demo:latest", 512, 0)
    assert row["size"] > DEMO.stat().st_size


def test_a_digest_is_computed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = tmp_path / "a.gguf", tmp_path / "k" / "digests.json"
    file.write_bytes(b"a" * 1000)
    wanted = hashlib.sha256(b"a" * 1000).hexdigest()
    assert Digests(kept).of([file]).result(30) == wanted
    with monkeypatch.context() as never:
        never.setattr(threading.Thread, "start", lambda self: pytest.fail("read again"))
        assert Digests(kept).of([file]).result(0) == wanted
        blob = tmp_path / f"sha256-{'5' * 64}"
        blob.write_bytes(b"x")
        assert Digests(kept).of([blob]).result(0) == "5" * 64  # as Ollama calls it
    file.write_bytes(b"b")
    assert Digests(kept).of([file]).result(30) == hashlib.sha256(b"b").hexdigest()
    kept.write_text("[1")
    assert Digests(kept).of([file, file]).result(30) == hashlib.sha256(b"bb").hexdigest()
    assert isinstance(Digests(kept).of([tmp_path / "none"]).exception(30), OSError)


def test_a_model_is_known_with_its_tag_and_in_any_case(made: Live, client: ollama.Client) -> None:
    for name in ("demo", "demo:latest", "DEMO", "Demo:latest"):
        assert client.generate(name, "a", options=FEW).model == name
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        assert made.client.post("/v1/completions", json=body).json()["model"] == "demo"
        assert made.client.get(f"/v1/models/{name}").json()["id"] == "demo"
        assert made.client.get(f"/api/models/{name}").json()["name"] == "demo"
    assert made.client.post("/v1/completions", json={"model": "demo:7b", "prompt": "a"}).status_code == 400  # an adapter
    assert made.client.post("/api/generate", json={"model": "demo:7b", "prompt": "a"}).status_code == 404
    assert [tagged(n) for n in ("a", "a:b", "h:1/a", "hf://o/r:Q4")] == ["a:latest", "a:b", "h:1/a:latest", "hf://o/r:Q4"]
    assert registered("o/a") == "registry.ollama.ai/o/a:latest"


def test_a_model_is_shown_whole(made: Live, client: ollama.Client) -> None:
    row = made.client.post("/api/show", json={"name": "demo"}).json()
    info = row["model_info"]
    assert (info["general.architecture"], info["llama.context_length"], info["tokenizer.ggml.tokens"]) == (
        "llama",
        512,
        None,
    )
    assert info["general.parameter_count"] == 10884352
    assert row["tensors"][0] == {"name": "token_embd.weight", "type": "Q8_0", "shape": [256, 4096]}
    assert row["capabilities"] == ["completion"]
    assert row["modelfile"].startswith("# Modelfile")
    long = made.client.post("/api/show", json={"model": "demo", "verbose": True}).json()["model_info"]
    assert (len(long["tokenizer.ggml.tokens"]), long["tokenizer.ggml.tokens"][1]) == (4096, "<s>")
    assert client.show("demo").modelinfo == info
    assert [_count(n) for n in (8_000_000_000, 8_030_261_248, 10_884_352, 3000, 5)] == ["8B", "8.0B", "10.88M", "3K", "5"]


def test_an_encoder_is_one_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "minilm.gguf").symlink_to(need_cases("minilm", "all-MiniLM-L6-v2-q8_0.gguf"))
    settings = Settings(models=(), models_dir=tmp_path, data_dir=tmp_path / "d", rates=Rates(requests=0))
    with running(settings) as made:
        row = made.client.post("/api/show", json={"model": "minilm"}).json()
        assert (row["capabilities"], row["details"]["parameter_size"]) == (["embedding"], "22.57M")
        vectors = made.client.post("/api/embed", json={"model": "minilm", "input": ["word " * 900, "word " * 510]}).json()
        assert vectors["prompt_eval_count"] == 2 * 512
        assert vectors["embeddings"][0] == pytest.approx(vectors["embeddings"][1], abs=1e-5)  # [SEP] is kept


def test_a_copy_has_the_same_weights_and_a_life_of_its_own(made: Live, client: ollama.Client) -> None:
    client.generate("demo", "a", options=FEW)
    assert made.client.post("/api/copy", json={"source": "demo", "destination": "Demo2:latest"}).content == b""
    assert names(made) == ["demo:latest", "Demo2:latest"]
    loaded = made.server.dispatcher.models.entry("demo").loaded
    body = {"model": "demo2", "prompt": "a", "max_tokens": 2}
    assert made.client.post("/v1/completions", json=body).json()["model"] == "Demo2"
    assert made.server.dispatcher.models.entry("demo2").loaded is loaded
    assert "Demo2" in [m["id"] for m in made.client.get("/v1/models").json()["data"]]
    client.delete("demo")
    assert (names(made), DEMO.exists()) == (["Demo2:latest"], True)
    assert client.generate("demo2", "a", options=FEW).done
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.completions.create(model="demo", prompt="a")
    answer = made.client.request("DELETE", "/api/delete", json={"model": "demo2"})
    assert (answer.status_code, answer.content, names(made)) == (200, b"", [])
    answer = made.client.request("DELETE", "/api/delete", json={"name": "demo2"})
    assert (answer.status_code, answer.json()) == (404, {"error": "model 'demo2' not found"})
    answer = made.client.post("/api/copy", json={"source": "nope", "destination": "x"})
    assert (answer.status_code, answer.json()) == (404, {"error": 'model "nope" not found'})


def test_names_last_and_a_file_of_the_folder_is_forgotten_not_removed(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(DEMO)
    settings = Settings(models=(), models_dir=tmp_path, data_dir=tmp_path / "d", rates=Rates(requests=0))
    with running(settings) as made:
        assert made.client.post("/api/copy", json={"source": "a", "destination": "c:7b"}).status_code == 200
        assert made.client.request("DELETE", "/api/delete", json={"model": "b"}).status_code == 200
        assert names(made) == ["a:latest", "c:7b"]
    with running(settings) as made:
        assert names(made) == ["a:latest", "c:7b"]
        assert made.client.post("/api/generate", json={"model": "C:7B"}).json()["done_reason"] == "load"
    assert (tmp_path / "b.gguf").exists()
    (tmp_path / "d" / "models.json").write_text('{"names": [{"zap": 1}]}')
    with running(settings) as made:
        assert names(made) == ["a:latest", "b:latest"]


def test_a_name_may_say_how_its_model_is_asked(made: Live, client: ollama.Client) -> None:
    parameters = {"temperature": 0, "num_predict": 3, "stop": ["zzz"], "num_ctx": 99}
    words = client.create(
        "mine", from_="demo", system="Be brief.", parameters=parameters, license=["MIT"], stream=True,
        template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
    )  # fmt: skip
    assert [w.status for w in words][-1] == "success"
    shown = client.show("mine")
    assert (shown.parameters or "").splitlines()[:2] == [
        "temperature                    0",
        "num_predict                    3",
    ]
    assert (shown.license, made.client.post("/api/show", json={"model": "mine"}).json()["system"]) == ("MIT", "Be brief.")
    assert all(
        line in (shown.modelfile or "") for line in ("SYSTEM Be brief.", "PARAMETER stop zzz", "LICENSE MIT", "MESSAGE")
    )
    said = client.chat("mine", [{"role": "user", "content": "b"}])
    assert (said.eval_count, said.prompt_eval_count) == (3, len(made.client.post(
        "/api/tokenize", json={"text": "<system>Be brief.<user>Hi<assistant>Ho<user>b"}).json()["tokens"]))  # fmt: skip
    body = {"model": "mine", "messages": [{"role": "user", "content": "b"}]}
    assert made.client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert client.chat("mine", [{"role": "user", "content": "b"}], options={"num_predict": 2}).eval_count == 2
    assert client.create("yours", from_="mine", system="Be long.").status == "success"
    assert "<{{ m.role }}>" in (client.show("yours").template or "")
    assert made.server.dispatcher.models.entry("yours") is made.server.dispatcher.models.entry("demo")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "x"}, 400, "neither 'from' or 'files' was specified"),
        ({"from": "demo"}, 400, "model is required"),
        ({"model": "../x", "from": "demo"}, 400, "invalid model name"),
        ({"model": "a" * 500, "from": "demo"}, 400, "invalid model name"),
        ({"model": "x", "from": "/etc/passwd"}, 404, "not found"),
        (
            {"model": "x", "from": "demo", "template": "{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}"},
            400,
            "one of Go",
        ),
        ({"model": "x", "from": "demo", "parameters": {"temperature": "hot"}}, 400, "temperature"),
        ({"model": "x", "from": "demo", "quantize": "q4_K_M"}, 400, "quarrel quantize"),
        ({"model": "x", "files": {"a.gguf": "sha256:" + "0" * 64}}, 404, "/api/blobs"),
        ({"model": "x", "files": {"a.gguf": "../../etc/passwd"}}, 400, "invalid digest"),
        ({"model": "x", "from": "demo", "adapters": {"a": "sha256:" + "0" * 64}}, 404, "/api/blobs"),
    ],
)
def test_what_cannot_be_created_is_one_sentence(made: Live, body: dict[str, Any], status: int, said: str) -> None:
    answer = made.client.post("/api/create", json=body)
    assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
    assert names(made) == ["demo:latest"]


def test_a_model_is_created_of_a_file_that_is_sent_and_goes_with_its_last_name(made: Live, client: ollama.Client) -> None:
    data = DEMO.read_bytes()[:-1] + b"\x01"
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    assert made.client.head(f"/api/blobs/{digest}").status_code == 404
    assert made.client.post(f"/api/blobs/{digest}", content=b"other").status_code == 400
    folder = made.settings.data_dir / "models"
    assert list(folder.iterdir()) == []
    assert made.client.post(f"/api/blobs/{digest}", content=data).status_code == 201  # more than other bodies may have
    assert made.client.head(f"/api/blobs/{digest}").status_code == 200
    assert client.create("sent", files={"a.gguf": digest}).status == "success"
    assert client.generate("sent", "a", options=FEW).done
    client.copy("sent", "again")
    client.delete("sent")
    assert [f.name for f in folder.iterdir()] == [digest.replace(":", "-")]
    client.delete("again")
    assert list(folder.iterdir()) == []
    known = "sha256:" + hashlib.sha256(DEMO.read_bytes()).hexdigest()
    assert made.client.head(f"/api/blobs/{known}").status_code == 200, "what is here already is not sent again"
    assert client.create("same", files={"a.gguf": known}).status == "success"
    assert made.client.post("/api/blobs/sha256:..", content=b"x").status_code == 400


def test_a_model_with_adapters_is_loaded_with_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    def load(source: str, adapters: Any = None) -> LLM:
        seen.append((source, adapters))
        return quarrel.load(source, backend="cpu", threads=1, max_seqs=1)

    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), load) as made:
        data = b"GGUF adapter"
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        assert made.client.post(f"/api/blobs/{digest}", content=data).status_code == 201
        body = {"model": "tuned", "from": "demo", "adapters": {"a.gguf": digest}, "stream": False}
        assert made.client.post("/api/create", json=body).json() == {"status": "success"}
        made.client.post("/api/generate", json={"model": "tuned"})
        path = str(tmp_path / "models" / digest.replace(":", "-"))
        assert seen[-1] == ("demo", {"a.gguf": path})
        assert made.server.dispatcher.models.entry("tuned") is not made.server.dispatcher.models.entry("demo")
        with made.server.dispatcher.models.named("tuned")[1].loaded.llm as llm:  # type: ignore[union-attr, attr-defined]
            prepared: dict[str, Any] = {}
            llm.prepare = lambda *a, **k: prepared.update(k)
            made.server.dispatcher.models.named("tuned")[0].prompting.of(llm).prepare("a", adapter=None)
            assert (prepared["adapter"], type(prepared["params"])) == ("a.gguf", SamplingParams)


def test_what_is_to_be_had_is_pulled_and_the_rest_plainly_refused(
    made: Live, client: ollama.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.pull("demo").status == "success"
    assert [w.status for w in client.pull("demo:latest", stream=True)] == ["pulling manifest", "success"]
    for name in ("mistral:7b", "/etc/passwd", "x" * 5000):
        with pytest.raises(ollama.ResponseError, match="is not to be had: Ollama's registry is not read here"):
            client.pull(name)
    store = tmp_path / "store"
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "small" / "latest"
    manifest.parent.mkdir(parents=True)
    blob = store / "blobs" / f"sha256-{'1' * 64}"
    blob.parent.mkdir()
    blob.write_bytes(DEMO.read_bytes())
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "1" * 64}
    manifest.write_text(json.dumps({"layers": [layer]}))
    assert client.pull("small").status == "success"
    assert "small:latest" in names(made)
    assert client.generate("small", "a", options=FEW).done
    fetched: list[str] = []
    monkeypatch.setattr("quarrel.server.ollama_models.download", lambda name, progress: fetched.append(name))
    assert client.pull("hf.co/owner/repo:Q4_K_M").status == "success"
    assert (fetched, names(made)[-1]) == (["hf://owner/repo:Q4_K_M"], "hf.co/owner/repo:Q4_K_M")

    assert made.client.get("/api/models").json()["models"][-1]["name"] == "hf.co/owner/repo:Q4_K_M"

    def slow(name: str, progress: Report) -> None:
        progress("m.gguf", 5, 10)
        time.sleep(0.01)

    monkeypatch.setattr("quarrel.server.ollama_models.download", slow)
    monkeypatch.setattr("quarrel.server.ollama_models.TELL_EVERY", 0.001)
    rows = list(client.pull("hf.co/owner/slow", stream=True))
    assert next((r.status, r.completed, r.total) for r in rows[1:-1]) == ("pulling m.gguf", 5, 10)

    def fails(name: str, progress: Report) -> None:
        raise quarrel.QuarrelError("there is no such repository")

    monkeypatch.setattr("quarrel.server.ollama_models.download", fails)
    with pytest.raises(ollama.ResponseError, match="no such repository"):
        list(client.pull("hf.co/owner/other", stream=True))
    with pytest.raises(ollama.ResponseError, match="not pushed from here"):
        client.push("demo")


def test_keys_and_origins_guard_these_routes_too(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, api_keys=("0123456789abcdef",), rates=Rates(requests=0))) as made:
        for method, path in (("POST", "/api/create"), ("DELETE", "/api/delete"), ("POST", f"/api/blobs/sha256:{'0' * 64}")):
            answer = made.client.request(method, path, json={"model": "demo"})
            assert (answer.status_code, isinstance(answer.json()["error"], str)) == (401, True)
            answer = httpx.request(method, f"{made.url}{path}", headers={"Origin": "https://evil.example"}, json={})
            assert answer.status_code == 403
        assert not re.search("models", " ".join(p.name for p in tmp_path.iterdir()))
