"""The bundled model on the Triton backend: greedy text against the CPU backend's, tokens a second, host time a step.

python bench/triton_demo.py [--tokens 100] [--compute float16]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import quarrel


def run(backend: str, compute: Any, tokens: int, again: int) -> dict[str, Any]:
    with quarrel.load("demo", backend=backend, compute=compute, n_ctx=512, max_seqs=1, prefix_cache=False) as llm:
        found: dict[str, Any] = {"backend": backend}
        for i in range(again):
            began = time.perf_counter()
            text = llm.generate("Once upon a time", max_tokens=tokens, temperature=0.0).text
            found |= {"text": text, f"seconds {i}": round(time.perf_counter() - began, 4)}
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--compute", default="float16")
    args = parser.parse_args()
    fast = run("triton", args.compute, args.tokens, 3)
    print(json.dumps(fast), flush=True)
    slow = run("cpu", "auto", args.tokens, 1)
    print(json.dumps(slow))
    print(json.dumps({"same text": fast["text"] == slow["text"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
