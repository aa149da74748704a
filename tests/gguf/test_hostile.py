"""Files made to hurt: each is refused in one sentence, quickly and cheaply, or read for what it is. H1 to H11."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quarrel.errors import GGUFError, ModelError
from quarrel.gguf import FORMATS, GGMLType, GGUFFile, GGUFWriter, Metadata, ValueType, dequantize, nbytes
from quarrel.gguf.header import MAX_KEYS, MAX_TENSORS
from tests.gguf.raw import array, file, key, tensor, text, u32, u64

LENGTHS = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
SMALL = GGUFWriter()
SMALL.add("general.architecture", "llama")
SMALL.add("llama.block_count", 2)
SMALL.add("llama.rope.freq_base", 10000.0)
SMALL.add("llama.flag", True)
SMALL.add("llama.attention.head_count_kv", [4, 2])
SMALL.add("tokenizer.ggml.tokens", ["a", "b", "c", "d"])
SMALL.add("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0])
SMALL.add("tokenizer.ggml.token_type", [1, 1, 1, 3])
SMALL.add("tokenizer.ggml.merges", ["a b"])
SMALL.add("tokenizer.ggml.bos_token_id", 3)
SMALL.add_tensor("token_embd.weight", np.arange(128, dtype=np.float32).reshape(4, 32))
SMALL.add_tensor("blk.0.attn_q.weight", np.ones((2, 64), np.float32), GGMLType.Q8_0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    SMALL.write(path)
    return path


def refused(tmp_path: Path, data: bytes, match: str | None = None) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=match) as caught:
        GGUFFile.open(path)
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


class TestLengths:
    """H1: every length and count field holds the numbers that wrap."""

    @pytest.mark.parametrize("n", LENGTHS[2:])
    @pytest.mark.parametrize(
        "build",
        [
            lambda n: file(n_tensors=n),
            lambda n: file(n_keys=n),
            lambda n: file([text("k", n) + u32(4) + u32(0)]),
            lambda n: file([key("k", ValueType.STRING, text("v", n))]),
            *(lambda n, e=e: file([array("k", e, n, bytes(64))]) for e in ValueType if e is not ValueType.ARRAY),
            lambda n: file([array("k", ValueType.STRING, 2, text("a") + text("b", n))]),
            lambda n: file([], [text("t", n) + u32(1) + u64(1) + u32(0) + u64(0)], bytes(64)),
            lambda n: file([], [tensor("t", [n])], bytes(64)),
            lambda n: file([], [tensor("t", [1, n])], bytes(64)),
            lambda n: file([], [tensor("t", [1], offset=n)], bytes(64)),
        ],
    )
    def test_counts(self, tmp_path: Path, build: Callable[[int], bytes], n: int) -> None:
        refused(tmp_path, build(n))

    @pytest.mark.parametrize("n", [0, 5, 6, (1 << 31), (1 << 32) - 1])
    def test_dimension_counts(self, tmp_path: Path, n: int) -> None:
        refused(tmp_path, file([], [tensor("t", [1] * 6, n_dims=n)], bytes(64)), "dimensions")

    def test_empty_names(self, tmp_path: Path) -> None:
        refused(tmp_path, file([key("", 4, u32(0))]), "a metadata key")
        refused(tmp_path, file([], [tensor("", [1])], bytes(64)), "a tensor name")

    @pytest.mark.parametrize("kind", [13, 255, 1 << 31, (1 << 32) - 1])
    def test_value_types(self, tmp_path: Path, kind: int) -> None:
        refused(tmp_path, file([key("k", kind, bytes(16))]), f"value type {kind}")
        refused(tmp_path, file([array("k", kind, 1, bytes(16))]), f"element type {kind}")

    @pytest.mark.parametrize(
        ("kind", "match"), [(4, "removed"), (31, "removed"), (43, "unknown"), ((1 << 32) - 1, "unknown")]
    )
    def test_tensor_types(self, tmp_path: Path, kind: int, match: str) -> None:
        refused(tmp_path, file([], [tensor("t", [32], kind)], bytes(128)), match)


class TestSizes:
    """H2 and H3: sums, paddings and products that overflow 64 bits, and dimensions that are negative there."""

    def test_two_tensors_whose_sum_wraps(self, tmp_path: Path) -> None:
        n = 0x7FFFFFFFFFFFFFC0
        refused(tmp_path, file([], [tensor("a", [n], GGMLType.I8), tensor("b", [n], GGMLType.I8, n)], bytes(64)), "2\\^48")

    def test_a_product_of_dimensions_that_wraps(self, tmp_path: Path) -> None:
        refused(tmp_path, file([], [tensor("a", [4, (1 << 30) - 1, (1 << 30) + 1])], bytes(64)), "2\\^48")

    def test_one_dimension_patched_high(self, tmp_path: Path) -> None:
        refused(tmp_path, file([], [tensor("a", [(1 << 42) + 1])], bytes(64)), "cut short")

    @pytest.mark.parametrize(
        "dims", [((1 << 63) - 1, 2, 1, 1), (1 << 63,), ((1 << 64) - 1, 1), (1, 1, 1 << 49), (0,), (3, 0)]
    )
    def test_dimensions_beyond_reason(self, tmp_path: Path, dims: tuple[int, ...]) -> None:
        refused(tmp_path, file([], [tensor("a", dims)], bytes(64)))

    def test_an_offset_just_below_the_wrap(self, tmp_path: Path) -> None:
        refused(tmp_path, file([], [tensor("a", [16], offset=(1 << 64) - 32)], bytes(64)), "cut short")

    def test_a_row_that_is_no_whole_block(self, tmp_path: Path) -> None:
        refused(tmp_path, file([], [tensor("a", [255, 2], GGMLType.Q4_K)], bytes(512)), "wanted a multiple of.* 256")

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(list(GGMLType)), st.lists(st.integers(1, 1 << 40), min_size=1, max_size=4))
    def test_the_one_formula_never_wraps(self, kind: GGMLType, dims: list[int]) -> None:
        block = FORMATS[kind]
        dims[0] *= block.elements
        elements = math.prod(dims)
        if elements > 1 << 48:
            with pytest.raises(GGUFError):
                nbytes(kind, dims)
        else:
            assert nbytes(kind, dims) * block.elements == elements * block.nbytes

    def test_overlap_disorder_and_misalignment(self, tmp_path: Path) -> None:
        refused(tmp_path, file([], [tensor("a", [16]), tensor("b", [16], offset=32)], bytes(256)), "overlaps 'a'")
        refused(tmp_path, file([], [tensor("a", [16]), tensor("b", [16], offset=65)], bytes(256)), "multiple of 32")
        path = tmp_path / "unsorted.gguf"
        path.write_bytes(file([], [tensor("b", [16], offset=64), tensor("a", [16])], bytes(64) + b"\1" * 64))
        with GGUFFile.open(path) as opened:
            assert list(opened.tensors) == ["a", "b"]
            assert opened.raw("b").min() == 1


class TestTruncation:
    """H4: a file cut anywhere before its last tensor's end is an error, never zeros."""

    @pytest.fixture
    def whole(self, small: Path) -> bytes:
        """The file without the padding behind its last tensor, which not all writers have."""
        data = small.read_bytes()
        end = len(data) - -nbytes(GGMLType.Q8_0, (64, 2)) % 32
        assert not any(data[end:])
        assert any(data[end - 8 : end])
        return data[:end]

    def test_every_length(self, tmp_path: Path, whole: bytes) -> None:
        data = whole
        cut = tmp_path / "cut.gguf"
        for size in [*range(700), *range(700, len(data), 7), len(data) - 1]:
            cut.write_bytes(data[:size])
            with pytest.raises(GGUFError):
                GGUFFile.open(cut)

    def test_a_missing_tail_is_named(self, tmp_path: Path, whole: bytes) -> None:
        refused(tmp_path, whole[:-1], "cut short, download or copy it again")

    def test_padding_may_be_missing(self, tmp_path: Path, whole: bytes) -> None:
        path = tmp_path / "whole.gguf"
        path.write_bytes(whole)
        with GGUFFile.open(path) as opened:
            assert opened.raw("blk.0.attn_q.weight").size == nbytes(GGMLType.Q8_0, (64, 2))


