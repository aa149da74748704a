"""What compute="fp8" costs in quality: the references on a whole model, its products rounded to E4M3 as the kernels do.

    python -m bench.check.fp8_quality MODEL TEXT [--tokens 1024] [--chunk 256] [--scale row]

All products of linear maps, vocabulary and all, have every row of both sides scaled to 448 and rounded (or with
`--scale tensor` each side as a whole). Prints perplexity both ways and the divergence (KL, nats a token) of the rounded
from the exact one, as JSON. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.shared import command_line
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops import linear
from quarrel.ops.contract import KVArrays, RawWeight
from quarrel.ops.reference import run_program
from quarrel.ops.step import StepInputs
from quarrel.tokenizer import load_tokenizer

BLOCK = 32


class Product:
    """LINEAR's reference, in E4M3 if `rounded`."""

    rounded, by_row = False, True

    def __call__(self, s: Any, x: Any, weight: RawWeight, bias: RawWeight | None = None) -> tuple[Any]:
        a, w = torch.from_numpy(x), torch.from_numpy(weight.dense())
        if self.rounded:
            a, w = _e4m3(a.half().float(), self.by_row), _e4m3(w, self.by_row)
        y = (a @ w.T).numpy()
        return (y if bias is None else y + bias.dense().reshape(-1),)


def _e4m3(rows: torch.Tensor, by_row: bool) -> torch.Tensor:
    largest = rows.abs().amax(1, keepdim=True) if by_row else rows.abs().amax()
    scale = largest.clamp(min=1e-12) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--scale", choices=("row", "tensor"), default="row")
    args = parser.parse_args()
    product = Product()
    product.by_row = args.scale == "row"
    object.__setattr__(linear.LINEAR, "reference", product)
    ids = load_tokenizer(args.model).encode(args.text.read_text("utf-8")[: 8 * args.tokens])[: args.tokens]
    nats: dict[bool, list[Any]] = {False: [], True: []}
    divergence, same = [], []
    with GGUFFile.open([args.model]) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        for start in range(0, len(ids) - args.chunk + 1, args.chunk):
            part = np.array(ids[start : start + args.chunk], np.int32)
            found = {}
            for rounded in (False, True):
                product.rounded = rounded
                blocks = -(-len(part) // BLOCK)
                caches = [
                    KVArrays(*(np.zeros((blocks, BLOCK, c.n_kv, c.head_dim), np.float32) for _ in "kv"))
                    for c in program.caches
                ]
                states = [np.zeros((1, *s.shape), np.float32) for s in program.states]
                each = np.arange(len(part), dtype=np.int32)
                inputs = StepInputs(
                    part,
                    each,
                    each,
                    np.array([0, len(part)], np.int32),
                    np.array([len(part)], np.int32),
                    np.arange(blocks, dtype=np.int32)[None],
                    each,
                    state_slots=np.zeros(1, np.int32),
                )
                logits = torch.from_numpy(run_program(program, tensors, caches, inputs, states)["logits"]).double()
                found[rounded] = logits.log_softmax(-1)
                nats[rounded].append(-found[rounded][each[:-1], part[1:]])
            p, q = found[False], found[True]
            divergence.append((p.exp() * (p - q)).sum(-1))
            same.append((p.argmax(-1) == q.argmax(-1)).double())
            print(f"{start + args.chunk} tokens", file=sys.stderr)
    exact, coarse = (float(torch.cat(nats[r]).mean().exp()) for r in (False, True))
    row = {
        "model": args.model.name,
        "scale": args.scale,
        "tokens": len(torch.cat(nats[True])),
        "perplexity": exact,
        "perplexity_fp8": coarse,
    }
    row |= {"kl": float(torch.cat(divergence).mean()), "same_top": float(torch.cat(same).mean())}
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
