"""An open GGUF model: one read-only mapping per shard, checked once, handed out as views."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from quarrel.errors import GGUFError, ModelError
from quarrel.gguf.blocks import dequantize
from quarrel.gguf.formats import FORMATS, GGMLType
from quarrel.gguf.header import HEADER_BUDGET, Header, Span, read_header
from quarrel.gguf.mapped import Mapped
from quarrel.gguf.metadata import Metadata
from quarrel.gguf.vocabulary import check_vocab

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
MAX_SHARDS = 1024


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of an open model. `dims` in GGUF order, fastest first; `offset` from the start of its shard."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    offset: int
    nbytes: int
    shard: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, as NumPy and PyTorch say it: [..., k] with blocks along k."""
        return self.dims[::-1]


class _Shard(Mapped):
    """One file of a model."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            assert self.map is not None
            with memoryview(self.map) as whole, whole[:HEADER_BUDGET] as view:
                self.header = read_header(view, len(self.map))
            self.advise("MADV_DONTNEED", 0, self.header.data_start)
            self.metadata = _metadata(self.header, self.descriptor)
            self.check_unchanged()
        except BaseException:
            self.close()
            raise


def _metadata(header: Header, descriptor: int) -> Metadata:
    values = {key: value.pack(descriptor) if isinstance(value, Span) else value for key, value in header.values.items()}
    return Metadata(values, header.kinds)


class GGUFFile:
    """A model, in one file or several shards. Open it with `GGUFFile.open(path)`; close it, or use it in a `with`.

    Everything the headers claim is checked before `open` returns. Views from `raw` point into the mapping and stay
    valid after `close`. They are the file's own pages: if somebody cuts the file short while it is mapped, touching a
    page that is gone ends the process with SIGBUS, which no Python code can catch. `raw` and `array` look at the file's
    size and time first, so a change is refused where it can be seen; copy the weights to be safe from a later one.
    """

    def __init__(self, shards: Sequence[_Shard]) -> None:
        self._shards = tuple(shards)
        first = self._shards[0]
        self.paths = tuple(shard.path for shard in self._shards)
        self.files = self.paths
        """What the model is read from."""
        self.version = first.header.version
        self.alignment = first.header.alignment
        self.metadata = first.metadata
        tensors: dict[str, TensorInfo] = {}
        for number, shard in enumerate(self._shards):
            for entry in shard.header.tensors:
                if entry.name in tensors:
                    other = self.paths[tensors[entry.name].shard].name
                    raise GGUFError(f"the tensor {entry.name!r} of {shard.path.name} is also in {other}")
                offset = shard.header.data_start + entry.offset
                tensors[entry.name] = TensorInfo(entry.name, entry.type, entry.dims, offset, entry.nbytes, number)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> GGUFFile:
        """Opens a file, or all shards of a split model: given any one of them by name, or all of them in order.

        Raises ModelNotFound for a file that is not there and GGUFError for one that is not sound.
        """
        if isinstance(path, str | os.PathLike):
            paths = shard_paths(Path(path))
        else:
            paths = tuple(Path(item) for item in path)
        if not 1 <= len(paths) <= MAX_SHARDS:
            raise GGUFError(f"{len(paths)} shards were given, wanted 1 to {MAX_SHARDS}")
        shards: list[_Shard] = []
        at = paths[0]
        try:
            for at in paths:
                shards.append(_Shard(at))
            for number, shard in enumerate(shards):
                at = shard.path
                _check_split(shard.metadata, number, shards)
            at = paths[0]
            file = cls(shards)
            check_vocab(file.metadata, file.tensors)
        except BaseException as error:
            for shard in shards:
                shard.close()
            if isinstance(error, ModelError) and not str(error).startswith(str(at)):
                raise GGUFError(f"{at}: {error}") from None
            raise
        return file

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes in the mapping, read-only and not copied: uint8 [*shape[:-1], row_bytes]."""
        info, shard = self._find(name)
        assert shard.bytes is not None
        block = FORMATS[info.type]
        row = info.dims[0] // block.elements * block.nbytes
        return shard.bytes[info.offset : info.offset + info.nbytes].reshape(*info.shape[:-1], row)

    def array(self, name: str) -> np.ndarray:
        """The tensor's values, dequantised: a new float32 array of `shape`."""
        return dequantize(self.raw(name), self.tensors[name].type)

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """The bytes of rows `first` to `last`, all axes but the last being one: uint8 [last - first, row_bytes]."""
        raw = self.raw(name)
        return raw.reshape(-1, raw.shape[-1])[first:last]

    def values(self, name: str, first: int, last: int) -> np.ndarray:
        """The same rows dequantised: float32 [last - first, k]."""
        return dequantize(self.rows(name, first, last), self.tensors[name].type)

    def prefetch(self, name: str) -> None:
        """Asks the system to read the tensor's pages from disk now; returns at once."""
        info, shard = self._find(name)
        shard.advise("MADV_WILLNEED", info.offset, info.nbytes)

    def release(self, name: str) -> None:
        """Lets go of the tensor's resident pages, to keep memory small while weights stream to a device."""
        info, shard = self._find(name)
        shard.advise("MADV_DONTNEED", info.offset, info.nbytes)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GGUFFile({str(self.paths[0])!r}, {len(self.tensors)} tensors, {len(self.paths)} file(s))"

    def _find(self, name: str) -> tuple[TensorInfo, _Shard]:
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.paths[0]} has no tensor {name!r}")
        shard = self._shards[info.shard]
        shard.check_unchanged()
        return info, shard


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the split that `path` names itself a part of, in order; just `path` where its name says nothing."""
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None:
        return (path,)
    number, count = int(name["number"]), int(name["count"])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise GGUFError(f"{path} names itself shard {number} of {count}, wanted 1 to {MAX_SHARDS} shards")
    return tuple(path.with_name(f"{name['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))


def _check_split(metadata: Metadata, number: int, shards: Sequence[_Shard]) -> None:
    count = metadata.int("split.count", 1, lo=0)
    if max(count, 1) != len(shards):
        raise GGUFError(
            f"its header counts {count} shards, but {len(shards)} were opened: keep all shards of a model in one"
            " folder, under the names they were made with"
        )
    if count <= 1:
        return
    if (own := metadata.int("split.no")) != number:
        raise GGUFError(f"its header calls it shard {own + 1} of {count}, but it stands in place {number + 1}")
    total = sum(len(shard.header.tensors) for shard in shards)
    if (claimed := metadata.int("split.tensors.count", total)) != total:
        raise GGUFError(f"its header counts {claimed} tensors in all shards, but they hold {total}")
