"""Decode speed against the tokens in the cache, and against sequences in the batch, as an SVG written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from quarrel.bench.report import Figure

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 34, 46
COLOURS = ("#0b5fa5", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0f766e", "#be123c", "#475569")

Curves = dict[str, list[tuple[float, float]]]


def plot(figures: Sequence[Figure]) -> str:
    """Two charts side by side, one curve for each model on each backend."""
    depth: Curves = {}
    batch: Curves = {}
    for f in figures:
        if f.kind == "decode":
            name = f"{f.model}, {f.backend}"
            if f.batch == 1:
                depth.setdefault(name, []).append((f.depth + f.tokens / 2, f.speed))
            if f.depth <= 1024:
                batch.setdefault(name, []).append((f.batch, f.speed))
    names = sorted({*depth, *batch})
    charts = [
        _chart(0, "one sequence, by tokens in the cache", "tokens in the cache", depth, names),
        _chart(WIDTH, "by sequences in the batch, all together", "sequences", batch, names),
    ]
    legend = [
        f'<rect x="{LEFT}" y="{HEIGHT + 18 * i}" width="12" height="12" fill="{_colour(i)}"/>'
        f'<text x="{LEFT + 18}" y="{HEIGHT + 18 * i + 11}">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]
    height = HEIGHT + 18 * len(names) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(charts + legend)}</svg>\n'
    )


def _chart(x0: int, title: str, below: str, curves: Curves, names: Sequence[str]) -> str:
    points = [p for curve in curves.values() for p in curve]
    parts = [f'<text x="{x0 + LEFT}" y="20" font-weight="bold">tokens/s, {escape(title)}</text>']
    if not points:
        return f'{parts[0]}<text x="{x0 + LEFT}" y="60" fill="#666">not measured</text>'
    xs, ys = _ticks(max(x for x, _ in points)), _ticks(max(y for _, y in points))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return round(x0 + LEFT + wide * x / xs[-1], 1), round(TOP + high * (1 - y / ys[-1]), 1)

    for y in ys:
        a, b = at(0, y)
        parts.append(f'<path d="M{a} {b}H{a + wide}" stroke="#ddd"/>')
        parts.append(f'<text x="{a - 6}" y="{b + 4}" text-anchor="end">{y:g}</text>')
    for x in xs:
        a, b = at(x, 0)
        parts.append(f'<text x="{a}" y="{b + 16}" text-anchor="middle">{x:g}</text>')
    a, b = at(xs[-1] / 2, 0)
    parts.append(f'<text x="{a}" y="{b + 36}" text-anchor="middle" fill="#444">{escape(below)}</text>')
    for name, curve in curves.items():
        colour = _colour(names.index(name))
        dots = [at(x, y) for x, y in sorted(curve)]
        path = " ".join(f"{x},{y}" for x, y in dots)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in dots]
    return "".join(parts)


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _ticks(most: float) -> list[float]:
    """From 0 in round steps, about five, to at least `most`."""
    raw = max(most, 1e-9) / 5
    size = 10.0 ** floor(log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
    ticks = [0.0]
    while ticks[-1] < most:
        ticks.append(ticks[-1] + step)
    return ticks