class TestParameters:
    """H5: alignments that divide by zero, and hyperparameters of the wrong type or size."""

    @pytest.mark.parametrize("alignment", [0, 1, 4, 7, 33, 48, 1 << 17, 1 << 31])
    def test_alignments(self, tmp_path: Path, alignment: int) -> None:
        refused(
            tmp_path, file([key("general.alignment", ValueType.UINT32, u32(alignment))]), f"is {alignment}, wanted a power"
        )

    def test_an_alignment_of_another_type(self, tmp_path: Path) -> None:
        for kind, payload in [
            (ValueType.STRING, text("32")),
            (ValueType.BOOL, b"\1"),
            (ValueType.FLOAT32, struct.pack("<f", 32)),
        ]:
            refused(tmp_path, file([key("general.alignment", kind, payload)]), "wanted a power")

    @pytest.mark.parametrize("alignment", [8, 16, 64, 4096, 1 << 16])
    def test_sound_alignments(self, tmp_path: Path, alignment: int) -> None:
        writer = GGUFWriter(alignment=alignment)
        for i in range(3):
            writer.add_tensor(f"t{i}", np.full((1, 3), i, np.float32))
        writer.write(tmp_path / "a.gguf")
        with GGUFFile.open(tmp_path / "a.gguf") as opened:
            assert [opened.array(f"t{i}")[0, 0] for i in range(3)] == [0, 1, 2]
            assert all(info.offset % alignment == 0 for info in opened.tensors.values())

    @pytest.mark.parametrize("value", [0, -1, 1 << 31, 1 << 63, True, 1.0, "2", [2], float("nan")])
    def test_a_layer_count(self, value: object) -> None:
        with pytest.raises(ModelError, match=r"llama\.block_count"):
            Metadata({"llama.block_count": value}).int("llama.block_count", lo=1, hi=4096)  # type: ignore[dict-item]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -1.0, True, "1e4", [1e4]])
    def test_a_rope_base(self, value: object) -> None:
        with pytest.raises(ModelError, match=r"llama\.rope\.freq_base"):
            Metadata({"llama.rope.freq_base": value}).float("llama.rope.freq_base", lo=1e-3)  # type: ignore[dict-item]

    @pytest.mark.parametrize("byte", [2, 255])
    def test_booleans_are_0_or_1(self, tmp_path: Path, byte: int) -> None:
        refused(tmp_path, file([key("k", ValueType.BOOL, bytes([byte]))]), "wanted 0 or 1")
        refused(tmp_path, file([array("k", ValueType.BOOL, 3, bytes([0, 1, byte]))]), "wanted 0 or 1")


