"""What pydantic found wrong with a body, as one sentence of this project: what, found, wanted."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from quarrel.server.fields import Body

SHOWN = 40
_KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null",
}
_LIMITS = {
    "string_unicode": "a text in UTF-8",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length}",
    "string_too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "string_pattern_mismatch": "what matches {pattern}",
    "literal_error": "{expected}",
    "value_error": "{error}",
}


def first_fault(error: ValidationError) -> tuple[str | None, str]:
    """The first wrong field, and the sentence. Of a choice of types it is about the one that the value came nearest to.
    None where a field's name is wrong itself, which has no place."""
    if any(not e["loc"] for e in error.errors(include_url=False)):
        return None, "the name of a field holds half a character (a lone surrogate), wanted texts in UTF-8"
    found = [(_path(e["loc"]), e) for e in error.errors(include_url=False)]
    first = found[0][0][0]
    path = max(
        (path for path, _ in found if path[0] == first), key=lambda p: (len(p), p[-1] if isinstance(p[-1], int) else 0)
    )
    here = [e for p, e in found if p == path]
    here = [e for e in here if e["type"] in _LIMITS] or here  # where one is over a limit, its type is the right one
    name = ".".join(map(str, path))[:80]
    if here[0]["type"] == "missing":
        return name, f"{name} is missing: the request needs it"
    wanted = " or ".join(dict.fromkeys(_wanted(e) for e in here))
    return name, f"{name} {_found(here[0])}, wanted {wanted}"


def _path(where: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """In the body: without the types between which pydantic had to choose, and without a key that is wrong itself."""
    if where[-1] == "[key]":
        return where[:-2]
    types = ("constrained-", "function-", "list[", "dict[", "literal[")
    names = _names(Body)
    path = tuple(p for p in where if isinstance(p, int) or not (p.startswith(types) or p in names))
    return path[:-1] if len(path) > 1 and path[-1] in ("str", "bool", "int", "float") else path


def _names(kind: type[Body]) -> set[str]:
    """Of all schemas, between which pydantic may have had to choose."""
    return {kind.__name__}.union(*map(_names, kind.__subclasses__()))


def _wanted(error: Any) -> str:
    kind: str = error["type"]
    if kind not in _LIMITS:
        return _KINDS.get(kind, str(error["msg"])[:200])
    limits = error.get("ctx", {})
    return _LIMITS[kind].format(**{k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in limits.items()})


def _found(error: Any) -> str:
    value = error["input"]
    if error["type"] in ("string_too_short", "string_too_long"):
        return f"has {len(value)} characters"
    if error["type"] in ("too_short", "too_long"):
        return f"has {len(value)} entries"
    if isinstance(value, dict | list):
        return "is a list" if isinstance(value, list) else "is an object"
    text = json.dumps(value)
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"has the key {shown}" if error["loc"][-1] == "[key]" else f"is {shown}"
