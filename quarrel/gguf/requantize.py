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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from quarrel.errors import GGUFError, RequestError
from quarrel.gguf.file import GGUFFile, TensorInfo
from quarrel.gguf.formats import FORMATS, GGMLType, nbytes
from quarrel.gguf.quantize import quantize
from quarrel.gguf.writer import GGUFWriter

PIECE = 1 << 21
"""Elements that a thread takes at a time, about 100 MB while a K format searches."""
MOST_THREADS = 16
RELEASED = 64
"""Pieces between which what was read leaves memory."""
_T = GGMLType


@dataclass(frozen=True)
class Mix:
    """`base` for most matrices, `finer` for some of the values' and last maps, `first` for those of the first layers;
    `number` is llama.cpp's of the mix."""

    base: GGMLType
    number: int
    finer: GGMLType | None = None
    first: GGMLType | None = None


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
    }
)
WHOLE = (_T.F32, _T.F16, _T.BF16)
_NARROW = {_T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}
"""What takes rows that are no multiple of 256, as in llama.cpp."""
_KEPT = re.compile(
    r"norm|ffn_gate_inp|ssm_conv1d|shortconv\.conv|position_embd|token_types|rope_|altup|laurel|per_layer_model_proj|\.scale"
)
_PARTS = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
_FINER = re.compile(rf"blk\.(\d+)\.({'|'.join(_PARTS)})\.weight")
_ATTENTION = re.compile(r"attn_(v|k|qkv)\.weight")
EIGHT = 8
"""Experts of Mixtral, for which llama.cpp keeps keys and values in 8 bits."""


def requantize(
    source: GGUFFile,
    target: Path,
    mix: str,
    *,
    again: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes `source` to `target` in a mix of `MIXES`; returns the file's size.

    Until it is whole the file has `.part` behind its name; another call with the same arguments goes on with it. again:
    weights that are quantised already may be so once more. progress: bytes done, and in all.

    Raises RequestError for an unknown mix, a target that is there, and quantised weights without `again`; GGUFError for
    values that no block can hold.
    """
    if mix.lower() not in MIXES:
        raise RequestError(f"the type is {mix!r}, wanted one of {', '.join(MIXES)}", "type")
    if target.exists():
        raise RequestError(f"{target} is there already: move it away, or choose another name", "target")
    types = types_of(source, mix, again=again)
    lossy = next(
        (t for t in source.tensors.values() if t.type is not types[t.name] and t.type not in (*WHOLE, _T.Q8_0)), None
    )
    if lossy is not None and not again:
        raise RequestError(
            f"the tensor {lossy.name} is {lossy.type.name} already, and would lose more than the original weights do: take"
            " a file in F16, BF16, F32 or Q8_0, or say again",
            "again",
        )
    header, starts = _writer(source, MIXES[mix.lower()], types).layout()
    last = list(source.tensors.values())[-1] if source.tensors else None
    total = len(header) if last is None else starts[last.name] + nbytes(types[last.name], last.dims)
    part, note = (target.with_name(f"{target.name}.{end}") for end in ("part", "part.json"))
    there = _begun(part, note, header, _facts(source, mix))
    with part.open("r+b") as out, ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:

        def show(done: int) -> None:
            if progress is not None:
                progress(done, total)

        for info in source.tensors.values():
            _fill(out, pool, source, info, types[info.name], starts[info.name], there, show)
        out.truncate(total)
    part.replace(target)
    note.unlink(missing_ok=True)
    return total


def own_mix(source: GGUFFile) -> str:
    """The mix that keeps most weights of a model in 16 or 32 bits as they are."""
    sizes = dict.fromkeys(("bf16", "f16", "f32"), 0)
    for info in source.tensors.values():
        name = info.type.name.lower()
        if len(info.dims) > 1 and name in sizes:
            sizes[name] += info.nbytes
    return max(sizes, key=lambda name: sizes[name])


def types_of(source: GGUFFile, name_of_mix: str, *, again: bool = False) -> dict[str, GGMLType]:
    """Which type each tensor gets. MXFP4 stays, as models were trained in it, unless `again`."""
    mix = MIXES[name_of_mix.lower()]
    keys, tied = source.metadata, "output.weight" not in source.tensors
    arch = keys.str("general.architecture")
    n_layers, n_experts = (keys.int(f"{arch}.{key}", 0) for key in ("block_count", "expert_count"))
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
            elif n_experts == EIGHT and "attn_output" in name and mix.base is _T.Q4_K:
                wanted = _T.Q5_K
            elif found:
                i = int(found[1]) if n_experts > 1 and "ffn" in name else order[found[2]].index(int(found[1]))
                n = n_layers if "ffn" in name else len(order[found[2]])
                if mix.finer is not None and _needs_more(i, n):
                    wanted = mix.finer
                if mix.first is not None and (i < n // 8 if "ffn" in name else i < 4):
                    wanted = mix.first
        if wanted is not info.type and info.dims[0] % FORMATS[wanted].elements:
            wanted = _NARROW.get(wanted, wanted)
            wanted = wanted if info.dims[0] % FORMATS[wanted].elements == 0 else _T.F16
        types[name] = wanted
    return types


def _needs_more(i: int, n: int) -> bool:
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _writer(source: GGUFFile, mix: Mix, types: Mapping[str, GGMLType]) -> GGUFWriter:
    """Keys and tensors of the new file, whose data this writer never makes."""
    writer, keys = GGUFWriter(alignment=source.alignment), source.metadata
    for key in keys:
        if not key.startswith("split.") and key not in (
            "general.file_type",
            "general.quantization_version",
            "general.alignment",
        ):
            writer.add(key, keys[key], keys.kind(key))
    writer.add("general.quantization_version", 2)
    writer.add("general.file_type", mix.number)
    for name, info in source.tensors.items():
        writer.add_tensor(name, tuple, types[name], info.shape)
    return writer


def _facts(source: GGUFFile, mix: str) -> dict[str, object]:
    """What an interrupted file must have been made of, to go on with it."""
    states = [path.stat() for path in source.files]
    return {
        "mix": mix.lower(),
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
        waiting.append((first, pool.submit(_piece, source, info, type, first, min(first + each, rows))))
        if len(waiting) > 2 * MOST_THREADS:
            store()
    while waiting:
        store()
    source.release(info.name)


def _piece(source: GGUFFile, info: TensorInfo, type: GGMLType, first: int, last: int) -> np.ndarray:
    if info.type is type:
        return np.ascontiguousarray(source.rows(info.name, first, last))
    try:
        return np.ascontiguousarray(quantize(source.values(info.name, first, last), type))
    except GGUFError as error:
        raise GGUFError(f"the tensor {info.name}: {error}") from None
