"""What llama.cpp's own library makes of a file, in a process of its own: a failed assertion of it would end the tests.

    python -m tests.convert.llama_cpp FILE ID [ID ...]

writes, as JSON, how likely each token but the first was to it, in logarithms; nothing for an encoder. The package
`llama-cpp-py-sync` brings the library, built for glibc 2.38 or newer.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np


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
