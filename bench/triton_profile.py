"""Where a decode step's time goes: every kernel of its last steps, as the device's own clock has it.

    python bench/triton_profile.py MODEL.gguf --batch 8,32,128 [--out profile.json]

The graph is replayed under torch's profiler; the table has microseconds a step for each kernel and grid.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quarrel.bench.session import How, Session
from quarrel.bench.work import Test
from quarrel.ops.registry import backend

STEPS = 24


def kernels(trace: Path) -> list[dict[str, object]]:
    """Events of kernels in the order they began."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])


def last_steps(events: list[dict], count: int) -> list[dict]:
    """Whole steps from the end: each begins with the embedding of its tokens."""
    marks = [i for i, e in enumerate(events) if e["name"].startswith("embed")]
    return events[marks[-count - 1] : marks[-1]] if len(marks) > count else events[len(events) // 2 :]


def profiled(session: Session, model: str, test: Test) -> dict[str, object]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        figures = list(session.model(model, [test]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = kernels(file)
    count = STEPS // 2
    events = last_steps(events, count)
    spent: dict[str, list[float]] = defaultdict(list)
    for e in events:
        name = re.sub(r"<.*", "", e["name"])[:60]
        spent[f"{name} {e['args']['grid']}"].append(e["dur"])
    rows = sorted(((sum(d) / count, len(d) / count, name) for name, d in spent.items()), reverse=True)
    span = (events[-1]["ts"] + events[-1]["dur"] - events[0]["ts"]) / count if events else 0.0
    return {
        "test": test.name, "speed": figures[0].speed, "span_us": round(span, 1),
        "kernels_us": round(sum(r[0] for r in rows), 1),
        "rows": [{"us": round(us, 2), "launches": round(n, 2), "kernel": name} for us, n, name in rows],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", default="8,32,128")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    for batch in map(int, args.batch.split(",")):
        session = Session(backend("triton"), How(rounds=1, checked=False))
        found.append(profiled(session, args.model, Test("decode", STEPS, args.depth, batch)))
        print(json.dumps({k: v for k, v in found[-1].items() if k != "rows"}))
        for row in found[-1]["rows"]:  # type: ignore[union-attr]
            each = row["us"] / max(1e-9, row["launches"])
            print(f"{row['us']:9.2f} us {row['launches']:6.1f} x {each:8.2f}  {row['kernel']}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
