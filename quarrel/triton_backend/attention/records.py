"""Arguments that attention kernels share, as records: on the host of tensors and numbers, in a kernel of pointers and
scalars.

Arrays are contiguous. T counts the step's rows, S its sequences, "items" pairs of a sequence with one new token and a split
of its keys (`splits.py`); `act` is the compute type.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Partial(NamedTuple):
    """What the splits of a sequence leave for the last of them to combine."""

    sums: Any  # float32 [items, heads, head_dim], weighted values
    top_sum: Any  # float32 [items, heads, 2], the greatest score times log2(e), and the sum of weights
    arrived: Any  # int32 [S, n_kv], of `attend_head` [S, heads], splits that are done; zero before and after


class Rotation(NamedTuple):
    """What turns linear maps of a token into a rotated query and a key in the cache."""

    k: Any  # act [T, n_kv * head_dim]
    v: Any  # act [T, n_kv * head_dim]
    positions: Any  # int32 [T, axes]
    freq: Any  # float32 [axes, n_rot / 2], radians a position
    slots: Any  # int32 [T], block * block_size + offset of the new key
    q_magnitude: float
    k_magnitude: float


class Append(NamedTuple):
    """What latent attention rotates and appends by itself."""

    rotation: Rotation  # its v act [T, latent]
    gain: Any  # float32 [latent], of the RMS norm of v
    eps: float


class Keys(NamedTuple):
    """A layer's cache."""

    k: Any  # act, or uint8 codes, [blocks, n_kv, block_size, head_dim]
    v: Any  # the same
    k_scale: Any  # float32 [blocks, n_kv, block_size], of codes
    v_scale: Any  # the same


class Sequences(NamedTuple):
    """Which rows and which blocks of the cache are a sequence's."""

    query_start: Any  # int32 [S + 1], first row
    kv_len: Any  # int32 [S], keys with the step's own
    table: Any  # int32 [S, width], blocks
    table_width: Any  # int32 [1]


class Score(NamedTuple):
    """How a product of query and key becomes a weight."""

    scale: float  # times log2(e), unless there is a cap
    cap: float  # cap * tanh(score / cap)
    window: int  # keys that a query sees, its own with them, or that share a chunk


class Shape(NamedTuple):
    """Constants of a layer: one record, hashed as a whole."""

    HEADS: int
    KV_HEADS: int
    DIM: int
    """Of a head."""
    WIDE: int
    """DIM, padded to a power of two."""
    SHARE: int
    """Query heads of a key head, padded to a power of two."""
    SIZE: int
    """Keys of a block."""
    WINDOW: bool
    CAP: bool
    SINKS: bool
    KIND: str
    """"plain", or the codes of the cache: "int8", "fp8" or "fp8_e5m2"."""
    CHUNKED: bool = False
    """Windows stand side by side: a query sees the keys of its own."""
    SPANS: bool = False
    """Queries say up to which position they see."""
    ROT: int = 0
    """Columns of a head that attention rotates, by positions of so many AXES; 0 for whole heads and one axis."""
    AXES: int = 1


class Warps(NamedTuple):
    """A form of `attend_warps`: key heads a program, keys a warp, and tiles that are on their way or in use."""

    heads: int
    keys: int
    stages: int


class Ring(NamedTuple):
    """A form of `attend_ring`: warps that consume, keys a warp, and tiles in shared memory."""

    W: int
    KEYS: int
    STAGES: int


class RopeShape(NamedTuple):
    """Constants of a rotation."""

    HEADS: int
    """Query heads."""
    KV_HEADS: int
    SIZE: int
    """Keys of a block."""
    NEOX: bool
    DIM: int
    """Of a head."""
    ROT: int
    """Values of a head that are rotated."""
    HALF: int
    """ROT / 2, padded to a power of two."""
    REST: int
    """DIM - ROT, padded."""
    WIDE: int
    """DIM, padded."""
    KIND: str
    AXES: int
