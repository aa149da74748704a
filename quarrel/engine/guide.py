"""What a grammar lets a text go on with; `llm/structured.py` has one that knows grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt


class Guide(Protocol):
    """One text on its way through a grammar."""

    ends: frozenset[int]
    """Ids that end the text where the grammar allows an end."""

    def allowed(self) -> npt.NDArray[Any]:
        """bool `[V]`: what may come next. Computed once for each position, while a device is busy if there is one."""

    def take(self, token: int) -> bool:
        """Goes on by a token that is allowed; says whether nothing can follow it."""


MakeGuide = Callable[[], Guide]
"""Makes a guide for a new text."""
