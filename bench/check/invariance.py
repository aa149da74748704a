"""Whether a request's logits have the same bits whatever happens around it, for every architecture of the reference cases.

    python -m bench.check.invariance --out invariance.json [--cases ../shared/cases --backend triton --modes 1,0 --jobs 14]

Each model runs what tests/llm/invariance.py lists, with 2 to 64 neighbours, and then one request --runs times under a mixed
load, whose distinct answers are counted. Mode 1 is `deterministic=True`, mode 0 is not. The JSON is complete at any moment.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from bench.shared import CASES as CASE_FOLDER
from bench.shared import command_line

PREFERRED = ("q4_k_m", "mxfp4_moe", "q4_0x", "mxfp4-f16")


def models(cases: Path, only: str) -> list[Path]:
    """One file of each decoder: the format that people use most, among those there are."""
    found = []
    for folder in sorted(p for p in cases.iterdir() if (p / "tokens.npy").exists()):
        files = [folder / f"model-{name}.gguf" for name in PREFERRED]
        here = [f for f in files if f.exists()]
        if here and folder.name not in ("bert", "nomic_bert", "minilm") and (not only or folder.name in only.split(",")):
            found.append(here[0])
    # Those with the most kinds of kernels take the longest to compile.
    return sorted(
        found,
        key=lambda p: -sum(word in p.parent.name for word in ("moe", "hybrid", "nemotron_h", "gptoss", "mixtral", "mamba")),
    )


def one(job: tuple[str, str, str, str, int, str]) -> dict[str, Any]:
    path, name, compute, mode, runs, kv = job
    from quarrel.gguf import GGUFFile
    from quarrel.ops.registry import backend as named
    from tests.llm.invariance import CASES, Bench, distinct, unlike, with_neighbours

    began = time.perf_counter()
    row: dict[str, Any] = {
        "model": Path(path).parent.name,
        "file": Path(path).stem[6:],
        "deterministic": mode == "1",
        "kv": kv,
    }
    try:
        backend = named(name)
        row |= {"device": backend.device(), "compute": backend.compute_of(compute)}  # type: ignore[arg-type]
        cases = {k: v for k, v in CASES.items() if k != "neighbours"}
        cases |= {f"{n} neighbours": (256, partial(with_neighbours, count=n)) for n in (2, 8, 31, 64)}
        with GGUFFile.open([path]) as file:
            bench = Bench(file, backend, compute, seqs=65, deterministic=mode == "1", kv_cache=kv)  # type: ignore[arg-type]
            row |= {"cases": [*cases, "chunks of 1024 alone"], "unlike": unlike(bench, cases)}
            if runs:
                row |= {"runs": runs, "distinct": distinct(bench, runs)}
    except Exception:
        row["raised"] = traceback.format_exc(limit=-4)[-900:]
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=Path, default=CASE_FOLDER)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--modes", default="1", help="1 is deterministic, 0 is not; 1,0 runs one after the other")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--only", default="", help="folders of cases, separated by commas")
    parser.add_argument("--runs", type=int, default=0, help="of one request, under a mixed load")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    began = time.perf_counter()
    paths = models(args.cases, args.only)
    modes = args.modes.split(",")
    jobs = [(str(p), args.backend, args.compute, mode, args.runs, args.kv_cache) for mode in modes for p in paths]
    rows: list[dict[str, Any]] = []
    pool = multiprocessing.get_context("spawn").Pool(min(args.jobs, len(jobs)))
    waiting = pool.imap_unordered(one, jobs)
    try:
        for _ in jobs:
            row = waiting.next(max(0.1, began + args.seconds - time.perf_counter()))
            rows.append(row)
            print(json.dumps(row), flush=True)
            args.out.write_text(json.dumps({"jobs": len(jobs), "rows": rows}, indent=1) + "\n")
    except multiprocessing.TimeoutError:
        print(f"the time is over: {len(rows)} of {len(jobs)}", flush=True)
    pool.terminate()
    bad = [r for r in rows if r["deterministic"] and (r.get("unlike") or "raised" in r or r.get("distinct", 1) > 1)]
    print(
        json.dumps({"jobs": len(jobs), "ran": len(rows), "failed": len(bad), "seconds": round(time.perf_counter() - began)})
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
