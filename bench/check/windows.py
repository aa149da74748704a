"""Window groups: the cache bytes that they save, whether they change a bit, and what they cost in time.

    python -m bench.check.windows                     bytes of a running sequence's keys and values, by model
    python -m bench.check.windows --cases ../shared/cases --backend triton [--deterministic]
                                                      the same requests with and without window groups, and a token's time

Prints a line for each model, then one JSON document.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from bench.shared import command_line
from quarrel.llm.memory import BLOCK, Demand
from quarrel.ops.windows import by_window
from tests.ops.test_windows import program

MODELS = {
    "gpt-oss-20b": ([128, 0] * 12, 8, 64, 32768),
    "gpt-oss-120b": ([128, 0] * 18, 8, 64, 32768),
    "gemma-2-9b": ([4096, 0] * 21, 8, 256, 8192),
    "gemma-3-1b": (([512] * 5 + [0]) * 4 + [512] * 2, 1, 256, 32768),
    "gemma-3-4b": (([1024] * 5 + [0]) * 5 + [1024] * 4, 4, 256, 32768),
    "gemma-3-27b": (([1024] * 5 + [0]) * 10 + [1024] * 2, 16, 128, 32768),
}
"""Windows by layer, key heads, their width, and a context."""
ROUNDS = 9
FILES = {"gemma2": "q4_0x", "gemma3": "q4_0x", "gptoss": "mxfp4_moe"}


def planned(name: str) -> dict[str, Any]:
    windows, heads, dim, context = MODELS[name]
    grouped = by_window(program(windows))
    token = 2 * heads * dim * 2  # keys and values of one layer, two bytes each
    before = len(windows) * token * context
    blocks = Demand.of(grouped, 0).each(context // BLOCK)
    after = len(grouped.caches) * token * blocks * BLOCK
    return {
        "model": name, "context": context, "groups": grouped.window_groups, "bytes_before": before, "bytes_after": after,
        "share": round(after / before, 3),
    }  # fmt: skip


def ran(path: Path, backend: str, deterministic: bool) -> dict[str, Any]:
    """Texts and step times of one file, both ways."""
    import quarrel
    from quarrel.llm import plan

    loaded = {}
    for way in ("one table", "groups"):
        keep = (
            mock.patch.object(plan, "by_window_if_smaller", lambda given, context: given)
            if way == "one table"
            else mock.MagicMock()
        )
        with keep:
            loaded[way] = quarrel.load(path, backend=backend, n_ctx=1024, max_seqs=8, deterministic=deterministic)
    prompts = [[(i * 37 + j * 11) % 250 + 1 for i in range(100 + 60 * j)] for j in range(8)]
    texts, times = [], {way: [] for way in loaded}
    for llm in loaded.values():
        several = llm.generate(prompts, max_tokens=64, temperature=0, ignore_eos=True)
        again = llm.generate(prompts[5][:300] + [7] * 40, max_tokens=32, seed=3, ignore_eos=True)
        texts.append([r.token_ids for r in (*several, again)])
    for _ in range(ROUNDS):  # in turns, for a machine is not the same at all times
        for way, llm in loaded.items():
            began = time.perf_counter()
            llm.generate(prompts[7], max_tokens=200, temperature=0, ignore_eos=True)
            times[way].append((time.perf_counter() - began) / 200 * 1e6)
    found: dict[str, Any] = {"model": path.parent.name, "same": texts[0] == texts[1]}
    for way, llm in loaded.items():
        found[way] = {"us_a_token": round(statistics.median(times[way]), 1), "blocks": llm.activity().n_blocks}
        llm.close()
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [planned(name) for name in MODELS]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.cases is not None:
        for name, kind in FILES.items():
            rows.append(ran(args.cases / name / f"model-{kind}.gguf", args.backend, args.deterministic))
            print(json.dumps(rows[-1]), flush=True)
    document = json.dumps({"backend": args.backend, "rows": rows})
    if args.out is not None:
        args.out.write_text(document + "\n")
    print(document)
    return int(not all(row.get("same", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
