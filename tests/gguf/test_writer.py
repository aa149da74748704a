"""What the writer writes, this reader and another one read back; what it cannot write, it refuses at once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from quarrel.errors import GGUFError
from quarrel.gguf import GGMLType, GGUFFile, GGUFWriter, ValueType, quantize

VALUES = {
    "bool": (True, ValueType.BOOL),
    "small": (7, ValueType.UINT32),
    "negative": (-7, ValueType.INT32),
    "large": (1 << 40, ValueType.UINT64),
    "large negative": (-(1 << 40), ValueType.INT64),
    "float": (0.5, ValueType.FLOAT32),
    "text": ("größer", ValueType.STRING),
    "bools": ([True, False], ValueType.BOOL),
    "ints": ([1, -2, 3], ValueType.INT32),
    "large ints": ([1, 1 << 33], ValueType.UINT64),
    "floats": ([1, 2.5], ValueType.FLOAT32),
    "texts": (["a", "", "\udcff"], ValueType.STRING),
}


def test_keys_round_trip_with_inferred_types(tmp_path: Path) -> None:
    writer = GGUFWriter()
    for name, (value, _) in VALUES.items():
        writer.add(name, value)
    writer.add("explicit", 7, ValueType.UINT8)
    writer.add("doubles", [0.1], ValueType.FLOAT64)
    writer.add("nothing", [], ValueType.STRING)
    writer.add("array", np.arange(3))
    writer.write(tmp_path / "keys.gguf")
    with GGUFFile.open(tmp_path / "keys.gguf") as file:
        for name, (value, kind) in VALUES.items():
            assert (file.metadata[name], file.metadata.kind(name)) == (value, kind)
        assert (file.metadata["explicit"], file.metadata.kind("explicit")) == (7, ValueType.UINT8)
        assert file.metadata["doubles"] == [0.1]
        assert file.metadata["nothing"] == []
        assert file.metadata["array"] == [0, 1, 2]
        assert list(file.metadata) == [*VALUES, "explicit", "doubles", "nothing", "array"]


def test_another_reader_agrees(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    writer = GGUFWriter(alignment=64)
    writer.add("general.architecture", "llama")
    writer.add_tensor("f", x)
    writer.add_tensor("odd", x[:3, :5], GGMLType.F16)
    writer.add_tensor("q", x, GGMLType.Q4_K)
    writer.add_tensor("raw", quantize(x.reshape(2, 3, 512), GGMLType.Q8_0), GGMLType.Q8_0)
    size = writer.write(tmp_path / "t.gguf")
    assert size == (tmp_path / "t.gguf").stat().st_size
    seen = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "t.gguf").tensors}
    np.testing.assert_array_equal(seen["f"].data, x)
    assert seen["raw"].shape.tolist() == [512, 3, 2]
    with GGUFFile.open(tmp_path / "t.gguf") as file:
        assert file.alignment == 64
        for name, info in file.tensors.items():
            assert file.raw(name).tobytes() == seen[name].data.tobytes()
            assert info.offset == seen[name].data_offset
            assert info.offset % 64 == 0


def test_tensors_are_made_when_their_turn_comes(tmp_path: Path) -> None:
    made = []

    def pieces(name: str) -> Iterator[np.ndarray]:
        for i in range(4):
            made.append((name, i))
            yield np.full(1 << 10, i, np.uint8)

    writer = GGUFWriter()
    for name in ("a", "b"):
        writer.add_tensor(name, lambda name=name: pieces(name), GGMLType.I8, (4, 1 << 10))
    assert made == []
    writer.write(tmp_path / "lazy.gguf")
    assert made == [(name, i) for name in "ab" for i in range(4)]
    with GGUFFile.open(tmp_path / "lazy.gguf") as file:
        assert file.raw("b")[:, 0].tolist() == [0, 1, 2, 3]


def test_a_stream_will_do() -> None:
    writer = GGUFWriter()
    writer.add_tensor("a", np.ones((2, 3), np.float32))
    stream = io.BytesIO()
    assert writer.write(stream) == len(stream.getvalue())


@pytest.mark.parametrize("made", [np.zeros(31, np.uint8), np.zeros(33, np.uint8), np.zeros(32, np.float32)])
def test_a_failed_file_leaves_nothing_behind(tmp_path: Path, made: np.ndarray) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"older")
    writer = GGUFWriter()
    writer.add_tensor("a", lambda: made, GGMLType.I8, (32,))
    with pytest.raises(GGUFError, match="was made"):
        writer.write(path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x.gguf", b"older")]


def test_mistakes_are_refused_where_they_are_made() -> None:
    writer = GGUFWriter()
    writer.add("k", 1)
    writer.add_tensor("t", np.ones((2, 3), np.float32))
    for mistake in (
        lambda: writer.add("k", 2),
        lambda: writer.add("mixed", [1, "a"]),
        lambda: writer.add("none", None),  # type: ignore[arg-type]
        lambda: writer.add("empty", []),
        lambda: writer.add("huge", 1 << 64),
        lambda: writer.add("negative", -1, ValueType.UINT32),
        lambda: writer.add_tensor("t", np.ones((2, 3), np.float32)),
        lambda: writer.add_tensor("raw", np.ones((2, 3), np.uint8)),
        lambda: writer.add_tensor("later", lambda: np.ones(3, np.uint8), GGMLType.I8),
        lambda: writer.add_tensor("row", lambda: np.ones(3, np.uint8), GGMLType.Q8_0, (31,)),
        lambda: writer.add_tensor("deep", np.ones((1, 1, 1, 1, 1), np.float32)),
    ):
        with pytest.raises(GGUFError):
            mistake()
