"""Signs that a continuation is broken, whatever its meaning: what wrong weights or a wrong kernel write."""

from __future__ import annotations

import re
import unicodedata

REPEATED, PUNCTUATION = 3, 5
_RUN = re.compile(rf"(\S)\1{{{REPEATED},}}")
_MARKS = re.compile(rf"[^\w\s]{{{PUNCTUATION + 1},}}")
_FINE = "\n\r\t"


def faults(text: str) -> list[str]:
    """What is wrong with a text, in words; empty if nothing is."""
    found = []
    if run := _RUN.search(text):
        found.append(f"the character {run[1]!r} comes {len(run[0])} times in a row, at most {REPEATED} are allowed")
    if marks := _MARKS.search(text):
        found.append(f"{len(marks[0])} marks of punctuation in a row, at most {PUNCTUATION} are allowed")
    scripts = {script for c in text if c.isalpha() for script in ("LATIN", "CYRILLIC") if _name(c).startswith(script)}
    if len(scripts) > 1:
        found.append("Latin and Cyrillic letters are mixed")
    controls = sorted({c for c in text if unicodedata.category(c) == "Cc" and c not in _FINE})
    if controls:
        found.append(f"the control character U+{ord(controls[0]):04X} occurs")
    if "\ufffd" in text:
        found.append("bytes that are no UTF-8 occur")
    return found


def _name(c: str) -> str:
    return unicodedata.name(c, "")
