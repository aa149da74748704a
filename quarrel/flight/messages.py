"""The JSON that Longbow reads, written the way its parsers take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from quarrel.errors import FlightDataError, RequestError

Filter = tuple[str, str, str | int | float]
"""Field, operator, value: ("id", ">=", 5). Several are joined by and."""
OPERATORS = {"=": "==", "==": "==", "!=": "!=", ">": ">", "<": "<", ">=": ">=", "<=": "<="}


def dataset_name(name: object) -> str:
    """A name that every call takes the same way."""
    if not isinstance(name, str) or not name or name.startswith("{") or any(ord(c) < 32 for c in name):
        raise RequestError(f"the dataset is called {name!r}, wanted a name that does not begin with a brace")
    return name


def filters_of(filters: Sequence[Filter]) -> list[dict[str, str]]:
    """Values go as texts: Longbow's parser takes neither booleans nor negative exponents."""
    made = []
    for item in filters:
        if not isinstance(item, tuple | list) or len(item) != 3 or item[1] not in OPERATORS or isinstance(item[2], bool):
            raise RequestError(f"a filter is {item!r}, wanted (field, one of {' '.join(OPERATORS)}, text or number)")
        name, operator, value = item
        text = value if isinstance(value, str) else _plain(value)
        made.append({"field": str(name), "operator": OPERATORS[operator], "value": text})
    return made


def get_ticket(name: str, filters: Sequence[Filter]) -> bytes:
    """A whole dataset goes by its name alone."""
    if not filters:
        return name.encode()
    return json.dumps({"name": name, "filters": filters_of(filters)}).encode()


def search_ticket(name: str, vector: np.ndarray[Any, Any], k: int, filters: Sequence[Filter]) -> bytes:
    """The numbers of the vector are written without exponents, each in as many digits as tell it apart."""
    body = {"dataset": name, "k": k} | ({"filters": filters_of(filters)} if filters else {})
    text = json.dumps(body)
    numbers = ",".join(np.format_float_positional(x, unique=True, trim="0") for x in vector)
    return f'{{"search":{text[:-1]},"vector":[{numbers}]}}}}'.encode()


def parse_object(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object from the server."""
    try:
        read = json.loads(body)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise FlightDataError(f"the server's answer to {what} is {body[:60]!r}, wanted a JSON object")
    return read


def _plain(value: int | float) -> str:
    return str(value) if isinstance(value, int) else np.format_float_positional(value, trim="0")
