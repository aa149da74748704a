"""What a block format is on Metal: planes that kernels read with aligned loads, and the Metal struct that decodes them.

A block is 32 columns, whatever the format's own is. Of block b a lane with h = 0 or 1 takes `q[0..7]`, columns 8h to
8h + 7, and `q[8..15]`, those plus 16 (`part` of the struct; `bare` leaves out factors that a sum may have). The values are

    scale * q - offset        scales(row, b) = (scale of the low 8, of the high 8, offset of the low 8, of the high 8)

`q` is exact: codes as they stand in halves (`codes.py`; the scale makes up for that), numbers that codes stand for, or the
stored values of F32, F16 and BF16 with scale 1. What a code of 0 is worth less than 0 is part of the offset.

GGUF's own blocks are 17 to 210 bytes long: read in place, a lane's codes start at any even (MXFP4: any) byte, and loads are
of 2 bytes. In planes every lane loads 8 or 4 aligned bytes of codes, neighbours load neighbouring bytes, and 6-bit scales
are bytes already, but for Q4_K's. Only Q5_K and IQ4_XS grow, by at most 2.3%.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array

Read = Callable[[int, int], Array]
"""Raw bytes `[stop - start, row_bytes]` of rows start to stop."""
Split = Callable[[mx.array], Sequence[mx.array]]
"""Raw blocks `[rows, blocks, nbytes]` uint8 to the planes of a format."""

_CHUNK = 64 << 20
LEAST = 8
"""MLX hands arrays of fewer values than this to a kernel in another address space."""

U8, I8, U16, U32, F16 = mx.uint8, mx.int8, mx.uint16, mx.uint32, mx.float16


@dataclass(frozen=True)
class Plane:
    """`count` entries of `dtype` in every run of `columns`; kernels read it through a pointer to the Metal type `reads`."""

    name: str
    dtype: mx.Dtype
    count: int
    columns: int
    reads: str

    def size(self, rows: int, k: int) -> int:
        """Entries of a weight; at least as many as make it a device array."""
        return max(LEAST, rows * (k // self.columns) * self.count)


NIBBLES = Plane("codes", U32, 4, 32, "uint2")
TWO_BITS = Plane("codes", U32, 2, 32, "uint")
EXTRA_BIT = Plane("bits", U16, 2, 32, "uchar2")
UPPER_BITS = Plane("bits", U32, 2, 32, "uint")
BYTE_SCALES = Plane("scale", U8, 2, 32, "uchar2")
SCALE, SCALE_AND_MIN = Plane("scale", F16, 1, 32, "half"), Plane("scale", F16, 2, 32, "half2")
TOP_SCALE, TOP_SCALE_AND_MIN = Plane("top", F16, 1, 256, "half"), Plane("top", F16, 2, 256, "half2")


class Format(ABC):
    """The planes of a format, `split`, which makes them, and the Metal text that reads them."""

    wider: tuple[BlockFormat, ...] = ()
    """The same for weights whose neighbouring blocks share their scales, those of most blocks first."""
    fewer: tuple[FewerBits, ...] = ()
    """The same for weights whose codes are all small, the smallest first."""

    def __init__(self, type: GGMLType, planes: tuple[Plane, ...], split: Split) -> None:
        self.type, self.planes, self.split = type, planes, split

    @property
    def name(self) -> str:
        """What the struct is called, unless it is a template."""
        return self.type.name

    @abstractmethod
    def struct(self) -> str:
        """Definition of the Metal struct."""

    @abstractmethod
    def bind(self, name: str, planes: Sequence[str], k: str, tail: bool) -> str:
        """Metal statement that makes the struct `name` from a kernel's inputs `planes`; `k` is what K is called there."""


_STRUCT = """
struct @NAME {
@FIELDS
  int K;
  typedef half Q;
  enum { OFFSET = @OFFSET, PLAIN = 0, ODD = @ODD, UNIT = @UNIT };
  inline void bare(int row, int block, int h, thread half* q) const {
    const int at = row * (K / 32) + block, pair = row * (K / 16) + (block * 2 + h);
    @PART
  }
  inline void part(int row, int block, int h, thread half* q) const {
    bare(row, block, h, q);
    UNROLL for (int i = 0; i < 16; i++) {
      if (UNIT > 1 || (ODD > 1 && i % 2)) q[i] *= half(i % 2 ? float(UNIT) / ODD : float(UNIT));
    }
  }
  inline float4 scales(int row, int block) const {
    const int at = row * (K / @RUN) + @BLOCK, whole = row * (K / 256) + (block >> 3);
    @SCALES
  }
};
"""


