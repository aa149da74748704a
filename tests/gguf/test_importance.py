"""Importance matrices: both of llama.cpp's forms, what is refused, and files that are made with them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quarrel.cli import main
from quarrel.errors import QuarrelError, RequestError
from quarrel.gguf import (
    Entry,
    GGMLType,
    GGUFFile,
    GGUFWriter,
    ImportanceMatrix,
    dequantize,
    quantize,
    read_importance,
)
from quarrel.gguf.mixes import types_of
from quarrel.gguf.requantize import requantize
from tests.gguf.test_requantize import MODULE, small

NAME = "blk.0.ffn_down.weight"


def matrix(name: str = NAME, maps: int = 1, k: int = 512) -> ImportanceMatrix:
    rng = np.random.default_rng(3)
    sums, counts = rng.random((maps, k)) * 40, np.arange(maps, dtype=np.float64) * 4 if maps > 1 else np.full(1, 4.0)
    return ImportanceMatrix({name: Entry(sums, counts)}, 3, 512, ("a.txt",))


def old(path: Path, entries: dict[str, np.ndarray], calls: int = 3, tail: bytes | None = None) -> Path:
    """As llama-imatrix wrote it before it wrote GGUF: values are means times `calls`."""
    data = struct.pack("<i", len(entries))
    for name, means in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, means.size)
        data += (means * calls).astype("<f4").tobytes()
    data += struct.pack("<ii", 7, 5) + b"b.txt" if tail is None else tail
    path.write_bytes(data)
    return path


def test_what_another_reader_sees(tmp_path: Path) -> None:
    made = matrix(maps=3)
    made.write(tmp_path / "i.gguf")
    other = gguf.GGUFReader(tmp_path / "i.gguf")
    assert {k: f.contents() for k, f in other.fields.items() if not k.startswith("GGUF.")} == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    tensors = {t.name: t for t in other.tensors}
    assert list(tensors) == [f"{NAME}.in_sum2", f"{NAME}.counts"]
    assert tensors[f"{NAME}.in_sum2"].shape.tolist() == [512, 3]
    assert tensors[f"{NAME}.counts"].shape.tolist() == [1, 3]
    assert np.allclose(tensors[f"{NAME}.in_sum2"].data, made.entries[NAME].sums)
    assert (tmp_path / "i.gguf").stat().st_size % 32 == 0, "ggml reads the padding behind the last tensor"
    again = read_importance(tmp_path / "i.gguf")
    assert (again.chunks, again.chunk_size, again.datasets) == (3, 512, ("a.txt",))


def test_means_of_columns_and_of_experts_that_no_token_chose(tmp_path: Path) -> None:
    made = matrix(maps=3)
    means = made.means(NAME, 3, 512)
    assert means is not None
    assert np.array_equal(means[0], np.ones(512))  # of no rows at all
    assert np.allclose(means[2], made.entries[NAME].sums[2] / 8)
    # One count for all of a tensor with several maps, as those of single heads have.
    one = ImportanceMatrix({NAME: Entry(made.entries[NAME].sums.reshape(1, -1), np.full(1, 2.0))})
    each = one.means(NAME, 3, 512)
    assert each is not None
    assert np.allclose(each, made.entries[NAME].sums / 2)
    assert made.means("blk.9.ffn_down.weight", 1, 512) is None
    for maps, k in ((3, 256), (1, 512), (2, 512)):
        with pytest.raises(RequestError, match=f"has 1536 values for {NAME}"):
            made.means(NAME, maps, k)


def test_the_older_form(tmp_path: Path) -> None:
    means = np.random.default_rng(1).random(512)
    found = read_importance(old(tmp_path / "i.dat", {NAME: means}))
    assert (found.chunks, found.datasets) == (7, ("b.txt",))
    values = found.means(NAME, 1, 512)
    assert values is not None
    assert np.allclose(values[0], means, rtol=1e-6)
    assert read_importance(old(tmp_path / "j.dat", {NAME: means}, tail=b"")).chunks == 0


def _keys(writer: GGUFWriter, kind: str = "imatrix") -> GGUFWriter:
    writer.add("general.type", kind)
    return writer


def _of(sums: np.ndarray, counts: np.ndarray | None, kind: str = "imatrix") -> Callable[[Path], object]:
    def write(path: Path) -> None:
        writer = _keys(GGUFWriter(), kind)
        writer.add_tensor(f"{NAME}.in_sum2", sums.astype(np.float32))
        if counts is not None:
            writer.add_tensor(f"{NAME}.counts", counts.astype(np.float32))
        writer.write(path)

    return write


def _cut(end: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(old(path, {NAME: np.ones(512)}).read_bytes()[:end])


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: None, "cannot be read: No such file"),
    (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    (lambda path: path.write_bytes(b""), "it ends where the number of entries should be"),
    (lambda path: path.write_bytes(b"hello, this is a text"), "the number of entries is|the length of a name is"),
    (lambda path: path.write_bytes(b"GGUF\x03\0\0\0"), "is not sound"),
    (lambda path: path.write_bytes(struct.pack("<i", 1 << 30)), "the number of entries is 1073741824"),
    (lambda path: path.write_bytes(struct.pack("<ii", 1, -5)), "the length of a name is -5"),
    (_cut(20), "in the middle of an entry"),
    (_cut(600), "in the middle of an entry"),
    (lambda path: old(path, {NAME: np.full(512, np.nan)}), "NaN, infinite or negative"),
    (lambda path: old(path, {NAME: np.full(512, np.inf)}), "NaN, infinite or negative"),
    (lambda path: old(path, {NAME: -np.ones(512)}), "NaN, infinite or negative"),
    (lambda path: _keys(GGUFWriter()).write(path), "is empty"),
    (_of(np.ones((1, 512)), None), "has no counts"),
    (_of(np.ones((1, 512)), np.ones((3, 1))), "has 3 counts for 512 values"),
    (_of(np.ones((1, 512)), np.full((1, 1), np.nan)), "NaN, infinite or negative"),
    (_of(np.ones((1, 512)), -np.ones((1, 1))), "NaN, infinite or negative"),
    (_of(np.full((1, 512), np.nan), np.ones((1, 1))), "NaN, infinite or negative"),
    (_of(np.ones((1, 512)), np.ones((1, 1)), "model"), "it is a model, wanted what"),
]


@pytest.mark.parametrize(("make", "said"), BAD)
def test_a_file_that_is_not_sound_is_refused(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    make(tmp_path / "i")
    with pytest.raises(QuarrelError, match=said) as caught:
        read_importance(tmp_path / "i")
    assert "\n" not in str(caught.value)


def test_a_file_made_with_importance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = small(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    made = matrix()
    made.write(tmp_path / "i.gguf")
    assert main(["quantize", str(path), str(target), "q3_k_s", "--imatrix", str(tmp_path / "i.gguf")]) == 0
    capsys.readouterr()
    with GGUFFile.open(path) as source, GGUFFile.open(target) as file:
        x, means = source.array(NAME), made.means(NAME, 1, 512)
        assert means is not None
        assert np.array_equal(file.raw(NAME), quantize(x, GGMLType.Q3_K, means[0]))
        assert not np.array_equal(file.raw(NAME), quantize(x, GGMLType.Q3_K))
        query = "blk.0.attn_q.weight"  # of which the matrix says nothing
        assert np.array_equal(file.raw(query), quantize(source.array(query), GGMLType.Q3_K))
        keys = {k: file.metadata[k] for k in file.metadata if "imatrix" in k}
        assert keys == {
            f"quantize.imatrix.{k}": v for k, v in zip(("dataset", "entries_count", "chunks_count"), ("a.txt", 1, 3))
        }


def test_each_expert_has_its_own_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, x = GGUFWriter(), np.random.default_rng(0).standard_normal((3, 5, 256)).astype(np.float32)
    writer.add("general.architecture", "llama")
    writer.add("llama.block_count", 1)
    name = "blk.0.ffn_up_exps.weight"
    writer.add_tensor(name, x)
    writer.write(tmp_path / "in.gguf")
    made = matrix(name, 3, 256)
    means = made.means(name, 3, 256)
    assert means is not None
    wanted = np.stack([quantize(x[e], GGMLType.Q4_K, means[e]) for e in range(3)])
    for piece in (1 << 21, 512, 768):
        monkeypatch.setattr(MODULE, "PIECE", piece)
        with GGUFFile.open(tmp_path / "in.gguf") as source:
            requantize(source, tmp_path / f"{piece}.gguf", "q4_k_m", importance=made)
        with GGUFFile.open(tmp_path / f"{piece}.gguf") as file:
            assert np.array_equal(file.raw(name), wanted)


def test_an_interrupted_run_begins_anew_with_another_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.gguf"

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        with pytest.raises(KeyboardInterrupt):
            requantize(source, target, "q4_k_s", importance=matrix(), progress=stop)
        requantize(source, target, "q4_k_s")
        requantize(source, tmp_path / "plain.gguf", "q4_k_s")
    assert target.read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_what_is_refused(tmp_path: Path) -> None:
    with GGUFFile.open(small(tmp_path / "in.gguf")) as source:
        target = tmp_path / "out.gguf"
        with pytest.raises(RequestError, match="q2_k_s wants an importance matrix: make one with `quarrel imatrix`"):
            requantize(source, target, "Q2_K_S")
        for name in ("iq3_xs", "IQ3_XXS", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m"):
            with pytest.raises(RequestError, match=f"^{name.lower()} wants an importance matrix: make one with"):
                requantize(source, target, name)
        with pytest.raises(
            RequestError, match=r"matrix has nothing for blk\.0\.attn_q\.weight, which becomes IQ2_XS: make"
        ):
            requantize(source, target, "iq2_xs", importance=matrix())
        with pytest.raises(RequestError, match="of another model: this one has no tensor blk.9.x"):
            requantize(source, target, "q4_k_m", importance=matrix("blk.9.x"))
        with pytest.raises(RequestError, match="has 256 values for .*, which has 512 columns: it was made of another"):
            requantize(source, target, "q4_k_m", importance=matrix(k=256))
        requantize(source, target, "q2_k_s", importance=matrix())
        assert not list(tmp_path.glob("*.part*"))
    with GGUFFile.open(target) as file:
        assert file.tensors[NAME].type is GGMLType.Q2_K
        assert np.isfinite(dequantize(file.raw(NAME), GGMLType.Q2_K)).all()


def layered(path: Path, layers: int, heads: int, kv_heads: int, experts: int = 0) -> Path:
    writer = GGUFWriter()
    writer.add("general.architecture", "llama")
    for key, value in {"block_count": layers, "attention.head_count": heads, "attention.head_count_kv": kv_heads}.items():
        writer.add(f"llama.{key}", value)
    if experts:
        writer.add("llama.expert_count", experts)
    for i in range(layers):
        for name in ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.zeros((1, 256), np.float32))
    writer.write(path)
    return path


@pytest.mark.parametrize(
    ("mix", "shape", "weighted", "wanted"),
    [
        ("q2_k", (16, 8, 2), False, {"attn_v": "Q4_K", "ffn_down": "Q3_K", "attn_output": "Q3_K", "attn_q": "Q2_K"}),
        ("q2_k", (16, 8, 4), False, {"attn_v": "Q3_K"}),
        ("q2_k", (16, 8, 2, 8), False, {"attn_v": "Q8_0", "attn_output": "Q5_K"}),
        ("q2_k_s", (16, 8, 2), True, {"attn_v": "Q4_K", "ffn_down": "Q4_K*2 Q2_K", "attn_output": "Q2_K"}),
        ("q3_k_s", (16, 8, 2), False, {"attn_v": "Q3_K", "ffn_down": "Q3_K", "attn_output": "Q3_K"}),
        ("q3_k_m", (32, 8, 2), False, {"attn_v": "Q5_K*2 Q4_K", "ffn_down": "Q5_K*2 Q4_K", "attn_output": "Q4_K"}),
        ("q3_k_l", (16, 8, 8), False, {"attn_v": "Q5_K", "ffn_down": "Q5_K", "attn_output": "Q5_K", "ffn_up": "Q3_K"}),
        ("iq4_xs", (16, 8, 2), False, {"attn_v": "Q5_K", "ffn_down": "Q5_K*2 IQ4_XS", "ffn_up": "IQ4_XS"}),
        ("iq4_xs", (16, 8, 4), True, {"attn_v": "IQ4_XS", "ffn_down": "IQ4_XS"}),
        ("iq4_nl", (16, 8, 2), True, {"attn_v": "Q5_K", "ffn_down": "IQ4_NL"}),
        ("q4_0", (16, 8, 2), True, {"ffn_down": "Q4_1*2 Q4_0", "attn_v": "Q4_0"}),
        ("q5_0", (16, 8, 2), True, {"ffn_down": "Q5_1*2 Q5_0"}),
        ("q4_0", (16, 8, 2), False, {"ffn_down": "Q4_0"}),
        ("q4_k_s", (16, 8, 2), True, {"ffn_down": "Q5_K*2 Q4_K", "attn_v": "Q5_K*4 Q4_K"}),
        (
            "iq3_m",
            (16, 8, 4),
            False,
            {"attn_v": "Q4_K", "ffn_down": "Q4_K*2 IQ3_S", "attn_output": "Q4_K", "attn_q": "IQ3_S"},
        ),
        ("iq3_m", (16, 8, 2, 8), True, {"attn_v": "Q8_0", "attn_output": "Q5_K"}),
        ("iq3_s", (16, 8, 4), False, {"attn_v": "IQ3_S", "ffn_down": "IQ3_S", "attn_output": "IQ3_S"}),
        ("iq3_xs", (16, 8, 2), True, {"attn_v": "Q4_K", "attn_q": "IQ3_XXS", "ffn_up": "IQ3_S*2 IQ3_XXS*12 IQ3_S*2"}),
        (
            "iq3_xxs",
            (16, 8, 4),
            True,
            {"attn_v": "IQ3_XXS", "attn_q": "IQ2_S", "attn_output": "IQ3_S", "ffn_up": "IQ3_XXS"},
        ),
        (
            "iq2_m",
            (16, 8, 4),
            True,
            {"attn_v": "IQ3_S", "attn_q": "IQ2_S", "ffn_down": "IQ3_S*2 IQ2_S", "attn_output": "IQ3_S"},
        ),
        ("iq2_s", (16, 8, 2), True, {"attn_v": "Q4_K", "attn_q": "IQ2_XS", "ffn_down": "IQ3_S*2 IQ2_XS"}),
        ("iq2_xs", (16, 8, 4), True, {"attn_v": "Q2_K", "ffn_down": "Q2_K*2 IQ2_XS", "attn_output": "IQ2_XS"}),
        ("iq2_xxs", (16, 8, 4, 4), True, {"attn_v": "Q4_K", "ffn_up": "IQ2_XXS"}),
        ("iq1_s", (16, 8, 4), True, {"attn_v": "Q2_K", "attn_output": "IQ2_XXS", "ffn_up": "IQ1_S"}),
        ("iq1_m", (16, 8, 4, 8), True, {"attn_v": "Q4_K", "attn_output": "Q5_K", "ffn_up": "IQ1_M"}),
    ],
)
def test_types_with_and_without_importance(
    mix: str, shape: tuple[int, ...], weighted: bool, wanted: dict[str, str], tmp_path: Path
) -> None:
    """By llama.cpp's `llama_tensor_get_type`."""
    with GGUFFile.open(layered(tmp_path / "in.gguf", *shape)) as source:
        types = types_of(source, mix, weighted=weighted)
    for name, said in wanted.items():
        runs = [(kind, int(count or shape[0])) for kind, _, count in (run.partition("*") for run in said.split())]
        each = [kind for kind, count in runs for _ in range(count)][: shape[0]]
        assert [types[f"blk.{i}.{name}.weight"].name for i in range(shape[0])] == each, name
