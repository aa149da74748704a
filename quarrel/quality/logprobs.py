"""Log-probabilities of rows of logits, and the 16-bit form in which llama.cpp keeps a reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOOR = 16.0
"""Nats below the best token under which the 16-bit form tells nothing apart."""
STEPS = 65535
HEAD = 4
"""Words of 16 bits before a row: its step and its smallest log-probability, both float32."""


def log_softmax(logits: Array) -> Array:
    """float64 `[T, V]`."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def width(n_vocab: int) -> int:
    """Words of a row: an even number of values behind the head."""
    return 2 * ((n_vocab + 1) // 2) + HEAD


def pack(logits: Array) -> Array:
    """uint16 `[T, width]` of float32 logits `[T, V]`: log-probability = step * word + smallest."""
    x = np.asarray(logits, np.float32)
    top = x.max(-1)
    low = np.maximum(x.min(-1), top - np.float32(FLOOR))
    total = np.exp((x - top[:, None]).astype(np.float64)).sum(-1)
    rows = np.zeros((len(x), width(x.shape[1])), np.uint16)
    step = (top - low) / np.float32(STEPS)
    head = np.stack([step, low - top - np.log(total).astype(np.float32)], 1).astype(np.float32)
    rows[:, :HEAD] = head.view(np.uint16)
    safe = np.where(step > 0, step, 1)[:, None]
    words = np.rint((x - low[:, None]) / safe)
    rows[:, HEAD : HEAD + x.shape[1]] = np.where((x > low[:, None]) & (step > 0)[:, None], words, 0).astype(np.uint16)
    return rows


def unpack(rows: Array, n_vocab: int) -> Array:
    """float32 log-probabilities `[T, V]`."""
    head = np.ascontiguousarray(rows[:, :HEAD]).view(np.float32)  # [T, 2]
    out: Array = head[:, :1] * rows[:, HEAD : HEAD + n_vocab].astype(np.float32) + head[:, 1:]
    return out
