"""A model's file once more with weights of other types: piece by piece, and on from where it was interrupted.

A mix is what llama.cpp's `llama-quantize` calls so: one type for most matrices, a finer one for the output and, in the
mixes with an M, for a part of the values' and the last maps (the first and last eighth of the layers, and every third
between). Vectors, norms, routers, convolutions and tables of positions stay as they are.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from quarrel.errors import GGUFError, RequestError
from quarrel.gguf.file import GGUFFile, TensorInfo
from quarrel.gguf.formats import FORMATS, GGMLType, nbytes
from quarrel.gguf.importance import ImportanceMatrix
from quarrel.gguf.metadata import Metadata
from quarrel.gguf.quantize import quantize
from quarrel.gguf.writer import GGUFWriter

PIECE = 1 << 21
"""Elements that a thread takes at a time, about 100 MB while a K format searches."""
MOST_THREADS = 16
RELEASED = 64
"""Pieces between which what was read leaves memory."""
_T = GGMLType


Q2_K_S, Q3_K_M = 21, 12


@dataclass(frozen=True)
class Mix:
    """`base` for most matrices, `finer` for some of the values' and last maps, `first` for those of the first layers;
    `number` is llama.cpp's of the mix. `values` and `lone`: the values' maps, with four or more heads of queries for each
    and with fewer. `last`, `begin`: the last maps, those of the first eighth of the layers. `out`: of attention."""

    base: GGMLType
    number: int
    finer: GGMLType | None = None
    first: GGMLType | None = None
    values: GGMLType | None = None
    lone: GGMLType | None = None
    last: GGMLType | None = None
    begin: GGMLType | None = None
    out: GGMLType | None = None

    @property
    def wants_importance(self) -> bool:
        return self.number == Q2_K_S


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "f32": Mix(_T.F32, 0),
        "f16": Mix(_T.F16, 1),
        "bf16": Mix(_T.BF16, 32),
        "q8_0": Mix(_T.Q8_0, 7),
        "q4_0": Mix(_T.Q4_0, 2),
        "q4_1": Mix(_T.Q4_1, 3),
        "q5_0": Mix(_T.Q5_0, 8),
        "q5_1": Mix(_T.Q5_1, 9),
        "q4_k_s": Mix(_T.Q4_K, 14, first=_T.Q5_K),
        "q4_k_m": Mix(_T.Q4_K, 15, _T.Q6_K),
        "q5_k_s": Mix(_T.Q5_K, 16),
        "q5_k_m": Mix(_T.Q5_K, 17, _T.Q6_K),
        "q6_k": Mix(_T.Q6_K, 18),
        "q2_k": Mix(_T.Q2_K, 10, values=_T.Q4_K, lone=_T.Q3_K, last=_T.Q3_K, out=_T.Q3_K),
        "q2_k_s": Mix(_T.Q2_K, Q2_K_S, values=_T.Q4_K, begin=_T.Q4_K),
        "q3_k_s": Mix(_T.Q3_K, 11),
        "q3_k_m": Mix(_T.Q3_K, Q3_K_M, values=_T.Q4_K, lone=_T.Q4_K, last=_T.Q4_K, out=_T.Q4_K),
        "q3_k_l": Mix(_T.Q3_K, 13, values=_T.Q5_K, lone=_T.Q5_K, last=_T.Q5_K, out=_T.Q5_K),
        "iq4_nl": Mix(_T.IQ4_NL, 25, values=_T.Q5_K, begin=_T.Q5_K),
        "iq4_xs": Mix(_T.IQ4_XS, 30, values=_T.Q5_K, begin=_T.Q5_K),
    }
)
WHOLE = (_T.F32, _T.F16, _T.BF16)
_UNMADE = re.compile(r"i?q[123]_(xxs|xs|s|m)")
"""Mixes that llama.cpp makes with an importance matrix only, or that begin with such types."""
_NARROW = {_T.Q2_K: _T.Q4_0, _T.Q3_K: _T.Q4_0, _T.IQ4_XS: _T.IQ4_NL, _T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}
"""What takes rows that are no multiple of 256, as in llama.cpp."""
_KEPT = re.compile(
    r"norm|^cls\.|ffn_gate_inp|ssm_conv1d|shortconv\.conv|position_embd|patch_embd|token_types|rope_|altup|laurel|per_layer_model_proj|\.scale"
)
_PARTS = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
_FINER = re.compile(rf"blk\.(\d+)\.({'|'.join(_PARTS)})\.weight")
_ATTENTION = re.compile(r"attn_(v|k|qkv)\.weight")
_PLAIN_OUT = (13, Q2_K_S)
EIGHT = 8
"""Experts of Mixtral, for which llama.cpp keeps keys and values in 8 bits."""


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
    _check_mix(mix, importance)
    if target.exists():
        raise RequestError(f"{target} is there already: move it away, or choose another name", "target")
    types = types_of(source, mix, again=again, weighted=importance is not None)
    means = _means(source, importance)
    lossy = next(
        (t for t in source.tensors.values() if t.type is not types[t.name] and t.type not in (*WHOLE, _T.Q8_0)), None
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
    part, note = (target.with_name(f"{target.name}.{end}") for end in ("part", "part.json"))
    there = _begun(part, note, header, _facts(source, mix, means))
    with part.open("r+b") as out, ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:

        def show(done: int) -> None:
            if progress is not None:
                progress(done, total)

        for info in source.tensors.values():
            make = partial(_piece, source, info, types[info.name], means.get(info.name))
            _fill(out, pool, source, info, types[info.name], starts[info.name], there, make, show)
        out.truncate(total)
    part.replace(target)
    note.unlink(missing_ok=True)
    return total


def _check_mix(mix: str, importance: ImportanceMatrix | None) -> None:
    name = mix.lower()
    if name not in MIXES:
        unmade = " which this version cannot make; it can make" if _UNMADE.fullmatch(name) else " wanted one of"
        raise RequestError(f"the type is {mix!r},{unmade} {', '.join(MIXES)}", "type")
    if MIXES[name].wants_importance and importance is None:
        raise RequestError(
            f"{name} wants an importance matrix: make one with `quarrel imatrix` and give it with --imatrix, or take q2_k",
            "imatrix",
        )


def _means(source: GGUFFile, importance: ImportanceMatrix | None) -> dict[str, np.ndarray]:
    """The importance [maps, k] of those tensors that have one; raises RequestError where none has."""
    found = {}
    for info in source.tensors.values() if importance is not None else ():
        assert importance is not None
        means = importance.means(info.name, math.prod(info.dims[2:]), info.dims[0])
        if means is not None:
            found[info.name] = means
    if importance is not None and not found:
        name = next(iter(importance.entries))
        raise RequestError(f"the importance matrix is of another model: this one has no tensor {name[:80]}", "imatrix")
    return found


def own_mix(source: GGUFFile) -> str:
    """The mix that keeps most weights of a model in 16 or 32 bits as they are."""
    sizes = dict.fromkeys(("bf16", "f16", "f32"), 0)
    for info in source.tensors.values():
        name = info.type.name.lower()
        if len(info.dims) > 1 and name in sizes:
            sizes[name] += info.nbytes
    return max(sizes, key=lambda name: sizes[name])


def types_of(source: GGUFFile, name_of_mix: str, *, again: bool = False, weighted: bool = False) -> dict[str, GGMLType]:
    """Which type each tensor gets. MXFP4 stays, as models were trained in it, unless `again`. weighted: with importance."""
    mix = MIXES[name_of_mix.lower()]
    keys, tied = source.metadata, "output.weight" not in source.tensors
    arch = keys.str("general.architecture")
    n_layers, n_experts = (keys.int(f"{arch}.{key}", 0) for key in ("block_count", "expert_count"))
    heads, kv_heads = (_one(keys, f"{arch}.attention.head_count{end}") for end in ("", "_kv"))
    shared = heads // max(1, kv_heads or heads)  # heads of queries for each of values
    order = {
        part: sorted(int(f[1]) for n in source.tensors if (f := _FINER.fullmatch(n)) and f[2] == part) for part in _PARTS
    }
    types, kept = {}, (_T.I32, _T.I64) if again else (_T.I32, _T.I64, _T.MXFP4)
    for name, info in source.tensors.items():
        wanted, found = mix.base, _FINER.fullmatch(name)
        if len(info.dims) < 2 or not name.endswith(".weight") or _KEPT.search(name) or info.type in kept:
            wanted = info.type
        elif mix.base not in (*WHOLE, _T.Q8_0):
            if name in ("token_embd.weight" if tied else "output.weight", "per_layer_token_embd.weight"):
                wanted = _T.Q6_K
            elif n_experts == EIGHT and _ATTENTION.search(name):  # they share few weights with each other
                wanted = _T.Q8_0
            elif "attn_output" in name and mix.base in _SMALL:
                wanted = _T.Q5_K if n_experts == EIGHT and mix.number not in _PLAIN_OUT else mix.out or mix.base
            elif found:
                i = int(found[1]) if n_experts > 1 and "ffn" in name else order[found[2]].index(int(found[1]))
                n = n_layers if "ffn" in name else len(order[found[2]])
                wanted = _of_last(mix, i, n, weighted) if "ffn" in name else _of_values(mix, i, n, shared)
        if wanted is not info.type and info.dims[0] % FORMATS[wanted].elements:
            wanted = _NARROW.get(wanted, wanted)
            wanted = wanted if info.dims[0] % FORMATS[wanted].elements == 0 else _T.F16
        types[name] = wanted
    return types


_SMALL = (_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.IQ4_NL, _T.IQ4_XS)


def _one(keys: Metadata, key: str) -> int:
    """A number, or the largest of a list of them; 0 where there is none."""
    if key not in keys:
        return 0
    value = keys[key]
    numbers = [value] if isinstance(value, int) else keys.ints(key)
    return max(numbers, default=0)


def _of_values(mix: Mix, i: int, n: int, shared: int) -> GGMLType:
    """The type of the i-th of n maps to values, each of which so many heads of queries share."""
    if mix.number == Q3_K_M and i < 2:
        return _T.Q5_K
    if mix.first is not None and i < 4:
        return mix.first
    if mix.finer is not None and _needs_more(i, n):
        return mix.finer
    return (mix.values if shared >= 4 else mix.lone) or mix.base


def _of_last(mix: Mix, i: int, n: int, weighted: bool) -> GGMLType:
    """The type of the i-th of n maps that end a feed-forward."""
    if mix.number == Q3_K_M and i < n // 16:
        return _T.Q5_K
    if i < n // 8:
        if weighted and mix.base in (_T.Q4_0, _T.Q5_0):  # with importance their first layers go wrong
            return _T.Q4_1 if mix.base is _T.Q4_0 else _T.Q5_1
        if mix.begin is not None and (mix.wants_importance or not weighted):
            return mix.begin
        if mix.first is not None:
            return mix.first
    if mix.finer is not None and _needs_more(i, n):
        return mix.finer
    return mix.last or mix.base


def _needs_more(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


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


def _facts(source: GGUFFile, mix: str, means: Mapping[str, np.ndarray]) -> dict[str, object]:
    """What an interrupted file must have been made of, to go on with it."""
    states = [path.stat() for path in source.files]
    return {
        "mix": mix.lower(),
        "importance": zlib.crc32(b"".join(means[name].tobytes() for name in sorted(means))),
        "source": [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in zip(source.files, states)],
    }


def _begun(part: Path, note: Path, header: bytes, facts: dict[str, object]) -> int:
    """Bytes of the interrupted file that count, its header made if there is none."""
    try:
        if json.loads(note.read_text("utf-8")) == facts:
            with part.open("rb") as begun:
                if begun.read(len(header)) == header:
                    return part.stat().st_size
    except (OSError, ValueError):
        pass
    part.write_bytes(header)
    note.write_text(json.dumps(facts), "utf-8")
    return len(header)


def _fill(
    out: BinaryIO,
    pool: ThreadPoolExecutor,
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
        out.write(made.result().data)
        progress(out.tell())
        if first // each % RELEASED == RELEASED - 1:
            source.release(info.name)  # of one tensor too, which may be larger than memory

    for first in pieces():
        waiting.append((first, pool.submit(make, first, min(first + each, rows))))
        if len(waiting) > 2 * MOST_THREADS:
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
    try:
        return np.ascontiguousarray(quantize(source.values(info.name, first, last), type, means))
    except GGUFError as error:
        raise GGUFError(f"the tensor {info.name}: {error}") from None
