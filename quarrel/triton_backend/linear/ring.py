"""Products on Hopper in which weights stream once through a ring of TMA copies, for one matrix or the matrices of experts.

`ring_kernels.py` computes them. This file makes the descriptors, chooses the cut, and is the entry of linear maps of a few
to a few hundred rows. Parts of K meet in float32 scratch, where `add_parts` adds them in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Compute, WeightRef
from quarrel.triton_backend.elementwise import ring_x
from quarrel.triton_backend.formats.pack import ROWS_BESIDE
from quarrel.triton_backend.formats.table import RING, by_name
from quarrel.triton_backend.formats.weights import stored_as
from quarrel.triton_backend.linear import mma
from quarrel.triton_backend.linear.left_parts import LEAST_ROWS, MOST_ROWS, Kind, Parts, leaves
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.linear.matmul import Epilogue
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.linear.ring_sums import Sums, add_parts, add_three
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

try:  # Gluon is no stable interface: without the names of Triton 3.6 to 3.9 other kernels run
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quarrel.triton_backend.linear import ring_kernels as kernels
    from quarrel.triton_backend.linear.ring_tiling import stage_bytes
    from quarrel.triton_backend.linear.ring_weights import Matrices, rows_of_stack, transposed_bytes
except (ImportError, AttributeError):  # pragma: no cover
    kernels = None  # type: ignore[assignment]

WIDTHS = (8, 16, 32, 64)
"""Rows of x to an item."""
MOST = 512
_LEAST = {1 << 23: 33, 1 << 25: 2}
"""Rows from which a linear map gains, by the values of its weights. Decode steps of Mistral-7B Q4_K_M on an H200, tokens/s
without and with the ring for gate and up, down and head, and with it for 4096 x 4096 too:

| 8 | 12 | 16 | 24 | 32 | 48 | 64 | 96 | 128 |
|---|---|---|---|---|---|---|---|---|
| 3446 | 4003 | 5266 | 4885 | 6517 | 8707 | 10806 | 13918 | 18348 |
| 3335 | 4686 | 6184 | 7804 | 10510 | 11604 | 14195 | 15977 | 20812 |
| 3179 | 4559 | 6049 | 7635 | 10468 | 11981 | 14727 | | |

Since its first weights are on their way before the kernel ahead is over, steps of 2 / 4 sequences of 12 layers take 801 /
819 us for 898 / 905, but 8 with 4096 x 4096 too 905 for 845 (2026-11-29).

From 2 rows on, too, where `mma.py` does not take a map: the head of gpt-oss took 349 us for 8 rows.
"""
_WARPS = 8
"""That consume, in one group: in two of four warps, ptxas waits for each product, and Mixtral's experts take 498 us for 128
tokens on an H200 for 444."""
_SHARED = 227 << 10
_COLUMNS = 1024
_MOST_DESCRIPTORS = 256
_LEAST_OF_BYTES = 8
"""The same of a map of 2^23 values or more in Q8_0: o of gpt-oss, 2880 x 4096, takes 11.3 / 12.1 us for 16 / 32 rows on an
H200 and in `mma.py` 11.1 / 16.9; 4096 x 4096 in Q4_K 13.3 for 32 and 12.4, in Q5_K 14.8 and 13.4. Now 12 layers of gpt-oss
with 8 / 16 sequences take 1,653 / 2,040 us for 1,672 / 2,061, 4 the same (2026-11-29)."""
_NARROW, _LEAST_OF_NARROW, _MOST_OF_SMALL, _SMALL = 2880, 8, 32, 1 << 22
"""The same of a map of so few outputs, which are too few for the programs of `mma.py`, in any format, and from 2^22 values
on for up to 32 rows: with 32 sequences on an H200 (2026-11-27) 7 layers of Nemotron with four maps 2688 x 4096 take 1,314
us for 1,351, and 6 of Granite-4-h-tiny with five 1536 x 3072 770 for 781; 4096 x 4096 gains nothing, Mixtral takes 1,295
for 1,291. With 8 / 16 sequences 20 layers of Granite-4-h-tiny take 1,142 / 1,548 us for 1,148 / 1,628 (2026-11-29)."""
_ROWS_OF_THREE = 2, 128
"""Rows for which three maps in one matrix gain: query, key and value on an H200, us for 8 / 16 / 32 / 128 rows with the
launch that puts x in order. In steps they gain from 2 rows on: 12 layers of Mistral-7B, of which six are so, 793 us for 801
with 2 sequences, 885 for 891 with 16, the same with 8 (2026-11-29).

