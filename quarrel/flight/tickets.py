"""What callers of the local server send: JSON bodies, tickets and the conditions in them, as Longbow reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quarrel.errors import RequestError

Body = dict[str, Any]

_WORDS = {"=": pc.equal, "!=": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal}
_SAME = {"==": "=", "eq": "=", "neq": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPERATORS = MappingProxyType(_WORDS | {word: _WORDS[same] for word, same in _SAME.items()})
_JSON_KINDS = MappingProxyType({int: "number", float: "number", bool: "bool", list: "array", dict: "object"})


def json_body(raw: bytes) -> Body:
    """The JSON object that an action or a ticket carries."""
    try:
        read = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise RequestError(f"invalid json body: {raw[:60]!r} is no object")
    return read


def text_of(body: Mapping[str, Any], key: str) -> str:
    """A text of the body, empty where it is missing. Longbow takes no number in its place."""
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        kind = _JSON_KINDS.get(type(value), "value")
        raise RequestError(f"invalid json body: json: cannot unmarshal {kind} into the text {key}")
    return value or ""


class Tickets:
    """Reads tickets of DoGet: JSON, or the bare name of a dataset.

    remembers: with Longbow's fault that a bare name keeps the filters of the ticket read before it, whoever sent that."""

    def __init__(self, remembers: bool) -> None:
        self._remembers = remembers
        self._filters: Sequence[Mapping[str, Any]] = []

    def read(self, raw: bytes) -> Body:
        if not raw.startswith(b"{"):
            return {"name": raw.decode("utf-8", "replace"), "filters": self._filters if self._remembers else []}
        body = json_body(raw)
        self._filters = _conditions(body.get("filters") or [])
        return body


def passing(table: pa.Table, filters: Any, *, silent: bool) -> pa.Table:
    """The rows that pass every filter. One that cannot be evaluated (an operator or a column that is none, a text where a
    number is compared) passes none where this is `silent`, and is a RequestError otherwise."""
    conditions = _conditions(filters)
    try:
        for condition in conditions:
            table = table.filter(_mask(table, condition))
    except RequestError:
        if not silent:
            raise
        return table.slice(0, 0)
    return table


def _conditions(filters: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(filters, list) or not all(isinstance(f, dict) for f in filters):
        raise RequestError(f"the filters are {str(filters)[:60]!r}, wanted a list of objects")
    return filters


def _mask(table: pa.Table, f: Mapping[str, Any]) -> Any:
    name, operator, value = f.get("field"), str(f.get("operator", f.get("op"))), f.get("value")
    if name not in table.column_names or operator not in OPERATORS:
        raise RequestError(f"bad filter: {name} {operator}")
    column = table[name]
    try:
        return OPERATORS[operator](column, pa.scalar(str(value)).cast(column.type))
    except pa.ArrowException as error:
        raise RequestError(f"bad filter value for {name}: {error}") from None
