"""gpt-oss' harmony: a turn of several messages, each with a channel (analysis, commentary, final) and some a recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


class Channels:
    """Takes such a turn apart as it comes. A text without any of the tags is said. What is sent to nobody who is known
    here is said too: a caller sees what the model wrote."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
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
        if last or not self._call:  # of a call nothing is known before its end
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
        if arguments_of(arguments) is not None:
            made.calls.append(Call(self._call, arguments.strip()))
        else:
            made.text += arguments
        self._call = ""

    def _turn(self, tag: str, made: Said) -> None:
        if tag in (START, CHANNEL, CONSTRAIN):
            self._head = (self._head if self._in_head else "") + tag
            self._in_head = True
        elif tag == MESSAGE:
            channel, to = _NAMED.search(self._head), _TO.search(self._head)
            self._call = to[1] if to is not None and to[1] in self._functions else ""
            self._thinks = channel is not None and channel[1] == "analysis" and not self._call
            self._in_head, self._head = False, ""
        else:
            self._gap = self._gap or self._thinks
            self._thinks = self._in_head = False


def _tail(text: str) -> int:
    """How much at the end may become a tag."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(tag.startswith(text[at:]) for tag in TAGS) else 0
