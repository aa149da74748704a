"""Metal text as tokens: enough of C++ to find words outside comments and to match brackets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\\\n|//[^\n]*|/\*.*?\*/)+)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<mark>\[\[|\]\]|::|.)""",
    re.S | re.X,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">", "[[": "]]"}


@dataclass(frozen=True)
class Token:
    kind: str  # space, string, word, number, mark, directive
    text: str


def tokenise(text: str) -> list[Token]:
    """The tokens of a text; joined, they are the text with its comments blanked, line for line.

    A directive (# at the start of a line) is one token up to its end, except #define, whose body is code.
    """
    tokens: list[Token] = []
    at, line_start = 0, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None
        kind, piece = match.lastgroup or "mark", match.group()
        if piece == "#" and line_start:
            end = _directive_end(text, at)
            if not re.match(r"#\s*define\b", text[at:end]):
                tokens.append(Token("directive", text[at:end]))
                at = end
                continue
        if kind == "space":
            piece = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), piece)
            line_start = line_start or "\n" in piece.replace("\\\n", "")
        else:
            line_start = False
        # `x[[i]...` never occurs in Metal outside attributes, but `]]` closes two subscripts as often as an attribute.
        tokens.append(Token(kind, piece))
        at = match.end()
    return _split_subscripts(tokens)


def _directive_end(text: str, at: int) -> int:
    match = re.compile(r"(?:[^\n\\]|\\\n|\\)*").match(text, at)
    assert match is not None
    return match.end()


def _split_subscripts(tokens: Iterable[Token]) -> list[Token]:
    """`]]` stays one token only where it closes `[[`."""
    result: list[Token] = []
    open_brackets: list[str] = []
    for token in tokens:
        if token.text in ("[", "[["):
            open_brackets.append(token.text)
        elif token.text == "]" and open_brackets:
            open_brackets.pop()
        elif token.text == "]]":
            if not open_brackets or open_brackets[-1] != "[[":
                del open_brackets[-2:]
                result += [Token("mark", "]"), Token("mark", "]")]
                continue
            open_brackets.pop()
        result.append(token)
    return result


def join(tokens: Iterable[Token]) -> str:
    return "".join(token.text for token in tokens)


def next_code(tokens: list[Token], at: int) -> int:
    """The index of the first token from `at` on that is not space; len(tokens) if there is none."""
    while at < len(tokens) and tokens[at].kind == "space":
        at += 1
    return at


def previous_code(tokens: list[Token], at: int) -> int:
    """The index of the last token up to `at` that is not space; -1 if there is none."""
    while at >= 0 and tokens[at].kind == "space":
        at -= 1
    return at


def closing(tokens: list[Token], at: int) -> int:
    """The index of the bracket that closes the one at `at`; -1 if nothing does."""
    left, right = tokens[at].text, _CLOSING[tokens[at].text]
    depth = 0
    for i in range(at, len(tokens)):
        if tokens[i].text == left:
            depth += 1
        elif tokens[i].text == right:
            depth -= 1
            if depth == 0:
                return i
    return -1


def split_commas(tokens: list[Token]) -> list[list[Token]]:
    """The parts between commas that are in no bracket of any kind; none for nothing but space."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.text in ("(", "[", "{", "<", "[["):
            depth += 1
        elif token.text in (")", "]", "}", ">", "]]"):
            depth -= 1
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts if join(tokens).strip() else []