class BlockFormat(Format):
    """Codes and scales: `part` and `scales` are the bodies of the struct's functions. There `at` is the block, `pair` a
    lane's half of it and `whole` the 256 columns that it is in: sums, so that a loop over blocks shifts nothing."""

    def __init__(
        self,
        type: GGMLType,
        planes: tuple[Plane, ...],
        split: Split,
        part: str,
        scales: str,
        offset: bool = False,
        shared: bool = False,
        odd: int = 1,
        unit: int = 1,
        name: str = "",
        fewer: tuple[FewerBits, ...] = (),
    ) -> None:
        """`part` gives 1/`unit` of the codes, in odd columns `odd` times as much, which costs less to take back in a sum.
        `shared`: neighbouring blocks of a weight may have the same scales, as MLX's groups of 64 and 128 have. `name`: of
        the struct, where it is not the type's."""
        super().__init__(type, planes, split)
        self._name, self.fewer = name or type.name, fewer
        self._part, self._scales, self._offset, self._run = part, scales, offset, 32
        self._odd, self._unit = odd, unit
        if shared:
            self.wider = (self._over(128), self._over(64))

    def _over(self, run: int) -> BlockFormat:
        planes = tuple(replace(p, columns=run) if p.name == "scale" else p for p in self.planes)
        wide = copy(self)
        wide.planes, wide._run, wide.wider = planes, run, ()
        return wide

    @property
    def name(self) -> str:
        return self._name + (f"_{self._run}" if self._run > 32 else "")

    def narrowed(self, planes: Sequence[mx.array], rows: int, k: int) -> list[mx.array] | None:
        """Planes of blocks of 32 as this format has them, or None if some of its runs have several scales."""
        if k % self._run:
            return None
        made = []
        for plane, whole in zip(self.planes, planes, strict=True):
            if plane.name == "scale":
                count = rows * (k // self._run)
                runs = whole[: count * plane.count * (self._run // 32)].view(U32).reshape(count, -1)
                if not mx.all(runs == runs[:, :1]).item():
                    return None
                first = mx.contiguous(runs[:, 0]).view(plane.dtype)
                whole = mx.pad(first, (0, plane.size(rows, k) - first.size))
            made.append(whole)
        return made

    def struct(self) -> str:
        fields = "\n".join(f"  device const {p.reads}* {p.name};" for p in self.planes)
        text = _STRUCT.replace("@NAME", self.name).replace("@FIELDS", fields)
        text = text.replace("@OFFSET", str(int(self._offset))).replace("@RUN", str(self._run))
        text = text.replace("@ODD", str(self._odd)).replace("@UNIT", str(self._unit))
        text = text.replace("@BLOCK", {32: "block", 64: "(block >> 1)", 128: "(block >> 2)"}[self._run])
        return text.replace("@PART", self._part).replace("@SCALES", self._scales)

    def bind(self, name: str, planes: Sequence[str], k: str, tail: bool) -> str:
        assert not tail, (self.type, "rows are whole blocks")
        pointers = ", ".join(f"(device const {p.reads}*){plane}" for p, plane in zip(self.planes, planes, strict=True))
        return f"const {self.name} {name} = {{{pointers}, {k}}};\n"


@dataclass(frozen=True)
class FewerBits:
    """`format` for weights that leave the bits `unused` of the words of their first plane, `count` a block, empty; `split`
    makes, of those words, the planes in its place."""

    format: BlockFormat
    count: int
    unused: int
    split: Callable[[mx.array], Sequence[mx.array]]

    def narrowed(self, planes: Sequence[mx.array], rows: int, k: int) -> list[mx.array] | None:
        """Planes as `format` has them, or None if a code is too large."""
        words, each = planes[0], _CHUNK // (4 * self.count)
        if mx.any(words & mx.array(self.unused, U32)).item():
            return None
        blocks = words[: rows * (k // 32) * self.count].reshape(-1, self.count)
        pieces = []
        for start in range(0, len(blocks), each):
            pieces.append([a.reshape(-1) for a in self.split(blocks[start : start + each])])
            mx.eval(pieces[-1])
        made = [mx.concatenate(piece) for piece in zip(*pieces)]
        sizes = [plane.size(rows, k) for plane in self.format.planes]
        return [*(mx.pad(a, (0, size - a.size)) for a, size in zip(made, sizes)), *planes[1:]]


# Of nibbles, of bytes: see `codes.py`.
NIBBLES_ONE, BYTES_ONE = ("ONE", "ONE / 16"), ("ONE", "ONE")
ONE_SCALE = "const float d = float(scale[at]);\n    return float4(d, d, 0.0f, 0.0f);"


def scale_less(zero: int, ones: tuple[str, str]) -> str:
    """`scales` of blocks with a float16 scale, whose codes count from `zero`."""
    return f"""const float d = float(scale[at]);
    return float4(d * ({ones[0]}), d * ({ones[1]}), d * {zero}.0f, d * {zero}.0f);"""


def scale_plus_min(ones: tuple[str, str]) -> str:
    """`scales` of blocks with a float16 scale and minimum."""
    return f"""const half2 s = scale[at];
    return float4(float(s.x) * ({ones[0]}), float(s.x) * ({ones[1]}), -float(s.y), -float(s.y));"""


# Of the bytes `low` and `high`: `six_a` is a block's first number, 2^-24 of it, `six_m` sixteen times that of its second.
# The upper fields of every other block stand 16 times as high.
SIX_BITS = """
    const bool odd = (block & 1) != 0;
    const float by_a = odd ? 1.0f : 16.0f, by_m = odd ? 4.0f : 64.0f;
    const float a0 = float(as_type<half>(ushort(low & 15)));
    const float m0 = float(as_type<half>(ushort(low & 240)));
    const float a1 = float(as_type<half>(ushort(high & (odd ? 48 : 3))));
    const float m1 = float(as_type<half>(ushort(high & (odd ? 192 : 12))));
    const float six_a = fma(a1, by_a, a0), six_m = fma(m1, by_m, m0);"""
BYTE_SCALE_AND_MIN = """const half2 d = top[whole];
    const uchar2 s = scale[at];
    const float a = float(d.x) * (ONE * ONE) * float(as_type<half>(ushort(s.x)));
    const float m = float(d.y) * ONE * float(as_type<half>(ushort(s.y)));
    return float4(a, a * 0.0625f, m, m);"""


@dataclass(frozen=True, eq=False)
class Packed:
    """`rows` of `k` values as flat arrays, one a plane of `format`, in its order."""

    format: Format
    rows: int
    k: int
    planes: tuple[mx.array, ...]

    @property
    def type(self) -> GGMLType:
        return self.format.type

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.planes)

    def inputs(self, prefix: str = "w") -> tuple[str, ...]:
        """What a kernel calls the planes."""
        return tuple(f"{prefix}_{p.name}" for p in self.format.planes)

    def bind(self, k: str, prefix: str = "w") -> str:
        """Metal text that makes the struct `prefix` out of those inputs; `k` is what K is called there."""
        return self.format.bind(prefix, self.inputs(prefix), k, self.k % 32 != 0)


def pack(format: Format, rows: int, k: int, read: Read) -> Packed:
    """Reads all rows, at most _CHUNK bytes of them at a time, and splits them on the device; scales that neighbouring
    blocks share are kept once, and codes that all fit into fewer bits in those."""
    block = FORMATS[format.type]
    step = max(1, _CHUNK // (k // block.elements * block.nbytes))
    pieces: list[list[mx.array]] = [[] for _ in format.planes]
    for start in range(0, rows, step):
        raw = mx.array(np.ascontiguousarray(read(start, min(start + step, rows))))
        made = [a.reshape(-1) for a in format.split(raw.reshape(len(raw), -1, block.nbytes))]
        mx.eval(made)
        for piece, a in zip(pieces, made, strict=True):
            piece.append(a)
    planes = []
    for plane, piece in zip(format.planes, pieces):
        whole = mx.concatenate(piece) if len(piece) > 1 else piece[0]
        missing = plane.size(rows, k) - whole.size
        assert missing >= 0, (format.type, plane, rows, k, whole.size)
        planes.append(mx.contiguous(mx.pad(whole, (0, missing)) if missing else whole))
        assert whole.dtype == plane.dtype, (format.type, plane, whole.dtype)
        mx.eval(planes[-1])
        piece.clear()
    for small in format.fewer:
        narrowed = small.narrowed(planes, rows, k)
        if narrowed is not None:
            format, planes = small.format, narrowed
            break
    for wide in format.wider:
        narrowed = wide.narrowed(planes, rows, k)
        if narrowed is not None:
            format, planes = wide, narrowed
            break
    mx.eval(planes)
    return Packed(format, rows, k, tuple(planes))
