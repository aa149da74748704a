"""Importance matrices made of models: what is added up, goes on and is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.cli import main
from quarrel.errors import ModelError, QuarrelError, RequestError
from quarrel.gguf import GGUFFile, ImportanceMatrix, read_importance
from quarrel.llm import LoadOptions
from quarrel.quality import importance
from quarrel.quality.importance import collect
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

SIZE = 16
OPTIONS = LoadOptions(backend="cpu", threads=1, compute="float32")
WORDS = "the quick brown fox jumps over the lazy dog and runs away from all of them "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS * 2)
    return path


def made(model: Path, text: Path, target: Path, most: int | None = None) -> ImportanceMatrix:
    return collect(str(model), text, target, OPTIONS, size=SIZE, most=most)


def test_sums_are_those_of_what_the_maps_read(tmp_path: Path, text: Path) -> None:
    """A layer by hand: rotations keep the squares of what attention mixes, and one token attends to itself."""
    path = write_tiny_model(tmp_path / "m.gguf")
    found = made(path, text, tmp_path / "i.gguf")
    with quarrel.load(path, backend="cpu", threads=1) as model, GGUFFile.open(path) as file:
        ids = model.tokenizer.encode(text.read_text().removesuffix("\n"))
        ids = ids[: len(ids) // SIZE * SIZE]
        ids = [model.tokenizer.bos_id if i % SIZE == 0 else id for i, id in enumerate(ids)]
        h = file.array("token_embd.weight")[ids].astype(np.float64)
        w = {n.removeprefix("blk.0.").removesuffix(".weight"): file.array(n).astype(np.float64) for n in file.tensors}

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    x = norm(h)
    q, k, v = (x @ w[f"attn_{n}"].T for n in "qkv")
    heads, mixed = 2, np.zeros_like(x)
    size = q.shape[1] // heads
    turn = np.arange(SIZE)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    for start in range(0, len(ids), SIZE):
        rows = slice(start, start + SIZE)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)

            def turned(a: np.ndarray, rows: slice = rows, columns: slice = columns) -> np.ndarray:
                a = a[rows, columns].reshape(SIZE, -1, 2)
                return (a[..., 0] + 1j * a[..., 1]) * np.exp(1j * turn)

            scores = (turned(q) @ turned(k).conj().T).real / size**0.5
            scores[np.triu_indices(SIZE, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[rows, columns] = p / p.sum(-1, keepdims=True) @ v[rows, columns]
    h = h + mixed @ w["attn_output"].T
    y = norm(h)
    gate = y @ w["ffn_gate"].T
    inner = gate / (1 + np.exp(-gate)) * (y @ w["ffn_up"].T)
    wanted = {"attn_q": x, "attn_k": x, "attn_v": x, "attn_output": mixed, "ffn_gate": y, "ffn_up": y, "ffn_down": inner}
    assert {f"blk.0.{n}.weight" for n in wanted} == set(found.entries)
    for name, read in wanted.items():
        entry = found.entries[f"blk.0.{name}.weight"]
        assert np.allclose(entry.sums[0], (read * read).sum(0), rtol=1e-4), name
        assert entry.counts.tolist() == [len(ids)]


@pytest.mark.parametrize("case", ["mixtral", "qwen35moe", "deepseek2", "mamba2"])
def test_chunks_know_nothing_of_each_other_and_experts_share_the_tokens(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = need_cases(case, "meta.json").parent
    model = sorted(folder.glob("model-*.gguf"))[0]
    path = tmp_path / "words.txt"
    path.write_text(WORDS * 8)
    together = made(model, path, tmp_path / "a.gguf", 3)
    monkeypatch.setattr(importance, "STEP", SIZE)
    alone = made(model, path, tmp_path / "b.gguf", 3)
    assert (together.chunks, together.chunk_size, together.datasets) == (3, SIZE, ("words.txt",))
    with GGUFFile.open(model) as file:
        for name, entry in together.entries.items():
            assert np.allclose(entry.sums, alone.entries[name].sums, rtol=1e-3), name
            assert np.array_equal(entry.counts, alone.entries[name].counts)
            info = file.tensors[name]
            assert together.means(name, int(np.prod(info.dims[2:])), info.dims[0]) is not None
            if name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
                # Every token goes to as many experts, and all read what the router reads.
                router = together.entries[name.rpartition("ffn_")[0] + "ffn_gate_inp.weight"]
                used = entry.counts.sum() / router.counts[0]
                assert used == round(used) >= 1
                assert np.allclose(entry.sums.sum(0), used * router.sums[0], rtol=1e-4)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "STEP", SIZE)
    monkeypatch.setattr(importance, "SAVED", 1)
    path, target = write_tiny_model(tmp_path / "m.gguf"), tmp_path / "i.gguf"
    whole = made(path, text, tmp_path / "whole.gguf")
    assert whole.chunks > 4
    at: list[int] = []

    def watch(done: int, total: int, stop: bool = True) -> None:
        at.append(done)
        assert total == whole.chunks
        if stop and done == 3:
            raise KeyboardInterrupt

    for size, begins in ((SIZE, 3), (SIZE // 2, 0)):
        with pytest.raises(KeyboardInterrupt):
            collect(str(path), text, target, OPTIONS, size=SIZE, progress=watch)
        assert not target.exists()
        at.clear()
        if size == SIZE:
            collect(str(path), text, target, OPTIONS, size=size, progress=lambda d, t: watch(d, t, False))
        else:
            collect(str(path), text, target, OPTIONS, size=size, progress=lambda d, t: at.append(d))
        assert at[0] == begins, "another chunk size went on with this one's sums"
        found = read_importance(target)
        assert found.note == ""
        if size == SIZE:
            assert (found.chunks, set(found.entries)) == (whole.chunks, set(whole.entries))
            for name, entry in whole.entries.items():
                assert np.allclose(found.entries[name].sums, entry.sums, rtol=1e-5)
        target.unlink()
        assert not list(tmp_path.glob("*.part"))


def test_what_is_refused(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = str(write_tiny_model(tmp_path / "m.gguf")), str(tmp_path / "i.gguf")
    short, none = tmp_path / "short.txt", tmp_path / "none.txt"
    short.write_text("abc")
    none.write_bytes(b"\xff\xfe")
    for words, said in (
        ([str(tmp_path / "x.txt")], "x.txt cannot be read: No such file"),
        ([str(none)], "is no UTF-8 text"),
        ([str(short)], "the text has 5 tokens and a chunk 512"),
        ([str(text), "--chunk-size", "4096"], "wanted 1 to 512, the context that the model was made for"),
        ([str(text), "--chunk-size", "2"], "--chunk-size is 2, wanted 4 or more"),
        ([str(text), "--chunks", "0"], "--chunks is 0, wanted 1 or more"),
    ):
        assert main(["imatrix", model, *words, "-o", target, "--backend", "cpu"]) != 0
        assert said in capsys.readouterr().err
    with pytest.raises(RequestError, match="cannot be written: there is no folder"):
        made(Path(model), text, tmp_path / "x" / "i.gguf")
    with pytest.raises(RequestError, match="is there already"):
        made(Path(model), text, text)


def test_a_damaged_model_is_named(tmp_path: Path, text: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        info = file.tensors["blk.0.attn_v.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"what comes into blk\.0\.attn_output\.weight is not finite"):
        made(path, text, tmp_path / "i.gguf")


def test_encoders_have_none(tmp_path: Path, text: Path) -> None:
    model = need_cases("minilm", "meta.json").parent
    with pytest.raises(QuarrelError, match="is an encoder"):
        made(sorted(model.glob("*.gguf"))[0], text, tmp_path / "i.gguf")


def test_the_commands_together(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = str(write_tiny_model(tmp_path / "m.gguf")), str(tmp_path / "i.gguf")
    words = ["imatrix", model, str(text), "-o", target, "--chunk-size", "16", "--chunks", "2", "--backend", "cpu", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": target, "chunks": 2, "chunk_size": 16, "maps": 7, "experts_never_chosen": 0}
    out = str(tmp_path / "out.gguf")
    assert main(["quantize", model, out, "q4_0", "--imatrix", target]) == 0
    with quarrel.load(out, backend="cpu", threads=1, n_ctx=64) as llm:
        assert llm.generate("abc", max_tokens=4).text