class TestNames:
    """H6: keys and tensors that are missing, twice there, or no text."""

    def test_a_missing_key_is_named(self, small: Path) -> None:
        with GGUFFile.open(small) as opened:
            for read in (opened.metadata.int, opened.metadata.str, opened.metadata.floats, opened.metadata.bool):
                with pytest.raises(ModelError, match=r"'llama\.nothing' is missing"):
                    read("llama.nothing")
            with pytest.raises(GGUFError, match=r"no tensor 'output\.weight'"):
                opened.raw("output.weight")

    def test_twice(self, tmp_path: Path) -> None:
        refused(tmp_path, file([key("k", 4, u32(1)), key("k", 4, u32(1))]), "appears twice")
        refused(tmp_path, file([], [tensor("t", [8]), tensor("t", [8], offset=32)], bytes(64)), "appears twice")

    def test_invalid_text(self, tmp_path: Path) -> None:
        refused(tmp_path, file([key(b"\xff\xfe", 4, u32(1))]), "not UTF-8")
        refused(tmp_path, file([], [tensor(b"t\xc0", [8])], bytes(64)), "not UTF-8")
        refused(tmp_path, file([], [tensor("t" * 128, [8])], bytes(64)), "1 to 127")

    def test_token_bytes_are_kept(self, tmp_path: Path) -> None:
        pieces = [b"ok", b"\xff\xfe", b"\xf0\x9f", "é".encode(), b"\0", b""]
        path = tmp_path / "tokens.gguf"
        path.write_bytes(file([array("tokenizer.ggml.tokens", ValueType.STRING, len(pieces), b"".join(map(text, pieces)))]))
        with GGUFFile.open(path) as opened:
            tokens = opened.metadata.strs("tokenizer.ggml.tokens")
        assert [token.encode("utf-8", "surrogateescape") for token in tokens] == pieces

    def test_text_values_can_always_be_printed(self, tmp_path: Path) -> None:
        path = tmp_path / "name.gguf"
        path.write_bytes(file([key("general.name", ValueType.STRING, text(b"caf\xe9"))]))
        with GGUFFile.open(path) as opened:
            assert opened.metadata.str("general.name") == "caf\N{REPLACEMENT CHARACTER}"


