"""Text for people and JSON for programs: what every command writes with."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TextIO

Progress = Callable[[int, int], None]

_CONTROLS = MappingProxyType({code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"})


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def line(text: str = "") -> None:
    """A line to stdout."""
    write(f"{text}\n")


def note(text: str) -> None:
    """A line to stderr, where nothing that a program reads is written."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_json(document: Any, indent: int | None = None) -> None:
    """One JSON document and a newline, in ASCII so that any terminal and any locale carries it."""
    line(json.dumps(_jsonable(document), indent=indent, allow_nan=False))


def _jsonable(value: Any) -> Any:
    # JSON has no NaN and no infinities, and a model file may hold either.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


def visible(text: str) -> str:
    """The text without the control characters by which a file or a model could drive the terminal."""
    return text if text.isprintable() else text.translate(_CONTROLS)


def tidy(text: str, width: int = 60) -> str:
    """One line of at most `width` characters, quoted as in JSON where it holds more than printable characters."""
    shown = text if text.isprintable() else json.dumps(text, ensure_ascii=True)[1:-1]
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def quoted(text: str, width: int = 60) -> str:
    """As a JSON string, shortened to about `width` characters."""
    short = text if len(text) <= width else f"{text[: width - 1]}…"
    return json.dumps(short, ensure_ascii=not short.isprintable())


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> Iterator[str]:
    """Lines with aligned columns; `right` names the columns that are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        yield (indent + "  ".join(cells)).rstrip()


def amount(nbytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def count(number: int) -> str:
    """A count for people: 1.1 B, 135 M."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def some(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def progress(label: str, stream: TextIO | None = None, unit: str = "B") -> Iterator[Progress | None]:
    """A bar on stderr to feed with bytes (or another unit) done and in all; None where stderr is no terminal."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield None
        return
    from tqdm import tqdm

    scale = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    with tqdm(desc=label, unit=unit, leave=False, file=stream, **scale) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
