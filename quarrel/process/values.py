"""Values of the engine as JSON, and back by the types that are wanted: nothing that arrives names a type."""

from __future__ import annotations

import base64
import dataclasses
import types
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from quarrel.child.wire import Json, pack_error, unpack_error
from quarrel.engine import Chunk, Histogram, Result, TokenLogprob
from quarrel.errors import QuarrelError

T = TypeVar("T")


def plain(value: Any) -> Json:
    """A value as JSON holds it: dataclasses by field, arrays in base64, errors by name, fields marked "json" unchanged."""
    if isinstance(value, QuarrelError):
        return pack_error(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {f.name: v if f.metadata.get("json") else plain(v) for f, v in values.items()}
    if isinstance(value, Histogram):
        return [list(value.bounds), list(value.counts), value.sum]
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return [little.dtype.str, list(value.shape), base64.b64encode(little.tobytes()).decode()]
    if isinstance(value, Mapping):
        # JSON's keys are texts, so pairs. A copy, because the engine counts meanwhile.
        return [[plain(k), plain(v)] for k, v in dict(value).items()]
    if isinstance(value, list | tuple | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def typed(hint: type[T], data: Json) -> T:
    """What `plain` made of a value of that type. Only types that are in the hint are ever made."""
    return cast("T", _typed(hint, data))


def _typed(hint: Any, data: Json) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        kinds = [a for a in args if a is not type(None)]
        # Several are of kinds that JSON itself distinguishes.
        return _typed(kinds[0], data) if len(kinds) == 1 else data
    if hint is Any:
        return data
    if hint is QuarrelError:
        return unpack_error(data)
    if dataclasses.is_dataclass(hint):
        by_name = _hints(cast("type", hint))
        return cast("type", hint)(**{name: _typed(by_name[name], value) for name, value in data.items()})
    if hint is Histogram:
        made = Histogram(tuple(data[0]))
        made.counts, made.sum = data[1], data[2]
        return made
    if hint is np.ndarray or origin is np.ndarray:
        return np.frombuffer(base64.b64decode(data[2]), np.dtype(data[0])).reshape(data[1])
    if origin is Counter:
        return Counter({_typed(args[0], k): v for k, v in data})
    if origin in (Mapping, dict):
        return {_typed(args[0], k): _typed(args[1], v) for k, v in data}
    if origin is tuple:
        hints = args[:1] * len(data) if len(args) == 2 and args[1] is Ellipsis else args
        return tuple(_typed(h, v) for h, v in zip(hints, data, strict=True))
    if origin is frozenset:
        return frozenset(data)
    if hint in (int, float, str, bool) or origin is Literal:
        return data
    raise TypeError(f"values of {hint} cannot travel between processes")


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    unchanged = {f.name: Any for f in dataclasses.fields(cls) if f.metadata.get("json")}
    return {**get_type_hints(cls), **unchanged}


def chunk_row(stream: int, chunk: Chunk) -> list[Json]:
    """A chunk as a message; most are a text and an id."""
    row: list[Json] = ["chunk", stream, chunk.index, chunk.text, chunk.token_id]
    if chunk.logprob is not None or chunk.result is not None or chunk.prompt_logprobs is not None or chunk.read:
        row += [plain(chunk.logprob), plain(chunk.result), plain(chunk.prompt_logprobs), chunk.read, chunk.cached]
    return row


def chunk_of(row: list[Json]) -> Chunk:
    """What `chunk_row` was made of."""
    _, _, index, text, token = row[:5]
    if len(row) == 5:
        return Chunk(text, token, index)
    return Chunk(text, token, index, *(typed(hint, value) for hint, value in zip(_REST, row[5:], strict=True)))


_REST: tuple[Any, ...] = (TokenLogprob | None, Result | None, tuple[TokenLogprob, ...] | None, int, int)
