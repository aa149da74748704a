"""What a bench has found, a line of JSON each, kept as it comes: a run that is cut off has what it had."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Notes:
    """Rows with the seconds since `began`, added to a file; those that are `shown` are printed too."""

    def __init__(self, path: Path, began: float, shown: Callable[[dict[str, Any]], bool] = lambda row: True) -> None:
        self._file, self._began, self._shown = path.open("a", encoding="utf-8"), began, shown

    def say(self, **row: Any) -> None:
        row = {"at": round(time.perf_counter() - self._began, 1)} | row
        text = json.dumps(row)
        print(text, file=self._file, flush=True)
        if self._shown(row):
            print(text, flush=True)
