"""A model's file once more with weights of other types: piece by piece, and on from where it was interrupted."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TextIO

import numpy as np

from quarrel.errors import GGUFError, RequestError
from quarrel.gguf.file import GGUFFile, TensorInfo
from quarrel.gguf.formats import GGMLType, nbytes
from quarrel.gguf.importance import ImportanceMatrix
from quarrel.gguf.lock import locked
from quarrel.gguf.mixes import MIXES, WANTING, WHOLE, Mix, check_mix, types_of
from quarrel.gguf.quantize import quantize
from quarrel.gguf.writer import GGUFWriter

PIECE = 1 << 21
"""Elements that a thread takes at a time: about 35 MB while a K format searches, 60 with an importance for each row."""
MOST_THREADS = 16
RELEASED = 16
"""Pieces between which what was read leaves memory."""
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def requantize(
    source: GGUFFile,
    target: Path,
    mix: str,
    *,
    again: bool = False,
    importance: ImportanceMatrix | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes `source` to `target` in a mix of `MIXES`; returns the file's size.

    Until it is whole the file has `.part` behind its name; another call with the same arguments goes on with it. again:
    weights that are quantised already may be so once more. importance: how much errors in each column weigh. progress:
    bytes done, and in all.

    Raises RequestError for an unknown mix, one that wants importance and has none, a matrix of another model, a target that
    is there, and quantised weights without `again`; GGUFError for values that no block can hold.
    """
    check_mix(mix, importance)
    _check_absent(target)
    types = types_of(source, mix, again=again, weighted=importance is not None)
    weighed, digest = _weighed(source, importance)
    types = {**types, **_unseen(source, types, weighed)}
    lossy = next(
        (
            t
            for t in source.tensors.values()
            if t.type is not types[t.name] and t.type not in (*WHOLE, GGMLType.Q8_0, GGMLType.Q8_1)
        ),
        None,
    )
    if lossy is not None and not again:
        raise RequestError(
            f"the tensor {lossy.name} is {lossy.type.name} already, and would lose more than the original weights do: take"
            " a file in F16, BF16, F32 or Q8_0, or say again",
            "again",
        )
    header, starts = _writer(source, MIXES[mix.lower()], types, importance).layout()
    last = list(source.tensors.values())[-1] if source.tensors else None
    total = len(header) if last is None else starts[last.name] + nbytes(types[last.name], last.dims)
    total += -total % source.alignment if last is not None else 0
    part, note = (target.with_name(f"{target.name}.{end}") for end in ("part", "part.json"))
    with note.open("a+", encoding="utf-8") as notes:
        if not locked(notes.fileno()):
            raise RequestError(f"another process is writing {part}: wait for it, or choose another name", "target")
        _check_absent(target)  # by now
        there = _begun(part, notes, header, _facts(source, mix, digest))
        if total - there > (free := shutil.disk_usage(part.parent).free):
            raise RequestError(
                f"{target} will have {total} bytes, {there} of which are there, and its disk has {free} free: make room, or"
                " choose another place",
                "target",
            )
        try:
            _write(part, source, types, importance, starts, there, total, progress)
        except OSError as error:
            if error.errno not in FULL:
                raise
            size = part.stat().st_size
            raise RequestError(
                f"{part} ends at {size} of {total} bytes ({error.strerror}): make room and run it again: it goes on there",
                "target",
            ) from None
        part.replace(target)
    note.unlink(missing_ok=True)
    return total


def _check_absent(target: Path) -> None:
    if target.exists():
        raise RequestError(f"{target} is there already: move it away, or choose another name", "target")
    if not target.parent.is_dir():
        raise RequestError(f"{target} cannot be written: there is no folder {target.parent}", "target")


