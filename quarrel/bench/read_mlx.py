"""How fast a GPU under MLX reads its memory: MLX's own sum over far more words than any cache holds.

A figure of a loop that only reads, made for this, would be a little higher on the largest chips; shares of the bus on Apple
GPUs are therefore, if anything, flattered.
"""

from __future__ import annotations

import time

import mlx.core as mx


def read_speeds(nbytes: int, rounds: int) -> list[float]:
    """Bytes a second, a few times."""
    data = mx.ones(nbytes // 4, mx.int32)
    mx.eval(data)
    speeds = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        total = mx.sum(data)
        mx.eval(total)
        speeds.append(data.nbytes / (time.perf_counter() - start))
    if int(total.item()) != data.size:
        raise RuntimeError("the measurement of the read bandwidth did not read every word")
    return speeds[2:]
