"""Calls of tools in what a model wrote: found by plain search, parsed as JSON, in the forms that templates teach.

And a grammar for answers that have to be one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quarrel.llm import Structure
from quarrel.llm.structured import SPACE
from quarrel.server.errors import Refused

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """One call; `arguments` is JSON text, as OpenAI's clients expect."""

    name: str
    arguments: str

    def body(self, index: int) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": "call_" + secrets.token_hex(12), "type": "function", "function": function}


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The functions among tools, as far as they have a name."""
    found = [f for tool in tools or [] if isinstance(f := tool.get("function"), dict)]
    return [f for f in found if isinstance(f.get("name"), str)]


def required_call(tools: Sequence[Mapping[str, Any]] | None, name: str | None, form: Structure | None) -> Structure:
    """Constrains an answer to a call of one of these tools, or of the one of that name. form: a constraint beside it."""
    if form is not None:
        text = "tool_choice wants a call and the answer's format something else: leave one of them out"
        raise Refused(400, "invalid_request", text, param="tool_choice")
    functions = [f for f in functions_of(tools) if name in (None, f["name"])]
    if not functions:
        text = "tool_choice wants a call of a function that is not among tools"
        raise Refused(400, "invalid_request", text, param="tool_choice")
    return one_call(functions)


def one_call(functions: Sequence[Mapping[str, Any]]) -> Structure:
    """Constrains an answer to one call of one of these functions: JSON alone, its arguments by the function's schema."""
    rules = []
    for function in functions:
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(schema, dict):
            text = f"the parameters of {function['name'][:40]!r} are no object, wanted a JSON schema"
            raise Refused(400, "invalid_request", text, param="tools")
        # A schema of its own, as its references lead from its own root.
        arguments = json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE}})
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'({head} %json {arguments} "}}")')
    return Structure.lark("start: " + "\n | ".join(rules))


def split_calls(text: str, names: Sequence[str]) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls, of tools in `names` only: Hermes' tags, or nothing but JSON objects.

    What does not parse stays text: a caller sees what the model wrote.
    """
    kept, calls, at = [], [], 0
    while (begin := text.find(OPENING, at)) >= 0:
        end = text.find(CLOSING, begin)
        stop = len(text) if end < 0 else end
        call = _call(text[begin + len(OPENING) : stop], names)
        after = stop if end < 0 else end + len(CLOSING)
        kept.append(text[at : begin if call else after])
        calls += call
        at = after
    kept.append(text[at:])
    rest = "".join(kept)
    if not calls:
        whole = _call(rest, names)
        if whole:
            return "", whole
    return (rest.strip() if calls else rest), calls


def cut_call(text: str, names: Sequence[str]) -> tuple[str, list[Call]]:
    """As `split_calls` for an answer that has to be a call, where its length may have ended it: of a call that is cut, what
    there is of its arguments, and no text."""
    rest, calls = split_calls(text, names)
    if calls:
        return rest, calls
    for name in names:
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        if text.startswith(head):
            return "", [Call(name, text[len(head) :])]
    return "", []


def _call(text: str, names: Sequence[str]) -> list[Call]:
    """The calls that a JSON object or a list of them makes; none if anything else is in it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for entry in found if isinstance(found, list) else [found]:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in names:
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        calls.append(Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments)))
    return calls
