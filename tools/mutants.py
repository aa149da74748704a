"""What tools that break code on purpose count: how many breaks the checks noticed, and what became of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Equivalents = Sequence[tuple[str, str, str]]
"""Edits that were looked at and change no result: the edit, a part of the line, and why."""


def equivalent(what: str, line: str, table: Equivalents) -> str:
    """Why an edit of a line changes no result, where someone has found that it does not; else an empty string."""
    return next((reason for edit, part, reason in table if what == edit and part in line), "")


@dataclass
class Tally:
    """Edits that count: equivalent ones do not."""

    kind: str
    made: int = 0
    caught: int = 0
    by: Counter[str] = field(default_factory=Counter)
    equivalent: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def add(self, mutant: str, noticed: str, reason: str = "") -> None:
        """Counts an edit and prints a line. noticed: what noticed it; reason: why nothing can, both may be empty."""
        if not noticed and reason:
            self.equivalent.append(f"{mutant}: {reason}")
            print(f"equivalent: {mutant}: {reason}", flush=True)
            return
        self.made += 1
        if noticed:
            self.caught += 1
            self.by[noticed] += 1
        else:
            self.missed.append(mutant)
        print(f"{self.kind} {self.caught}/{self.made} {noticed or 'MISSED'}: {mutant}", flush=True)

    def report(self) -> dict[str, Any]:
        """As JSON."""
        lists = {"equivalent": sorted(self.equivalent), "missed": sorted(self.missed)}
        return {"made": self.made, "caught": self.caught, "by": dict(self.by), **lists}


def share(tallies: Sequence[Tally]) -> float:
    """Of the edits that count, those noticed."""
    return round(sum(t.caught for t in tallies) / max(1, sum(t.made for t in tallies)), 4)