class TestFormat:
    def test_other_files(self, tmp_path: Path) -> None:
        refused(tmp_path, b"", "is empty")
        refused(tmp_path, b"PK\3\4" + bytes(60), "not a GGUF file, take the model in safetensors")
        refused(tmp_path, b"\xc8r\0\0" + bytes(60), "not a GGUF file, name the folder that it is in")
        refused(tmp_path, bytes(64), "not copied or downloaded whole")
        refused(tmp_path, file(magic=b"GGML"), "not a GGUF file")
        refused(tmp_path, b"GGU")

    @pytest.mark.parametrize("version", [0, 1, 4, 255])
    def test_versions(self, tmp_path: Path, version: int) -> None:
        refused(tmp_path, file(version=version), f"version is {version}, wanted 2 or 3")

    def test_big_endian(self, tmp_path: Path) -> None:
        refused(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")

    def test_arrays_of_arrays(self, tmp_path: Path) -> None:
        nested = u32(ValueType.ARRAY) + u64(1)
        refused(tmp_path, file([array("k", ValueType.ARRAY, 1, nested * 100_000)]), "array of arrays")

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError, match="no regular file"):
            GGUFFile.open(tmp_path)
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with pytest.raises(GGUFError, match="no regular file"):
            GGUFFile.open(fifo)


class TestVocabulary:
    """H8: arrays of a vocabulary that disagree, and ids outside it."""

    def rebuilt(self, tmp_path: Path, **changes: object) -> bytes:
        keys: dict[str, object] = {
            "tokens": ["a", "b", "c", "d"],
            "scores": [0.0] * 4,
            "token_type": [1] * 4,
            "merges": ["a b"],
            "bos_token_id": 3,
        }
        keys |= changes
        rows = keys.pop("rows", 4)
        writer = GGUFWriter()
        for name, value in keys.items():
            if value is not None:
                writer.add(f"tokenizer.ggml.{name}", value)  # type: ignore[arg-type]
        writer.add_tensor("token_embd.weight", np.ones((rows, 8), np.float32))  # type: ignore[arg-type]
        writer.write(tmp_path / "vocab.gguf")
        return (tmp_path / "vocab.gguf").read_bytes()

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"tokens": ["a"] * 5}, "scores has 4 elements"),
            ({"scores": [0.0] * 3}, "scores has 3 elements"),
            ({"scores": 1.0}, "scores has no elements"),
            ({"token_type": [1] * 5}, "token_type has 5 elements"),
            ({"merges": ["a b"] * 257}, "merges has 257"),
            ({"bos_token_id": 4}, "wanted 0 to 3"),
            ({"bos_token_id": 1 << 31}, "wanted 0 to 3"),
            ({"eos_token_id": -2}, "wanted 0 to 3"),
            ({"eot_token_id": "x"}, "no integer"),
            ({"padding_token_id": (1 << 32) - 2}, "wanted 0 to 3"),
            ({"tokens": "abcd"}, "no array"),
            ({"rows": 3}, "3 rows, fewer than the 4 tokens"),
        ],
    )
    def test_disagreement(self, tmp_path: Path, changes: dict[str, object], match: str) -> None:
        refused(tmp_path, self.rebuilt(tmp_path, **changes), match)

    @pytest.mark.parametrize(
        "changes", [{}, {"rows": 64}, {"padding_token_id": (1 << 32) - 1}, {"scores": None, "merges": None}]
    )
    def test_what_is_legal(self, tmp_path: Path, changes: dict[str, object]) -> None:
        self.rebuilt(tmp_path, **changes)
        GGUFFile.open(tmp_path / "vocab.gguf").close()


