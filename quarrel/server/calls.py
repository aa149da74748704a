"""Calls of tools taken out of a text while it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from quarrel.server.call_parts import CallPart, CallParts, whole
from quarrel.server.formats import FORMATS, JSON_HEAD, Call, Format, Functions, Unfinished, json_calls, python_calls

_GROUPS: dict[str, list[Format]] = {}
for _made in FORMATS.values():
    _GROUPS.setdefault(_made.opening, []).append(_made)
_STRAY = "</tool_call>"
"""What Qwen3-Coder writes behind a call before which it has forgotten the opening."""
_WORDS = (*_GROUPS, _STRAY)
_OPENING = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))))
_KIND = re.compile(r'"type"\s*:\s*"function"\s*,\s*')

MAX_TRIES = 64
"""Closings that stand in an argument: each has the call read again."""


class CallSplitter:
    """Takes calls of these functions out of a text as it comes: in the forms of the table, or where the text is nothing but
    JSON objects, or a list of Python's calls, that are calls.

    Held back is what may become a call, and spaces in front of it; all else flows at once. What does not parse stays
    text: a caller sees what the model wrote. forced: the whole text has to be a call, in JSON. in_parts: calls begin as
    soon as they can be nothing else, and their arguments come in pieces; one that is not whole in the end is cut there.
    """

    def __init__(self, functions: Functions, *, forced: bool = False, in_parts: bool = False) -> None:
        self._functions, self._forced, self._in_parts = functions, forced, in_parts
        self.parts: list[CallPart] = []
        """What came of calls with the last piece of text."""
        self._stretch: CallParts | None = None
        """Calls that have begun in what is kept."""
        self._kept, self._gap = "", ""
        self._open: list[Format] = []
        """The formats whose opening stands before what is kept."""
        self._seen = self._tries = 0
        """Before this place of what is kept there is no closing that ends a call."""
        self._bare, self._begun = True, False
        """Whether the text may be bare calls; whether anything of it has flown, or was a call."""
        self.count = 0
        """Calls that were found."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """What flows of the text so far, and the calls that are whole. last: nothing comes behind it."""
        self._kept += text
        self.parts = []
        if self._forced:
            self._read((JSON_HEAD,))
            if not last:
                return "", []
            rest, found = cut_call(self._kept, self._functions)
            return rest, self._ended(found, len(self._kept))
        said, calls = list[str](), list[Call]()
        if self._bare:
            self._bare = may_be_bare(self._kept, self._functions)
            if self._bare:
                self._read((JSON_HEAD,))
            if self._bare and not last:
                return "", []
            if self._bare:
                rest = self._behind()
                if found := self._ended(bare_calls(self._kept, self._functions), len(self._kept)):
                    return rest, found
            self._bare, self._stretch = False, None
        while (self._inside if self._open else self._outside)(said, calls, last):
            pass
        if last and not self.count:
            said.append(self._gap)
            self._gap = ""
        return "".join(said), calls

    def _outside(self, said: list[str], calls: list[Call], last: bool) -> bool:
        """Up to the next opening; whether there was one."""
        found = _OPENING.search(self._kept)
        if found is None:
            keep = 0 if last else _tail(self._kept)
            self._say(self._kept[: len(self._kept) - keep], said)
            self._kept = self._kept[len(self._kept) - keep :]
            return False
        self._say(self._kept[: found.start()], said)
        self._kept = self._kept[found.end() :]
        if found[0] == _STRAY:
            if not self.count:
                self._say(_STRAY, said)
        else:
            self._open, self._seen, self._tries, self._stretch = _GROUPS[found[0]], 0, 0, None
        return True

    def _inside(self, said: list[str], calls: list[Call], last: bool) -> bool:
        """Behind an opening: what stands up to a closing, if it is calls; whether that is known."""
        opening, closing = self._open[0].opening, self._open[0].closing
        mark = closing or opening
        # What begins like none of them cannot become one.
        hopeless = not any(f.may_begin(self._kept, self._functions) for f in self._open)
        if not hopeless:
            self._read([head for f in self._open for head in f.heads])
        while not hopeless:
            end = self._kept.find(mark, self._seen)
            if end < 0 and not last:
                self._seen = max(self._seen, len(self._kept) - len(mark) + 1)
                return False
            stop = len(self._kept) if end < 0 else end
            try:
                found = self._parsed(self._kept[:stop])
            except Unfinished:
                if end < 0:
                    break
                self._seen, self._tries = end + len(mark), self._tries + 1
                if self._tries > MAX_TRIES:
                    break
                continue
            if not found:
                break
            calls += self._ended(found, stop)
            self._gap = self._gap if self._begun else ""
            self._begun, self._open = True, []
            self._kept = self._kept[stop + len(closing) if end >= 0 and closing else stop :]
            return True
        self._open = []
        if self._stretch is not None and self._stretch.begun:  # too late for it to be a text
            end = self._kept.find(mark, self._seen)
            calls += self._ended([], len(self._kept) if end < 0 else end)
            self._kept = "" if end < 0 else self._kept[end + len(closing) :]
            self._begun = True
            return True
        self._say(opening, said)
        return True

    def _read(self, heads: Sequence[re.Pattern[str]]) -> None:
        """What has come of the arguments of calls that have begun."""
        if self._in_parts:
            self._stretch = self._stretch or CallParts(heads, self._functions, self.count)
            self.parts += self._stretch.read(self._kept)

    def _behind(self) -> str:
        """The text behind bare calls that have begun, where it is no call itself."""
        if self._stretch is None or not self._stretch.begun or bare_calls(self._kept, self._functions):
            return ""
        return self._kept[self._stretch.at :].lstrip(" \t\r\n]},;")

    def _ended(self, found: list[Call], stop: int) -> list[Call]:
        """The calls of a stretch up to `stop`: those that have begun as they were given away, and the rest of `found`."""
        begun = [] if self._stretch is None else self._stretch.calls(self._kept[:stop])
        rest = [whole(call, self.count + len(begun) + i) for i, call in enumerate(found[len(begun) :])]
        self.parts += rest
        self._stretch = None
        made = [*begun, *(Call(part.name, part.arguments, part.id) for part in rest)]
        self.count += len(made)
        return made

    def _parsed(self, body: str) -> list[Call]:
        unfinished = None
        for format in self._open:
            if not format.may_begin(body, self._functions):
                continue
            try:
                if found := format.parse(body, self._functions):
                    return found
            except Unfinished as error:
                unfinished = error
        if unfinished is not None:
            raise unfinished
        return []

    def _say(self, text: str, said: list[str]) -> None:
        """Text flows; spaces at its end wait, as they count only if a text comes behind them."""
        full = self._gap + text
        flows = full.rstrip()
        if flows:
            said.append(flows)
            self._begun = True
        self._gap = full[len(flows) :]


def _tail(text: str) -> int:
    """How much at the end may become an opening."""
    end = text[-max(map(len, _WORDS)) + 1 :]
    places = (at for at, character in enumerate(end) if character in "<[")
    return next((len(end) - at for at in places if any(word.startswith(end[at:]) for word in _WORDS)), 0)


def may_be_bare(text: str, functions: Functions) -> bool:
    """Whether a text that begins so can turn out to be calls alone: in JSON, or in a list of Python's."""
    start = text.lstrip()
    if start[:1] == "[":
        inner = start[1:].lstrip()
        if any(f"{name}(".startswith(inner) or inner.startswith(f"{name}(") for name in functions):
            return True
    return may_be_call(text, functions)


