"""Answers a file of prompts, one a line, and writes one JSON object for each: all of them run together."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import quarrel

folder = Path(tempfile.mkdtemp())
prompts, results = folder / "prompts.txt", folder / "results.jsonl"
prompts.write_text("Once upon a time\nThe king said\nIn the deep forest\nA fisherman\n", "utf-8")

with quarrel.load(sys.argv[1] if len(sys.argv) > 1 else "demo", max_seqs=4) as llm:
    texts = prompts.read_text("utf-8").splitlines()
    with results.open("w", encoding="utf-8") as file:
        for text, result in zip(texts, llm.generate(texts, max_tokens=24, seed=1), strict=True):
            # A request that fails, such as one that is too slow, has an error; the others go on.
            row = {"prompt": text, "text": result.text, "error": result.error and str(result.error)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

print(results.read_text("utf-8"), end="")
