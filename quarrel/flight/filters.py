"""Filters of rows, checked against the columns: of what the store does not know, it matches nothing and says nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from quarrel.errors import RequestError

Filter = tuple[str, str, str | int | float]
"""Field, operator, value: ("id", ">=", 5). Several are joined by and."""
EXACT = ("==", "!=")
"""Operators that every store evaluates rightly. On x86-64 with AVX-512, Longbow has those of order the other way round for
numbers: `id < 10` are there the rows above 10, and those below are lost."""
OPERATORS = {"=": "==", "==": "==", "!=": "!=", ">": ">", "<": "<", ">=": ">=", "<=": "<="}


def filters_of(filters: Sequence[Filter], schema: pa.Schema | None = None) -> list[dict[str, str]]:
    """As a ticket has them; values go as texts, as Longbow's parser takes neither booleans nor negative exponents.

    schema: of the dataset. Each field must then be one of its columns, and each value one that the column compares with.
    """
    made = []
    for item in filters:
        if not isinstance(item, tuple | list) or len(item) != 3 or item[1] not in OPERATORS or not _plain(item[2]):
            raise RequestError(f"a filter is {item!r}, wanted (field, one of {' '.join(OPERATORS)}, text or number)")
        name, operator, value = item
        if schema is None:
            text = str(value)
        elif name in schema.names:
            text = _text(str(name), schema.field(name).type, value)
        else:
            raise RequestError(f"there is no column {name!r} to filter by; there are {', '.join(schema.names)}")
        made.append({"field": str(name), "operator": OPERATORS[operator], "value": text})
    return made


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _text(name: str, kind: pa.DataType, value: str | float) -> str:
    """A value to compare a column with, as the store reads it."""
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else _decimal(value)
    if pa.types.is_int64(kind):
        whole = _whole(value)
        if whole is None or not -(1 << 63) <= whole < 1 << 63:
            raise RequestError(f"{name} is compared with {value!r}, wanted a whole number that {kind} holds")
        return str(whole)
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not np.isfinite(number):
            raise RequestError(f"{name} is compared with {value!r}, wanted a number")
        return _decimal(number)
    # Of other columns Longbow finds nothing, or passes the filter over.
    wanted = "the store compares int64, float, double and string alone: filter the rows that come"
    raise RequestError(f"the column {name} is {kind}, and {wanted}")


def _whole(value: str | float) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"[+-]?[0-9]{1,20}", value) else None
    return int(value) if value == value // 1 else None


def _decimal(value: float) -> str:
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="0")
