"""The weights of a Hugging Face folder: safetensors files, one or several, checked once and handed out as views."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quarrel.convert.config import POINTED, POINTER, read_json
from quarrel.errors import GGUFError, ModelError
from quarrel.gguf import Mapped

MAX_HEADER = 100 << 20
MAX_AXES = 8
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
        "I64": "<i8",
        "I32": "<i4",
        "U32": "<u4",
        "I16": "<i2",
        "I8": "i1",
        "U8": "u1",
        "BOOL": "u1",
    }
)
"""NumPy has no bfloat16 and no 8-bit floats: their bits."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: `dtype` as safetensors says it, bytes `start` to `end` of file number `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    end: int


class Checkpoint:
    """All tensors of a folder by name. Close it, or use it in a `with`."""

    def __init__(self, folder: Path, further: Mapping[str, Path] = MappingProxyType({})) -> None:
        """further: files of one map each, whose tensors are named as here where they have `linear`.

        Raises ModelError, with the file's name, for whatever is not sound.
        """
        tensors: dict[str, Stored] = {}
        with ExitStack() as opened:
            index = _index(folder)
            own = [folder / name for name in (sorted(set(index.values())) if index else _whole(folder))]
            self.paths = (*own, *further.values())
            names, files = [*[""] * len(own), *further], []
            for number, path in enumerate(self.paths):
                try:
                    file = opened.enter_context(_Closing(path)).file
                    found = _header(file, number)
                except ModelError as error:
                    raise ModelError(f"{path}: {error}") from None
                files.append(file)
                if names[number]:
                    found = [replace(stored, name=stored.name.replace("linear", names[number])) for stored in found]
                for stored in found:
                    if (other := tensors.setdefault(stored.name, stored)) is not stored:
                        raise ModelError(f"{path}: the tensor {stored.name} is also in {self.paths[other.file].name}")
            for name, file_name in index.items():
                if name not in tensors or self.paths[tensors[name].file].name != file_name:
                    raise ModelError(f"{folder / INDEX} says that {name} is in {file_name}, which has no such tensor")
            opened.pop_all()
        self._files = files
        self.tensors: Mapping[str, Stored] = MappingProxyType(tensors)

    def view(self, name: str) -> np.ndarray:
        """The tensor in the mapping, read-only and not copied; bits where NumPy has no such type."""
        stored = self.tensors[name]
        file = self._files[stored.file]
        file.check_unchanged()
        assert file.bytes is not None
        # Not every file's data is aligned to its elements.
        return np.frombuffer(file.bytes[stored.start : stored.end], DTYPES[stored.dtype]).reshape(stored.shape)

    def advise(self, advice: str, name: str) -> None:
        stored = self.tensors[name]
        self._files[stored.file].advise(advice, stored.start, stored.end - stored.start)

    def close(self) -> None:
        for file in self._files:
            file.close()


class _Closing:
    def __init__(self, path: Path) -> None:
        self.file = Mapped(path)

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _index(folder: Path) -> dict[str, str]:
    """Tensor to file; empty where the folder has no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{path} has no weight_map: download the model again")
    for name, file in found.items():
        # A name with a folder in it would reach files outside of this one.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelError(f"{path} places the tensor {name} in {file!r}, wanted a safetensors file of the same folder")
    missing = sorted({file for file in found.values() if not (folder / file).is_file()})
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:3])}, which {INDEX} names: download the model whole")
    return found


def _whole(folder: Path) -> list[str]:
    names = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter_")))
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if names:
        return names
    pickled = next(iter(sorted(folder.glob("*.bin"))), None)
    why = f"; {pickled.name} may run code when it is read, and is not" if pickled else ""
    raise ModelError(f"{folder} has no safetensors files{why}: download those of the model")


def _header(file: Mapped, number: int) -> list[Stored]:
    """What a file says that it holds, checked against its size."""
    assert file.map is not None
    size = len(file.map)
    if file.map[: len(POINTER)] == POINTER.encode():
        raise GGUFError(POINTED)
    length = int.from_bytes(file.map[:8], "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise GGUFError(f"its header claims {length} bytes of the file's {size}: it is no safetensors file, or cut short")
    try:
        header = json.loads(file.map[8 : 8 + length].decode("utf-8"))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise GGUFError("its header is no JSON object: download it again")
    data = 8 + length
    found = [_stored(name, entry, data, size, number) for name, entry in header.items() if name != "__metadata__"]
    found.sort(key=lambda stored: (stored.start, stored.end))
    for before, after in pairwise(found):
        if after.start < before.end:
            raise GGUFError(f"the tensors {before.name} and {after.name} overlap: download it again")
    return found


def _stored(name: str, entry: Any, data: int, size: int, number: int) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise GGUFError(f"the tensor {name} has no dtype, shape and data_offsets: download it again")
    if dtype not in DTYPES:
        raise GGUFError(f"the tensor {name} has type {dtype!r}, wanted one of {', '.join(DTYPES)}")
    if len(shape) > MAX_AXES or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        raise GGUFError(f"the tensor {name} has the shape {str(shape)[:80]}, which is none")
    wanted = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if not 0 <= start <= end or end - start != wanted:
        raise GGUFError(f"the tensor {name} takes bytes {start} to {end}, but {dtype} {shape} has {wanted} bytes")
    if data + end > size:
        raise GGUFError(f"the tensor {name} ends at byte {data + end}, but the file has {size}: it is cut short")
    return Stored(name, dtype, tuple(shape), number, data + start, data + end)
