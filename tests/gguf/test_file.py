"""Real files open, and every key, tensor and byte of them is where another reader sees it."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from quarrel.errors import GGUFError, ModelError, ModelNotFound
from quarrel.gguf import GGMLType, GGUFFile, GGUFWriter, Metadata, ValueType, dequantize
from tests.paths import CASE_SETS, need_cases

FILES = sorted(str(path.relative_to(s)) for s in CASE_SETS for path in s.rglob("*.gguf")) or ["no-case-files"]


def split(tmp_path: Path, count: int = 3, **changes: int) -> list[Path]:
    paths = []
    for number in range(count):
        writer = GGUFWriter()
        if number == 0:
            writer.add("general.architecture", "llama")
        writer.add("split.no", changes.get(f"no{number}", number), ValueType.UINT16)
        writer.add("split.count", changes.get("claimed", count), ValueType.UINT16)
        writer.add("split.tensors.count", changes.get("tensors", 2 * count), ValueType.INT32)
        for i in range(2):
            name = f"t{number}.{i}" if "same" not in changes else f"t{i}"
            writer.add_tensor(name, np.full((2, 8), 10 * number + i, np.float32))
        paths.append(tmp_path / f"model-{number + 1:05d}-of-{count:05d}.gguf")
        writer.write(paths[-1])
    return paths


@pytest.mark.parametrize("name", FILES)
def test_every_case_file_opens_and_has_finite_weights(name: str) -> None:
    with GGUFFile.open(need_cases(name)) as file:
        assert file.version in (2, 3)
        assert file.metadata.str("general.architecture")
        for tensor, info in file.tensors.items():
            raw = file.raw(tensor)
            assert raw.nbytes == info.nbytes
            assert not raw.flags.writeable
            assert np.isfinite(dequantize(raw, info.type)).all()


@pytest.mark.parametrize(
    "name", ["tinyllama/model-q4_0x.gguf", "gptoss/model-mxfp4-bf16.gguf", "granitehybrid/model-q4_k_m.gguf"]
)
def test_another_reader_sees_the_same(name: str) -> None:
    path = need_cases(name)
    other = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        keys = {key: field.contents() for key, field in other.fields.items() if not key.startswith("GGUF.")}
        assert dict(file.metadata) == keys
        assert list(file.tensors) == [tensor.name for tensor in other.tensors]
        for tensor in other.tensors:
            info = file.tensors[tensor.name]
            assert list(info.dims) == tensor.shape.tolist()
            assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
            assert info.shape == info.dims[::-1]
            assert file.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_raw_is_a_view_of_whole_rows() -> None:
    with GGUFFile.open(need_cases("mixtral", "model-q4_k_m.gguf")) as file:
        assert file.tensors["blk.0.ffn_up_exps.weight"].dims == (256, 256, 4)
        assert file.raw("blk.0.ffn_up_exps.weight").shape == (4, 256, 144)
        assert file.raw("blk.0.ffn_up_exps.weight").base is not None
        assert file.array("blk.0.ffn_up_exps.weight").shape == (4, 256, 256)
        assert file.raw("output_norm.weight").shape == (1024,)
        file.prefetch("output.weight")
        file.release("output.weight")
        assert np.isfinite(file.array("output.weight")).all()


def test_a_large_vocabulary_is_read_in_half_a_second() -> None:
    path = need_cases("tokenizers", "ggml-vocab-qwen2.gguf")
    start = time.process_time()
    with GGUFFile.open(path) as file:
        assert len(file.metadata.strs("tokenizer.ggml.tokens")) == 151936
        assert len(file.metadata.strs("tokenizer.ggml.merges")) == 151387
        assert len(file.metadata.ints("tokenizer.ggml.token_type")) == 151936
    assert time.process_time() - start < 0.5


def test_metadata_outlives_the_file_and_travels_to_other_processes() -> None:
    with GGUFFile.open(need_cases("tinyllama", "model-q4_0x.gguf")) as file:
        metadata = pickle.loads(pickle.dumps(file.metadata))
    assert metadata.length("tokenizer.ggml.tokens") == 32000
    assert metadata["tokenizer.ggml.tokens"] == file.metadata["tokenizer.ggml.tokens"]
    assert metadata.strs("tokenizer.ggml.tokens")[1] == "<s>"


def test_version_2_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(version=2)
    writer.add("a", 1)
    writer.write(tmp_path / "v2.gguf")
    with GGUFFile.open(tmp_path / "v2.gguf") as file:
        assert (file.version, file.metadata.int("a")) == (2, 1)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_shard_opens_all(tmp_path: Path, which: int) -> None:
    paths = split(tmp_path)
    with GGUFFile.open(paths[which]) as file:
        assert file.paths == tuple(paths)
        assert file.metadata.str("general.architecture") == "llama"
        assert {info.shard for info in file.tensors.values()} == {0, 1, 2}
        assert [file.array(f"t{n}.{i}")[1, 7] for n in range(3) for i in range(2)] == [0, 1, 10, 11, 20, 21]


def test_shards_under_other_names_are_given_in_order(tmp_path: Path) -> None:
    moved = [path.rename(tmp_path / f"sha256-{i}") for i, path in enumerate(split(tmp_path))]
    with GGUFFile.open(moved) as file:
        assert len(file.tensors) == 6
    with pytest.raises(GGUFError, match="stands in place 1"):
        GGUFFile.open(moved[::-1])
    with pytest.raises(GGUFError, match="counts 3 shards, but 1 were opened"):
        GGUFFile.open(moved[0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"claimed": 2}, "counts 2 shards, but 3 were opened"),
        ({"no1": 2}, "calls it shard 3 of 3, but it stands in place 2"),
        ({"tensors": 7}, "counts 7 tensors in all shards, but they hold 6"),
        ({"same": 1}, "model-00002-of-00003.gguf is also in model-00001-of-00003.gguf"),
    ],
)
def test_shards_that_disagree(tmp_path: Path, changes: dict[str, int], match: str) -> None:
    paths = split(tmp_path, **changes)
    with pytest.raises(GGUFError, match=match):
        GGUFFile.open(paths[0])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelNotFound, match="model-00002-of-00003"):
        GGUFFile.open(paths[2])
    with pytest.raises(GGUFError, match="names itself shard 4 of 3"):
        GGUFFile.open(tmp_path / "model-00004-of-00003.gguf")


VALUES = Metadata(
    {"int": 3, "float": 0.5, "bool": True, "str": "x", "ints": [1, 2], "strs": ["a"], "bools": [True], "empty": []}
)


def test_typed_reads() -> None:
    assert VALUES.int("int", lo=1, hi=3) == 3
    assert VALUES.float("int") == 3.0
    assert isinstance(VALUES.float("int"), float)
    assert VALUES.bool("bool") is True
    assert VALUES.str("str") == "x"
    assert VALUES.ints("ints", count=2) == [1, 2]
    assert VALUES.ints("int", count=4) == [3] * 4
    assert VALUES.floats("ints") == [1.0, 2.0]
    assert VALUES.bools("bools") == [True]
    assert VALUES.strs("strs") == ["a"]
    assert VALUES.ints("empty") == VALUES.strs("empty") == []
    assert VALUES.int("nothing", None) is None
    assert VALUES.strs("nothing", ()) == ()
    assert Metadata({"x": float("inf")}).float("x", finite=False) == float("inf")


@pytest.mark.parametrize(
    ("read", "key", "options"),
    [
        ("int", "float", {}),
        ("int", "bool", {}),
        ("int", "str", {}),
        ("int", "ints", {}),
        ("int", "int", {"lo": 4}),
        ("int", "int", {"hi": 2}),
        ("float", "bool", {}),
        ("float", "float", {"lo": 0.6, "hi": 1}),
        ("bool", "int", {}),
        ("str", "strs", {}),
        ("ints", "int", {}),
        ("ints", "strs", {}),
        ("ints", "bools", {}),
        ("ints", "ints", {"count": 3}),
        ("ints", "ints", {"lo": 2}),
        ("floats", "strs", {}),
        ("strs", "str", {}),
        ("strs", "ints", {}),
        ("bools", "ints", {}),
    ],
)
def test_typed_reads_refuse_other_types_and_ranges(read: str, key: str, options: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=f"the metadata key '{key}' is .*, wanted "):
        getattr(VALUES, read)(key, **options)
    with pytest.raises(ModelError, match="'gone' is missing"):
        getattr(VALUES, read)("gone", **options)


def test_a_reader_cannot_change_what_the_next_one_sees() -> None:
    VALUES.ints("ints").append(9)
    list.append(VALUES["ints"], 9)  # type: ignore[arg-type]
    assert VALUES.ints("ints") == [1, 2]


def test_integers_of_every_type(tmp_path: Path) -> None:
    writer = GGUFWriter()
    kinds = [kind for kind in ValueType if "INT" in kind.name]
    for kind in kinds:
        writer.add(kind.name, 100, kind)
        writer.add(f"{kind.name}s", [1, 2], kind)
    writer.write(tmp_path / "ints.gguf")
    with GGUFFile.open(tmp_path / "ints.gguf") as file:
        for kind in kinds:
            assert file.metadata.int(kind.name) == 100
            assert file.metadata.ints(f"{kind.name}s") == [1, 2]
            assert file.metadata.kind(kind.name) is file.metadata.kind(f"{kind.name}s") is kind


def test_types_have_names_and_sizes() -> None:
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert all(GGMLType(number).name == name for number, name in names.items())
    assert (GGMLType(41).name, GGMLType(42).name) == ("Q1_0", "Q2_0")
