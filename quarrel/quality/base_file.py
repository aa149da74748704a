"""Reference log-probabilities and their files, as `llama-perplexity --kl-divergence-base` writes and reads them.

`_logits_`, then n_ctx (uint32), n_vocab and n_chunk (int32), the tokens of all chunks (int32), then for each chunk the rows
of its second half in a 16-bit form.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quarrel.errors import RequestError
from quarrel.quality.chunks import scored

Array = npt.NDArray[Any]
MAGIC = b"_logits_"
HEADER = struct.Struct("<8sIii")
MOST = 1 << 24
"""Tokens of a chunk or a vocabulary beyond which a header is nonsense."""
FLOOR = 16.0
"""Nats below the best token: the 16-bit form has no smaller values."""
STEPS = 65535
HEAD = 4
"""Words of 16 bits before a row: its step and its smallest log-probability, both float32."""


def log_softmax(logits: Array) -> Array:
    """float64 `[T, V]`."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    out: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def width(n_vocab: int) -> int:
    """Words of a row: an even number of values after the head."""
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


class BaseWriter:
    """Writes a file row by row; it appears under its name when it is whole."""

    def __init__(self, path: Path, pieces: list[list[int]], n_vocab: int) -> None:
        self._path, self._part = path, path.with_name(f"{path.name}.{os.getpid()}.part")
        self._stream: BinaryIO = self._part.open("wb")
        self._stream.write(HEADER.pack(MAGIC, len(pieces[0]), n_vocab, len(pieces)))
        self._stream.write(np.array(pieces, "<i4").tobytes())

    def add(self, logits: Array) -> None:
        """The scored rows of the next chunk."""
        self._stream.write(pack(logits).astype("<u2", copy=False).tobytes())

    def finish(self) -> None:
        self._stream.close()
        self._part.replace(self._path)

    def abandon(self) -> None:
        self._stream.close()
        self._part.unlink(missing_ok=True)


class BaseFile:
    """A file's chunk size, vocabulary and tokens, and the rows of each chunk in turn. Refuses a damaged one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as stream:
                self._read(stream, os.fstat(stream.fileno()).st_size)
        except OSError as error:
            raise RequestError(f"{path} cannot be read: {error.strerror}") from None

    def _read(self, stream: BinaryIO, found: int) -> None:
        head = stream.read(HEADER.size)
        if len(head) < HEADER.size or head[:8] != MAGIC:
            raise RequestError(f"{self._path} is no file of reference logits: it does not begin with {MAGIC.decode()}")
        _, self.n_ctx, self.n_vocab, self.n_chunk = HEADER.unpack(head)
        span = scored(self.n_ctx)
        self._count = span.stop - span.start
        self._start = HEADER.size + 4 * self.n_chunk * self.n_ctx
        size = self._start + 2 * self.n_chunk * self._count * width(self.n_vocab)
        if not (4 <= self.n_ctx < MOST and 0 < self.n_vocab < MOST and self.n_chunk > 0 and found == size):
            raise RequestError(
                f"{self._path} has {found} bytes, wanted {size} for its {self.n_chunk} chunks of {self.n_ctx} tokens over"
                f" a vocabulary of {self.n_vocab}: it is damaged, make it again"
            )
        tokens = np.frombuffer(stream.read(4 * self.n_chunk * self.n_ctx), "<i4")
        self.pieces: list[list[int]] = tokens.reshape(self.n_chunk, self.n_ctx).tolist()

    def rows(self) -> Iterator[Array]:
        """float32 log-probabilities of each chunk's scored rows, `[rows, V]`."""
        wide = width(self.n_vocab)
        for i in range(self.n_chunk):
            with self._path.open("rb") as stream:
                stream.seek(self._start + 2 * i * self._count * wide)
                raw = np.frombuffer(stream.read(2 * self._count * wide), "<u2").reshape(self._count, wide)
            yield unpack(raw, self.n_vocab)