def _write(
    part: Path,
    source: GGUFFile,
    types: Mapping[str, GGMLType],
    importance: ImportanceMatrix | None,
    starts: Mapping[str, int],
    there: int,
    total: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """What the interrupted file lacks."""

    def show(done: int) -> None:
        if progress is not None:
            progress(done, total)

    # Without a buffer: what could not be written is known at once, and not tried again when the file is closed.
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with part.open("r+b", buffering=0) as out, ThreadPoolExecutor(threads) as pool:
        try:
            for info in source.tensors.values():
                make = partial(_piece, source, info, types[info.name], _means(info, importance))
                _fill(out, pool, 2 * threads, source, info, types[info.name], starts[info.name], there, make, show)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else the pieces that wait would be made, which takes a minute
            raise
        out.truncate(total)
        os.fsync(out.fileno())  # a name must not outlive what it names when the power fails


def _means(info: TensorInfo, importance: ImportanceMatrix | None) -> np.ndarray | None:
    """The importance [maps, k] of a tensor that has one."""
    return None if importance is None else importance.means(info.name, math.prod(info.dims[2:]), info.dims[0])


def _weighed(source: GGUFFile, importance: ImportanceMatrix | None) -> tuple[frozenset[str], int]:
    """The tensors that have an importance, and a sum that tells one matrix from another. One after the other, as those of a
    model of 600 billion weights are a gigabyte. Raises RequestError where none has any."""
    found, digest = set(), 0
    for name in sorted(source.tensors):
        if (means := _means(source.tensors[name], importance)) is not None:
            found.add(name)
            digest = zlib.crc32(np.ascontiguousarray(means).data, digest)
    if importance is not None and not found:
        name = next(iter(importance.entries))
        raise RequestError(f"the importance matrix is of another model: this one has no tensor {name[:80]}", "imatrix")
    return frozenset(found), digest


def _unseen(source: GGUFFile, types: Mapping[str, GGMLType], weighed: Set[str]) -> dict[str, GGMLType]:
    """Other types for what has no importance where its type wants some: blocks that predict further tokens, which a text
    does not run. Raises RequestError for others."""
    arch, found = source.metadata.str("general.architecture"), {}
    n_layers, further = (source.metadata.int(f"{arch}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    for name, type in types.items():
        if type in WANTING and name not in weighed and name not in ("token_embd.weight", "output.weight"):
            block = re.match(r"blk\.(\d+)\.", name)
            if block is None or int(block[1]) < n_layers - further:
                raise RequestError(
                    f"the importance matrix has nothing for {name}, which becomes {type.name}: make one of this model with"
                    " `quarrel imatrix`, or take iq3_s or a larger type",
                    "imatrix",
                )
            found[name] = GGMLType.Q4_K
    return found


def _writer(source: GGUFFile, mix: Mix, types: Mapping[str, GGMLType], importance: ImportanceMatrix | None) -> GGUFWriter:
    """Keys and tensors of the new file, whose data this writer never makes."""
    writer, keys = GGUFWriter(alignment=source.alignment), source.metadata
    for key in keys:
        if not key.startswith(("split.", "quantize.imatrix.")) and key not in (
            "general.file_type",
            "general.quantization_version",
            "general.alignment",
        ):
            writer.add(key, keys[key], keys.kind(key))
    writer.add("general.quantization_version", 2)
    writer.add("general.file_type", mix.number)
    if importance is not None:
        writer.add("quantize.imatrix.dataset", (*importance.datasets, "")[0])
        writer.add("quantize.imatrix.entries_count", len(importance.entries))
        writer.add("quantize.imatrix.chunks_count", importance.chunks)
    for name, info in source.tensors.items():
        writer.add_tensor(name, tuple, types[name], info.shape)
    return writer


def _facts(source: GGUFFile, mix: str, digest: int) -> dict[str, object]:
    """What an interrupted file must have been made of, to go on with it."""
    states = [path.stat() for path in source.files]
    return {
        "mix": mix.lower(),
        "importance": digest,
        "source": [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in zip(source.files, states)],
    }


def _begun(part: Path, note: TextIO, header: bytes, facts: dict[str, object]) -> int:
    """Bytes of the interrupted file that count, its header made if there is none."""
    note.seek(0)
    try:
        if json.loads(note.read()) == facts:
            with part.open("rb") as begun:
                if begun.read(len(header)) == header:
                    return part.stat().st_size
    except (OSError, ValueError):
        pass
    part.write_bytes(header)
    note.truncate(0)
    note.write(json.dumps(facts))
    note.flush()
    return len(header)


def _fill(
    out: FileIO,
    pool: ThreadPoolExecutor,
    ahead: int,
    source: GGUFFile,
    info: TensorInfo,
    type: GGMLType,
    start: int,
    there: int,
    make: Callable[[int, int], np.ndarray],
    progress: Callable[[int], None],
) -> None:
    """The pieces of a tensor that are not in the file yet, in order."""
    rows, each, width = math.prod(info.dims[1:]), max(1, PIECE // info.dims[0]), nbytes(type, info.dims[:1])
    waiting: deque[tuple[int, Future[np.ndarray]]] = deque()

    def pieces() -> Iterator[int]:
        for first in range(0, rows, each):
            if start + min(first + each, rows) * width > there:
                yield first

    def store() -> None:
        first, made = waiting.popleft()
        out.seek(start + first * width)
        data = made.result().data.cast("B")
        while len(data):  # a system may take a part only
            data = data[out.write(data) :]
        progress(out.tell())
        if first // each % RELEASED == RELEASED - 1:
            source.release(info.name)  # of one tensor too, which may be larger than memory

    for first in pieces():
        waiting.append((first, pool.submit(make, first, min(first + each, rows))))
        if len(waiting) > ahead:
            store()
    while waiting:
        store()
    source.release(info.name)


def _piece(
    source: GGUFFile, info: TensorInfo, type: GGMLType, means: np.ndarray | None, first: int, last: int
) -> np.ndarray:
    """means: the importance [maps, k] of a tensor of so many maps."""
    if info.type is type:
        return np.ascontiguousarray(source.rows(info.name, first, last))
    if means is not None:
        rows = math.prod(info.dims[1:]) // len(means)
        means = means[first // rows] if first // rows == (last - 1) // rows else means[np.arange(first, last) // rows]
    values = source.values(info.name, first, last)
    try:
        made = np.ascontiguousarray(quantize(values, type, means))
        if type is GGMLType.F16 and (np.isinf(made.view(np.float16)) & np.isfinite(values)).any():
            raise GGUFError("F16 holds values up to 65504, but the array has larger ones: take BF16 or F32")
        return made
    except GGUFError as error:
        raise GGUFError(f"the tensor {info.name}: {error}") from None
