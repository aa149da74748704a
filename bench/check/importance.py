"""What an importance matrix gains: perplexity, and divergence from the original, of a model's files with and without one.

    python -m bench.check.importance MODEL IMATRIX TEXT [--chunks 8] [--types q2_k,...]

IMATRIX is what `quarrel imatrix MODEL OTHER_TEXT` made. Each type is made anew; those that want importance, with it only.
Everything runs on the CPU in float32. Divergence is KL in nats a token. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.shared import command_line
from quarrel.gguf import GGUFFile, read_importance
from quarrel.gguf.mixes import MIXES
from quarrel.gguf.requantize import requantize
from quarrel.gguf.resolve import resolve
from quarrel.llm import LoadOptions, load_with
from quarrel.quality.base_file import BaseFile
from quarrel.quality.evaluate import evaluate, pieces_of
from quarrel.quality.files import read_text

TYPES = "q4_k_s,iq4_xs,q3_k_s,iq3_s,q2_k,iq3_xxs,iq2_s,iq2_xs,iq2_xxs,iq1_m,iq1_s"


def scored(path: Path, base: Path, text: str, chunks: int, *, first: bool = False) -> dict[str, float]:
    options = LoadOptions(backend="cpu", compute="float32", threads=1, n_ctx=512)
    with load_with(str(path), options) as llm:
        pieces = pieces_of(llm, text, 512, chunks)
        made = evaluate(llm, pieces, None if first else BaseFile(base), base if first else None, lambda *_: None)
    found = {"perplexity": round(made.perplexity.value, 4), "error": round(made.perplexity.error, 4), "tokens": made.tokens}
    return found if made.divergence is None else {**found, "divergence": round(made.divergence.kld.value, 5)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("imatrix", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--types", default=TYPES)
    args = parser.parse_args()
    paths, importance, text = resolve(args.model).paths, read_importance(args.imatrix), read_text(args.text)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made, GGUFFile.open(paths) as source:
        base = Path(made) / "base.kld"
        rows.append({"type": "original", **scored(paths[0], base, text, args.chunks, first=True)})
        for name in args.types.split(","):
            for weighed in (False, True) if not MIXES[name].wants_importance else (True,):
                target = Path(made) / f"{name}-{weighed}.gguf"
                size = requantize(source, target, name, again=True, importance=importance if weighed else None)
                rows.append({"type": name, "imatrix": weighed, "bytes": size, **scored(target, base, text, args.chunks)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                target.unlink()
    print(json.dumps({"command": " ".join(sys.argv), "model": args.model, "chunks": importance.chunks, "rows": rows}))


if __name__ == "__main__":
    main()
