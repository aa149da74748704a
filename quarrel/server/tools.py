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
from quarrel.llm.structured import SPACE, without_notes
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


class CallSplitter:
    """Takes calls of tools in `names` out of a text as it comes: in Hermes' tags, or where the text is nothing but JSON
    objects that are calls.

    Held back is what may become a call, and spaces in front of it; all else flows at once. What does not parse stays
    text: a caller sees what the model wrote. forced: the whole text has to be a call.
    """

    def __init__(self, names: Sequence[str], *, forced: bool = False) -> None:
        self._names, self._forced = names, forced
        self._kept = ""
        self._bare, self._begun = True, False
        """Whether the text may be bare JSON; whether anything of it has flown, or was a call."""
        self.count = 0
        """Calls that were found."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """What flows of the text so far, and the calls that are whole. last: nothing comes behind it."""
        self._kept += text
        if self._forced:
            made = cut_call(self._kept, self._names) if last else ("", [])
        else:
            made = self._taken(last)
        self.count += len(made[1])
        return made

    def _taken(self, last: bool) -> tuple[str, list[Call]]:
        self._bare = self._bare and may_be_call(self._kept, self._names)
        if self._bare:
            if not last:
                return "", []
            if whole := _call(self._kept, self._names):
                return "", whole
        said: list[str] = []
        calls: list[Call] = []
        while (at := self._kept.find(OPENING)) >= 0 and ((end := self._kept.find(CLOSING, at)) >= 0 or last):
            stop, after = (len(self._kept),) * 2 if end < 0 else (end, end + len(CLOSING))
            found = _call(self._kept[at + len(OPENING) : stop], self._names)
            calls += found
            before, self._kept = self._kept[: at if found else after], self._kept[after:]
            if found:  # spaces in front of a call count only if a text comes behind it
                text = before.rstrip()
                before, self._kept = text, (before[len(text) :] if self._begun or text else "") + self._kept
            said.append(before)
            self._begun = self._begun or bool(found or before)
        if last:
            free = len(self._kept.rstrip() if calls or self.count else self._kept)
        else:
            free = self._free(at)
        said.append(self._kept[:free])
        self._kept = self._kept[free:]
        self._begun = self._begun or free > 0
        return "".join(said), calls

    def _free(self, at: int) -> int:
        """How much of what is held is no part of a call, nor spaces in front of one that may begin. at: where one has."""
        if at < 0:
            most = min(len(self._kept), len(OPENING) - 1)
            at = len(self._kept) - next((n for n in range(most, 0, -1) if self._kept.endswith(OPENING[:n])), 0)
        return len(self._kept[:at].rstrip())


def may_be_call(text: str, names: Sequence[str]) -> bool:
    """Whether a text that begins so can turn out to be calls in bare JSON."""
    rest = text.lstrip()
    rest = rest[1:].lstrip() if rest[:1] == "[" else rest
    if rest and rest[0] != "{":
        return False
    rest = rest[1:].lstrip()
    for key in ('"arguments"', '"parameters"'):
        if key.startswith(rest) or rest.startswith(key):
            return True
    if not rest.startswith('"name"'):
        return '"name"'.startswith(rest)
    value = rest[len('"name"') :].lstrip()
    value = value[1:].lstrip() if value[:1] == ":" else value
    quoted = {json.dumps(name, ensure_ascii=ascii) for name in names for ascii in (True, False)}
    return any(q.startswith(value) or value.startswith(q) for q in quoted)


def split_calls(text: str, names: Sequence[str]) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls, as `CallSplitter` finds them in one piece."""
    return CallSplitter(names).push(text, last=True)


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
        try:
            if not isinstance(json.loads(calls[-1].arguments), dict):
                return []
        except (ValueError, RecursionError):
            return []
    return calls
