"""Rotary embedding, alone or together with the append to the cache.

    (a, b) -> (a cos - b sin, a sin + b cos) * magnitude,   angle = position * freq[i] rounded to float32

A program takes R (token, head) pairs. The angle is reduced in float64, where a quarter turn is exact to 1e-10 at position
2^20, and sine and cosine are short polynomials: the library's sine keeps a table in local memory for large angles.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, KV_APPEND, ROPE_APPEND, RopeAppendSpec
from quarrel.ops.contract import Value
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import ROPE, RopeSpec
from quarrel.triton_backend.codes import code_of, factors, largest
from quarrel.triton_backend.runtime import DTYPES, Cache, Launch, Live, Site, cdiv, dims, power_of_two, starts_early

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
def turned(a, b, sin, cos, magnitude):
    """Pairs after their rotation; no compiler chooses which product to round, so every kernel has these bits."""
    sin, cos = tl.broadcast_to(sin, a.shape), tl.broadcast_to(cos, a.shape)
    return tl.fma(a, cos, -(b * sin)) * magnitude, tl.fma(a, sin, b * cos) * magnitude


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
    low, high = turned(a, b, sin, cos, magnitude)
    tl.store(p_to + first, low.to(to.dtype.element_ty), mask=mask)
    tl.store(p_to + second, high.to(to.dtype.element_ty), mask=mask)
    if ROT < DIM:
        j = ROT + tl.arange(0, REST)[None, :]
        mask = ok[:, None] & (j < DIM)
        tl.store(p_to + j, tl.load(p_x + j, mask=mask, other=0.0).to(to.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_to_codes(
    to, scales, x, positions, freq, magnitude, token, source, target, ok,
    NEOX: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """As `_rotate`, into codes and their scales."""
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
    low, high = turned(a, b, sin, cos, magnitude)
    most, bad = largest(low)
    most_high, bad_high = largest(high)
    most, bad = tl.maximum(most, most_high), bad + bad_high
    if ROT < DIM:
        j = ROT + tl.arange(0, REST)[None, :]
        rest_ok = ok[:, None] & (j < DIM)
        rest = tl.load(p_x + j, mask=rest_ok, other=0.0).to(tl.float32)
        most_rest, bad_rest = largest(rest)
        most, bad = tl.maximum(most, most_rest), bad + bad_rest
    factor, scale = factors(most, bad, KIND)
    tl.store(scales + target, scale, mask=ok)
    tl.store(p_to + first, code_of(low, factor, KIND), mask=mask)
    tl.store(p_to + second, code_of(high, factor, KIND), mask=mask)
    if ROT < DIM:
        tl.store(p_to + j, code_of(rest, factor, KIND), mask=rest_ok)


@triton.jit
def _copy_to_codes(to, scales, x, source, target, ok, DIM: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, WIDE)[None, :]
    mask = ok[:, None] & (i < DIM)
    value = tl.load(x + source[:, None] * DIM + i, mask=mask, other=0.0).to(tl.float32)
    most, bad = largest(value)
    factor, scale = factors(most, bad, KIND)
    tl.store(scales + target, scale, mask=ok)
    tl.store(to + target[:, None] * DIM + i, code_of(value, factor, KIND), mask=mask)


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
    keys, values, key_scales, value_scales, k, v, slots, tokens, HEADS: tl.constexpr, SIZE: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head, ok = row // HEADS, row % HEADS, row < tokens.to(tl.int64) * HEADS
    target = cache_row(tl.load(slots + token, mask=ok, other=0).to(tl.int64), head, HEADS, SIZE)
    if KIND == "plain":
        _copy(keys, k, row, target, ok, DIM, WIDE)
        _copy(values, v, row, target, ok, DIM, WIDE)
    else:
        _copy_to_codes(keys, key_scales, k, row, target, ok, DIM, WIDE, KIND)
        _copy_to_codes(values, value_scales, v, row, target, ok, DIM, WIDE, KIND)


@triton.jit(do_not_specialize=["tokens"])
def rope_append_rows(
    y, keys, values, key_scales, value_scales, q, k, v, positions, freq, slots, q_magnitude, k_magnitude, tokens,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, NEOX: tl.constexpr,
    DIM: tl.constexpr, ROT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
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
        if KIND == "plain":
            if role == 1:
                _rotate(keys, k, positions, freq, k_magnitude, token, head, row, target, ok, NEOX, DIM, ROT, HALF, REST)
            else:
                _copy(values, v, row, target, ok, DIM, WIDE)
        elif role == 1:
            _rotate_to_codes(
                keys, key_scales, k, positions, freq, k_magnitude, token, row, target, ok, NEOX, DIM, ROT, HALF, REST, KIND
            )
        else:
            _copy_to_codes(values, value_scales, v, row, target, ok, DIM, WIDE, KIND)


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
    rows, shape = _rows_each(spec.head_dim), _shape(spec)

    def run(live: Live) -> None:
        count = live.count(axis)
        site.launch(
            rope_rows, (cdiv(count * spec.n_heads, rows),),
            target.tensor, source.tensor, position.tensor, table, spec.magnitude, count,
            HEADS=spec.n_heads, **shape, R=rows,
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
            cache.k, cache.v, *cache.both_scales, k.tensor, v.tensor, slots.tensor, count,
            HEADS=n_kv, SIZE=cache.block_size, DIM=dim, WIDE=power_of_two(dim), R=rows, KIND=cache.kind,
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
    shape = {**_shape(spec.q), "WIDE": power_of_two(spec.k.head_dim)}
    left = joined(site, node.outputs[0], cache) is not None

    def run(live: Live) -> None:
        if left and not live.several:
            return
        count = live.count(axis)
        site.launch(
            rope_append_rows, (cdiv(count * heads, rows), 3),
            target.tensor, cache.k, cache.v, *cache.both_scales, q.tensor, k.tensor, v.tensor, positions.tensor, table,
            slots.tensor,
            spec.q.magnitude, spec.k.magnitude, count,
            Q_HEADS=spec.q.n_heads, HEADS=spec.k.n_heads, SIZE=cache.block_size, **shape,
            R=rows, KIND=cache.kind, early=starts_early(site),
        )  # fmt: skip

    return run


def left_to_attention(nodes: Sequence[Node], kept: set[int]) -> list[tuple[int, int]]:
    """ROPE_APPENDs whose queries one attention over the same cache reads and nobody else: places of both among the nodes.
    A cache may serve several layers, each with a block table of its own.

    In a step without prompts that attention does their work (`attend_one`): whole heads of a power of two.
    """
    found = []
    for i, node in enumerate(nodes):
        if node.op is not ROPE_APPEND or node.outputs[0].id in kept:
            continue
        q, k = node.spec.q, node.spec.k
        readers = [j for j, n in enumerate(nodes) if any(v is node.outputs[0] for v in n.inputs)]
        if len(readers) != 1 or nodes[readers[0]].op is not ATTENTION:
            continue
        table, cache = nodes[readers[0]].inputs[3:5]
        over = [n for n in nodes if n.op is ATTENTION and n.inputs[3] is table and n.inputs[4] == node.inputs[6]]
        whole = q.head_dim == q.n_rot == k.n_rot == power_of_two(q.head_dim) and q.head_dim >= 16
        if whole and cache == node.inputs[6] and len(over) == 1:
            found.append((i, readers[0]))
    return found


def joined(site: Site, value: Value, cache: Cache) -> Node | None:
    """The ROPE_APPEND of these queries that leaves its work to the attention behind it in a step without prompts."""
    narrow = site.compute != "float32" or cache.k.shape[3] <= 128
    return site.turned(value) if narrow and cache.k.dtype == DTYPES[site.compute] else None


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
