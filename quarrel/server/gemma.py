"""How Gemma 4 writes a call: `call:NAME{key:value,..}`, where a text stands between two tags, and values may hold others.

value   <|"|>text<|"|>   5   0.5   true   null   {key:value,..}   [value,..]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

QUOTE = '<|"|>'
CALL = "call:"
_HEAD = re.compile(r"\s*call:([^{]+)\{")
_PLAIN = re.compile(r"[^,{}\[\]<]*")


class Open(Exception):
    """A text within the call is not closed: what closes the call stands in it."""


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of one call. Raises ValueError for anything else, `Open` for one that goes on."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("no call")
    arguments, at = _mapping(text, head.end())
    if text[at:].strip():
        raise ValueError("more than a call")
    return head[1].strip(), arguments


def rendered(value: Any) -> str:
    """A value as the model writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{rendered(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(rendered, value))}]"
    return json.dumps(value)


def _mapping(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Behind its brace."""
    found: dict[str, Any] = {}
    while True:
        at = _spaces(text, at)
        if text.startswith("}", at):
            return found, at + 1
        if text.startswith(QUOTE, at):
            key, at = _quoted(text, at)
            at = _spaces(text, at)
        else:
            end = text.find(":", at)
            if end < 0:
                raise ValueError("a key without a value")
            key, at = text[at:end].strip(), end
        if not text.startswith(":", at):
            raise ValueError("a key without a value")
        found[key], at = _value(text, at + 1)
        at = _next(text, at, "}")


def _value(text: str, at: int) -> tuple[Any, int]:
    at = _spaces(text, at)
    if text.startswith(QUOTE, at):
        return _quoted(text, at)
    if text.startswith("{", at):
        return _mapping(text, at + 1)
    if text.startswith("[", at):
        return _list(text, at + 1)
    plain = _PLAIN.match(text, at)
    assert plain is not None
    word = plain[0].strip()
    if not word:
        raise ValueError("no value")
    try:
        return json.loads(word), plain.end()
    except ValueError:
        return word, plain.end()  # a text that lacks its tags


def _list(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        at = _spaces(text, at)
        if text.startswith("]", at):
            return found, at + 1
        value, at = _value(text, at)
        found.append(value)
        at = _next(text, at, "]")


def _next(text: str, at: int, end: str) -> int:
    """Behind a comma, or at the end."""
    at = _spaces(text, at)
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(end, at):
        raise ValueError(f"no {end}")
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    end = text.find(QUOTE, at + len(QUOTE))
    if end < 0:
        raise Open
    return text[at + len(QUOTE) : end], end + len(QUOTE)


def _spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
