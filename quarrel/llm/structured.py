"""Texts that keep to a JSON schema, a regular expression or a Lark grammar, by the llguidance package (extra `structured`).

A grammar is compiled before the request is queued, within limits of size, nesting and work; what the compiler does not
support is an error, never ignored. Regular expressions run in linear time.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from quarrel.engine import MakeGuide
from quarrel.errors import QuarrelError, RequestError, installing
from quarrel.tokenizer import Tokenizer

Kind = Literal["json", "regex", "lark", "gbnf"]
MAX_TEXT = 1 << 16
"""Characters, also of what numbers in braces make of a regular expression: each step takes 5 microseconds for one that a
text must go on with."""
MAX_RULES = 1000
"""Of a GBNF grammar: they are read in time that grows with their square, a second for so many."""
MAX_DEPTH = 64
MAX_COMPILED = 32
FUEL = 2_000_000
"""Of the compiler and the lexer; about 40 milliseconds."""
STEP_FUEL = 500_000
SPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between the parts of JSON; without a limit a model could write spaces for ever."""


@dataclass(frozen=True)
class Structure:
    """What an answer must look like: `Structure.json(schema)`, `Structure.regex(text)`, `Structure.lark(text)`,
    `Structure.gbnf(text)`."""

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise RequestError(f"the structure's kind is {self.kind!r}, wanted json, regex, lark or gbnf")
        if not isinstance(self.text, str) or not self.text or len(self.text) > MAX_TEXT:
            raise RequestError(f"a {self.kind} structure wants a text of 1 to {MAX_TEXT} characters")
        if _depth(self.text) > MAX_DEPTH:
            raise RequestError(f"the {self.kind} structure nests brackets deeper than {MAX_DEPTH}: make it flatter")
        if self.kind == "gbnf" and self.text.count("::=") > MAX_RULES:
            raise RequestError(f"the GBNF grammar has more than {MAX_RULES} rules: make it smaller")
        if any(_least(text) > MAX_TEXT for text in (_patterns(self.text) if self.kind == "json" else [self.text])):
            raise RequestError(
                f"the {self.kind} structure repeats more than {MAX_TEXT} characters: write smaller numbers in braces"
            )

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str) -> Structure:
        """JSON that a schema allows; `{"type": "object"}` is any object."""
        if isinstance(schema, str):
            return cls("json", schema)
        try:
            text = json.dumps(without_notes(schema), allow_nan=False)
            json.loads(text, parse_int=_whole)
            return cls("json", text)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema is no JSON ({error})") from None

    @classmethod
    def regex(cls, text: str) -> Structure:
        """Text that matches as a whole, by Rust's syntax: no look-around, no back-references."""
        return cls("regex", text)

    @classmethod
    def gbnf(cls, text: str) -> Structure:
        """Text of a grammar as llama.cpp writes it, which begins with the rule `root`."""
        return cls("gbnf", text)

    @classmethod
    def lark(cls, text: str) -> Structure:
        """Text of a context-free grammar, by llguidance's dialect of Lark; it begins with the rule `start`."""
        return cls("lark", text)


