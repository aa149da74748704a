"""What a backend's `run_op` refuses before anything runs: wrong types, shapes, layouts, and indices past the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.errors import RequestError
from quarrel.gguf import FORMATS
from quarrel.ops.contract import Concrete, KVArrays, Op, Param, RawWeight


def bind_axes(op: Op, spec: Any, inputs: Sequence[Concrete]) -> dict[str, int]:
    """The sizes of the op's free axes; raises `RequestError` if an argument lies outside the contract."""
    params = op.params(spec)
    if len(params) != len(inputs):
        raise RequestError(f"{op.name} takes {[p.name for p in params]}, got {len(inputs)} arguments")
    free: dict[str, int] = {}
    for param, given in zip(params, inputs):
        _check(op, spec, param, given, free)
    if "S1" in free:
        free.setdefault("S", free["S1"] - 1)
    _check_indices(op, spec, {p.name: i for p, i in zip(params, inputs)}, free)
    return free


def _check(op: Op, spec: Any, param: Param, given: Concrete, free: dict[str, int]) -> None:
    """Type, shape and layout of one argument; free axes are bound as they are met."""
    dims = param.dims(spec)
    wanted = ", ".join(str(free.get(d, d)) if isinstance(d, str) else str(d) for d in dims)
    what = f"{op.name}: {param.name}"
    if param.kind == "weight":
        if not isinstance(given, RawWeight):
            raise RequestError(f"{what} is {type(given).__name__}, wanted raw weight rows [{wanted}]")
        _check_raw(what, given)
        found: tuple[int, ...] = (len(given.raw), given.k) if len(dims) == 2 else (len(given.raw) * given.k,)
    elif param.kind == "cache":
        if not isinstance(given, KVArrays) or given.k.ndim != 4 or given.k.shape[:3] != given.v.shape[:3]:
            raise RequestError(f"{what} is no pair of [C, block_size, n_kv, width] arrays")
        return
    elif param.kind == "state":
        shape = dims or spec.state
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape[1:] != shape:
            raise RequestError(f"{what} is no float32 array [slots, {', '.join(map(str, shape))}]")
        return
    else:
        if not isinstance(given, np.ndarray):
            raise RequestError(f"{what} is {type(given).__name__}, wanted an array [{wanted}]")
        dtype = np.dtype(np.int32 if param.kind == "i32" else np.float32)
        if given.dtype != dtype or not given.flags.c_contiguous:
            layout = "contiguous" if given.flags.c_contiguous else "strided"
            raise RequestError(
                f"{what} is {layout} {given.dtype}, wanted contiguous {dtype}: copy it with np.ascontiguousarray"
            )
        found = given.shape
    sizes = [free.setdefault(d, f) if isinstance(d, str) else d for f, d in zip(found, dims)]
    if len(found) != len(dims) or list(found) != sizes:
        raise RequestError(f"{what} has shape {list(found)}, wanted [{wanted}]")


def _check_raw(what: str, weight: RawWeight) -> None:
    raw = weight.raw
    if raw.dtype != np.uint8 or raw.ndim != 2:
        raise RequestError(
            f"{what} holds a {raw.ndim}-d array of {raw.dtype}, wanted raw blocks [rows, row_bytes] of uint8"
        )
    block = FORMATS[weight.type]
    row_bytes = weight.k // block.elements * block.nbytes
    if weight.k % block.elements or raw.shape[1] != row_bytes:
        raise RequestError(
            f"{what} has rows of {raw.shape[1]} bytes for {weight.k} values of {weight.type.name}, wanted {row_bytes} bytes"
        )


def _check_indices(op: Op, spec: Any, named: Mapping[str, Concrete], free: Mapping[str, int]) -> None:
    """Everything that a kernel would follow as an address."""

    def within(name: str, stop: int, least: int = 0) -> None:
        given = named.get(name)
        if isinstance(given, np.ndarray) and given.size and (given.min() < least or given.max() >= stop):
            raise RequestError(f"{op.name}: {name} lies in {given.min()}..{given.max()}, wanted {least}..{stop - 1}")

    cache = named.get("cache")
    if isinstance(cache, KVArrays):
        blocks, size = cache.k.shape[:2]
        inner = spec.append if hasattr(spec, "append") else spec
        held = [list(a.shape[2:]) for a in (cache.k, cache.v)]
        wanted = [[inner.n_kv, inner.head_dim], [inner.n_kv, inner.latent or inner.head_dim]]
        if held != wanted:
            raise RequestError(f"{op.name}: the cache holds keys and values {held} a token, wanted {wanted}")
        within("slots", blocks * size)
        within("block_table", blocks)
        within("kv_len", size * free.get("B", 0) + 1)
    state = named.get("state")
    if isinstance(state, np.ndarray):
        within("state_slots", len(state))
    if op.name == "embedding":
        within("ids", spec.n)
    if hasattr(spec, "n_experts"):
        within("ids", spec.n_experts)
    joined = getattr(spec, "n", 1) if op.name == "gather_rows" else 1
    within("rows", free.get("T", 0) - joined + 1)
    within("put", free.get("T", 0), -1)
    within("mask_row", free.get("M", 0), -1)
    ends = named.get("list_end")
    if isinstance(ends, np.ndarray) and ((np.diff(ends, prepend=0) < 0).any() or ends[-1:].tolist() != [free["L"]]):
        raise RequestError(f"{op.name}: list_end does not rise from 0 to {free['L']}")
    starts = named.get("query_start")
    if isinstance(starts, np.ndarray):
        sound = len(starts) == free["S"] + 1 and starts[0] == 0 and starts[-1] == free["T"] and (np.diff(starts) >= 0).all()
        if not sound:
            raise RequestError(f"{op.name}: query_start does not rise from 0 to {free['T']} in {free['S']} steps")
