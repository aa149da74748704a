"""What a block that predicts a further token (MTP) gains, and what it costs where it is never right.

    python -m bench.engine.own_block MODEL.gguf TEXT --out FILE.jsonl [--prompts 12] [--tokens 96] [--rounds 3]

MODEL has such a block. It is loaded with it and without it, and both continue the same passages of TEXT greedily, one
sequence after the other, in turns; the tokens must be the same. A second line is the same of the model with the block's
matrices drawn anew, whose guesses are wrong: what is slower then is the block's cost whatever it guesses. Lines of JSON:
tokens a second (medians of the rounds), steps, guesses and how many were right.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import quarrel
from bench.shared import Notes, command_line
from quarrel.bench.machine import machine
from quarrel.gguf import GGUFFile, GGUFWriter

_BLOCK = re.compile(r"blk\.\d+\.nextn\.eh_proj\.weight")
WORDS = 40
"""Of a passage."""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    words, notes = args.text.read_text("utf-8").split(), Notes(args.out)
    starts = np.linspace(0, len(words) - WORDS, args.prompts).astype(int)
    prompts = [" ".join(words[i : i + WORDS]) for i in starts]
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder, "drawn.gguf")
        redrawn(args.model, drawn)
        for block, path in (("its own", args.model), ("drawn at random", drawn)):
            found = compare(path, prompts, args.tokens, args.rounds, {"backend": args.backend, "threads": args.threads})
            notes.say(model=args.model.name, block=block, **found, machine=machine())
    return 0


def compare(path: Path, prompts: list[str], tokens: int, rounds: int, options: dict[str, Any]) -> dict[str, Any]:
    """Both ways in turns; a different token ends it."""
    given = {key: value for key, value in options.items() if value is not None}
    with quarrel.load(path, **given) as plain, quarrel.load(path, draft="mtp", **given) as drafting:
        rates: dict[str, list[float]] = {"plain": [], "mtp": []}
        for _ in range(rounds + 1):  # the first one compiles
            texts = []
            for name, llm in (("plain", plain), ("mtp", drafting)):
                began = time.perf_counter()
                made = [llm.generate(p, max_tokens=tokens, temperature=0, ignore_eos=True).token_ids for p in prompts]
                rates[name].append(sum(map(len, made)) / (time.perf_counter() - began))
                texts.append(made)
            assert texts[0] == texts[1], "the block has changed a text"
        stats, alone = drafting.stats(), plain.stats()
    speeds = {name: round(median(found[1:]), 1) for name, found in rates.items()}
    return {
        "tokens_per_second": speeds,
        "gain": round(speeds["mtp"] / speeds["plain"], 3),
        "steps": {"plain": alone.steps, "mtp": stats.steps},
        "guessed": stats.drafted_tokens,
        "right": stats.drafted_right,
        "share_right": round(stats.drafted_right / max(stats.drafted_tokens, 1), 3),
    }


def redrawn(source: Path, to: Path) -> None:
    """The model with other values in all matrices of its block."""
    rng, writer = np.random.default_rng(0), GGUFWriter()
    with GGUFFile.open([source]) as file:
        at = next((name.split(".nextn.")[0] for name in file.tensors if _BLOCK.fullmatch(name)), None)
        if at is None:
            raise SystemExit(f"{source} has no block that predicts a further token: tools.demo_predictor writes one")
        for key in file.metadata:
            writer.add(key, file.metadata[key])
        for name, info in file.tensors.items():
            values = np.array(file.array(name), np.float32)
            if name.startswith(f"{at}.") and values.ndim > 1:
                values = rng.standard_normal(values.shape).astype(np.float32) * values.std()
            writer.add_tensor(name, values, info.type)
    writer.write(to)


if __name__ == "__main__":
    sys.exit(main())
