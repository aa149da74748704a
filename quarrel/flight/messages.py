"""The JSON that Longbow reads, written the way its parsers take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.errors import FlightDataError, RequestError

DONE = ("deleted", "dropped", "ok", "success", "")

Filters = list[dict[str, str]]
"""See `filters_of`."""


def dataset_name(name: object) -> str:
    """A name that every call takes the same way."""
    if not isinstance(name, str) or not name or name.startswith("{") or any(ord(c) < 32 for c in name):
        raise RequestError(
            f"the dataset is called {name!r}, wanted a name without control characters that does not begin with a brace"
        )
    encoded({"name": name})
    return name


def encoded(body: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8, as it is: Longbow's parser does not put the two halves of an escaped character together."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{str(body)[:120]!r} is not Unicode, and JSON cannot carry it: give whole characters") from None


def get_ticket(name: str, filters: Filters | None = None) -> bytes:
    """Always JSON: to a ticket that is a bare name, Longbow applies the filters of the ticket before it."""
    return encoded({"name": name} | ({"filters": filters} if filters else {}))


def search_ticket(name: str, vector: np.ndarray[Any, Any], k: int, filters: Filters | None = None) -> bytes:
    """The numbers of the vector are written without exponents, each in as many digits as tell it apart."""
    body = {"dataset": name, "k": k} | ({"filters": filters} if filters else {})
    numbers = ",".join(np.format_float_positional(x, unique=True, trim="0") for x in vector)
    return b'{"search":' + encoded(body)[:-1] + f',"vector":[{numbers}]}}}}'.encode()


def parse_object(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object from the server."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise FlightDataError(f"the server's answer to {what} is {body[:60]!r}, wanted a JSON object")
    return read


def check_done(answers: Sequence[bytes], action: str) -> None:
    """That an action which changes something was done: Longbow says so in a bare word, others in a JSON object."""
    for body in answers:
        text = body.decode("utf-8", "replace").strip()
        if text.startswith("{"):
            said = parse_object(body, action)
            text = str(said.get("error") or said.get("status", "ok"))
        if text.lower() not in DONE:
            raise FlightDataError(f"the server's answer to {action} is {text[:120]!r}, wanted one of {', '.join(DONE)}")
