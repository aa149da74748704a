"""Reading a request's JSON by a schema: every problem is one sentence, every unknown field is reported or refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.validation import first_fault

B = TypeVar("B", bound=Body)
Choose = Callable[[dict[str, Any]], type[B]]
IGNORED = "X-Quarrel-Ignored"
MAX_DEPTH = 64
MAX_VALUES = 2 << 20
"""While a list of more numbers is parsed and checked, each in one call, nothing else is answered for too long."""
LARGE = 64 << 10
"""Bytes of a body that takes a millisecond to read."""
log = logging.getLogger("quarrel.server")


def body_of(*schemas: type[BaseModel]) -> dict[str, Any]:
    """For a route's decorator: the body in the OpenAPI document, one of these."""
    made = [schema.model_json_schema(ref_template="#/components/schemas/{model}") for schema in schemas]
    parts = {name: part for schema in made for name, part in schema.pop("$defs", {}).items()}
    content = {"application/json": {"schema": {"$defs": parts, **(made[0] if len(made) == 1 else {"anyOf": made})}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


async def read_body(
    request: Request, schema: type[B], dispatcher: Dispatcher, choose: Choose[B] | None = None
) -> tuple[B, dict[str, str]]:
    """The body, and the headers that name fields which were ignored. Raises `Refused` (400).

    choose: the schema of a body that may be of several, in place of `schema`.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() not in ("", "identity"):
        raise Refused(415, "unsupported", f"the body's Content-Encoding is {coding[:40]!r}, wanted none", param=None)
    raw = await request.body()

    def read() -> tuple[B, dict[str, str]]:
        body = parse_body(raw, schema, choose)
        return body, ignored_fields(body, dispatcher, request.url.path)

    if len(raw) <= LARGE:
        return read()
    async with dispatcher.reading:  # one after the other, beside what the server answers meanwhile
        return await asyncio.to_thread(read)


def ignored_fields(body: Body, dispatcher: Dispatcher, where: str) -> dict[str, str]:
    """Refuses unknown fields where the API is strict, else names them for a header."""
    unknown = body.unknown()
    if not unknown:
        return {}
    names = ", ".join(n[:40] for n in unknown[:10])
    if dispatcher.settings.strict_api:
        raise Refused(400, "unknown_field", f"not understood here: {names}", param=unknown[0][:40])
    log.warning("%s: ignored %s", where, names.encode("ascii", "backslashreplace").decode())
    # A header's value neither begins nor ends with a space, so names have none.
    shown = ("".join(c if 32 < ord(c) < 127 else "?" for c in n[:40]) for n in unknown[:10])
    return {IGNORED: ", ".join(shown)}


def parse_body(raw: bytes | str, schema: type[B], choose: Choose[B] | None = None) -> B:
    """A body by its schema; `Refused` (400) says which field is wrong and what was wanted."""
    if raw.count("," if isinstance(raw, str) else b",") > MAX_VALUES:  # type: ignore[arg-type]
        raise Refused(413, "too_large", f"the JSON has more than {MAX_VALUES} commas: send less at once")
    try:
        # Told its encoding, for the parser would take UTF-16 as well.
        data = json.loads(raw if isinstance(raw, str) else raw.decode(), parse_constant=_no_constant)
    except RecursionError as error:
        raise Refused(400, "invalid_request", f"the JSON is nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:
        raise Refused(400, "invalid_request", f"the body is not JSON in UTF-8: {str(error)[:100]}") from error
    if not isinstance(data, dict):
        raise Refused(400, "invalid_request", f"the body is a JSON {type(data).__name__}, wanted an object")
    _check_depth(data)
    try:
        return (schema if choose is None else choose(data)).model_validate(data)
    except ValidationError as error:
        field, sentence = first_fault(error)
        raise Refused(400, "invalid_request", sentence, param=field) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _check_depth(data: object) -> None:
    level: list[object] = [data]
    for _ in range(MAX_DEPTH):
        level = [v for d in level for v in (d.values() if isinstance(d, dict) else d) if isinstance(v, dict | list)]  # type: ignore[attr-defined]
        if not level:
            return
    raise Refused(400, "invalid_request", f"the JSON is nested more than {MAX_DEPTH} levels deep")
