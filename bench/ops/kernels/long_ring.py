"""An experiment: attention of a sequence with one new token behind many keys, through a ring of TMA copies (Hopper).

A program takes a part of one sequence's keys for one key head, as `attend_one` does, but parts are whole blocks of the
cache and as many as there are places on the device, so all of them run at once. Blocks are copied to shared memory STAGES
tiles ahead, the first of them before the queries are there. A tile is KEYS keys for each of W warps; a warp's softmax stays
in its registers, and warps meet once, at the end. A second kernel joins the parts (`join_parts`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.triton_backend.attention import rope
from quarrel.triton_backend.attention.decode import LOG2E, combine
from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.elementwise import activation

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_OUTSIDE: tl.constexpr = tl.constexpr(1 << 30)
"""A row that no cache has: its copy is zeros, and reads nothing."""

# Names of Triton 3.9, or of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_sin_cos = gluon.jit(rope.sin_cos.fn)
_rotate_pairs = gluon.jit(rope.rotate_pairs.fn)
_cache_row = gluon.jit(rope.cache_row.fn)
_as_values = gluon.jit(as_values.fn)
_tanh = gluon.jit(activation.tanh.fn)


class Ring(NamedTuple):
    """A form of `attend_ring`: warps, keys a warp, tiles in shared memory, and parts of a sequence's keys."""

    W: int
    KEYS: int
    STAGES: int
    PARTS: int


@gluon.constexpr_function
def box_rows(size, keys):
    """Keys of a copy: a block's, or those of a warp if they are fewer."""
    return min(size, keys)


