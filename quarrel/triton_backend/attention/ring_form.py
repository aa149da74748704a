"""What the ring of attention (`ring_kernels.py`) is in shared memory and registers, as it follows from a layer's shape."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from quarrel.triton_backend.attention.splits import STEP


@gluon.constexpr_function
def box_rows(size):
    """Keys of a copy: a block's, or those of a step of splits if they are fewer."""
    return min(size, STEP)


@gluon.constexpr_function
def chunks_of(dim, bits):
    """Copies of 128 bytes a key."""
    return max(1, dim * bits // 1024)


@gluon.constexpr_function
def meeting_rows(group):
    """Rows of a product that warps add: of its sixteen the first half, where all heads are among them."""
    return 8 if group <= 8 else 16


@gluon.constexpr_function
def mma_layout(w):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[w, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def shared_layout(dim, bits, rank):
    return gl.NVMMASharedLayout(min(128, dim * bits // 8), bits, rank)


@gluon.constexpr_function
def keys_layout(w, keys, dim):
    """Codes of keys `[w, keys, dim]`: a lane has dim / 4 columns side by side of every eighth key, in fours of which
    each is its share of a step of the first product."""
    steps = [[0, 0, 1 << i] for i in range((dim // 4).bit_length() - 1)]
    tiles = [[0, 8 << i, 0] for i in range((keys // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        steps + tiles,
        [[0, 0, dim // 4], [0, 0, dim // 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << i, 0, 0] for i in range(w.bit_length() - 1)],
        [],
        [w, keys, dim],
    )


@gluon.constexpr_function
def values_layout(w, keys, dim):
    """Codes of values: a lane has dim / 8 columns side by side, one for each tile of the second product."""
    columns = [[0, 0, 1 << i] for i in range((dim // 8).bit_length() - 1)]
    rows = [[0, 1, 0], [0, 8, 0], *([0, 16 << i, 0] for i in range((keys // 16).bit_length() - 1))]
    return gl.DistributedLinearLayout(
        columns + rows,
        [[0, 2, 0], [0, 4, 0], [0, 0, dim // 8], [0, 0, dim // 4], [0, 0, dim // 2]],
        [[1 << i, 0, 0] for i in range(w.bit_length() - 1)],
        [],
        [w, keys, dim],
    )


@aggregate
class Stages:
    """The ring in shared memory, and the barriers of its stages: keys are there, values are there, and all was read. They
    are arrays of their own, as Triton 3.6 has all warps wait for each other between two uses of one."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_scale: gl.shared_memory_descriptor
    v_scale: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, k_scale, v_scale, k_full, v_full, free):
        self.k = k
        self.v = v
        self.k_scale = k_scale
        self.v_scale = v_scale
        self.k_full = k_full
        self.v_full = v_full
        self.free = free


class Form(NamedTuple):
    """What follows from the layer's shape and the ring's."""

    W: int
    KEYS: int
    STAGES: int
    TILE: int
    """Keys of a tile."""
    BOX: int
    """Keys of a copy."""
    COUNT: int
    """Copies of a tile of one chunk."""
    CHUNKS: int
    COLUMNS: int
    """Values of a key in a chunk."""
    CODES: bool
    BYTES: int
    """Of a tile's keys, or of its values, with their scales."""
    ROWS: int
    """Of the queries of a key head and what pads them, those among which all heads are."""


@gluon.constexpr_function
def form_of(S, R, bits):
    tile, box, chunks, codes = R.W * R.KEYS, box_rows(S.SIZE), chunks_of(S.DIM, bits), S.KIND != "plain"
    nbytes = tile * (S.DIM * bits // 8 + (4 if codes else 0))
    return Form(
        R.W, R.KEYS, R.STAGES, tile, box, tile // box, chunks, S.DIM // chunks, codes, nbytes,
        meeting_rows(S.HEADS // S.KV_HEADS),
    )  # fmt: skip
