"""How far llama.cpp's likelihoods of a quantised file are from ours, and whether that is its rounding of activations.

    python -m bench.check.llama_cpp [CASE ...] --out FILE

A case is a folder of random weights of `tests/convert`, converted. Beside quantised weights llama.cpp rounds what comes in
to 8 bits, so each file is also read with its weights in float32, as the gguf package decodes them: there it rounds nothing.
`its rounding` is how far it is from itself. `eight_bits` is what errors of the size of such a rounding do to the NumPy
reference, the smallest and largest of eight draws. All are the largest of seven tokens' differences in logarithms.

Wants the package llama-cpp-py-sync.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import quarrel
from bench.shared import command_line
from quarrel.convert.folder import FolderFile
from quarrel.gguf import GGUFFile
from quarrel.gguf.requantize import requantize
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.rounding import Shake, shake_inputs
from tests.convert.llama_cpp import dequantized, likelihoods
from tests.convert.test_references import folder_of
from tests.models.test_reference_logits import chunk

CASES = (
    *("qwen35", "qwen35_vl", "qwen35moe", "qwen3next", "llama32", "qwen3", "qwen3moe", "olmo2", "mixtral", "mamba2"),
    *("granitehybrid", "falcon_h1", "glm47flash", "gptoss"),
)
KINDS = ("q4_k_m", "q8_0")
IDS = (5, 9, 40, 77, 101, 3, 60, 61)
DRAWS = 8


def ours(path: Path, compute: Any) -> np.ndarray:
    with quarrel.load(path, backend="cpu", compute=compute, n_ctx=64, threads=1) as llm:
        found = llm.generate(list(IDS), max_tokens=1, temperature=0, logprobs=0, prompt_logprobs=True).prompt_logprobs
    assert found is not None
    return np.array([row.logprob for row in found])


def reference(path: Path, shake: Shake | None = None) -> np.ndarray:
    """NumPy's."""
    ids = np.array(IDS, np.int32)
    with GGUFFile.open(path) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        caches = [empty_cache(layer, 1, 16) for layer in program.caches]
        states = [np.zeros((2, *state.shape), np.float32) for state in program.states]
        rows = run_program(program, tensors, caches, chunk(ids, 0, len(ids)), states, shake)["logits"].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    found: np.ndarray = rows[np.arange(len(ids) - 1), ids[1:]]
    return found


def apart(a: Any, b: Any) -> float:
    return float(f"{np.abs(np.asarray(a) - np.asarray(b)).max():.2g}")


def row(case: str, kind: str, made: Path) -> dict[str, Any]:
    (made / "m").mkdir()
    with FolderFile(folder_of(case, made / "m")) as folder:
        requantize(folder, made / "m.gguf", kind)
    with GGUFFile.open(made / "m.gguf") as file:
        types = Counter(info.type.name for info in file.tensors.values())
    path, plain = made / "m.gguf", dequantized(made / "m.gguf", made / "plain.gguf")
    theirs, theirs_plain, exact, numpy = (
        likelihoods(path, IDS),
        likelihoods(plain, IDS),
        ours(path, "float32"),
        reference(path),
    )
    draws = [apart(reference(path, shake_inputs("int8", np.random.default_rng(seed))), numpy) for seed in range(DRAWS)]
    return {
        "case": case,
        "type": kind,
        "blocks": dict(types),
        "llama.cpp - ours": apart(theirs, exact),
        "llama.cpp - ours, weights decoded first": apart(theirs_plain, exact),
        "its rounding": apart(theirs, theirs_plain),
        "our default - our float32": apart(ours(path, "auto"), exact),
        "NumPy - our float32": apart(numpy, exact),
        "eight_bits": [min(draws), max(draws)],
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for case in args.cases:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as made:
                try:
                    rows.append(row(case, kind, Path(made)))
                except subprocess.CalledProcessError as error:
                    rows.append({"case": case, "type": kind, "llama.cpp said": error.stderr.strip()[-200:]})
            print(json.dumps(rows[-1]), flush=True)
            document = {"command": "python -m bench.check.llama_cpp --out FILE", "rows": rows}
            args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
