"""Rows that end within a superblock: their last blocks are read in place, and nothing of what lies behind them counts."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import padded, row_bytes
from quarrel.cpu_backend.linear.matvec import matvec
from quarrel.cpu_backend.runtime.features import Level, levels
from quarrel.gguf import GGMLType
from quarrel.gguf.quantize import quantize

Run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
PARTIAL = sorted(name for name, fmt in BLOCKS.items() if fmt.elements < 256)


def products(name: str, level: Level, k: int, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rows of a matrix that ends where a page ends that nobody may read."""
    fmt = BLOCKS[name]
    libc = ctypes.CDLL(None, use_errno=True)
    size = -(-rows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with mmap.mmap(-1, size + mmap.PAGESIZE) as memory:
        handle = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(handle)
        at = base + size - rows.nbytes
        ctypes.memmove(at, rows.ctypes.data, rows.nbytes)
        assert libc.mprotect(ctypes.c_void_p(base + size), mmap.PAGESIZE, 0) == 0
        y, bounds, live = np.zeros(len(rows), np.float32), np.array([0, len(rows)]), np.array([1])
        kernel = matvec(fmt, level, True)
        args = kernel.pack(
            {
                "live_rows": live.ctypes.data, "x": x.ctypes.data, "x_stride": len(x), "bounds": bounds.ctypes.data,
                "w": at, "n": len(rows), "row_bytes": rows.shape[1], "blocks": k // 256,
                "tail": k % 256 // fmt.elements, "p": padded(k), "y": y.ctypes.data, "y_stride": y.nbytes,
                "bias": 0, "residual": 0, "scale": 1.0,
            }
        )  # fmt: skip
        Run(kernel.address(level))(args.ctypes.data, 0, 0)
        del handle
    return y


def rounded(x: np.ndarray) -> np.ndarray:
    """A row as the kernels read it."""
    k, p = len(x), padded(len(x))
    blocks = np.zeros(p, np.float32)
    blocks[:k] = x
    blocks = blocks.reshape(-1, 32)
    d = np.abs(blocks).max(1) / np.float32(127)
    q = np.rint(np.divide(blocks, d[:, None], out=np.zeros_like(blocks), where=d[:, None] > 0)).astype(np.int8)
    sums = q.astype(np.int32)
    parts = (
        d,
        d * sums.sum(1).astype(np.float32),
        sums.sum(1, dtype=np.int32),
        sums.reshape(-1, 4, 4, 16).sum(3, dtype=np.int32).transpose(0, 2, 1).reshape(-1),  # in lanes of SIXTEEN
        q.reshape(-1, 2, 4, 2, 16).transpose(0, 2, 3, 1, 4).reshape(-1),  # halves of blocks i and i + 4 beside each other
        sums.reshape(-1, 16).sum(1, dtype=np.int16),
    )
    out = np.concatenate([q.reshape(-1).view(np.uint8), *(np.ascontiguousarray(p).view(np.uint8) for p in parts)])
    assert len(out) == row_bytes(k)
    return out


@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="guards a page as POSIX does")
@pytest.mark.parametrize("level", levels(), ids=lambda level: level.name)
@pytest.mark.parametrize("name", PARTIAL)
def test_what_lies_behind_a_row_does_not_count(name: str, level: Level) -> None:
    rng = np.random.default_rng(3)
    for k in (64, 576, 832, 2880):
        x = rounded(rng.standard_normal(k).astype(np.float32))
        values = rng.standard_normal((5, k)).astype(np.float32)
        rows = quantize(values, GGMLType.Q4_0 if name == "IQ4_NL" else GGMLType[name])  # which lie alike
        alone = [products(name, level, k, row[None], x)[0] for row in rows]
        rows[[1, 3]] = 255  # where these bytes are scales they are no numbers
        assert np.isfinite(alone).all()
        np.testing.assert_array_equal(products(name, level, k, rows, x)[::2], alone[::2])