def without_notes(schema: Any) -> Any:
    """A schema without formats that no grammar knows, which are notes by the standard: they narrow nothing."""
    if isinstance(schema, list):
        return [without_notes(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA else without_notes(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _FORMATS)
    }


_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_DATA = ("const", "enum", "default", "example", "examples")
"""Keys of a schema whose values are no schemas."""


class Grammars:
    """Compiles structures for one vocabulary. Safe for threads."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer, self._n_vocab = tokenizer, n_vocab
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._ends: frozenset[int] = frozenset()
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()

    def compile(self, structure: Structure) -> MakeGuide:
        """What makes a guide for each continuation. Raises RequestError for what cannot be compiled."""
        with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = self._compile(structure)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(structure)
            matcher = self._compiled[structure]
        return lambda: _Guide(matcher.deep_copy(), self._ends, self._n_vocab)

    def _compile(self, structure: Structure) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise QuarrelError(f"a structure wants the package llguidance ({error}): {installing('structured')}") from None
        if self._vocabulary is None:
            self._vocabulary, self._ends = _vocabulary(self._tokenizer, llguidance)
        limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, step_lexer_fuel=STEP_FUEL, max_grammar_size=FUEL)
        try:
            if structure.kind == "json":
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    structure.text, defaults={"whitespace_pattern": SPACE}
                )
            elif structure.kind == "regex":
                grammar = llguidance.LLMatcher.grammar_from_regex(structure.text)
            else:
                text = _lark_of(structure.text) if structure.kind == "gbnf" else structure.text
                grammar = llguidance.LLMatcher.grammar_from_lark(text)
            matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        except ValueError as error:
            fault = f"the {structure.kind} structure cannot be used: {_short(str(error))}"
            raise RequestError(fault, "structure") from None
        if matcher.is_error():
            gbnf = structure.kind == "lark" and "::=" in structure.text
            hint = "this is GBNF, which Structure.gbnf takes: " if gbnf else ""
            fault = f"the {structure.kind} structure cannot be used: {hint}{_short(matcher.get_error())}"
            raise RequestError(fault, "structure")
        return matcher


class _Guide:
    def __init__(self, matcher: Any, ends: frozenset[int], n_vocab: int) -> None:
        self.ends = ends
        self._matcher, self._n_vocab = matcher, n_vocab
        self._allowed: npt.NDArray[Any] | None = None

    def allowed(self) -> npt.NDArray[Any]:
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, count=min(8 * len(bits), self._n_vocab), bitorder="little").astype(bool)
            self._check()
            # A model's output may be wider than its vocabulary; no text has those ids.
            self._allowed = np.zeros(self._n_vocab, bool)
            self._allowed[: len(found)] = found
        return self._allowed

    def take(self, token: int) -> bool:
        self._allowed = None
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the structure cannot be followed any further, no text fits it: {_short(self._matcher.get_error())}"
            )


class _Words:
    """A tokenizer as llguidance reads it: bytes by id."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        ids = range(tokenizer.n_vocab)
        self.special_token_ids = [i for i in ids if tokenizer.is_control(i)]
        special = set(self.special_token_ids)
        # A token without text gets a name after a byte that no UTF-8 has, so that no grammar matches it.
        self.tokens = [
            b"\xff" + f"[{i}]".encode() if i in special or not tokenizer.token_bytes(i) else tokenizer.token_bytes(i)
            for i in ids
        ]
        self.eos_token_id, self.bos_token_id = end, None
        self._tokenizer = tokenizer
        self._ids = {word: i for i, word in reversed(list(enumerate(self.tokens))) if i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids whose bytes are exactly `text`: the tokenizer's own, unless it would add something, such as a first space."""
        raw = text if isinstance(text, bytes) else text.encode()
        ids = self._tokenizer.encode(raw.decode("utf-8", "replace"), add_special=False)
        return ids if b"".join(self.tokens[i] for i in ids) == raw else self._greedy(raw)

    def _greedy(self, raw: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(raw):
            ends = range(min(len(raw), at + self._longest), at, -1)
            end = next((end for end in ends if raw[at:end] in self._ids), None)
            if end is None:
                break  # no token has this byte; what is known so far is a beginning all the same
            ids.append(self._ids[raw[at:end]])
            at = end
        return ids


def _vocabulary(tokenizer: Tokenizer, llguidance: Any) -> tuple[Any, frozenset[int]]:
    ends = sorted(tokenizer.stop_ids)
    if not ends:  # any id that is no text will do: the text ends where it is drawn
        ends = [next((i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)), 0)]
    words = llguidance.TokenizerWrapper(_Words(tokenizer, ends[0]))
    return llguidance.LLTokenizer(words, n_vocab=tokenizer.n_vocab, eos_token=ends), frozenset(ends)


def _depth(text: str) -> int:
    """How deep brackets nest, wherever they are: the compiler is recursive."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


_ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL | re.ASCII)
_REPEATS = re.compile(r"\{\d")


def _least(text: str) -> int:
    """About how many characters a text has at least that a regular expression fits: its own, as often as braces say."""
    if _REPEATS.search(text) is None:
        return len(text)
    sizes, last = [0], 0
    for found in _ATOM.finditer(text):
        atom, times = found[0], found[1]
        if times is not None:
            count = int(times) if len(times) < 10 else MAX_TEXT + 1
            sizes[-1] += last * (count - 1)
            last *= count
            if sizes[-1] > MAX_TEXT:
                return sizes[-1]
        elif atom == "(":
            sizes.append(0)
        elif atom == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _patterns(text: str) -> list[str]:
    """The regular expressions of a schema."""
    try:
        level, found = [json.loads(text)], list[str]()
    except (ValueError, RecursionError):
        return []  # the compiler says what is wrong with it
    while level:
        rows = [row for row in level if isinstance(row, dict)]
        found += [row[key] for row in rows for key in ("pattern", "whitespace_pattern") if isinstance(row.get(key), str)]
        found += [key for row in rows if isinstance(named := row.get("patternProperties"), dict) for key in named]
        level = [v for x in level if isinstance(x, dict | list) for v in (x.values() if isinstance(x, dict) else x)]
    return found


_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _lark_of(text: str) -> str:
    """A GBNF grammar in Lark. Raises RequestError for what is none."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_unescaped, text)))
    except Exception as error:  # its parser has no error of its own
        raise RequestError(f"the GBNF grammar cannot be read: {_short(str(error))}", "structure") from None


def _unescaped(found: re.Match[str]) -> str:
    """A character by its number as the reader knows it, which takes \\xHH and loses zeros of the others."""
    number = int(found[1] or found[2] or "0", 16)
    if not number or 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        return found[0]
    return f"\\x{number:02x}" if number < 256 else chr(number)


def _whole(digits: str) -> int:
    """The compiler would put the nearest 64-bit number in the place of others."""
    if not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError(f"{digits[:40]} has more than 64 bits, wanted a smaller number")
    return number


_SCHEMA = "failed to compile JSON schema: "
_SHOWN = re.compile(r"\n\s*\d+ \|")


def _short(text: str) -> str:
    if _SCHEMA in text:  # in a grammar around it, which its writer has not seen
        text = _SHOWN.split(text.partition(_SCHEMA)[2])[0]
    line = " ".join(text.partition("<state>")[0].split())  # behind it the compiler shows what it has come to
    return line if len(line) <= 300 else line[:297] + "..."
