"""Rotary embedding, alone or together with the append to the cache.

    (a, b) -> (a cos - b sin, a sin + b cos) * magnitude,   angle = position * freq[i] rounded to float32

A program takes R (token, head) pairs. The angle is reduced in float64, where a quarter turn is exact to 1e-10 at position
2^20, and sine and cosine are short polynomials: the library's sine keeps a table in local memory for large angles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.attention import KV_APPEND, ROPE_APPEND, RopeAppendSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import ROPE, RopeSpec
from quarrel.triton_backend.runtime import Launch, Live, Site, cdiv, dims, power_of_two, starts_early

_TILE = 2048  # pairs of values to a program

# Taylor remainders below 4e-8 on [-pi/4, pi/4].
_S3, _S5, _S7, _S9 = (tl.constexpr(v) for v in (-1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880))
_C2, _C4, _C6, _C8, _C10 = (tl.constexpr(v) for v in (-0.5, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800))


@triton.jit
def sin_cos(angle):
    """Sine and cosine of a float32 angle of any size up to 2^30, to 1e-7."""
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarter * 1.5707963267948966).to(tl.float32)
    s = r * r
    sine = r * (1.0 + s * (_S3 + s * (_S5 + s * (_S7 + s * _S9))))
    cosine = 1.0 + s * (_C2 + s * (_C4 + s * (_C6 + s * (_C8 + s * _C10))))
    turn = quarter.to(tl.int64) & 3
    swap = (turn & 1) == 1
    sin = tl.where(swap, cosine, sine)
    cos = tl.where(swap, sine, cosine)
    return tl.where(turn >= 2, -sin, sin), tl.where((turn == 1) | (turn == 2), -cos, cos)


@triton.jit
def cache_row(slot, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Index of a head's row in a cache `[blocks, HEADS, SIZE, head_dim]`; slot is block * SIZE + offset, int64."""
    return (slot // SIZE * HEADS + head) * SIZE + slot % SIZE


@triton.jit
def _rotate(
    to, x, positions, freq, magnitude, token, head, source, target, ok,
    NEOX: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rows `source` of x `[.., DIM]`, rotated into rows `target` of `to`; all [R]."""
    i = tl.arange(0, HALF)[None, :]
    in_half = i < ROT // 2
    position = tl.load(positions + token, mask=ok, other=0).to(tl.float32)[:, None]
    sin, cos = sin_cos(position * tl.load(freq + i, mask=in_half, other=0.0))
    if NEOX:
        first, second = i, i + ROT // 2
    else:
        first, second = i * 2, i * 2 + 1
    mask = ok[:, None] & in_half
    p_x, p_to = x + source[:, None] * DIM, to + target[:, None] * DIM
    a = tl.load(p_x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(p_x + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_to + first, ((a * cos - b * sin) * magnitude).to(to.dtype.element_ty), mask=mask)
    tl.store(p_to + second, ((a * sin + b * cos) * magnitude).to(to.dtype.element_ty), mask=mask)
    if ROT < DIM:
        j = ROT + tl.arange(0, REST)[None, :]
        mask = ok[:, None] & (j < DIM)
        tl.store(p_to + j, tl.load(p_x + j, mask=mask, other=0.0).to(to.dtype.element_ty), mask=mask)


@triton.jit
def _copy(to, x, source, target, ok, DIM: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, WIDE)[None, :]
    mask = ok[:, None] & (i < DIM)
    value = tl.load(x + source[:, None] * DIM + i, mask=mask, other=0.0)
    tl.store(to + target[:, None] * DIM + i, value.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rope_rows(
    y, x, positions, freq, magnitude, tokens, HEADS: tl.constexpr, NEOX: tl.constexpr,
    DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head, ok = row // HEADS, row % HEADS, row < tokens.to(tl.int64) * HEADS
    _rotate(y, x, positions, freq, magnitude, token, head, row, row, ok, NEOX, DIM, ROT, HALF, REST)


@triton.jit(do_not_specialize=["tokens"])
def append_rows(
    keys, values, k, v, slots, tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head, ok = row // HEADS, row % HEADS, row < tokens.to(tl.int64) * HEADS
    target = cache_row(tl.load(slots + token, mask=ok, other=0).to(tl.int64), head, HEADS, SIZE)
    _copy(keys, k, row, target, ok, DIM, WIDE)
    _copy(values, v, row, target, ok, DIM, WIDE)


@triton.jit(do_not_specialize=["tokens"])
def rope_append_rows(
    y, keys, values, q, k, v, positions, freq, slots, q_magnitude, k_magnitude, tokens,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, NEOX: tl.constexpr,
    DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The second axis of the grid is the role: rotate queries, rotate and append keys, append values.
    role = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    if role == 0:
        token, head, ok = row // Q_HEADS, row % Q_HEADS, row < tokens.to(tl.int64) * Q_HEADS
        _rotate(y, q, positions, freq, q_magnitude, token, head, row, row, ok, NEOX, DIM, ROT, HALF, REST)
    else:
        token, head, ok = row // HEADS, row % HEADS, row < tokens.to(tl.int64) * HEADS
        target = cache_row(tl.load(slots + token, mask=ok, other=0).to(tl.int64), head, HEADS, SIZE)
        if role == 1:
            _rotate(keys, k, positions, freq, k_magnitude, token, head, row, target, ok, NEOX, DIM, ROT, HALF, REST)
        else:
            _copy(values, v, row, target, ok, DIM, WIDE)


def _shape(spec: RopeSpec) -> dict[str, int | bool]:
    """The constants of a rotation; HALF pairs and REST unrotated values are padded to powers of two."""
    return {
        "NEOX": spec.style == "neox",
        "DIM": spec.head_dim,
        "ROT": spec.n_rot,
        "HALF": power_of_two(spec.half),
        "REST": power_of_two(spec.head_dim - spec.n_rot),
    }


def _rows_each(head_dim: int) -> int:
    return max(1, _TILE // power_of_two(head_dim))


def build_rope(site: Site, node: Node) -> Launch:
    """ROPE: x `[T, heads * head_dim]`, positions `[T]` int32, freq `[n_rot / 2]` float32."""
    spec: RopeSpec = node.spec
    x, positions, freq = node.inputs
    source, position, target = site.slot(x), site.slot(positions), site.slot(node.outputs[0])  # type: ignore[arg-type]
    table = site.const(freq)  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])
    rows = _rows_each(spec.head_dim)

    def run(live: Live) -> None:
        count = live.count(axis)
        site.launch(
            rope_rows, (cdiv(count * spec.n_heads, rows),),
            target.tensor, source.tensor, position.tensor, table, spec.magnitude, count,
            HEADS=spec.n_heads, **_shape(spec), R=rows,
        )  # fmt: skip

    return run


def build_kv_append(site: Site, node: Node) -> Launch:
    """KV_APPEND: k and v `[T, n_kv * head_dim]`, slots `[T]` int32 inside the cache."""
    k, v, slots = (site.slot(i) for i in node.inputs[:3])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[3])  # type: ignore[arg-type]
    n_kv, dim = node.spec.n_kv, node.spec.head_dim
    axis, _ = dims(node.inputs[0])  # type: ignore[arg-type]
    rows = _rows_each(dim)

    def run(live: Live) -> None:
        count = live.count(axis)
        site.launch(
            append_rows, (cdiv(count * n_kv, rows),),
            cache.k, cache.v, k.tensor, v.tensor, slots.tensor, count,
            HEADS=n_kv, SIZE=cache.block_size, DIM=dim, WIDE=power_of_two(dim), R=rows,
        )  # fmt: skip

    return run


def build_rope_append(site: Site, node: Node) -> Launch:
    """ROPE_APPEND: rotates q into y, and k into the cache beside v, in one launch."""
    spec: RopeAppendSpec = node.spec
    q, k, v, positions = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    table = site.const(node.inputs[4])  # type: ignore[arg-type]
    slots = site.slot(node.inputs[5])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[6])  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    axis, _ = dims(node.outputs[0])
    rows = _rows_each(spec.q.head_dim)
    heads = max(spec.q.n_heads, spec.k.n_heads)

    def run(live: Live) -> None:
        count = live.count(axis)
        site.launch(
            rope_append_rows, (cdiv(count * heads, rows), 3),
            target.tensor, cache.k, cache.v, q.tensor, k.tensor, v.tensor, positions.tensor, table, slots.tensor,
            spec.q.magnitude, spec.k.magnitude, count,
            Q_HEADS=spec.q.n_heads, HEADS=spec.k.n_heads, SIZE=cache.block_size, **_shape(spec.q),
            WIDE=power_of_two(spec.k.head_dim), R=rows, early=starts_early(site),
        )  # fmt: skip

    return run


def _accepts_append(spec: RopeAppendSpec) -> str | None:
    def shape(s: RopeSpec) -> tuple[str, int, int]:
        return s.style, s.head_dim, s.n_rot

    if shape(spec.q) != shape(spec.k):
        return f"needs query and key rotated alike, got {shape(spec.q)} and {shape(spec.k)}"
    return None


IMPLEMENTATIONS = (
    Implementation(ROPE, "rows", build_rope),
    Implementation(KV_APPEND, "rows", build_kv_append),
    Implementation(ROPE_APPEND, "one launch", build_rope_append, _accepts_append),
)
