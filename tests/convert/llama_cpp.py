"""What llama.cpp's own library makes of a file, in a process of its own: a failed assertion of it would end the tests.

    python -m tests.convert.llama_cpp FILE ID [ID ...]

writes, as JSON, how likely each token but the first was to it, in logarithms; nothing for an encoder. The package
`llama-cpp-py-sync` brings the library, built for glibc 2.38 or newer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def likelihoods(path: Path, ids: Sequence[int]) -> list[float]:
    """Of a file and all ids but the first; raises CalledProcessError where llama.cpp cannot read it."""
    line = [sys.executable, "-m", "tests.convert.llama_cpp", str(path), *map(str, ids)]
    found: list[float] = json.loads(
        subprocess.run(line, capture_output=True, check=True, text=True).stdout.splitlines()[-1]
    )
    return found


def dequantized(path: Path, target: Path) -> Path:
    """The same weights in float32, as the gguf package decodes them: beside those llama.cpp rounds no activations."""
    import gguf  # only here, for the process that reads a file needs none of it

    from quarrel.gguf import GGUFFile, GGUFWriter

    writer = GGUFWriter()
    with GGUFFile.open(path) as file:
        for key in file.metadata:
            if key != "general.file_type":
                writer.add(key, file.metadata[key], file.metadata.kind(key))
        for tensor in gguf.GGUFReader(path).tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, values.reshape(file.tensors[tensor.name].shape))
        writer.write(target)
    return target


def main(path: str, ids: list[int]) -> None:
    from llama_cpp_py_sync import Llama

    exact = {"type_k": "f32", "type_v": "f32", "flash_attn_type": 0}
    model = Llama(path, n_ctx=64, n_threads=1, **exact)
    ffi, lib, found = model._ffi, model._lib, []
    for at, id in enumerate(ids[:-1]):
        model._eval_tokens([id], at)
        logits = lib.llama_get_logits_ith(model._ctx, -1)
        if logits == ffi.NULL:
            break
        row = np.frombuffer(ffi.buffer(logits, 4 * model.n_vocab), np.float32).astype(np.float64)
        found.append(row[ids[at + 1]] - row.max() - np.log(np.exp(row - row.max()).sum()))
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], [int(id) for id in sys.argv[2:]])