def bare_calls(text: str, functions: Functions) -> list[Call]:
    """The calls that a whole text is; none if anything else is in it."""
    try:
        return json_calls(text, functions) or (python_calls(text, functions) if text.lstrip()[:1] == "[" else [])
    except Unfinished:
        return []


def may_be_call(text: str, names: Iterable[str]) -> bool:
    """Whether a text that begins so can turn out to be calls in bare JSON."""
    rest = text.lstrip()
    rest = rest[1:].lstrip() if rest[:1] == "[" else rest
    if rest and rest[0] != "{":
        return False
    rest = rest[1:].lstrip()
    if rest.startswith('"type"'):
        kind = _KIND.match(rest)
        if kind is None:
            return '"type":"function",'.startswith("".join(rest.split()))
        rest = rest[kind.end() :]
        if rest.startswith('"function"') or '"function"'.startswith(rest):
            return True
    for key in ('"arguments"', '"parameters"', '"type"'):
        if key.startswith(rest) or rest.startswith(key):
            return True
    if not rest.startswith('"name"'):
        return '"name"'.startswith(rest)
    value = rest[len('"name"') :].lstrip()
    value = value[1:].lstrip() if value[:1] == ":" else value
    quoted = {json.dumps(name, ensure_ascii=ascii) for name in names for ascii in (True, False)}
    return any(q.startswith(value) or value.startswith(q) for q in quoted)


def split_calls(text: str, functions: Functions) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls, as `CallSplitter` finds them in one piece."""
    return CallSplitter(functions).push(text, last=True)


def cut_call(text: str, functions: Functions) -> tuple[str, list[Call]]:
    """As `split_calls` for an answer that has to be a call, where its length may have ended it: of a call that is cut, what
    there is of its arguments, and no text."""
    rest, calls = split_calls(text, functions)
    if calls:
        return rest, calls
    for name in functions:
        head = f'{{"name": {json.dumps(name)}, "arguments": '
        if text.startswith(head):
            return "", [Call(name, text[len(head) :])]
    return "", []
