"""Names use the glossary's words: those that it replaces become fewer, never more."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "quarrel"

MOST = {
    "told": 1, "asked": 2, "held": 9, "few": 1, "worth": 0, "halved": 0, "halves": 0, "settled": 0, "deal": 0, "turned": 0,
    "hosted": 1, "door": 0,
}  # fmt: skip
"""How many names of the package may still have the word. Lower a number when you have renamed something."""


def names(tree: ast.AST) -> Iterator[str]:
    """What functions, classes, parameters, variables and attributes are called where they are defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_replaced_words_become_fewer() -> None:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        for name in (path.stem, *names(ast.parse(path.read_text("utf-8")))):
            found.update(words(name) & MOST.keys())
    more = {word: count for word, count in found.items() if count > MOST[word]}
    assert more == {}, "docs/glossary.md has the words to use instead"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def was_told(): pass", "told"),
        ("class AskedFor: pass", "asked"),
        ("x.held = 1", "held"),
        ("def f(deal): pass", "deal"),
    ],
)
def test_a_word_is_found_in_any_kind_of_name(text: str, word: str) -> None:
    assert word in {w for name in names(ast.parse(text)) for w in words(name)}


def test_a_word_within_another_is_none() -> None:
    assert not {w for name in names(ast.parse("ideal = household = 1")) for w in words(name)} & {"deal", "held"}
