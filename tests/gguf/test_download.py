"""Downloads from a hub arrive whole in the cache, go on after a break, and end in one sentence when they cannot."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quarrel
from quarrel.errors import DownloadError, ModelNotFound
from quarrel.gguf import pull, resolve
from tests.convert.folders import llama_folder
from tests.gguf.hub_server import COMMIT, Hub, serve

pytest.importorskip("huggingface_hub")

FILES = {"m-Q4_0.gguf": bytes(range(256)) * 400, "m-Q8_0.gguf": b"eight" * 1000, "README.md": b"words"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        yield hub


def fetched(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_model_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    found = resolve("hf://owner/repo:Q8_0")
    assert found.source == "hub"
    assert found.paths[0].read_bytes() == FILES["m-Q8_0.gguf"]
    assert tmp_path in found.paths[0].parents
    assert fetched(hub) == ["m-Q8_0.gguf"]
    hub.requests.clear()
    assert resolve("hf://owner/repo:Q8_0") == found
    assert hub.requests == []


def test_without_a_choice_the_usual_quantisation_is_fetched(hub: Hub) -> None:
    assert pull("owner/repo").paths[0].name == "m-Q4_0.gguf"


def test_what_sees_is_fetched_along_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**FILES, "mmproj-Q8_0.gguf": b"coarse", "mmproj-F16.gguf": b"eyes", "sub/mmproj-F16.gguf": b"others"}
    with serve(Hub(files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        found = resolve("hf://owner/repo:Q8_0")
        assert found.projector is not None
        assert found.projector.read_bytes() == b"eyes"
        assert fetched(hub) == ["m-Q8_0.gguf", "mmproj-F16.gguf"]
        pull("hf://owner/repo:Q4_0", progress=False)
        assert fetched(hub) == ["m-Q8_0.gguf", "mmproj-F16.gguf", "m-Q4_0.gguf"]
        assert resolve("owner/repo:Q8_0") == found
        for scheme in ("hf://", ""):  # one of several, by its name; nothing comes with it
            assert resolve(f"{scheme}owner/repo:mmproj-Q8_0.gguf").paths[0].read_bytes() == b"coarse"
        assert fetched(hub)[3:] == ["mmproj-Q8_0.gguf"]


def test_who_asked_is_told_how_far_it_is(hub: Hub) -> None:
    reached: list[tuple[str, int, int]] = []
    pull("hf://owner/repo:Q8_0", progress=lambda file, done, size: reached.append((file, done, size)))
    size = len(FILES["m-Q8_0.gguf"])
    assert reached[-1] == ("m-Q8_0.gguf", size, size)


def test_nothing_is_fetched_when_told_not_to(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="does not have it"):
        resolve("hf://owner/repo", download=False)
    assert hub.requests == []


def ranges(hub: Hub) -> list[str | None]:
    return [wanted for method, path, wanted in hub.requests if method == "GET" and "/resolve/" in path]


def test_a_broken_transfer_goes_on_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    hub.cut = 65536
    assert pull("hf://owner/repo:Q4_0").paths[0].read_bytes() == FILES["m-Q4_0.gguf"]
    first, second = ranges(hub)
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) <= 65536


def partial(tmp_path: Path, data: bytes) -> Path:
    digest = hashlib.sha256(FILES["m-Q4_0.gguf"]).hexdigest()
    part = tmp_path / "models--owner--repo" / "blobs" / f"{digest}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    return part


def test_a_later_attempt_goes_on_where_the_first_stopped(hub: Hub, tmp_path: Path) -> None:
    part = partial(tmp_path, FILES["m-Q4_0.gguf"][:50_000])
    assert pull("hf://owner/repo:Q4_0").paths[0].read_bytes() == FILES["m-Q4_0.gguf"]
    assert ranges(hub) == ["bytes=50000-"]
    assert not part.exists()


def test_a_partial_file_that_is_too_long_is_begun_again(hub: Hub, tmp_path: Path) -> None:
    partial(tmp_path, bytes(200_000))
    assert pull("hf://owner/repo:Q4_0").paths[0].read_bytes() == FILES["m-Q4_0.gguf"]
    assert ranges(hub) == [None]


def test_a_partial_file_of_other_content_is_found_out_by_its_digest(hub: Hub, tmp_path: Path) -> None:
    partial(tmp_path, bytes(50_000))
    with pytest.raises(DownloadError, match="digest"):
        pull("hf://owner/repo:Q4_0")
    assert pull("hf://owner/repo:Q4_0").paths[0].read_bytes() == FILES["m-Q4_0.gguf"]


def test_two_downloads_of_one_file_do_not_mix(hub: Hub, tmp_path: Path) -> None:
    with partial(tmp_path, b"").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="another process"):
            pull("hf://owner/repo:Q4_0")


def test_other_tools_find_the_file_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    import huggingface_hub

    path = pull("hf://owner/repo:Q4_0").paths[0]
    seen = huggingface_hub.hf_hub_download("owner/repo", "m-Q4_0.gguf", cache_dir=tmp_path, local_files_only=True)
    assert Path(seen) == path


def test_a_file_of_the_wrong_size_is_refused_and_not_kept(hub: Hub, tmp_path: Path) -> None:
    hub.claim = {"m-Q4_0.gguf": 999_999}
    with pytest.raises(DownloadError, match="lists 999999"):
        pull("hf://owner/repo:Q4_0")
    with pytest.raises(ModelNotFound):
        resolve("hf://owner/repo:Q4_0", download=False)
    assert not any(path.is_file() for path in (tmp_path / "models--owner--repo" / "snapshots" / COMMIT).rglob("*.gguf"))


def test_what_the_hub_does_not_have(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="Q2_K"):
        pull("hf://owner/repo:Q2_K")
    with pytest.raises(ModelNotFound, match="other/repo"):
        pull("hf://other/repo")


def test_file_names_of_a_hostile_hub_are_ignored(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"../../../evil.gguf": b"evil", "/etc/evil.gguf": b"evil", "a\\..\\evil.gguf": b"evil"}
    with pytest.raises(ModelNotFound, match="no whole GGUF"):
        pull("hf://owner/repo")
    assert fetched(hub) == []


def test_no_hub_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=r"owner/repo could not be downloaded from http://127\.0\.0\.1:9"):
        pull("hf://owner/repo")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"quarrel\[hub\]"):
        pull("hf://owner/repo")


def test_progress_is_shown_and_can_be_silenced(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    pull("hf://owner/repo:Q4_0")
    assert "m-Q4_0.gguf" in capsys.readouterr().err
    pull("hf://owner/repo:Q8_0", progress=False)
    assert "m-Q8_0.gguf" not in capsys.readouterr().err


def test_a_repository_of_safetensors_is_fetched_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_folder(tmp_path / "m")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    more = {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x", "modeling_x.py": b"x", "onnx/model.json": b"x"}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve(Hub({**files, **more})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with quarrel.load("hf://owner/repo", backend="cpu", n_ctx=64, threads=1) as model:
            assert model.generate("abc", max_tokens=3, ignore_eos=True).text
        assert fetched(hub)[-1] == "config.json", "what makes the folder whole came before the rest"
        assert sorted(fetched(hub)) == sorted(files)
        hub.requests.clear()
        found = resolve("hf://owner/repo")
        assert hub.requests == []
        assert found.paths[0].is_dir()
        with pytest.raises(ModelNotFound, match="has no whole GGUF model"):
            pull("hf://owner/repo:Q4_K_M")
        (found.paths[0] / "model.safetensors").unlink()
        hub.requests.clear()
        assert resolve("hf://owner/repo") == found
        assert hub.requests, "a folder without weights was taken for a whole one"
        assert (found.paths[0] / "model.safetensors").is_file()


def test_a_folder_that_lacks_a_shard_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    names = sorted(set(index["weight_map"].values()))
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), **dict.fromkeys(names, b"w")}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with serve(Hub(files)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        folder = pull("hf://owner/repo").paths[0]
        (folder / names[1]).unlink()
        hub.requests.clear()
        assert resolve("hf://owner/repo").paths == (folder,)
        assert hub.requests, "a folder without a shard was taken for a whole one"
        assert (folder / names[1]).is_file()
