"""How far a normal matrix moves when it is quantised, by us and by ggml: mean squared errors of each type.

    python -m bench.check.quantisers --ggml LIBRARY --out FILE

LIBRARY is libggml-base.so of a build of llama.cpp; the package `llama-cpp-py-sync` has one. `tests/gguf/test_blocks.py`
holds our errors to the record.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quarrel.gguf import GGMLType, dequantize, quantize
from quarrel.gguf.formats import nbytes

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "TQ2_0", "MXFP4"),
)
ROWS, COLUMNS = 64, 2048


def matrix() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def error(type: GGMLType, make: Callable[[np.ndarray, GGMLType], np.ndarray] = quantize) -> float:
    """Mean squared, of the matrix above."""
    values = matrix()
    return float(((dequantize(make(values, type), type).astype(np.float64) - values) ** 2).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chunk = ctypes.CDLL(str(args.ggml)).ggml_quantize_chunk
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    chunk.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]
    chunk.restype = ctypes.c_size_t

    def ggml(values: np.ndarray, type: GGMLType) -> np.ndarray:
        rows, columns = values.shape
        made = np.zeros((rows, nbytes(type, (columns,))), np.uint8)
        assert chunk(int(type), values.ctypes.data, made.ctypes.data, 0, rows, columns, None) == made.nbytes
        return made

    found = {name: {"ours": error(GGMLType[name]), "ggml": error(GGMLType[name], ggml)} for name in TYPES}
    command = "python -m bench.check.quantisers --ggml libggml-base.so --out FILE"
    document = {"command": command, "matrix": [ROWS, COLUMNS], "mean squared errors": found}
    args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for name, both in found.items():
        print(f"{name:8} {both['ours']:.4g} {both['ggml']:.4g} {both['ours'] / both['ggml']:.4f}")


if __name__ == "__main__":
    main()