@gluon.constexpr_function
def chunks_of(dim, bits):
    """Copies of 128 bytes a key."""
    return max(1, dim * bits // 1024)


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


@gluon.jit
def _column(n, S: gl.constexpr):
    """Which column of a head is column n of the second product."""
    if S.KIND == "plain":
        d = n
    else:
        d = n % 8 * (S.DIM // 8) + n // 8
    return d


_FOUR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 x, nine; mov.b32 nine, 0x48804880; xor.b32 x, $2, 0x80808080;"
    " prmt.b32 $0, x, 0x48484848, 0x4140; sub.f16x2 $0, $0, nine;"
    " prmt.b32 $1, x, 0x48484848, 0x4342; sub.f16x2 $1, $1, nine; }"
)


@gluon.jit
def _values(codes, S: gl.constexpr, COMPUTE: gl.constexpr):
    """`as_values`, but codes of int8 four at a time, and those of fp8 by the device's own conversion: 256 times as much."""
    KIND: gl.constexpr = S.KIND
    if KIND == "int8":
        return gl.inline_asm_elementwise(_FOUR, "=r,=r,r", [codes], gl.float16, True, 4).to(COMPUTE)
    elif KIND == "fp8":
        return codes.to(gl.float8e4nv, bitcast=True).to(gl.float16).to(COMPUTE)
    else:
        return _as_values(codes, KIND, COMPUTE)


@gluon.jit
def _rows(p_table, kv_head, key, stop, S: gl.constexpr, R: gl.constexpr):
    """Where in the cache the copies of a tile begin; outside of it for what lies beyond `stop`."""
    BOX: gl.constexpr = box_rows(S.SIZE, R.KEYS)
    rows = ()
    for j in gl.static_range(R.W * R.KEYS // BOX):
        at = key + j * BOX
        block = gl.load(p_table + at // S.SIZE, mask=at < stop, other=0)
        rows = rows + (gl.where(at < stop, (block * S.KV_HEADS + kv_head) * S.SIZE + at % S.SIZE, _OUTSIDE),)  # noqa: RUF005
    return rows


@gluon.jit
def _request(tiles, rows, slot, S: gl.constexpr, R: gl.constexpr):
    """Asks for keys and values of a tile, and for the scales of codes."""
    BOX: gl.constexpr = box_rows(S.SIZE, R.KEYS)
    COUNT: gl.constexpr = R.W * R.KEYS // BOX
    BITS: gl.constexpr = tiles[0].dtype.primitive_bitwidth
    CHUNKS: gl.constexpr = chunks_of(S.DIM, BITS)
    COLUMNS: gl.constexpr = S.DIM // CHUNKS
    CODES: gl.constexpr = S.KIND != "plain"
    BYTES: gl.constexpr = R.W * R.KEYS * (S.DIM * BITS // 8 + (4 if CODES else 0))
    for i in gl.static_range(2):
        bar = tiles[6].index(slot * 2 + i)
        mbarrier.expect(bar, BYTES)
        for j in gl.static_range(COUNT):
            for c in gl.static_range(CHUNKS):
                to = tiles[2 + i].index(slot * CHUNKS + c).slice(j * BOX, BOX)
                _copy(tiles[i], [rows[j], c * COLUMNS], bar, to)
            if CODES:
                _copy(tiles[7 + i], [rows[j] // BOX, 0], bar, tiles[4 + i].index(slot).slice(j, 1))


@gluon.jit
def _accumulate(
    sums, q, tiles, slot, phase, begin, oldest, stop, score, S: gl.constexpr, R: gl.constexpr, MASK: gl.constexpr,
    COMPUTE: gl.constexpr,
):  # fmt: skip
    """Adds a tile to sums (a tuple of [W, 16, columns]), maxima and totals [W, 16]."""
    W: gl.constexpr = R.W
    KEYS: gl.constexpr = R.KEYS
    MMA: gl.constexpr = mma_layout(W)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    BITS: gl.constexpr = tiles[0].dtype.primitive_bitwidth
    CHUNKS: gl.constexpr = chunks_of(S.DIM, BITS)
    COLUMNS: gl.constexpr = S.DIM // CHUNKS
    SHARED: gl.constexpr = shared_layout(COLUMNS, BITS, 3)
    KIND: gl.constexpr = S.KIND
    accs, top, total = sums
    mbarrier.wait(tiles[6].index(slot * 2), phase)
    products = gl.zeros([W, 16, KEYS], gl.float32, layout=MMA)
    for c in gl.static_range(CHUNKS):
        s_k = _view(tiles[2].index(slot * CHUNKS + c), tiles[0].dtype, [W, KEYS, COLUMNS], SHARED)
        if KIND == "plain":
            b_k = s_k.permute((0, 2, 1)).load(B)
        else:
            b_k = _values(s_k.load(keys_layout(W, KEYS, S.DIM)), S, COMPUTE)
            b_k = gl.permute(gl.reshape(b_k, [W, KEYS, 4, S.DIM // 16, 2, 2]), (0, 1, 3, 4, 2, 5))
            b_k = gl.permute(gl.reshape(b_k, [W, KEYS, S.DIM]), (0, 2, 1))
            b_k = gl.convert_layout(b_k, B, assert_trivial=True)
        products = mma_v2(q[c], b_k, products)
    if KIND != "plain":
        ROW: gl.constexpr = gl.SliceLayout(1, MMA)
        SCALES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
        s_scale = _view(tiles[4].index(slot), gl.float32, [W, KEYS], SCALES)
        k_scale = s_scale.load(ROW)
        if KIND == "fp8":
            k_scale = k_scale * 0.00390625
        products = products * gl.expand_dims(k_scale, 1)
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = score.scale
    if S.CAP:
        products = _tanh(products * (score.scale / score.cap))
        factor = score.cap * _LOG2E
    if MASK:
        w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
        n = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        key = begin + gl.expand_dims(gl.expand_dims(w, 1), 2) * KEYS + gl.expand_dims(gl.expand_dims(n, 0), 1)
        seen = key < stop
        if S.WINDOW:
            seen = seen & (key >= oldest)
        products = gl.where(seen, products, float("-inf"))
    new_top = gl.maximum(top, gl.max(products, 2) * factor)
    base = new_top
    if MASK:
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(products * factor - gl.expand_dims(base, 2))
    fade = gl.exp2(top - base)
    total = total * fade + gl.sum(p, 2)
    mbarrier.wait(tiles[6].index(slot * 2 + 1), phase)
    if KIND != "plain":
        s_scale = _view(tiles[5].index(slot), gl.float32, [W, KEYS], SCALES)
        v_scale = gl.expand_dims(s_scale.load(ROW), 1)
        if KIND == "fp8":
            v_scale = v_scale * 0.00390625
        if MASK:
            v_scale = gl.where(seen, v_scale, 0.0)
        p = p * v_scale
    b_p = gl.convert_layout(p.to(COMPUTE), gl.DotOperandLayout(0, MMA, 2))
    fade = gl.expand_dims(fade, 2)
    done = ()
    for c in gl.static_range(CHUNKS):
        s_v = _view(tiles[3].index(slot * CHUNKS + c), tiles[1].dtype, [W, KEYS, COLUMNS], SHARED)
        if KIND == "plain":
            b_v = s_v.load(B)
        else:
            b_v = _values(s_v.load(values_layout(W, KEYS, S.DIM)), S, COMPUTE)
            b_v = gl.permute(gl.reshape(b_v, [W, KEYS, 8, S.DIM // 8]), (0, 1, 3, 2))
            b_v = gl.convert_layout(gl.reshape(b_v, [W, KEYS, S.DIM]), B, assert_trivial=True)
        if MASK:
            # Zero times what another sequence left there may be NaN.
            w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))
            n = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, B)))
            at = begin + gl.expand_dims(gl.expand_dims(w, 1), 2) * KEYS + gl.expand_dims(gl.expand_dims(n, 0), 2)
            there = at < stop
            if S.WINDOW:
                there = there & (at >= oldest)
            b_v = gl.where(there, b_v, gl.zeros_like(b_v))
        done = done + (mma_v2(b_p, b_v, accs[c] * fade),)  # noqa: RUF005
    return done, new_top, total


@gluon.jit
def _rotated(x, at, ok, i, sin, cos, magnitude, to, NEOX: gl.constexpr, M: gl.constexpr, HALF: gl.constexpr):
    """Rows at [M] of whole heads, rotated, [M, 2 HALF], rounded to the type of `to`."""
    if NEOX:
        first, second = i, i + HALF
    else:
        first, second = i * 2, i * 2 + 1
    a = gl.load(x + at[:, None] + first[None, :], mask=ok[:, None], other=0.0).to(gl.float32)
    b = gl.load(x + at[:, None] + second[None, :], mask=ok[:, None], other=0.0).to(gl.float32)
    low, high = _rotate_pairs(a, b, sin[None, :], cos[None, :], magnitude)
    both = gl.join(low, high)  # [M, HALF, 2]
    if NEOX:
        both = gl.permute(both, (0, 2, 1))
    return gl.reshape(both, [M, 2 * HALF]).to(to.dtype.element_ty)


@gluon.jit(do_not_specialize=["seqs"])
def attend_ring(
    partial, q, rotation, cache, k_copy, v_copy, k_scale_copy, v_scale_copy, sequences, seqs, score, S: gl.constexpr,
    R: gl.constexpr, ROTATE: gl.constexpr, EARLY: gl.constexpr, COMPUTE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Sums of a part of one sequence's keys, for one key head. Grid (sequences * PARTS, n_kv).

    k_copy, v_copy              TMA descriptors of keys and values `[rows, head_dim]` in boxes of `[box_rows, 128 bytes]`
    k_scale_copy, v_scale_copy  of their scales `[rows / box_rows, box_rows]`, read with codes only
    Triton 3.6 cannot launch a kernel with descriptors in a tuple. Else as `attend_one`, whose records these are; every
    sequence has one new token.
    """
    GROUP: gl.constexpr = S.HEADS // S.KV_HEADS
    DIM: gl.constexpr = S.DIM
    SIZE: gl.constexpr = S.SIZE
    W: gl.constexpr = R.W
    KEYS: gl.constexpr = R.KEYS
    STAGES: gl.constexpr = R.STAGES
    PARTS: gl.constexpr = R.PARTS
    BOX: gl.constexpr = box_rows(SIZE, KEYS)
    COUNT: gl.constexpr = W * KEYS // BOX
    KIND: gl.constexpr = S.KIND
    MMA: gl.constexpr = mma_layout(W)
    BITS: gl.constexpr = k_copy.dtype.primitive_bitwidth
    CHUNKS: gl.constexpr = chunks_of(DIM, BITS)
    COLUMNS: gl.constexpr = DIM // CHUNKS
    TILE: gl.constexpr = W * KEYS
    CODES: gl.constexpr = KIND != "plain"
    NEOX: gl.constexpr = ROTATE == "neox"
    FLAT: gl.constexpr = shared_layout(COLUMNS, BITS, 2)
    s_k = gl.allocate_shared_memory(k_copy.dtype, [STAGES * CHUNKS, TILE, COLUMNS], FLAT)
    s_v = gl.allocate_shared_memory(k_copy.dtype, [STAGES * CHUNKS, TILE, COLUMNS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], mbarrier.MBarrierLayout())
    k_scales, v_scales = s_k, s_v
    if CODES:
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, COUNT, BOX], gl.NVMMASharedLayout(0, 32, 2))
        v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, COUNT, BOX], gl.NVMMASharedLayout(0, 32, 2))
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(full.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    tiles = (k_copy, v_copy, s_k, s_v, k_scales, v_scales, full, k_scale_copy, v_scale_copy)
    seq = gl.program_id(0) // PARTS
    part = gl.program_id(0) % PARTS
    kv_head = gl.program_id(1)
    n_keys = gl.load(sequences.kv_len + seq)
    last = n_keys - 1
    oldest = last * 0
    if S.WINDOW:
        if S.CHUNKED:
            oldest = last // score.window * score.window
        else:
            oldest = gl.maximum(n_keys - score.window, 0)
    # Whole blocks of the keys before the newest, shared out evenly.
    first_block = oldest // BOX
    blocks = (last + BOX - 1) // BOX - first_block
    start = (first_block + part * blocks // PARTS) * BOX
    stop = gl.minimum(last, (first_block + (part + 1) * blocks // PARTS) * BOX)
    count = (gl.maximum(stop - start, 0) + TILE - 1) // TILE
    p_table = sequences.table + seq.to(gl.int64) * gl.load(sequences.table_width)
    ahead = ()
    for i in gl.static_range(STAGES):
        ahead = ahead + (_rows(p_table, kv_head, start + i * TILE, stop, S, R),)  # noqa: RUF005
    for i in gl.static_range(STAGES):
        if i < count:
            _request(tiles, ahead[i], i, S, R)
    coming = _rows(p_table, kv_head, start + STAGES * TILE, stop, S, R)

    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    lane = gl.arange(0, 16, gl.SliceLayout(1, LOAD))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LOAD))
    head = kv_head * GROUP + lane
    ok = lane < GROUP
    token = gl.load(sequences.query_start + seq).to(gl.int64)
    if ROTATE != "":
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [W, 1], [1, 0])
        i = gl.arange(0, DIM // 2, gl.SliceLayout(0, PAIRS))
        m = gl.arange(0, 16, gl.SliceLayout(1, PAIRS))
        sin, cos = _sin_cos(gl.load(rotation.positions + token).to(gl.float32) * gl.load(rotation.freq + i))
        row = _cache_row(gl.load(rotation.slots + token).to(gl.int64), kv_head, S.KV_HEADS, SIZE)
    else:
        slot_of = gl.load(p_table + last // SIZE).to(gl.int64) * SIZE + last % SIZE
        row = _cache_row(slot_of, kv_head, S.KV_HEADS, SIZE)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        gdc_wait()
    newest = part == PARTS - 1
    if ROTATE != "":
        at = (token * S.HEADS + kv_head * GROUP + m) * DIM
        b_q = _rotated(q, at, m < GROUP, i, sin, cos, rotation.q_magnitude, q, NEOX, 16, DIM // 2)
        b_q = gl.convert_layout(b_q, LOAD)
        at = (token * S.KV_HEADS + kv_head) * DIM
        b_new = _rotated(
            rotation.k, at + m * 0, m < 16, i, sin, cos, rotation.k_magnitude, cache.k, NEOX, 16, DIM // 2
        )  # fmt: skip
        # Sixteen times the same row.
        b_new = gl.convert_layout(b_new, LOAD)
        if newest:
            v_new = gl.load(rotation.v + at + d).to(cache.v.dtype.element_ty)
            once = (lane == 0)[:, None]
            gl.store(cache.k + row * DIM + d[None, :] + lane[:, None] * 0, b_new, mask=once & (d >= 0)[None, :])
            gl.store(cache.v + row * DIM + d, v_new)
        b_new = b_new.to(gl.float32)
    else:
        at = (token * S.HEADS + head) * DIM
        b_q = gl.load(q + at[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        b_new = _as_values(gl.load(cache.k + row * DIM + d), KIND, COMPUTE).to(gl.float32)[None, :]
    b_q = b_q.to(COMPUTE)
    own = gl.sum(b_q.to(gl.float32) * b_new, 1)  # [16]
    if CODES:
        own = own * gl.load(cache.k_scale + row)
    factor = score.scale
    if S.CAP:
        own = _tanh(own * (score.scale / score.cap))
        factor = score.cap * _LOG2E
    ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    w = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, ROWS)), 1)
    there = (w == 0) & newest & (gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, ROWS)), 0) >= 0)
    # The new key begins the sums of the last part's first warp.
    own = gl.expand_dims(gl.convert_layout(own * factor, gl.SliceLayout(0, ROWS)), 0)
    top = gl.where(there, own, float("-inf"))
    total = gl.where(there, 1.0, 0.0)
    s_q = gl.allocate_shared_memory(COMPUTE, [16, DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    if CODES:
        # The order of the columns of `keys_layout`.
        b_q = gl.permute(gl.reshape(b_q, [16, 4, DIM // 16, 2, 2]), (0, 2, 3, 1, 4))
        b_q = gl.reshape(b_q, [16, DIM])
    s_q.store(b_q)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    query = ()
    accs = ()
    for c in gl.static_range(CHUNKS):
        one = s_q.slice(c * COLUMNS, COLUMNS, 1).load(gl.SliceLayout(0, A))
        query = query + (gl.expand_dims(one, 0) + gl.zeros([W, 16, COLUMNS], COMPUTE, layout=A),)  # noqa: RUF005
        column = _column(c * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, MMA))), S)
        if ROTATE != "":
            value = gl.load(rotation.v + (token * S.KV_HEADS + kv_head) * DIM + column).to(cache.v.dtype.element_ty)
        else:
            value = _as_values(gl.load(cache.v + row * DIM + column), KIND, COMPUTE)
        value = value.to(gl.float32)
        if CODES:
            value = value * gl.load(cache.v_scale + row)
        value = gl.expand_dims(gl.expand_dims(value, 0), 1)
        accs = accs + (gl.where(gl.expand_dims(there, 2), value, 0.0),)  # noqa: RUF005
    sums = (accs, top, total)

    slot = 0
    phase = 0
    whole = gl.maximum(stop - start, 0) // TILE
    for i in range(whole):
        now = coming
        coming = _rows(p_table, kv_head, start + (i + STAGES + 1) * TILE, stop, S, R)
        sums = _accumulate(sums, query, tiles, slot, phase, start + i * TILE, oldest, stop, score, S, R, S.WINDOW, COMPUTE)
        _barrier()
        if i + STAGES < count:
            _request(tiles, now, slot, S, R)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase = phase ^ 1
    if whole < count:
        sums = _accumulate(sums, query, tiles, slot, phase, start + whole * TILE, oldest, stop, score, S, R, True, COMPUTE)
    for i in gl.static_range(STAGES * 2):
        mbarrier.invalidate(full.index(i))

    accs, top, total = sums
    most = gl.max(top, 0)  # [16]
    base = gl.where(most == float("-inf"), 0.0, most)
    weight = gl.exp2(top - gl.expand_dims(base, 0))  # [W, 16]
    total = gl.sum(total * weight, 0)
    weight = gl.expand_dims(weight, 2)
    lane = gl.arange(0, 16, gl.SliceLayout(0, ROWS))
    place = gl.program_id(0).to(gl.int64) * S.HEADS + kv_head * GROUP + lane
    gl.store(partial.top_sum + place * 2, most, mask=lane < GROUP)
    gl.store(partial.top_sum + place * 2 + 1, total, mask=lane < GROUP)
    # Of all warps, in the registers of a lane.
    MET: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 2, 16], [1, W, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, MET)
    lane = gl.arange(0, 16, gl.SliceLayout(1, OUT))
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    place = gl.program_id(0).to(gl.int64) * S.HEADS + kv_head * GROUP + lane
    for c in gl.static_range(CHUNKS):
        at = place[:, None] * DIM + _column(c * COLUMNS + d, S)[None, :]
        met = gl.sum(gl.convert_layout(accs[c] * weight, MET), 0)
        gl.store(partial.sums + at, met, mask=(lane < GROUP)[:, None] & (d >= 0)[None, :])


@triton.jit
def join_parts(
    output, partial, sinks, sequences, S: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds the parts that `attend_ring` left. Grid (sequences, n_kv)."""
    seq = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p_out = output.plain + token * S.HEADS * S.DIM
    first = tl.program_id(1) * (S.HEADS // S.KV_HEADS)
    combine(p_out, output.int8x2, partial, sinks, seq * PARTS, PARTS, first, S, AT_ONCE, 1, FORM)
