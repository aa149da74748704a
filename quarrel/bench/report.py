"""Figures, and their output: a Markdown table, one JSON document, JSON lines, CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from quarrel.bench.phases import Phased
from quarrel.errors import RequestError

FORMATS = ("markdown", "md", "json", "jsonl", "csv")
"""`md`, llama-bench's name, is markdown."""


@dataclass(frozen=True)
class Figure:
    """One test of one model on one backend. Speeds are tokens a second over all sequences."""

    model: str
    architecture: str
    model_bytes: int
    backend: str
    device: str
    compute: str
    test: str
    kind: str
    tokens: int
    depth: int
    batch: int
    speed: float
    """Median of the repetitions."""
    spread: float
    """Median distance from the median."""
    low: float
    high: float
    samples: tuple[float, ...]
    warm_up_s: float
    load_s: float
    step_tokens: int
    bytes_per_step: int
    """Bytes that one decode step must read: weights, keys, values, states. 0 for prompts."""
    read_gb_s: float
    """Read bandwidth of the memory, measured beside this figure."""
    share: float
    """Share of that bandwidth at which `bytes_per_step` were read. 0 for prompts."""
    checked: str
    """What was compared with the references before."""
    quarrel: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.backend, self.test


def statistics(work: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Speeds of the repetitions, and their median, spread and ends."""
    speeds = tuple(work / s for s in seconds)
    middle = median(speeds)
    spread = median(abs(s - middle) for s in speeds)
    return {"speed": middle, "spread": spread, "low": min(speeds), "high": max(speeds), "samples": speeds}


def document(
    figures: Sequence[Figure], machine: Mapping[str, object], explained: Mapping[str, object], phases: Sequence[Phased] = ()
) -> str:
    """One JSON document: the machine, which kernel ran each call, and the figures, or the phases."""
    found: dict[str, object] = {"figures": [asdict(f) for f in figures]} if not phases else {}
    if phases:
        found["phases"] = [asdict(p) for p in phases]
    return json.dumps({"machine": machine, "explain": explained, **found}, indent=1)


def line(figure: Figure | Phased) -> str:
    """One figure, or the phases of one test, as one line of JSON."""
    return json.dumps(asdict(figure))


def brief(figure: Figure) -> str:
    """One figure as a short line."""
    share = _share(figure)
    return f"{figure.model}: {figure.test} {_speed(figure)} tokens/s{f', {share}' if share else ''}"


def table(figures: Sequence[Figure], before: Mapping[tuple[str, str, str], float] | None = None) -> str:
    """Markdown; with `before`, ratios against it."""
    heads = ["model", "size", "backend", "arithmetic", "test", "tokens/s", "of the bandwidth", "checked"]
    rows = [
        [f.model, f"{f.model_bytes / 1e9:.2f} GB", f.backend, f.compute, f.test, _speed(f), _share(f), f.checked]
        for f in figures
    ]
    if before is not None:
        heads.append("ratio")
        rows = [[*row, _ratio(f, before)] for row, f in zip(rows, figures)]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |" for row in [heads, *rows]]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def csv_text(figures: Sequence[Figure]) -> str:
    """A header and a row a figure; samples are joined by spaces."""
    out = io.StringIO()
    names = [f.name for f in fields(Figure)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for figure in figures:
        values = asdict(figure) | {"samples": " ".join(f"{s:.3f}" for s in figure.samples)}
        writer.writerow([values[name] for name in names])
    return out.getvalue().rstrip("\n")


def earlier(path: Path) -> dict[tuple[str, str, str], float]:
    """Speeds of an earlier document, or of a file of JSON lines, by model, backend and test."""
    try:
        text = path.read_text("utf-8")
        try:
            whole = json.loads(text)
            rows = whole.get("figures", [whole]) if isinstance(whole, dict) else whole
        except json.JSONDecodeError:
            rows = [json.loads(part) for part in text.splitlines() if part.strip()]
        return {(r["model"], r["backend"], r["test"]): float(r["speed"]) for r in rows if "speed" in r}
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} holds no figures of quarrel.bench ({type(error).__name__}: {error})") from None


def _speed(f: Figure) -> str:
    digits = 1 if f.speed >= 100 else 2
    return f"{f.speed:.{digits}f} ± {f.spread:.{digits}f}"


def _share(f: Figure) -> str:
    if f.share > 1:  # what a small model reads stays in a cache between steps
        return f"above {f.read_gb_s:.0f} GB/s: cached"
    return f"{100 * f.share:.1f}% of {f.read_gb_s:.0f} GB/s" if f.share else ""


def _ratio(f: Figure, before: Mapping[tuple[str, str, str], float]) -> str:
    old = before.get(f.key)
    return f"{f.speed / old:.3f}" if old else "new"
