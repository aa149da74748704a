"""Attention of sequences with one new token, through a ring of TMA copies in shared memory (Hopper).

Programs are persistent: each takes, one after the other, splits of a sequence's keys for one key head, as `attend_one`
takes one. A producer warp copies tiles STAGES ahead, into the next split too, and the first of them before the queries are
there. W consumer warps take KEYS keys of each tile, keep a softmax of their own in their registers, and meet once a split,
at its end. The place of a tile is free as soon as its values are in registers, before they are multiplied. Where a sequence
has one split its result is stored at once; the sums of several are left to a second launch (`ring.py: join_splits`).

Keys that nobody has, or that lie before a window, are copied as zeros or not at all; what a block of another sequence may
have left never meets a weight (`MASK`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.triton_backend.attention import decode, rope
from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.attention.ring_form import (
    Stages,
    form_of,
    keys_layout,
    mma_layout,
    shared_layout,
    values_layout,
)
from quarrel.triton_backend.attention.splits import split_of
from quarrel.triton_backend.elementwise import activation

_LOG2E: gl.constexpr = gl.constexpr(decode.LOG2E)
_OUTSIDE: gl.constexpr = gl.constexpr(1 << 30)
"""A row that no cache has (`ring.py: MOST_ROWS`): its copy is zeros, and reads nothing."""

# Names of Triton 3.9, or of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_sin_cos = gluon.jit(rope.sin_cos.fn)
_rotate_pairs = gluon.jit(rope.rotate_pairs.fn)
_cache_row = gluon.jit(rope.cache_row.fn)
_oldest_key = gluon.jit(decode.oldest_key.fn)
_as_values = gluon.jit(as_values.fn)
_split_of = gluon.jit(split_of.fn)
_tanh = gluon.jit(activation.tanh.fn)


@gluon.jit
def _column(n, S: gl.constexpr):
    """Which column of a head is column n of the second product."""
    if S.KIND == "plain":
        d = n
    else:
        d = n % 8 * (S.DIM // 8) + n // 8
    return d


_FOUR: gl.constexpr = gl.constexpr(
    "{ .reg .b32 x, nine; mov.b32 nine, 0x48804880; xor.b32 x, $2, 0x80808080;"
    " prmt.b32 $0, x, 0x48484848, 0x4140; sub.f16x2 $0, $0, nine;"
    " prmt.b32 $1, x, 0x48484848, 0x4342; sub.f16x2 $1, $1, nine; }"
)


@gluon.jit
def _values(codes, KIND: gl.constexpr, COMPUTE: gl.constexpr):
    """`as_values`, but codes of int8 four at a time, and those of fp8 by the device's own conversion: 256 times as much."""
    if KIND == "int8":
        return gl.inline_asm_elementwise(_FOUR, "=r,=r,r", [codes], gl.float16, True, 4).to(COMPUTE)
    elif KIND == "fp8":
        return codes.to(gl.float8e4nv, bitcast=True).to(gl.float16).to(COMPUTE)
    else:
        return _as_values(codes, KIND, COMPUTE)


@gluon.jit
def _find(starts, n, item, W: gl.constexpr):
    """`decode.find` with PER = 1: the last s below n with starts[s] <= item."""
    found = item * 0 - 1
    for begin in range(0, n, 64):
        i = begin + gl.arange(0, 64, gl.BlockedLayout([2], [32], [W], [0]))
        at = gl.load(starts + i, mask=i < n, other=0)
        found += gl.sum(((at <= item) & (i < n)).to(gl.int32), 0)
    return found