| Mistral-7B, Q4_K | 10.1 / 11.0 / 12.1 / 21.1 | `mma.py`, `wgmma.py` | 8.2 / 10.7 / 15.5 / 28.7 |
|---|---|---|---|
| gpt-oss, Q8_0 | 10.8 / 11.7 / 12.5 / 16.4 | `mma.py`, `matmul.py` | 11.7 / 18.5 / 22.6 / 31.0 |

A Mamba-2's maps: 7 layers of Nemotron with three of them take 760 us for 803 with 8 sequences and 1,314 for 1,351 with 32,
6 of Granite-4-h-tiny with five 754 for 781 with 32 (2026-11-27).
"""
_THREE_APART, _ROWS_APART = 1 << 24, (17, 64)
"""Weights of three maps from which those of several formats gain, each matrix in a launch of its own, and for which rows:
12 layers of Mistral-7B, of which six have another format for v, take 1,070 us for 1,121 with 24 sequences on an H200,
1,074 for 1,120 with 32, 1,411 for 1,446 with 64; 2,114 for 2,063 with 128, 801 for 791 with 8 (2026-11-29)."""
_MOST_PARTS = 8
_LONG_STAGES = 16
"""Rows up to which stages of 512 columns gain, in Q4_K: steps of 16 sequences of Mistral-7B (8 layers) take 709 us for 726
on an H200 (2026-11-29), both by a consumer that has left the tree."""
LONG_ROWS = 1024
"""Columns of a row from which on stages of 512 are used."""


class Cut(NamedTuple):
    """Rows of x to an item; programs to a multiprocessor, warps of each that consume, and how many times 256 columns a
    stage of the ring has."""

    width: int
    residents: int
    warps: int = _WARPS
    span: int = 1

    @classmethod
    def of(cls, width: int) -> Cut:
        return cls(width, 1 if width >= 64 else 2)


class Ending(NamedTuple):
    """What a launch does with its sums beside biases and an activation, where it leaves no parts of K to be added."""

    parts: int = 1
    """Of K, whose sums are added as they would be by `add_parts`."""
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    further: tuple[torch.Tensor, ...] = ()
    """The second and third result of three maps in one matrix, of `rows` each."""
    rows: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.further, *self.rows) if self.residual is None else (self.residual, self.alpha)


PLAIN = Ending()


class Rows(NamedTuple):
    """What a launch multiplies with."""

    x: Any
    """A descriptor of rows in the order of `ring_x.py`."""
    items: Any
    """int32, as `ring_kernels.ring` reads them; anything where `count` says it all."""
    pairs: Any
    """The row of y of each row of x, int32; likewise."""
    count: int = 0
    """Rows of x of one matrix, which are the rows of y; 0 where items list them."""
    known: bool = False
    """Whether an earlier launch of the ring has read the same items (`ring_kernels.py: ring`)."""
    likely: int = 0
    """How many matrices there are, if most of them are likely to have an item; else 0."""


def declines_device(site: Site) -> str | None:
    """Why the ring does not run, whatever the weights are."""
    return declines_on(site.generation, site.compute)


def declines_on(generation: int, compute: Compute) -> str | None:
    """The same of a device of this major capability."""
    if kernels is None or INTERPRETED or generation != 9:
        return "needs compute capability 9"
    return None if compute == "float16" else f"needs float16 arithmetic, got {compute}"


def declines_weights(weights: Sequence[Packed]) -> str | None:
    """Why these are not read through it."""
    for weight in weights:
        if weight.format not in RING:
            return f"needs {', '.join(RING)}, got {weight.format}"
        whole = _whole(weight.format)
        if weight.k % whole:
            return f"needs rows of a multiple of {whole} columns, got {weight.k}"
        if weight.reused:
            return "needs matrices that stay in their place"
    return None


def declines_stacks(stacks: Sequence[Packed], n: int) -> str | None:
    """Why stacks of matrices of n rows are not read through it."""
    if (reason := declines_weights(stacks)) is not None:
        return reason
    whole = max(rows_of_stack(GGMLType[stack.format], stack.k) for stack in stacks)
    return None if n % whole == 0 else f"needs matrices of a multiple of {whole} rows, got {n}"


def _whole(format: str) -> int:
    """Columns of which a row is a whole number: of a super-block, or of a block."""
    made = by_name(format)
    return made.top.columns if made.top else 32


def shift_of(weight: Packed) -> int:
    """The power of two that its scales are divided by (`formats/ring_codes.py`)."""
    scale, top = weight.planes.scale, weight.planes.top
    ring = by_name(weight.format).ring
    assert ring is not None, weight.format
    return 0 if scale.device.type == "meta" else ring.shift(scale, top)


def copies_bytes(refs: Iterable[WeightRef], compute: Compute, generation: int) -> int:
    """What `Matrices` may copy of these weights on a device of this major capability: of some it does not."""
    if declines_on(generation, compute) is not None:
        return 0
    return sum(transposed_bytes(stored_as(ref.type, compute), ref.rows, ref.k) for ref in refs)


class Product:
    """Products with a matrix `[n, k]` or a stack of them, or with gate and up, which have one format."""

    def __init__(
        self, site: Site, weights: Sequence[Packed], n: int, activation: str, biases: Sequence[torch.Tensor]
    ) -> None:
        self._site, self._biases, self._kind, self._n = site, biases, activation, n
        self.format, self.k = weights[0].format, weights[0].k
        self._stacks = [Matrices.of(w) for w in weights]
        self._device = weights[0].buffer.device
        self._shift = max(shift_of(w) for w in weights)
        self.padded = cdiv(self.k, 256) * 256
        """Columns of a row of x."""
        self._rows: dict[tuple[int, int, int], Any] = {}

    @property
    def gated(self) -> bool:
        return len(self._stacks) == 2

    @property
    def scale_transposed(self) -> bool:
        """Whether scales are read from a transposed copy."""
        return self._stacks[0].scale_transposed

    def tiles(self, cut: Cut) -> int:
        """Tiles of a matrix's rows."""
        return cdiv(self._n, (8 if self.gated else 16) * cut.warps)

    @property
    def multiprocessors(self) -> int:
        return multiprocessors(self._device)

    def rows(self, tensor: torch.Tensor, count: int, width: int) -> Any:
        """The first `count` rows of x, `[count, padded]`, as TMA reads them."""
        key = (tensor.data_ptr() if tensor.device.type != "meta" else 0, count, width)
        if key not in self._rows:
            if len(self._rows) == _MOST_DESCRIPTORS:
                self._rows.clear()
            rows = tensor.reshape(-1)[: count * self.padded].view(count, self.padded)
            self._rows[key] = TensorDescriptor.from_tensor(rows, [width, 64], gl.NVMMASharedLayout(128, 16, 2))
        return self._rows[key]

    def launch(
        self, y: torch.Tensor, rows: Rows, cut: Cut, parts: int = 0, part_stride: int = 0, ending: Ending = PLAIN
    ) -> None:
        """y `[pairs, n]`, or with parts of K their sums `[parts, pairs, n]` without biases."""
        site, one, gated = self._site, self._stacks[0], self.gated
        tile = (8 if gated else 16) * cut.warps
        gates, ups = (stack.descriptors(tile) for stack in (one, self._stacks[-1]))
        planes = [plane for pair in zip(gates, ups, strict=True) for plane in pair]
        bias = self._biases or (y,)
        site.launch(
            kernels.ring, (cut.residents * self.multiprocessors,), y, *planes, rows.x, (rows.items, rows.pairs),
            (bias[0], bias[-1], 2.0**-self._shift, 2.0**self._shift, *ending.arguments), self._n, part_stride, rows.count,
            K=self.k, PARTS=parts or ending.parts, SCALE_TRANSPOSED=one.scale_transposed,
            BITS_TRANSPOSED=one.bits_transposed, FORMAT=self.format, GATED=gated, KIND=self._kind,
            BIAS=bool(self._biases) and not parts, BT=cut.width, STAGES=self._stages(cut), TILES=self.tiles(cut),
            T=cut.warps, LISTED=not rows.count, SPAN=cut.span, IN_TURN=ending.parts > 1, ADD=ending.residual is not None,
            THREE=bool(ending.further), KNOWN=rows.known, LIKELY=rows.likely, warps=cut.warps,
            early=starts_early(site), maxnreg=_registers(cut),
        )  # fmt: skip

    def _stages(self, cut: Cut) -> int:
        """As many as fit."""
        stage = stage_bytes(self.format, 16 * cut.warps, cut.width, cut.span)
        return max(2, min(12, (_SHARED // cut.residents - 1024) // stage))


def _registers(cut: Cut) -> int:
    """For each thread, with the producer's, of whose four warps one works."""
    return min(168, 65536 // (cut.residents * 32 * (cut.warps + 4)) // 8 * 8)


def matrices(weights: Sequence[Packed]) -> list[tuple[Packed, int]]:
    """The matrices whose rows these are, in order, and how many of these each has."""
    found: list[tuple[Packed, int]] = []
    rest = list(weights)
    while rest:
        count = next((n for n in range(len(rest), 1, -1) if as_one(rest[:n]) is not None), 1)
        found.append((as_one(rest[:count]) or rest[0], count))
        rest = rest[count:]
    return found


def as_one(weights: Sequence[Packed]) -> Packed | None:
    """The matrix whose rows these are, all of them and in order."""
    whole = weights[0].whole
    if whole is None or any(w.whole is not whole for w in weights) or sum(w.n for w in weights) != whole.n:
        return None
    return whole


def declines(site: Site, maps: Maps) -> str | None:
    """Takes float16 arithmetic on one large map, on gate and up, or on three maps in one matrix or two, on devices of
    capability 9."""
    if (reason := declines_device(site) or declines_weights(maps.weights)) is not None:
        return reason
    if site.deterministic:
        return "its parts of K follow from the number of rows, and a step is deterministic"
    values = sum(w.n * w.k for w in maps.weights)
    if len(maps.weights) == 3:
        if maps.together() is not None:
            return "needs three maps with biases or without"
        apart = len(matrices(maps.weights))
        if apart > 1 and (
            apart > 2
            or values < _THREE_APART
            or maps.weights[0].k % 256
            or any(w.n % ROWS_BESIDE for w in maps.weights[:2])
        ):
            return f"needs three maps in one matrix, or {_THREE_APART} weights in two, got {values} in {apart}"
    elif not maps.gated and len(maps.weights) > 1:
        return f"needs one map, gate and up, or three maps, got {len(maps.weights)} maps"
    needs = _SMALL if _is_narrow(maps) else min(_LEAST)
    return None if values >= needs else f"needs {needs} weights or more, got {values}"


def _is_narrow(maps: Maps) -> bool:
    """Whether it is one map of few outputs."""
    return len(maps.weights) == 1 and maps.weights[0].n <= _NARROW


def build(site: Site, maps: Maps) -> Serves:
    values = sum(w.n * w.k for w in maps.weights)
    if values < min(_LEAST):
        return Serves(_Maps(site, maps), _LEAST_OF_NARROW, _MOST_OF_SMALL)
    # `mma.py` was not measured with large maps of rows that are no whole super-blocks, as the head of gpt-oss.
    by_mma = mma.declines(site, maps) is None and (maps.weights[0].k % 256 == 0 or values < max(_LEAST))
    least = min(rows for size, rows in _LEAST.items() if values >= size) if by_mma else 2
    most = MOST
    if len(maps.weights) == 3:
        least, most = _ROWS_OF_THREE if as_one(maps.weights) is not None else _ROWS_APART
    elif _is_narrow(maps):
        least = min(least, _LEAST_OF_NARROW)
    elif maps.weights[0].format == "Q8_0" and not maps.gated:
        least = min(least, _LEAST_OF_BYTES)
    return Serves(_Maps(site, maps), least, most, maps.arrange is not None)


class _Plan(NamedTuple):
    """How a number of rows is computed."""

    cut: Cut
    parts: int


class _Matrix:
    """A matrix, or gate and up, and how it is cut."""

    def __init__(self, site: Site, maps: Maps, weights: Sequence[Packed], biases: Sequence[torch.Tensor]) -> None:
        self.n, self._gated = weights[0].n, maps.gated
        self.product = Product(site, weights, self.n, maps.activation, biases)

    def plan(self, count: int) -> _Plan:
        """Parts of K until there are units for each program, where they may meet afterwards."""
        product = self.product
        # In a trial kernel 128 rows of x gave wrong sums with MXFP4; nobody has found out why.
        widths = WIDTHS if product.format == "MXFP4" else (*WIDTHS, 2 * WIDTHS[-1])
        cut = Cut.of(next((w for w in widths if count <= w), widths[-1]))
        if cut.width <= _LONG_STAGES and product.format == "Q4_K" and product.k >= LONG_ROWS:
            cut = cut._replace(span=2)
        if self._gated:
            return _Plan(cut, 1)
        steps, programs = cdiv(product.padded, 256 * cut.span), cut.residents * product.multiprocessors
        units = product.tiles(cut) * cdiv(count, cut.width)
        most = max(1, min(_MOST_PARTS, steps, cdiv(programs, units)))

        def longest(parts: int) -> int:
            """Steps of the longest program, and one for each end of a unit."""
            return cdiv(units * parts, programs) * (cdiv(steps, parts) + 1)

        return _Plan(cut, min(range(1, most + 1), key=longest))


class _Maps:
    """One map, gate and up, or three maps in one matrix or several."""

    def __init__(self, site: Site, maps: Maps) -> None:
        three = len(maps.weights) == 3
        self._site, self._maps = site, maps
        self._direct = not three and (maps.gated or maps.residual is None)
        if three:
            found = matrices(maps.weights)
            self._matrices = [_Matrix(site, maps, [matrix], ()) for matrix, _ in found]
            self._of = [i for i, (_, count) in enumerate(found) for _ in range(count)]
            """Which matrix each map is rows of."""
        else:
            self._matrices, self._of = [_Matrix(site, maps, maps.weights, maps.given)], [0]
        self._padded = self._matrices[0].product.padded
        self._arranged = site.scratch("one", MOST * self._padded, torch.float16)
        sums = [
            [0 if self._single(p := m.plan(c)) else p.parts * c * m.n for c in range(1, MOST + 1)] for m in self._matrices
        ]
        self._sums = [site.scratch("one", max(1, *room)) for room in sums]
        kept = max(1, *sums[0][LEAST_ROWS - 1 : MOST_ROWS])
        self._kept_sums = None if maps.left is None else site.lasting("parts", kept, torch.float32)

    def _single(self, plan: _Plan) -> bool:
        """Whether the product itself writes the result."""
        return plan.parts == 1 and self._direct

    def __call__(self, batch: Batch) -> None:
        site, maps, count = self._site, self._maps, batch.count(self._maps.axis)
        early, arranged = starts_early(site), self._arranged
        if maps.arrange is not None:
            maps.arrange(arranged, batch, 0)
        else:
            site.launch(
                ring_x.arrange, (count, cdiv(self._padded, _COLUMNS)), arranged.tensor, maps.x.tensor,
                K=maps.weights[0].k, KP=self._padded, C=_COLUMNS, early=early,
            )  # fmt: skip
        if len(maps.ys) == 3:
            self._three(count)
            return
        (matrix,), y = self._matrices, maps.ys[0].tensor
        plan, product = matrix.plan(count), matrix.product
        x = product.rows(arranged.tensor, MOST, plan.cut.width)
        if self._single(plan):
            product.launch(y, Rows(x, x.base, x.base, count), plan.cut)
            return
        left = maps.left if leaves(count) else None
        sums = (self._sums[0] if left is None or self._kept_sums is None else self._kept_sums).tensor
        stride = count * matrix.n
        product.launch(sums, Rows(x, x.base, x.base, count), plan.cut, plan.parts, stride)
        biases, residual = maps.given, maps.residual
        more = Epilogue(biases[0] if biases else y, y, y if residual is None else residual.tensor)

        def add() -> None:
            site.launch(
                add_parts, (count, cdiv(matrix.n, _COLUMNS)), y, sums, more, stride, maps.alpha, matrix.n, PARTS=plan.parts,
                BIAS=bool(biases), ADD=residual is not None, C=_COLUMNS, early=early,
            )  # fmt: skip

        if left is None:
            add()
        else:
            kind: Kind = "biased" if biases else "parts"
            left.leave(Parts(sums, more.bias, more.residual, stride, maps.alpha), kind, plan.parts, add)

    def _three(self, count: int) -> None:
        """Three results."""
        maps, made = self._maps, []
        for matrix, room in zip(self._matrices, self._sums, strict=True):
            plan, product = matrix.plan(count), matrix.product
            x = product.rows(self._arranged.tensor, MOST, plan.cut.width)
            product.launch(room.tensor, Rows(x, x.base, x.base, count), plan.cut, plan.parts, count * matrix.n)
            made.append(Sums(room.tensor, matrix.n, plan.parts))
        ns, sums = [w.n for w in maps.weights], []
        for i, of in enumerate(self._of):
            sums.append(made[of]._replace(first=sum(n for n, other in zip(ns[:i], self._of, strict=False) if other == of)))
        add_three(self._site, [y.tensor for y in maps.ys], ns, sums, maps.given, count)
