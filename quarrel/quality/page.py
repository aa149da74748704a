"""The report of a regression run: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10

from quarrel.quality.suite import Allowed, Entry

STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1b1b}
table{border-collapse:collapse;margin:.6rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:left}
.ok{color:#15803d}.bad{color:#b91c1c}pre{white-space:pre-wrap;background:#f5f5f5;padding:.5rem}"""
Judged = tuple[Entry, dict[str, float], list[str]]


def page(judged: Sequence[Judged], allowed: Allowed) -> str:
    """Plots of all models first, then one section for each."""
    failed = sum(bool(wrong) for *_, wrong in judged)
    verdict = f'<span class="bad">{failed} of {len(judged)} failed</span>' if failed else '<span class="ok">passed</span>'
    names = [entry["model"] for entry, *_ in judged]
    plots = "".join(
        _bars(title, list(zip(names, values)), limit, logarithmic)
        for title, values, limit, logarithmic in (
            ("logits distance (log scale)", [m.get("logits distance") for _, m, _ in judged], allowed.distance, True),
            ("perplexity", [e["perplexity"]["value"] for e, *_ in judged], None, False),
            ("tokens a second", [e["tokens_per_second"] for e, *_ in judged], None, False),
            ("peak memory of the process, MB", [e["memory"]["process_peak"] / 1e6 for e, *_ in judged], None, False),
        )
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Quarrel: regression report</title>'
        f"<style>{STYLE}</style><h1>Regression report: {verdict}</h1>{plots}{''.join(map(_section, judged))}</html>\n"
    )


def _section(judged: Judged) -> str:
    entry, measures, wrong = judged
    about = ", ".join(str(entry[key]) for key in ("architecture", "backend", "device", "compute", "quarrel"))
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{value:.6g}</td></tr>" for name, value in measures.items())
    faults = "".join(f'<li class="bad">{escape(text)}</li>' for text in wrong) or '<li class="ok">nothing is wrong</li>'
    texts = "".join(f"<pre><b>{escape(c['prompt'])}</b>{escape(c['text'])}</pre>" for c in entry["continuations"])
    return (
        f"<h2>{escape(entry['model'])}</h2><p>{escape(about)}</p><ul>{faults}</ul>"
        f"<table><tr><th>perplexity</th><td>{entry['perplexity']['value']:.4f}</td></tr>{rows}</table>{texts}"
    )


def _bars(title: str, values: Sequence[tuple[str, float | None]], limit: float | None, logarithmic: bool) -> str:
    """Horizontal bars; a dashed line where the limit is."""
    known = [v for _, v in values if v is not None]
    if not known:
        return ""

    def length(value: float) -> float:
        if logarithmic:
            return 400 * (log10(max(value, 1e-12)) + 12) / 12
        return 400 * value / (max(known) or 1.0)

    rows = []
    for i, (name, value) in enumerate(values):
        y = 8 + 24 * i
        rows.append(f'<text x="0" y="{y + 13}">{escape(name[:34])}</text>')
        if value is not None:
            wide = max(1.0, min(400.0, length(value)))
            rows.append(f'<rect x="240" y="{y}" width="{wide:.1f}" height="18" fill="#0b5fa5"/>')
            rows.append(f'<text x="{246 + wide:.1f}" y="{y + 13}">{value:.4g}</text>')
    high = 16 + 24 * len(values)
    if limit is not None:
        x = 240 + length(limit)
        rows.append(f'<path d="M{x:.1f} 0V{high}" stroke="#b91c1c" stroke-dasharray="4 3"/>')
    return f'<h3>{escape(title)}</h3><svg width="760" height="{high}" font-size="12">{"".join(rows)}</svg>'
