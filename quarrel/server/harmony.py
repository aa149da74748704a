"""gpt-oss' harmony: a turn of several messages, each with a channel (analysis, commentary, final) and some a recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from quarrel.server.call_parts import CallPart, CallParts, whole
from quarrel.server.formats import Call, Functions, arguments_of

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, "<|end|>", "<|call|>", "<|return|>")
TO = " to="
_TAG = re.compile("|".join(map(re.escape, TAGS)))
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass
class Said:
    """What came with a piece of text."""

    thought: str
    text: str
    calls: list[Call]
    parts: list[CallPart] = field(default_factory=list)


_OBJECT = re.compile(r"\s*(?=\{)")


class Channels:
    """Takes such a turn apart as it comes. A text without any of the tags is said. What is sent to nobody who is known
    here is said too: a caller sees what the model wrote. in_parts: calls come in parts, from the brace on that opens their
    arguments."""

    def __init__(self, functions: Functions, *, in_parts: bool = False) -> None:
        self._functions, self._in_parts = functions, in_parts
        self._stretch: CallParts | None = None
        self.count = 0
        """Calls so far."""
        self._kept, self._head = "", ""
        self._begins, self._in_head = True, False
        """Whether nothing has come yet, and whether what comes says to whom and where a message goes."""
        self._thinks, self._gap, self._call = False, False, ""

    def push(self, text: str, *, last: bool = False) -> Said:
        """last: nothing comes behind it."""
        self._kept += text
        made = Said("", "", [])
        if self._begins:  # the prompt ends with the sender, whom a recipient may follow
            if not last and TO.startswith(self._kept):
                return made
            self._begins, self._in_head = False, self._kept.startswith(TO)
        while (tag := _TAG.search(self._kept)) is not None:
            self._take(self._kept[: tag.start()], made)
            self._kept = self._kept[tag.end() :]
            self._turn(tag[0], made)
        if self._call and self._stretch is not None:
            made.parts += self._stretch.read(self._kept[: len(self._kept) - (0 if last else _tail(self._kept))])
        if last or not self._call:  # whether it is a call is known at its end
            keep = 0 if last else _tail(self._kept)
            self._take(self._kept[: len(self._kept) - keep], made)
            self._kept = self._kept[len(self._kept) - keep :]
        return made

    def _take(self, text: str, made: Said) -> None:
        """Text that no tag stands in."""
        if self._in_head:
            self._head += text
        elif self._call:
            self._called(text, made)
        elif self._thinks:
            made.thought += "\n" + text if self._gap and text else text
            self._gap = self._gap and not text
        else:
            made.text += text

    def _called(self, arguments: str, made: Said) -> None:
        call = Call(self._call, arguments.strip()) if arguments_of(arguments) is not None else None
        if self._stretch is not None:
            made.parts += self._stretch.read(arguments)
            call = self._stretch.calls(arguments)[0] if self._stretch.begun else call
        if call is None:
            made.text += arguments
        else:
            if self._stretch is None or not self._stretch.begun:
                made.parts.append(whole(call, self.count))
                call = replace(call, id=made.parts[-1].id)
            made.calls.append(call)
            self.count += 1
        self._call, self._stretch = "", None

    def _turn(self, tag: str, made: Said) -> None:
        if tag in (START, CHANNEL, CONSTRAIN):
            self._head = (self._head if self._in_head else "") + tag
            self._in_head = True
        elif tag == MESSAGE:
            channel, to = _NAMED.search(self._head), _TO.search(self._head)
            self._call = to[1] if to is not None and to[1] in self._functions else ""
            if self._call and self._in_parts:
                self._stretch = CallParts((_OBJECT,), self._functions, self.count, self._call)
            self._thinks = channel is not None and channel[1] == "analysis" and not self._call
            self._in_head, self._head = False, ""
        else:
            self._gap = self._gap or self._thinks
            self._thinks = self._in_head = False


def _tail(text: str) -> int:
    """How much at the end may become a tag."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(tag.startswith(text[at:]) for tag in TAGS) else 0
