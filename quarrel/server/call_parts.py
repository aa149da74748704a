"""Calls while they come: their arguments in pieces, in the forms where these are JSON.

A call begins when a text can be nothing else any more: behind a format's opening, or at the beginning of a bare text,
stands the name of a function of the request, and then a brace that opens its arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from quarrel.server.formats import Call, Functions

_LONGEST = 4096
"""Of what stands before a call's arguments."""
_MARK = re.compile(r'\\.|["{}]', re.DOTALL)


@dataclass(frozen=True)
class CallPart:
    """A piece of a call's arguments. index: of the call in its answer. begins, ends: whether it is the call's first piece,
    and its last."""

    index: int
    id: str
    name: str
    arguments: str
    begins: bool
    ends: bool

    def body(self) -> dict[str, object]:
        """As OpenAI's streams have it; what is said once is not said again."""
        if not self.begins:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class _Begun:
    """A call that has begun. start: of its arguments; sent: up to where they have been given away."""

    index: int
    id: str
    name: str
    start: int
    sent: int
    end: int | None = None


class CallParts:
    """Of one stretch of text, which is read as it grows. heads: what stands before arguments (`formats.Format`). first: the
    index of its first call. named: the function, where it is known already."""

    def __init__(
        self, heads: Sequence[re.Pattern[str]], functions: Functions, first: int, named: str | None = None
    ) -> None:
        self._heads, self._functions, self._first, self._named = heads, functions, first, named
        self.begun: list[_Begun] = []
        self.at = 0
        """Up to where the text was read: behind the last call, or within one."""
        self._depth, self._quoted = 0, False

    def read(self, text: str) -> list[CallPart]:
        """The pieces that came with the rest of the text."""
        made: list[CallPart] = []
        while True:
            if not self.begun or self.begun[-1].end is not None:
                end = self.at + _LONGEST
                head = next((found for h in self._heads if (found := h.match(text, self.at, end))), None)
                if head is None or (name := self._named or _name(head["name"])) not in self._functions:
                    return made
                self._depth, self._quoted, self.at = 0, False, head.end()
                id = next((v for k, v in head.groupdict().items() if k != "name" and v), None)
                id = id or "call_" + secrets.token_hex(12)
                self.begun.append(_Begun(self._first + len(self.begun), id, name, self.at, self.at))
            call, begins = self.begun[-1], self.begun[-1].sent == self.begun[-1].start
            self._scan(text, call)
            piece, call.sent = text[call.sent : self.at], self.at
            if piece or call.end is not None:
                made.append(CallPart(call.index, call.id, call.name, piece, begins, call.end is not None))
            if call.end is None:
                return made

    def calls(self, text: str) -> list[Call]:
        """Those that have begun, with what there is of their arguments."""
        return [Call(c.name, text[c.start : self.at if c.end is None else c.end], c.id) for c in self.begun]

    def _scan(self, text: str, call: _Begun) -> None:
        while (mark := _MARK.search(text, self.at)) is not None:
            self.at = mark.end()
            if mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark[0] in "{}":
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    call.end = self.at
                    return
        self.at = len(text) - text.endswith("\\", self.at)  # what it escapes is not here yet


def whole(call: Call, index: int) -> CallPart:
    """A call in one piece."""
    return CallPart(index, call.named, call.name, call.arguments, begins=True, ends=True)


def _name(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"')) if "\\" in text else text.strip()
    except ValueError:
        return ""
