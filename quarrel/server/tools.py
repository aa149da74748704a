"""The functions that a request offers, and grammars for answers that have to call one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quarrel.llm import Structure
from quarrel.llm.structured import SPACE, without_notes
from quarrel.server.errors import Refused
from quarrel.server.formats import Functions


def functions_of(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The functions among tools, as far as they have a name."""
    found = [f for tool in tools or [] if isinstance(f := tool.get("function"), dict)]
    return [f for f in found if isinstance(f.get("name"), str)]


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> Functions:
    """The functions' names, and the schemas of their arguments."""
    return {f["name"]: p if isinstance(p := f.get("parameters"), dict) else {} for f in functions_of(tools)}


def required_call(tools: Sequence[Mapping[str, Any]] | None, name: str | None) -> Structure:
    """Constrains an answer to a call of one of these tools, or of the one of that name."""
    functions = [f for f in functions_of(tools) if name in (None, f["name"])]
    if not functions:
        text = "tool_choice wants a call of a function that is not among tools"
        raise Refused(400, "invalid_request", text, param="tool_choice")
    return one_call(functions)


def call_or(form: Structure | None, tools: Sequence[Mapping[str, Any]] | None) -> Structure | None:
    """Constrains an answer to a form, where there is one, or to a call of one of these tools."""
    functions = functions_of(tools)
    if form is None or form.kind != "json" or not functions:
        return form
    schema = json.loads(form.text)
    spaced = json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE}}) if isinstance(schema, dict) else form.text
    return Structure.lark(f"{one_call(functions).text}\n | %json {spaced}")


def one_call(functions: Sequence[Mapping[str, Any]]) -> Structure:
    """Constrains an answer to one call of one of these functions: JSON alone, its arguments by the function's schema."""
    rules = []
    for function in functions:
        schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(schema, dict):
            text = f"the parameters of {function['name'][:40]!r} are no object, wanted a JSON schema"
            raise Refused(400, "invalid_request", text, param="tools")
        # A schema of its own, as its references lead from its own root.
        arguments = json.dumps({**without_notes(schema), "x-guidance": {"whitespace_pattern": SPACE}})
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'({head} %json {arguments} "}}")')
    return Structure.lark("start: " + "\n | ".join(rules))
