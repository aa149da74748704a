"""Names lead to the files that they mean, to nothing outside their stores, and otherwise to a list of places."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quarrel.errors import ModelError, ModelNotFound, UnsupportedModel
from quarrel.gguf import hub, ollama, resolve
from quarrel.gguf import resolve as resolve_name
from quarrel.gguf.hub import HubName
from quarrel.gguf.ollama import LAYER, OllamaName

TRAVERSAL = [
    "../../etc/passwd:latest",
    "library/../../secret",
    "a/b/../c",
    "..",
    ".hidden",
    "hf.co/../repo:x",
    "hf.co/user/..:x",
    "x:..",
    "x:../../blobs",
    "x:.",
    "a//b",
    "a/b/c/d",
    "\\\\server\\share",
    "x\0y",
    "x:a\0b",
    "%2e%2e/x:..%2f",
    "",
    ":latest",
    "x:",
    "\u2025/x",
    "a" * 200,
]


@pytest.fixture(autouse=True)
def _nothing_from_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ollama, "SERVICE_STORES", (tmp_path / "service",))
    for variable in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def put_blob(store: Path, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    blob = store / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def put_model(store: Path, place: str, **layers: bytes) -> Path:
    manifest = store / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"mediaType": LAYER + kind.rstrip("_"), **put_blob(store, data)} for kind, data in layers.items()]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return manifest


def put_snapshot(cache: Path, repo: str, files: dict[str, bytes], revision: str = "r1", main: bool = True) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    for name, data in files.items():
        path = folder / "snapshots" / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return folder / "snapshots" / revision


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    found = resolve(str(path))
    assert (found.paths, found.source) == ((path,), "path")
    assert resolve("x.gguf").paths == (Path("x.gguf"),)


def test_any_shard_stands_for_all(tmp_path: Path) -> None:
    shards = tuple(tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3))
    for shard in shards:
        shard.touch()
    assert resolve(str(shards[1])).paths == shards
    shards[2].unlink()
    with pytest.raises(ModelNotFound, match="m-00003-of-00003"):
        resolve(str(shards[0]))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mistral", "registry.ollama.ai/library/mistral/latest"),
        ("granite4:latest", "registry.ollama.ai/library/granite4/latest"),
        ("nemotron-mini:4b", "registry.ollama.ai/library/nemotron-mini/4b"),
        ("someone/model:v1.2", "registry.ollama.ai/someone/model/v1.2"),
        ("hf.co/user/repo.GGUF:Q4_K_M", "hf.co/user/repo.GGUF/Q4_K_M"),
        ("localhost:5000/a/b:c", "localhost:5000/a/b/c"),
        ("HF.co/User/Repo:q4_k_m", "hf.co/user/repo/Q4_K_M"),
    ],
)
def test_ollama_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str) -> None:
    store = tmp_path / "store"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    put_model(store, place, model=b"GGUF weights")
    found = resolve(name)
    assert found.source == "ollama"
    assert [path.read_bytes() for path in found.paths] == [b"GGUF weights"]


def test_ollama_stores_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "registry.ollama.ai/library/m/latest"
    for folder, data in [(tmp_path / "service", b"3"), (tmp_path / "home/.ollama/models", b"2"), (tmp_path / "own", b"1")]:
        put_model(folder, place, model=data)
        if folder.name == "own":
            monkeypatch.setenv("OLLAMA_MODELS", str(folder))
        assert resolve("m").paths[0].read_bytes() == data


def test_ollama_text_layers_are_handed_on(tmp_path: Path) -> None:
    store = tmp_path / "home/.ollama/models"
    texts = {"template": b"{{ .Prompt }}", "system": b"Be brief.", "params": b'{"stop": ["x"]}', "license": b"free"}
    put_model(store, "registry.ollama.ai/library/m/latest", model=b"one", model_=b"two", projector=b"eyes", **texts)
    found = resolve("m")
    assert [path.read_bytes() for path in found.paths] == [b"one", b"two"]
    assert (found.template, found.system, found.params) == ("{{ .Prompt }}", "Be brief.", '{"stop": ["x"]}')


def test_ollama_models_that_cannot_be_used(tmp_path: Path) -> None:
    store = tmp_path / "home/.ollama/models"
    put_model(store, "registry.ollama.ai/library/tensors/latest", tensor=b"x", json=b"{}")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        resolve("tensors")
    put_model(store, "registry.ollama.ai/library/lora/latest", model=b"x", adapter=b"y")
    with pytest.raises(UnsupportedModel, match="LoRA"):
        resolve("lora")
    put_model(store, "registry.ollama.ai/library/empty/latest", license=b"x")
    with pytest.raises(ModelError, match="no model layer"):
        resolve("empty")


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd",
        "sha256:" + "a" * 63,
        "sha256:" + "A" * 64,
        "sha512:" + "a" * 64,
        "a" * 64,
        "sha256:" + "a" * 64 + "\n",
    ],
)
def test_ollama_digests_are_checked_for_form(tmp_path: Path, digest: str) -> None:
    store = tmp_path / "home/.ollama/models"
    manifest = put_model(store, "registry.ollama.ai/library/m/latest", model=b"x")
    manifest.write_text(json.dumps({"layers": [{"mediaType": LAYER + "model", "digest": digest}]}))
    with pytest.raises(ModelError, match="64 hexadecimal"):
        resolve("m")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"layers": 3}',
        '{"layers": [3]}',
        '{"layers": [{"mediaType": 1, "digest": "x"}]}',
        "[" * 100_000,
    ],
)
def test_ollama_manifests_may_be_garbage(tmp_path: Path, text: str) -> None:
    store = tmp_path / "home/.ollama/models"
    put_model(store, "registry.ollama.ai/library/m/latest", model=b"x").write_text(text)
    with pytest.raises(ModelError, match="malformed"):
        resolve("m")


def test_ollama_blobs_must_be_there_and_whole(tmp_path: Path) -> None:
    store = tmp_path / "home/.ollama/models"
    put_model(store, "registry.ollama.ai/library/m/latest", model=b"whole")
    blob = next((store / "blobs").iterdir())
    old = blob.rename(blob.with_name(blob.name.replace("-", ":")))
    assert resolve("m").paths == (old,)
    old.rename(blob)
    blob.write_bytes(b"who")
    with pytest.raises(ModelError, match="has 3 bytes, wanted 5"):
        resolve("m")
    blob.unlink()
    with pytest.raises(ModelNotFound, match="pull the model again"):
        resolve("m")


@pytest.mark.parametrize("name", TRAVERSAL)
def test_no_name_leads_out_of_its_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "home/.ollama/models/manifests").mkdir(parents=True)
    (tmp_path / "home/.ollama/models/secret").write_text('{"layers": []}')
    parsed = OllamaName.parse(name)
    if parsed is not None:
        parts = (parsed.host, parsed.namespace, parsed.model, parsed.tag)
        assert not any(part.startswith(".") or "/" in part or "\\" in part or "\0" in part for part in parts)
    if name != "..":  # which is a folder
        with pytest.raises(ModelNotFound):
            resolve(name)
    with pytest.raises(ModelNotFound):
        resolve("hf://" + name, download=False)


@pytest.mark.parametrize(
    "name",
    ["a/b:../x.gguf", "a/b:/etc/x.gguf", "a/b:x/../../y.gguf", "a/b:c\\d.gguf", "../b", "a/..", "a/b:", "a--b/c", "a/b/c"],
)
def test_hub_names_that_lead_out_are_no_names(name: str) -> None:
    assert HubName.parse(name) is None


QUANTS = {f"tiny-{quant}.gguf": quant.encode() for quant in ("Q4_0", "Q4_K_M", "Q8_0", "IQ4_XS")}


def test_the_hub_cache_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    put_snapshot(cache, "owner/repo", {**QUANTS, "mmproj-Q8_0.gguf": b"eyes", "README.md": b""})
    for name in (
        "owner/repo",
        "hf://owner/repo",
        "hf.co/owner/repo",
        "owner/repo:q4_k_m",
        "hf://owner/repo:tiny-Q4_K_M.gguf",
    ):
        found = resolve(name, download=False)
        assert (found.source, found.paths[0].read_bytes()) == ("hub", b"Q4_K_M")
    assert resolve("owner/repo:Q8_0").paths[0].read_bytes() == b"Q8_0"
    with pytest.raises(ModelNotFound, match="does not have it"):
        resolve("owner/repo:Q2_K")


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"), ("HF_HUB_CACHE", "")]
)
def test_the_cache_lies_where_the_variables_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    assert hub.cache_folder() == tmp_path / "home/.cache/huggingface/hub"
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    assert hub.cache_folder() == tmp_path / "there" / below


def test_the_main_revision_comes_first_and_an_incomplete_one_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    put_snapshot(tmp_path, "o/r", {"m.gguf": b"main"}, "r1")
    put_snapshot(tmp_path, "o/r", {"m.gguf": b"other"}, "r2", main=False)
    assert resolve("o/r").paths[0].read_bytes() == b"main"
    put_snapshot(tmp_path, "o/s", {"m-00001-of-00002.gguf": b""}, "r1")
    old = put_snapshot(tmp_path, "o/s", {"m-00001-of-00002.gguf": b"", "m-00002-of-00002.gguf": b""}, "r0", main=False)
    assert resolve("o/s").paths == (old / "m-00001-of-00002.gguf", old / "m-00002-of-00002.gguf")


def test_choosing_among_the_files_of_a_repository() -> None:
    def choose(choice: str | None, *files: str) -> tuple[str, ...]:
        return hub.choose(files, HubName("o", "r", choice))

    shards = ("Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf")
    assert choose("Q6_K", "m-Q4_0.gguf", *shards) == shards
    assert choose("m-Q6_K-00002-of-00002.gguf", "m-Q4_0.gguf", *shards) == shards
    assert choose("Q4_K", "m-Q4_K_M.gguf", "m.Q4_K.gguf") == ("m.Q4_K.gguf",)
    assert choose("Q4_K_M", "UD-Q4_K_M.gguf", "m-Q4_K_M.gguf") == ("m-Q4_K_M.gguf",)
    assert choose(None, "only.gguf", "mmproj-only.gguf") == ("only.gguf",)
    assert choose(None, "a-Q8_0.gguf", "a-Q4_0.gguf") == ("a-Q4_0.gguf",)
    for files in (["a-Q2_K.gguf", "a-Q3_K.gguf"], ["../a.gguf"], ["m-00001-of-00002.gguf"], ["a.safetensors"], []):
        with pytest.raises(ModelNotFound):
            choose(None, *files)


def test_what_sees_is_found_beside_a_model_in_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("m.gguf", "mmproj-m-f32.gguf", "mmproj-m-bf16.gguf", "mmproj-m-F16.gguf", "eyes.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    assert resolve("m.gguf").projector == Path("mmproj-m-F16.gguf")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/m.gguf").touch()
    assert resolve("alone/m.gguf").projector is None
    store = tmp_path / "store"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    put_model(store, "registry.ollama.ai/library/seer/latest", model=b"text", projector=b"eyes")
    put_model(store, "registry.ollama.ai/library/blind/latest", model=b"text")
    found = resolve("seer")
    assert found.projector is not None
    assert (found.projector.read_bytes(), [path.read_bytes() for path in found.paths]) == (b"eyes", [b"text"])
    assert resolve("blind").projector is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = {
        "Q4_0/m-Q4_0.gguf": b"a",
        "m-Q8_0.gguf": b"b",
        "m.mmproj-Q8_0.gguf": b"root",
        "other/mmproj-F16.gguf": b"other",
    }
    snapshot = put_snapshot(tmp_path / "hub", "o/r", files)
    for choice in ("Q4_0", "Q8_0"):
        assert resolve(f"o/r:{choice}").projector == snapshot / "m.mmproj-Q8_0.gguf"
    hub.remove([snapshot / "m-Q8_0.gguf"])
    assert (snapshot / "m.mmproj-Q8_0.gguf").is_file()
    hub.remove([snapshot / "Q4_0/m-Q4_0.gguf"])
    assert not list(snapshot.rglob("*.gguf"))


def test_not_found_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "own"))
    with pytest.raises(ModelNotFound) as caught:
        resolve("some/model")
    text = str(caught.value)
    for place in (
        "some/model",
        str(tmp_path / "own"),
        ".ollama/models",
        str(tmp_path / "service"),
        ".cache/huggingface/hub",
        "hf://",
    ):
        assert place in text
    assert "\n" not in text


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"is a folder\."):
        resolve(str(tmp_path))
    (tmp_path / "mistral.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"is a folder, in which there is mistral\.gguf\."):
        resolve(str(tmp_path))


def test_a_name_that_is_nearly_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistral.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"mistrl\.gguf is no file, but there is mistral\.gguf\. Name"):
        resolve("mistrl.gguf")


def test_demo_is_the_bundled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.setattr(sys.modules["quarrel.gguf.resolve"].importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(ModelNotFound, match="install quarrel again"):
        resolve("demo")
    for file in ("quarrel-demo-11M-Q8_0.gguf", "quarrel-chat-17M-Q8_0.gguf"):
        (tmp_path / "demo" / file).touch()
    assert resolve("demo") == resolve_name("quarrel-demo")
    assert resolve("demo").paths == (tmp_path / "demo/quarrel-demo-11M-Q8_0.gguf",)
    assert resolve("demo-chat").paths == (tmp_path / "demo/quarrel-chat-17M-Q8_0.gguf",)


def test_finding_models_needs_no_download_library() -> None:
    code = "import sys, quarrel.gguf; sys.exit(any(m.split('.')[0] in ('huggingface_hub', 'tqdm') for m in sys.modules))"
    # The gguf package itself imports tqdm, so only the hub's library is the sign of an eager import.
    code = code.replace("('huggingface_hub', 'tqdm')", "('huggingface_hub',)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