class TestChange:
    """H10: a file that changes while it is open is an error at the next read."""

    def test_truncated(self, small: Path) -> None:
        with GGUFFile.open(small) as opened:
            os.truncate(small, small.stat().st_size - 1)
            with pytest.raises(GGUFError, match="changed while it was open"):
                opened.raw("token_embd.weight")
            with pytest.raises(GGUFError, match="changed while it was open"):
                opened.array("token_embd.weight")

    def test_rewritten_in_place(self, small: Path) -> None:
        with GGUFFile.open(small) as opened:
            data = small.read_bytes()
            with small.open("r+b") as stream:
                stream.write(data)
            os.utime(small, ns=(0, 0))
            with pytest.raises(GGUFError, match="changed while it was open"):
                opened.raw("token_embd.weight")

    def test_replaced_by_another(self, tmp_path: Path, small: Path) -> None:
        with GGUFFile.open(small) as opened:
            other = tmp_path / "other"
            other.write_bytes(b"something else")
            other.replace(small)
            assert opened.array("token_embd.weight")[3, 31] == 127

    def test_closed(self, small: Path) -> None:
        opened = GGUFFile.open(small)
        view = opened.raw("token_embd.weight")
        opened.close()
        opened.close()
        assert view.view(np.float32)[0, 1] == 1
        with pytest.raises(GGUFError, match="is closed"):
            opened.raw("token_embd.weight")

    def test_a_lost_tail_ends_the_process_and_never_gives_zeros(self, tmp_path: Path) -> None:
        writer = GGUFWriter()
        writer.add_tensor("t", np.ones((64, 4096), np.float32))
        path = tmp_path / "large.gguf"
        writer.write(path)
        code = (
            "import os, sys; from quarrel.gguf import GGUFFile; f = GGUFFile.open(sys.argv[1]); raw = f.raw('t');"
            "os.truncate(sys.argv[1], 4096); print(int(raw.sum()))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True, text=True)
        assert done.returncode == -7
        assert done.stdout == ""


class TestContent:
    """H11: any bytes are legal blocks; they index no table out of range and warn nobody."""

    @pytest.mark.parametrize("kind", [kind for kind in GGMLType if kind not in (GGMLType.Q8_1, GGMLType.Q8_K)])
    def test_any_bytes(self, kind: GGMLType) -> None:
        size = FORMATS[kind].nbytes
        random = np.random.default_rng(kind).integers(0, 256, (64, size * 3), np.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for raw in (
                random,
                np.full((2, size), 255, np.uint8),
                np.full((2, size), 0x7F, np.uint8),
                np.zeros((2, size), np.uint8),
            ):
                values = dequantize(raw, kind)
                assert values.shape == (len(raw), raw.shape[1] // size * FORMATS[kind].elements)
                assert values.dtype == np.float32

    @pytest.mark.parametrize("kind", [GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.IQ2_XXS, GGMLType.F16])
    @pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
    def test_scales_that_are_no_numbers(self, kind: GGMLType, scale: float) -> None:
        raw = np.full((1, FORMATS[kind].nbytes), 0x55, np.uint8)
        at = FORMATS[kind].nbytes - 2 if kind is GGMLType.Q6_K else 0
        raw[0, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        assert not np.isfinite(dequantize(raw, kind)).all()


# VmHWM is this program's own peak in KiB; ru_maxrss would count what its parent held when it was started. Seconds are those
# of a machine that makes a million turns of a loop in an eighth of one: a slower one is given as much more.
GROWTH = """
import re, struct, sys, time
from quarrel.gguf import GGUFFile
from quarrel.errors import GGUFError
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before, start = peak(), time.process_time()
try:
    GGUFFile.open(sys.argv[1])
except GGUFError as error:
    growth, seconds = peak() - before, time.process_time() - start
    start, zeros, at, unpack = time.process_time(), bytes(8 << 20), 0, struct.Struct("<Q").unpack_from
    for _ in range(1 << 20):
        at += 8 + unpack(zeros, at)[0]
    print(growth, seconds / max(1.0, 8 * (time.process_time() - start)), error)
"""
EMPTY, SHORT = text(b""), text(b"xy")
WORST: dict[str, Callable[[], bytes]] = {
    "all budgets used up, wrong at the end": lambda: file(
        [
            array("a", ValueType.STRING, 1 << 20, EMPTY * (1 << 20)),
            array("b", ValueType.STRING, 1 << 20, SHORT * (1 << 20)),
            *(key(f"{i:05d}", ValueType.UINT8, b"\1") for i in range(MAX_KEYS - 2)),
        ],
        [tensor(f"{i:05d}", [1, 1, 1, 1], offset=i * 32) for i in range(MAX_TENSORS)],
        bytes(32),
    ),
    "one long text, then nothing": lambda: file([key("k", ValueType.STRING, text(bytes(60 << 20)))], n_keys=2),
    "one long array, then a wrong key": lambda: file(
        [array("k", ValueType.BOOL, 60 << 20, bytes(60 << 20)), key("k", 99, b"")]
    ),
    "a long array that ends wrong": lambda: file([array("k", ValueType.BOOL, 60 << 20, bytes((60 << 20) - 1) + b"\2")]),
    "a vocabulary that disagrees": lambda: file(
        [
            array("tokenizer.ggml.tokens", ValueType.STRING, 2 << 20, text(b"x" * 12) * (2 << 20)),
            array("tokenizer.ggml.scores", ValueType.FLOAT32, 1 << 20, bytes(4 << 20)),
        ]
    ),
    "too many strings": lambda: file([array("k", ValueType.STRING, (2 << 20) + 1, EMPTY * ((2 << 20) + 1))]),
    "too many strings in all": lambda: file([array(name, ValueType.STRING, 2 << 20, EMPTY * (2 << 20)) for name in "ab"]),
    "a header without end": lambda: file([key("k", ValueType.STRING, text(bytes((64 << 20) + 9)))]),
}


def costs(path: Path) -> tuple[int, float, str]:
    if sys.platform != "linux":
        pytest.skip("the peak of a process is read from /proc")
    done = subprocess.run([sys.executable, "-c", GROWTH, str(path)], check=True, capture_output=True, text=True)
    growth, seconds, sentence = done.stdout.split(maxsplit=2)
    return int(growth), float(seconds), sentence


@pytest.mark.parametrize("name", WORST)
def test_h7_a_refusal_costs_little(tmp_path: Path, name: str) -> None:
    path = tmp_path / "worst.gguf"
    path.write_bytes(WORST[name]())
    measured = [costs(path)]
    while measured[-1][1] > 1 and len(measured) < 3:  # what else runs here can only add to it
        measured.append(costs(path))
    growth, seconds, sentence = min(measured, key=lambda m: m[1])
    assert growth <= 128 << 10, sentence
    assert seconds <= 1, sentence


def test_h7_strings_far_apart_in_a_huge_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as stream:
        stream.write(file([array("k", ValueType.STRING, 1 << 20, b"")], alignment=1))
        for _ in range(4000):  # each in a page of its own, and together far beyond the header budget
            stream.write(u64(1 << 16))
            stream.seek(1 << 16, os.SEEK_CUR)
        stream.truncate(200 << 30)
    growth, seconds, sentence = costs(path)
    assert "runs past the header limit of 64 MiB" in sentence
    assert growth <= 128 << 10
    assert seconds <= 1


def test_h9_compressed_models_are_refused(tmp_path: Path) -> None:
    for magic in (b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh9"):
        refused(tmp_path, magic + bytes(100), "not a GGUF file")
