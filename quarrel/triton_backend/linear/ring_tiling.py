"""What the ring of weights (`ring_kernels.py`) is in shared memory, and how its work is cut."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from quarrel.triton_backend.formats.ring_tiles import planes_of
from quarrel.triton_backend.formats.table import byte_scales, tops, upper_bits


@aggregate
class Stages:
    """The ring in shared memory, and the barriers of its stages: `full` of the copies, `free` of the consumers;
    and `warm`, of `_warm`."""

    codes: gl.shared_memory_descriptor
    scale: gl.shared_memory_descriptor
    bits: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    warm: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, scale, bits, top, x, full, free, warm):
        self.codes = codes
        self.scale = scale
        self.bits = bits
        self.top = top
        self.x = x
        self.full = full
        self.free = free
        self.warm = warm


@aggregate
class Tiling:
    """How the work is cut: constants of `ring`, and what follows from them."""

    FORMAT: gl.constexpr
    SCALE_TRANSPOSED: gl.constexpr
    BITS_TRANSPOSED: gl.constexpr
    GATED: gl.constexpr
    K: gl.constexpr
    STEPS: gl.constexpr
    """Stages of a row."""
    SPAN: gl.constexpr
    PARTS: gl.constexpr
    UNITS: gl.constexpr
    """Of a tile and an item: a part of K each, or all of them one after the other."""
    TILES: gl.constexpr
    BT: gl.constexpr
    STAGES: gl.constexpr
    T: gl.constexpr
    PDL: gl.constexpr
    LISTED: gl.constexpr
    KNOWN: gl.constexpr
    LIKELY: gl.constexpr
    PLANES: gl.constexpr
    BITS: gl.constexpr
    """Words of upper bits to a block."""
    TOP: gl.constexpr
    """Whether a super-block has scales of its own."""
    BM: gl.constexpr
    """Rows of a tile in shared memory."""
    BN: gl.constexpr
    """Rows of the result that it makes."""

    @gluon.constexpr_function
    def __init__(
        self, FORMAT, SCALE_TRANSPOSED, BITS_TRANSPOSED, GATED, K, SPAN, PARTS, IN_TURN, TILES, BT, STAGES, T, PDL, LISTED,
        KNOWN, LIKELY,
    ):  # fmt: skip
        self.FORMAT = gl.constexpr(FORMAT)
        self.SCALE_TRANSPOSED = gl.constexpr(SCALE_TRANSPOSED)
        self.BITS_TRANSPOSED = gl.constexpr(BITS_TRANSPOSED)
        self.GATED = gl.constexpr(GATED)
        self.K = gl.constexpr(K)
        self.STEPS = gl.constexpr((K + 256 * SPAN - 1) // (256 * SPAN))
        self.SPAN = gl.constexpr(SPAN)
        self.PARTS = gl.constexpr(PARTS)
        self.UNITS = gl.constexpr(1 if IN_TURN else PARTS)
        self.TILES = gl.constexpr(TILES)
        self.BT = gl.constexpr(BT)
        self.STAGES = gl.constexpr(STAGES)
        self.T = gl.constexpr(T)
        self.PDL = gl.constexpr(PDL)
        self.LISTED = gl.constexpr(LISTED)
        self.KNOWN = gl.constexpr(KNOWN or not LISTED)
        self.LIKELY = gl.constexpr(LIKELY)
        self.PLANES = gl.constexpr(planes_of(FORMAT))
        self.BITS = gl.constexpr(upper_bits(FORMAT))
        self.TOP = gl.constexpr(tops(FORMAT) > 0)
        self.BM = gl.constexpr(16 * T)
        self.BN = gl.constexpr(8 * T if GATED else 16 * T)


@gluon.constexpr_function
def stage_bytes(format, rows, width, span):
    """What the copies of a stage bring: of so many rows of weights, and of x."""
    scales = 8 if byte_scales(format) else 16
    row = 128 * planes_of(format) + scales + 32 * upper_bits(format) + (4 if tops(format) else 0)
    return int(span * (rows * row + width * 512))
