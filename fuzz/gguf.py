"""Mutates a sound GGUF file and reads what comes of it: only ModelError may come out, quickly and in little memory.

    python -m fuzz.gguf [--seconds 60] [--seed 0]

Half of the mutations write a number that is likely to hurt into a length, count, type, dimension or offset of the header;
the others change any bytes. A mutant that still opens is read whole: every key, every tensor.
"""

from __future__ import annotations

import io
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fuzz.running import arguments, examples, rounds
from quarrel.errors import ModelError
from quarrel.gguf import FORMATS, GGMLType, GGUFFile, GGUFWriter, ValueType

SECONDS = 1.0
HURTFUL = [0, 1, 2, 3, 7, 8, 13, 31, 32, 33, 255, 256, 1 << 16, (1 << 21) + 1]
HURTFUL += [(1 << n) + d for n in (31, 32, 48, 62, 63, 64) for d in (-64, -1, 0, 1) if (1 << n) + d < 1 << 64]


@dataclass(frozen=True)
class Seed:
    data: bytes
    fields: tuple[tuple[int, int], ...]  # (offset, width) of every number that the reader must not trust


def seed_of(data: bytes) -> Seed:
    """A valid file, and where its numbers lie."""
    return Seed(data, tuple(_fields(data)))


@cache
def sound() -> Seed:
    """A valid file with a key of every type and a tensor of every type that a file may have, and where its numbers lie."""
    writer = GGUFWriter()
    writer.add("general.architecture", "llama")
    writer.add("general.alignment", 32)
    for kind in ValueType:
        value = {ValueType.STRING: "text", ValueType.BOOL: True}.get(kind, 3)
        if kind is not ValueType.ARRAY:
            writer.add(f"one.{kind.name}", value, kind)
            writer.add(f"many.{kind.name}", [value] * 3, kind)
    writer.add("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    writer.add("tokenizer.ggml.merges", ["a b"])
    writer.add("tokenizer.ggml.bos_token_id", 2)
    writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
    rng = np.random.default_rng(0)
    for kind in (kind for kind in GGMLType if kind is not GGMLType.Q8_1):
        writer.add_tensor(f"t.{kind.name}", rng.integers(0, 256, (2, FORMATS[kind].nbytes), np.uint8), kind)
    stream = io.BytesIO()
    writer.write(stream)
    return seed_of(stream.getvalue())


def _fields(data: bytes) -> list[tuple[int, int]]:
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    fields: list[tuple[int, int]] = []
    at = 4

    def number(width: int) -> int:
        nonlocal at
        fields.append((at, width))
        at += width
        return int.from_bytes(data[at - width : at], "little")

    def text() -> None:
        nonlocal at
        size = number(8)
        at += size

    def value(kind: int) -> None:
        if kind == ValueType.STRING:
            text()
        elif kind == ValueType.ARRAY:
            element = number(4)
            for _ in range(number(8)):
                value(element)
        else:
            number(sizes[kind])

    number(4)
    n_tensors, n_keys = number(8), number(8)
    for _ in range(n_keys):
        text()
        value(number(4))
    for _ in range(n_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return fields


@st.composite
def mutants(draw: st.DrawFn, origin: Seed) -> bytes:
    """One to four edits of a valid file."""
    data = bytearray(origin.data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1)) if data else 0
        match draw(st.sampled_from(["field", "field", "field", "near", "bytes", "cut", "repeat"])):
            case "field":
                at, width = draw(st.sampled_from(origin.fields))
                number = draw(st.sampled_from(HURTFUL) | st.integers(0, 1 << 16)) % (1 << 8 * width)
                data[at : at + width] = number.to_bytes(width, "little")
            case "near":
                at, width = draw(st.sampled_from(origin.fields))
                (old,) = struct.unpack_from("<B", data.ljust(at + 1, b"\0"), at)
                data[at : at + 1] = bytes([(old + draw(st.integers(-2, 2))) % 256])
            case "bytes":
                patch = draw(st.binary(min_size=1, max_size=16))
                data[at : at + len(patch)] = patch
            case "cut":
                del data[at : draw(st.sampled_from([at + 1, at + 8, len(data)]))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


def read_whole(path: Path) -> bool:
    """Whether the file is sound; everything in it is read if it is."""
    start = time.process_time()
    try:
        with GGUFFile.open(path) as file:
            for key in file.metadata:
                assert file.metadata[key] is not None
            for name, info in file.tensors.items():
                raw = file.raw(name)
                assert raw.nbytes == info.nbytes
                if info.type not in (GGMLType.Q8_1, GGMLType.Q8_K):
                    assert file.array(name).shape == info.shape
        return True
    except ModelError as error:
        assert str(error)
        assert "\n" not in str(error)
        return False
    finally:
        taken = time.process_time() - start
        assert taken <= SECONDS, f"{taken:.2f} s"


def fuzz(count: int, number: int, path: Path) -> tuple[int, int]:
    """Runs so many mutants and returns how many were refused and how many read. Raises on the first that does harm."""
    counts = [0, 0]

    def one(data: bytes) -> None:
        path.write_bytes(data)
        counts[read_whole(path)] += 1

    examples(mutants(sound()), count, number, one)
    return counts[0], counts[1]


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    args = arguments(__doc__).parse_args(given)
    total = [0, 0]

    def one(number: int) -> None:
        for i, n in enumerate(fuzz(1000, number, Path(folder) / "mutant.gguf")):
            total[i] += n

    with tempfile.TemporaryDirectory() as folder:
        count = rounds(args.seconds, args.seed, one)
    seeds = f"seeds {args.seed} to {args.seed + count - 1}"
    print(f"{sum(total)} mutants of a GGUF file, {seeds}: {total[0]} refused, {total[1]} read, none did harm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