@gluon.jit
def _split(sequences, item_start, seqs, item, score, S: gl.constexpr, F: gl.constexpr, W: gl.constexpr):
    """Of an item: its sequence and that one's splits (0 for no item), last key and blocks; the keys from `start` to below
    `stop` that it walks, the oldest that are seen, and whether the new key is its own. W warps ask."""
    # Most often every sequence has one split, so its place is the item's: one trip to memory and no search.
    seq = gl.minimum(item, seqs - 1)
    if (gl.load(item_start + seq) != item) | (gl.load(item_start + seq + 1) != item + 1):
        seq = _find(item_start, seqs, item, W)
    first_item = gl.load(item_start + seq)
    splits = gl.load(item_start + seq + 1) - first_item
    # A graph has programs for more items than there may be: those beyond walk nothing and store nothing.
    there_is = item - first_item < splits
    n_keys = gl.load(sequences.kv_len + seq)
    last = gl.maximum(n_keys - 1, 0)
    split = _split_of(n_keys, gl.maximum(splits, 1))
    start = (item - first_item) * split
    newest = there_is & (start + split >= n_keys)
    stop = gl.where(there_is, gl.minimum(last, start + split), 0)
    oldest = last * 0
    if S.WINDOW:
        oldest = _oldest_key(last, score.window, S.CHUNKED)
        start = gl.maximum(start, oldest // F.BOX * F.BOX)
    p_table = sequences.table + seq.to(gl.int64) * gl.load(sequences.table_width)
    return seq, gl.where(there_is, splits, 0), last, p_table, start, stop, oldest, newest


@gluon.jit
def _rows(p_table, kv_head, key, stop, S: gl.constexpr, F: gl.constexpr):
    """Where in the cache the copies of a tile begin; outside of it for what lies beyond `stop`."""
    COUNT: gl.constexpr = F.COUNT
    rows = ()
    for j in gl.static_range(COUNT):
        at = key + j * F.BOX
        block = gl.load(p_table + at // S.SIZE, mask=at < stop, other=0)
        rows = rows + (gl.where(at < stop, (block * S.KV_HEADS + kv_head) * S.SIZE + at % S.SIZE, _OUTSIDE),)  # noqa: RUF005
    return rows


@gluon.jit
def _request(copy, scale_copy, to, to_scale, bar, rows, slot, F: gl.constexpr):
    """Asks for the keys or the values of a tile, and for the scales of codes."""
    COUNT: gl.constexpr = F.COUNT
    CHUNKS: gl.constexpr = F.CHUNKS
    mbarrier.expect(bar, F.BYTES)
    for j in gl.static_range(COUNT):
        for c in gl.static_range(CHUNKS):
            part = to.index(slot * CHUNKS + c).slice(j * F.BOX, F.BOX)
            _copy(copy, [rows[j], c * F.COLUMNS], bar, part)
        if F.CODES:
            _copy(scale_copy, [rows[j] // F.BOX, 0], bar, to_scale.index(slot).slice(j, 1))


@gluon.jit
def _produce(
    k_copy, v_copy, k_scale_copy, v_scale_copy, sequences, item_start, seqs, items, score, stages, S: gl.constexpr,
    F: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: copies of every tile of this program's splits, as far ahead as there is room."""
    if PDL and not EARLY:
        gdc_wait()
    slot = 0
    phase = 1
    for work in range(gl.program_id(0), items * S.KV_HEADS, gl.num_programs(0)):
        kv_head = work % S.KV_HEADS
        _, _, _, p_table, start, stop, _, _ = _split(sequences, item_start, seqs, work // S.KV_HEADS, score, S, F, 1)
        # The numbers of a tile's blocks come while the one before it is awaited.
        coming = _rows(p_table, kv_head, start, stop, S, F)
        for begin in range(start, stop, F.TILE):
            rows = coming
            coming = _rows(p_table, kv_head, begin + F.TILE, stop, S, F)
            mbarrier.wait(stages.free.index(slot), phase)
            _request(k_copy, k_scale_copy, stages.k, stages.k_scale, stages.k_full.index(slot), rows, slot, F)
            _request(v_copy, v_scale_copy, stages.v, stages.v_scale, stages.v_full.index(slot), rows, slot, F)
            slot += 1
            if slot == F.STAGES:
                slot = 0
                phase = phase ^ 1


@gluon.jit
def _accumulate(
    sums, q, stages, slot, phase, begin, oldest, stop, score, S: gl.constexpr, F: gl.constexpr,
    MASK: gl.constexpr, COMPUTE: gl.constexpr,
):  # fmt: skip
    """Adds a tile to sums (a tuple of [W, 16, columns]), maxima and totals [W, 16], and gives its slot back."""
    W: gl.constexpr = F.W
    KEYS: gl.constexpr = F.KEYS
    CHUNKS: gl.constexpr = F.CHUNKS
    MMA: gl.constexpr = mma_layout(W)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    SCALES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    SHARED: gl.constexpr = shared_layout(F.COLUMNS, stages.k.dtype.primitive_bitwidth, 3)
    KIND: gl.constexpr = S.KIND
    accs, top, total = sums
    mbarrier.wait(stages.k_full.index(slot), phase)
    products = gl.zeros([W, 16, KEYS], gl.float32, layout=MMA)
    for c in gl.static_range(CHUNKS):
        s_k = _view(stages.k.index(slot * CHUNKS + c), stages.k.dtype, [W, KEYS, F.COLUMNS], SHARED)
        if KIND == "plain":
            b_k = s_k.permute((0, 2, 1)).load(B)
        else:
            b_k = _values(s_k.load(keys_layout(W, KEYS, S.DIM)), KIND, COMPUTE)
            b_k = gl.permute(gl.reshape(b_k, [W, KEYS, 4, S.DIM // 16, 2, 2]), (0, 1, 3, 4, 2, 5))
            b_k = gl.permute(gl.reshape(b_k, [W, KEYS, S.DIM]), (0, 2, 1))
            b_k = gl.convert_layout(b_k, B, assert_trivial=True)
        products = mma_v2(q[c], b_k, products)
    if KIND != "plain":
        k_scale = _view(stages.k_scale.index(slot), gl.float32, [W, KEYS], SCALES).load(ROW)
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
    mbarrier.wait(stages.v_full.index(slot), phase)
    if KIND != "plain":
        v_scale = gl.expand_dims(_view(stages.v_scale.index(slot), gl.float32, [W, KEYS], SCALES).load(ROW), 1)
        if KIND == "fp8":
            v_scale = v_scale * 0.00390625
        if MASK:
            v_scale = gl.where(seen, v_scale, 0.0)
        p = p * v_scale
    b_p = gl.convert_layout(p.to(COMPUTE), gl.DotOperandLayout(0, MMA, 2))
    fade = gl.expand_dims(fade, 2)
    loaded = ()
    for c in gl.static_range(CHUNKS):
        s_v = _view(stages.v.index(slot * CHUNKS + c), stages.v.dtype, [W, KEYS, F.COLUMNS], SHARED)
        if KIND == "plain":
            b_v = s_v.load(B)
        else:
            b_v = s_v.load(values_layout(W, KEYS, S.DIM))
        loaded = loaded + (b_v,)  # noqa: RUF005
    # Every warp has what it needs of this tile.
    _barrier()
    mbarrier.arrive(stages.free.index(slot), count=1)
    done = ()
    for c in gl.static_range(CHUNKS):
        b_v = loaded[c]
        if KIND != "plain":
            b_v = _values(b_v, KIND, COMPUTE)
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


@gluon.jit
def _consume(
    out, partial, q, rotation, cache, sinks, sequences, item_start, seqs, items, score, stages, s_q, s_met, S: gl.constexpr,
    F: gl.constexpr, ROTATE: gl.constexpr, EARLY: gl.constexpr, COMPUTE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """W warps: the queries, the new key and value, and the sums of each split."""
    if PDL and not EARLY:
        gdc_wait()
    slot = 0
    phase = 0
    for work in range(gl.program_id(0), items * S.KV_HEADS, gl.num_programs(0)):
        item = work // S.KV_HEADS
        split = _split(sequences, item_start, seqs, item, score, S, F, F.W)
        if split[1] > 0:
            slot, phase = _attend(
                out, partial, q, rotation, cache, sinks, sequences, split, item, work % S.KV_HEADS, score, stages, s_q,
                s_met, slot, phase, S, F, ROTATE, EARLY, COMPUTE, PDL,
            )  # fmt: skip
    if PDL and EARLY:
        # Whoever waits for this kernel relies on the kernels before it being over, too.
        gdc_wait()


@gluon.jit
def _attend(
    out, partial, q, rotation, cache, sinks, sequences, split, item, kv_head, score, stages, s_q, s_met, slot, phase,
    S: gl.constexpr, F: gl.constexpr, ROTATE: gl.constexpr, EARLY: gl.constexpr, COMPUTE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One split that there is (`_split`); the slot of the ring and the phase where the next begins."""
    W: gl.constexpr = F.W
    GROUP: gl.constexpr = S.HEADS // S.KV_HEADS
    DIM: gl.constexpr = S.DIM
    CHUNKS: gl.constexpr = F.CHUNKS
    COLUMNS: gl.constexpr = F.COLUMNS
    KIND: gl.constexpr = S.KIND
    CODES: gl.constexpr = F.CODES
    NEOX: gl.constexpr = ROTATE == "neox"
    MMA: gl.constexpr = mma_layout(W)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    seq, splits, last, p_table, start, stop, oldest, newest = split
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
        row = _cache_row(gl.load(rotation.slots + token).to(gl.int64), kv_head, S.KV_HEADS, S.SIZE)
    else:
        slot_of = gl.load(p_table + last // S.SIZE).to(gl.int64) * S.SIZE + last % S.SIZE
        row = _cache_row(slot_of, kv_head, S.KV_HEADS, S.SIZE)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        gdc_wait()
    ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    w = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, ROWS)), 1)
    there = (w == 0) & newest & (gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, ROWS)), 0) >= 0)
    accs = ()
    for c in gl.static_range(CHUNKS):
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
    # The new key begins the sums of the last split's first warp.
    own = gl.expand_dims(gl.convert_layout(own * factor, gl.SliceLayout(0, ROWS)), 0)
    top = gl.where(there, own, float("-inf"))
    total = gl.where(there, 1.0, 0.0)
    if CODES:
        # The order of the columns of `keys_layout`.
        b_q = gl.permute(gl.reshape(b_q, [16, 4, DIM // 16, 2, 2]), (0, 2, 3, 1, 4))
        b_q = gl.reshape(b_q, [16, DIM])
    s_q.store(b_q)
    _barrier()
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    query = ()
    for c in gl.static_range(CHUNKS):
        one = s_q.slice(c * COLUMNS, COLUMNS, 1).load(gl.SliceLayout(0, A))
        query = query + (gl.expand_dims(one, 0) + gl.zeros([W, 16, COLUMNS], COMPUTE, layout=A),)  # noqa: RUF005
    sums = (accs, top, total)
    keys = gl.maximum(stop - start, 0)
    whole = start + keys // F.TILE * F.TILE
    for begin in range(start, whole, F.TILE):
        sums = _accumulate(sums, query, stages, slot, phase, begin, oldest, stop, score, S, F, S.WINDOW, COMPUTE)
        slot += 1
        if slot == F.STAGES:
            slot = 0
            phase = phase ^ 1
    if whole < stop:
        sums = _accumulate(sums, query, stages, slot, phase, whole, oldest, stop, score, S, F, True, COMPUTE)
        slot += 1
        if slot == F.STAGES:
            slot = 0
            phase = phase ^ 1
    accs, top, total = sums
    most = gl.max(top, 0)  # [16]
    base = gl.where(most == float("-inf"), 0.0, most)
    weight = gl.exp2(top - gl.expand_dims(base, 0))  # [W, 16]
    total = gl.sum(total * weight, 0)
    lane = gl.arange(0, 16, gl.SliceLayout(0, ROWS))
    ok = lane < GROUP
    apart = ok & (splits > 1)
    place = item.to(gl.int64) * S.HEADS + kv_head * GROUP + lane
    gl.store(partial.top_sum + place * 2, most, mask=apart)
    gl.store(partial.top_sum + place * 2 + 1, total, mask=apart)
    if splits == 1:
        if S.SINKS:
            sink = gl.load(sinks + kv_head * GROUP + lane, mask=ok, other=0.0) * _LOG2E
            new_base = gl.maximum(base, sink)
            fade = gl.exp2(base - new_base)
            total = total * fade + gl.exp2(sink - new_base)
            weight = weight * gl.expand_dims(fade, 0)
        weight = weight / gl.expand_dims(gl.where(total > 0, total, 1.0), 0)
    weight = gl.expand_dims(weight, 2)
    # Of all warps, in the registers of a lane.
    MET: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 2, 16], [1, W, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, MET)
    lane = gl.arange(0, F.ROWS, gl.SliceLayout(1, OUT))
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    ok = lane < GROUP
    head = kv_head * GROUP + lane
    for c in gl.static_range(CHUNKS):
        mine = accs[c] * weight
        if F.ROWS == 8:
            mine, _ = gl.split(gl.permute(gl.reshape(mine, [W, 2, 8, COLUMNS]), (0, 2, 3, 1)))
        _barrier()
        s_met.store(mine)
        _barrier()
        met = gl.sum(s_met.load(MET), 0)
        column = _column(c * COLUMNS + d, S)[None, :]
        to = (gl.where(splits == 1, token, item) * S.HEADS + head)[:, None] * DIM + column
        there_is = ok[:, None] & (d >= 0)[None, :]
        gl.store(out + to, met.to(out.dtype.element_ty), mask=there_is & (splits == 1))
        gl.store(partial.sums + to, met, mask=there_is & (splits > 1))
    return slot, phase


@gluon.jit(do_not_specialize=["seqs", "items"])
def attend_ring(
    out, partial, q, rotation, cache, k_copy, v_copy, k_scale_copy, v_scale_copy, sinks, sequences, item_start, seqs, items,
    score, S: gl.constexpr, R: gl.constexpr, ROTATE: gl.constexpr, EARLY: gl.constexpr, COMPUTE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Each sequence's result, or the sums of each of its splits. Grid: any number of programs; S.DIM is 64 or 128.

    out                         where results go, `[T, heads * head_dim]`
    k_copy, v_copy              TMA descriptors of keys and values `[rows, head_dim]` in boxes of `[box_rows, 128 bytes]`
    k_scale_copy, v_scale_copy  of their scales `[rows / box_rows, box_rows]`, read with codes only
    items                       how many there may be
    R                           `records.Ring`
    Triton 3.6 cannot launch a kernel with descriptors in a tuple. Else as `decode.attend_one`.
    """
    F: gl.constexpr = form_of(S, R, k_copy.dtype.primitive_bitwidth)
    FLAT: gl.constexpr = shared_layout(F.COLUMNS, k_copy.dtype.primitive_bitwidth, 2)
    s_k = gl.allocate_shared_memory(k_copy.dtype, [F.STAGES * F.CHUNKS, F.TILE, F.COLUMNS], FLAT)
    s_v = gl.allocate_shared_memory(k_copy.dtype, [F.STAGES * F.CHUNKS, F.TILE, F.COLUMNS], FLAT)
    s_q = gl.allocate_shared_memory(COMPUTE, [16, S.DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    s_met = gl.allocate_shared_memory(gl.float32, [F.W, F.ROWS, F.COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    k_full = gl.allocate_shared_memory(gl.int64, [F.STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [F.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [F.STAGES, 1], mbarrier.MBarrierLayout())
    k_scale, v_scale = s_k, s_v
    if F.CODES:
        k_scale = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.COUNT, F.BOX], gl.NVMMASharedLayout(0, 32, 2))
        v_scale = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.COUNT, F.BOX], gl.NVMMASharedLayout(0, 32, 2))
    STAGES: gl.constexpr = F.STAGES
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    stages = Stages(s_k, s_v, k_scale, v_scale, k_full, v_full, free)
    gl.warp_specialize(
        [
            (_consume, (
                out, partial, q, rotation, cache, sinks, sequences, item_start, seqs, items, score, stages, s_q, s_met, S,
                F, ROTATE, EARLY, COMPUTE, PDL,
            )),
            (_produce, (
                k_copy, v_copy, k_scale_copy, v_scale_copy, sequences, item_start, seqs, items, score, stages, S, F, EARLY,
                PDL,
            )),
        ],
        [1], [40],
    )  # fmt: skip
