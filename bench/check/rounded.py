"""What 16 bits cost a reference model: NumPy's forward pass with the values between ops and the weights of maps rounded
as a GPU stores them, against the reference's logits.

    python -m bench.check.rounded deepseek2_lite/q4_0x,gemma4_e/q4_0x --out FILE.jsonl

A line of JSON for each model and arithmetic: the error of all rows, and of the last eight, which `triton_check` decodes one
by one. Sums, softmax and recurrent states stay exact, as they are float32 on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench.shared import Notes, command_line
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops.contract import Array, Compute, RawWeight, WeightRef, rel_error
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.step import WeightSource
from tests.models.test_reference_logits import chunk, specify, wanted
from tests.paths import CASE_SETS

EXACT = ("token_embd", "ffn_gate_inp")
"""Tables whose rows become the stream, in float32, and routers."""


def rounded(x: Array, compute: Compute) -> Array:
    """To the nearest value of the type, ties to even."""
    if compute == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


class Rounded:
    """Matrices in the type that products take them in."""

    def __init__(self, weights: WeightSource, compute: Compute) -> None:
        self._weights, self._compute = weights, compute

    def raw(self, ref: WeightRef) -> RawWeight:
        raw = self._weights.raw(ref)
        if ref.rows == 1 or any(name in ref.name for name in EXACT):
            return raw
        return RawWeight(GGMLType.F32, rounded(raw.dense(), self._compute).view(np.uint8), ref.k)


def errors(name: str, compute: Compute) -> dict[str, float]:
    """Of FOLDER/VARIANT."""
    folder, variant = name.split("/")
    path = next(path for cases in CASE_SETS for path in cases.glob(f"{folder}/model-{variant}.gguf"))
    with GGUFFile.open(path) as file:
        want, ids = wanted(path.parent, variant), np.load(path.parent / "tokens.npy").reshape(-1).astype(np.int32)
        tensors = Tensors(file)
        program = assemble(specify(file, path.parent, variant), tensors)
        caches = [empty_cache(layer, 32, 16) for layer in program.caches]
        states = [np.zeros((2, *state.shape), np.float32) for state in program.states]
        inputs, weights = chunk(ids, 0, len(ids)), Rounded(tensors, compute)
        got = run_program(program, weights, caches, inputs, states, lambda op, x: rounded(x, compute))["logits"]
    got = got[-len(want) :]
    return {"error": float(rel_error(got, want)), "last_rows": float(rel_error(got[-8:], want[-8:]))}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", help="FOLDER/VARIANT, separated by commas")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    notes = Notes(args.out)
    for name in args.models.split(","):
        for compute in ("float16", "bfloat16"):
            notes.say(model=name, compute=compute, **errors(name, compute))
    return 0


if __name__ == "__main__":
    sys.exit(main())
