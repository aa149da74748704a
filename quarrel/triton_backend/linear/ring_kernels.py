"""Packed weights times a few to a few hundred rows of x on Hopper, for one matrix or for the chosen ones of a stack.

Weights are the left operand of `wgmma`, decoded in its registers (`formats/ring_tiles.py`); rows of x are the right one. A
producer warp copies all that there is of weights and x by TMA into a ring of STAGES stages of SPAN times 256 columns; T
consumer warps decode and multiply 16 T rows of every stage. Codes lie as the matvec kernels read them. What a copy cannot
take from there, as its rows are no whole 16 bytes apart or have fewer, is read from a transposed copy
(`ring_weights.py`): a row to a block or a super-block, with an entry for each row of the matrix.

A unit of work is a tile of rows, a part of K and an item; an item is a matrix of the stack and up to BT of its rows of x,
listed on the device, or of a single matrix BT rows after the other. Programs are persistent and take units in turn, items
innermost, so a second item of a matrix finds its weights in L2. Gate and up share a tile, half each: a lane holds row r of
gate and row r of up, so the activation needs no exchange.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.triton_backend.elementwise import activation as elementwise
from quarrel.triton_backend.formats.ring_tiles import (
    decode,
    double_entries,
    entries,
    factors,
    nibbles,
    row_of,
    signed_bytes,
    transposed_entries,
    transposed_tops,
)
from quarrel.triton_backend.linear.ring_tiling import Stages, Tiling, stage_bytes

# Names of Triton 3.9, or of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_activate = gluon.jit(elementwise.activate.fn)


@gluon.jit
def _bring(matrix, up, row, column, full, tile, how):
    """A tile `[16 T, ...]`: rows of one matrix, or half of gate and half of up."""
    if how.GATED:
        _copy(matrix, [row, column], full, tile.slice(0, 8 * how.T))
        _copy(up, [row, column], full, tile.slice(8 * how.T, 8 * how.T))
    else:
        _copy(matrix, [row, column], full, tile)


@gluon.jit
def _bring_transposed(matrix, up, block, row, full, tile, B: gl.constexpr, how):
    """A tile `[B, 16 T]` of a transposed plane, or `[2 B, 8 T]`: of gate and of up."""
    if how.GATED:
        _copy(matrix, [block, row], full, tile.slice(0, B))
        _copy(up, [block, row], full, tile.slice(B, B))
    else:
        _copy(matrix, [block, row], full, tile)


@gluon.jit
def _number(items, tokens, how):
    """How many items there are."""
    if how.LISTED:
        n = gl.load(items[0], cache_modifier=".cg")
    else:
        n = (tokens + how.BT - 1) // how.BT
    return n


@gluon.jit
def _item(items, tokens, i, how):
    """Matrix, first row of x and rows of an item."""
    if how.LISTED:
        p = items[0] + 1 + i * 4
        matrix, first = gl.load(p, cache_modifier=".cg"), gl.load(p + 1, cache_modifier=".cg")
        count = gl.load(p + 2, cache_modifier=".cg")
    else:
        matrix, first = i * 0, i * how.BT
        count = gl.minimum(tokens - first, how.BT)
    return matrix, first, count


@gluon.jit
def _warm(codes, up_codes, N, stages, how):
    """Copies the codes that this program would begin with if each of LIKELY matrices had one item: most of them have, and
    are then found in L2, whoever reads them."""
    unit = gl.program_id(0)
    row = unit % how.LIKELY * N + unit // how.LIKELY % how.TILES * how.BN
    mbarrier.expect(stages.warm.index(0), how.STAGES * how.SPAN * how.PLANES * how.BM * 128)
    for i in gl.static_range(how.STAGES * how.SPAN * how.PLANES):
        _bring(codes, up_codes, row, i * 32, stages.warm.index(0), stages.codes.index(i), how)


@gluon.jit
def _produce(codes, up_codes, scale, up_scale, bits, up_bits, top, up_top, x, items, tokens, N, stages, how):
    """One warp: copies of every stage of every unit of this program, as far ahead as there is room. Weights of the first
    stage are on their way before the kernel ahead is over, where items are known by then."""
    if how.PDL and not how.KNOWN:
        if how.LIKELY > 0:
            _warm(codes, up_codes, N, stages, how)
        gdc_wait()
        if how.LIKELY > 0:
            mbarrier.wait(stages.warm.index(0), 0)
    n = _number(items, tokens, how)
    slot = 0
    phase = 1
    BYTES: gl.constexpr = stage_bytes(how.FORMAT, how.BM, how.BT, how.SPAN)
    for unit in range(gl.program_id(0), n * (how.TILES * how.UNITS), gl.num_programs(0)):
        matrix, row, _ = _item(items, tokens, unit % n, how)
        rest = unit // n
        part = rest % how.UNITS
        first = matrix * N + rest // how.UNITS * how.BN
        for step in range(part * how.STEPS // how.UNITS, (part + 1) * how.STEPS // how.UNITS):
            mbarrier.wait(stages.free.index(slot), phase)
            bar = stages.full.index(slot)
            mbarrier.expect(bar, BYTES)
            for s in gl.static_range(how.SPAN):
                at = slot * how.SPAN + s
                super = step * how.SPAN + s
                for i in gl.static_range(how.PLANES):
                    tile = stages.codes.index(at * how.PLANES + i)
                    _bring(codes, up_codes, first, (super * how.PLANES + i) * 32, bar, tile, how)
                if how.SCALE_TRANSPOSED:
                    _bring_transposed(scale, up_scale, super * 8, first, bar, stages.scale.index(at), 8, how)
                else:
                    _bring(scale, up_scale, first, super * 8, bar, stages.scale.index(at), how)
                if how.BITS_TRANSPOSED:
                    _bring_transposed(bits, up_bits, super * 8, first, bar, stages.bits.index(at), 8, how)
                elif how.BITS > 0:
                    _bring(bits, up_bits, first, super * (8 * how.BITS), bar, stages.bits.index(at), how)
                if how.TOP:
                    _bring_transposed(top, up_top, super, first, bar, stages.top.index(at), 1, how)
            if how.PDL and how.KNOWN:  # waits once: whatever is ahead is over from then on
                gdc_wait()
            for i in gl.static_range(4 * how.SPAN):
                _copy(x, [row, step * how.SPAN * 256 + i * 64], bar, stages.x.index(slot * how.SPAN * 4 + i))
            slot += 1
            if slot == how.STAGES:
                slot = 0
                phase = phase ^ 1


@gluon.jit
def _consume(
    y, items, tokens, epilogue, N, part_stride, stages, KIND: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    THREE: gl.constexpr, how,
):  # fmt: skip
    """T warps: decodes and multiplies the tile of rows of each stage."""
    T: gl.constexpr = how.T
    BT: gl.constexpr = how.BT
    FORMAT: gl.constexpr = how.FORMAT
    GATED: gl.constexpr = how.GATED
    PLANES: gl.constexpr = how.PLANES
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[T, 1], instr_shape=[16, BT, 16])
    bias, up_bias, down, up_again = epilogue[0], epilogue[1], epilogue[2], epilogue[3]
    IN_TURN: gl.constexpr = how.UNITS < how.PARTS
    if how.PDL:
        gdc_wait()
        if not how.KNOWN:
            # Not before: who is behind the next kernel reads these items without a wait (KNOWN).
            gdc_launch_dependents()
    n = _number(items, tokens, how)
    slot = 0
    phase = 0
    begun = False
    for unit in range(gl.program_id(0), n * (how.TILES * how.UNITS), gl.num_programs(0)):
        matrix, first, count = _item(items, tokens, unit % n, how)
        rest = unit // n
        part = rest % how.UNITS
        begin = part * how.STEPS // how.UNITS
        end = (part + 1) * how.STEPS // how.UNITS
        tile = rest // how.UNITS * how.BN
        acc = warpgroup_mma_init(gl.zeros([how.BM, BT], gl.float32, layout=MMA))
        if IN_TURN:
            total = gl.zeros([how.BM, BT], gl.float32, layout=MMA)
            parts = 0
            border = how.STEPS // how.PARTS
        for step in range(begin, end):
            for s in gl.static_range(how.SPAN):
                place = slot * how.SPAN + s
                if s == 0:
                    mbarrier.wait(stages.full.index(slot), phase)
                if PLANES == 2:
                    q0, q1, r0, r1 = signed_bytes(stages.codes.index(place * 2), T, GATED)
                    q2, q3, r2, r3 = signed_bytes(stages.codes.index(place * 2 + 1), T, GATED)
                else:
                    q0, q1, q2, q3 = nibbles(stages.codes.index(place), T, GATED)
                    r0, r1, r2, r3 = q0, q1, q2, q3
                if how.SCALE_TRANSPOSED:
                    s0, s1 = transposed_entries(stages.scale.index(place), T, GATED, PLANES)
                else:
                    s0, s1 = entries(stages.scale.index(place), T, GATED, PLANES)
                if how.BITS == 2:
                    u0, v0, u1, v1 = double_entries(stages.bits.index(place), T, GATED, PLANES)
                elif how.BITS == 1:
                    if how.BITS_TRANSPOSED:
                        u0, u1 = transposed_entries(stages.bits.index(place), T, GATED, PLANES)
                    else:
                        u0, u1 = entries(stages.bits.index(place), T, GATED, PLANES)
                    v0, v1 = u0, u1
                else:
                    u0, v0, u1, v1 = s0, s0, s1, s1
                t = s0
                if how.TOP:
                    t = transposed_tops(stages.top.index(place), T, GATED, PLANES)
                a, b, c, d = factors(FORMAT, s0, t, down)
                w = decode(FORMAT, 0, q0, r0, a, b, c, d, u0, v0, T, MMA)
                acc = warpgroup_mma_wait(0, deps=[acc])
                if s == 0:
                    # All warps have read the codes of the slot before this one, and products with its x are done.
                    _barrier()
                    mbarrier.arrive(stages.free.index(gl.where(slot == 0, how.STAGES - 1, slot - 1)), count=1, pred=begun)
                    begun = True
                if IN_TURN and s == 0:  # the sum of a part begins with its first product
                    goes_on = step != border
                    if step == border:
                        total += acc
                        parts += 1
                        border = (parts + 1) * how.STEPS // how.PARTS
                    x0 = stages.x.index(place * 4).permute((1, 0))
                    acc = warpgroup_mma(w, x0, acc, use_acc=goes_on, is_async=True)
                else:
                    acc = warpgroup_mma(w, stages.x.index(place * 4).permute((1, 0)), acc, is_async=True)
                w = decode(FORMAT, 1, q1, r1, a, b, c, d, u0, v0, T, MMA)
                acc = warpgroup_mma(w, stages.x.index(place * 4 + 1).permute((1, 0)), acc, is_async=True)
                a, b, c, d = factors(FORMAT, s1, t, down)
                w = decode(FORMAT, 0, q2, r2, a, b, c, d, u1, v1, T, MMA)
                acc = warpgroup_mma_wait(1, deps=[acc])
                acc = warpgroup_mma(w, stages.x.index(place * 4 + 2).permute((1, 0)), acc, is_async=True)
                w = decode(FORMAT, 1, q3, r3, a, b, c, d, u1, v1, T, MMA)
                acc = warpgroup_mma_wait(1, deps=[acc])
                acc = warpgroup_mma(w, stages.x.index(place * 4 + 3).permute((1, 0)), acc, is_async=True)
            slot += 1
            if slot == how.STAGES:
                slot = 0
                phase = phase ^ 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        if IN_TURN:
            acc = total + acc
        acc = acc * up_again
        if GATED:
            gate, value = gl.split(gl.permute(gl.reshape(acc, [T, 2, 8, BT]), (0, 2, 3, 1)))
            gate, value = _plain_rows(gate, T, BT, PLANES), _plain_rows(value, T, BT, PLANES)
            OUT: gl.constexpr = gl.BlockedLayout([2, 1], [4, 8], [T, 1], [0, 1])
            gate, value = gl.convert_layout(gate, OUT), gl.convert_layout(value, OUT)
            i = tile + gl.arange(0, 8 * T, gl.SliceLayout(1, OUT))
            j = gl.arange(0, BT, gl.SliceLayout(0, OUT))
            if BIAS:
                gate += gl.load(bias + matrix * N + i, mask=i < N, other=0.0)[:, None]
                value += gl.load(up_bias + matrix * N + i, mask=i < N, other=0.0)[:, None]
            if KIND == "oai":
                gate = gl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
                value = gl.maximum(value, -7.0, propagate_nan=tl.PropagateNan.ALL)
                value = gl.minimum(value, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
                value = gate / (1.0 + gl.exp(-1.702 * gate)) * value
            else:
                value = _activate(gate, KIND) * value
        else:
            i = tile + row_of(gl.arange(0, how.BM, gl.SliceLayout(1, MMA)), False, T, PLANES)
            j = gl.arange(0, BT, gl.SliceLayout(0, MMA))
            value = acc
            if BIAS:
                value += gl.load(bias + matrix * N + i, mask=i < N, other=0.0)[:, None]
            if KIND == "relu2":
                value = gl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                value = value * value
        if how.LISTED:
            pair = gl.load(items[1] + first + j, mask=j < count, other=0).to(gl.int64)
        else:
            pair = (first + j).to(gl.int64)
        if ADD and BT == 128:  # all at once outgrow the registers
            PART: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[T, 1], instr_shape=[16, 32, 16])
            i = tile + row_of(gl.arange(0, how.BM, gl.SliceLayout(1, PART)), False, T, PLANES)
            j = first + gl.arange(0, 32, gl.SliceLayout(0, PART))
            near, far = gl.split(gl.permute(gl.reshape(value, [how.BM, 2, 64]), (0, 2, 1)))
            first_part, second_part = gl.split(gl.permute(gl.reshape(near, [how.BM, 2, 32]), (0, 2, 1)))
            third_part, fourth_part = gl.split(gl.permute(gl.reshape(far, [how.BM, 2, 32]), (0, 2, 1)))
            _add(y, epilogue, gl.convert_layout(first_part, PART), j, i, tokens, N)
            _add(y, epilogue, gl.convert_layout(second_part, PART), j + 32, i, tokens, N)
            _add(y, epilogue, gl.convert_layout(third_part, PART), j + 64, i, tokens, N)
            _add(y, epilogue, gl.convert_layout(fourth_part, PART), j + 96, i, tokens, N)
        elif ADD:
            _add(y, epilogue, value, first + j, i, tokens, N)
        elif THREE:
            out, width, before = _one_of_three(y, epilogue, tile)
            p = out + pair[None, :] * width + (i - before)[:, None]
            gl.store(p, value.to(y.dtype.element_ty), mask=(j < count)[None, :] & (i < N)[:, None])
        else:
            p = y + part * part_stride + pair[None, :] * N + i[:, None]
            gl.store(p, value.to(y.dtype.element_ty), mask=(j < count)[None, :] & (i < N)[:, None])


@gluon.jit
def _add(y, epilogue, value, row, column, tokens, N):
    """y = residual + alpha * value in rows of y and columns, of fewer than 2^31 values: addresses of 64 bits spill."""
    at = row[None, :] * N + column[:, None]
    there = (row < tokens)[None, :] & (column < N)[:, None]
    value = gl.load(epilogue[4] + at, mask=there, other=0.0).to(gl.float32) + epilogue[5] * value
    gl.store(y + at, value.to(y.dtype.element_ty), mask=there)


@gluon.jit
def _one_of_three(y, epilogue, row):
    """Which of three results this row of their matrix belongs to: where it is, its columns, and the rows before it."""
    first = epilogue[6]
    both = first + epilogue[7]
    second = row >= first
    third = row >= both
    out = gl.where(third, epilogue[5], gl.where(second, epilogue[4], y))
    width = gl.where(third, epilogue[8], gl.where(second, epilogue[7], first))
    before = gl.where(third, both, gl.where(second, first, 0))
    return out, width, before


@gluon.jit
def _plain_rows(v, T: gl.constexpr, BT: gl.constexpr, PLANES: gl.constexpr):
    """`[T, 8, BT]` in the order of the product's rows to `[8 T, BT]` in that of the tile's."""
    if PLANES == 1:
        v = gl.permute(gl.reshape(v, [T, 4, 2, BT]), (0, 2, 1, 3))
    return gl.reshape(v, [8 * T, BT])


@gluon.jit(do_not_specialize=["part_stride", "tokens"])
def ring(
    y, codes, up_codes, scale, up_scale, bits, up_bits, top, up_top, x, items, epilogue, N, part_stride, tokens,
    K: gl.constexpr, PARTS: gl.constexpr, SCALE_TRANSPOSED: gl.constexpr, BITS_TRANSPOSED: gl.constexpr,
    FORMAT: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, BIAS: gl.constexpr, BT: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, T: gl.constexpr, LISTED: gl.constexpr, PDL: gl.constexpr,
    SPAN: gl.constexpr = 1, IN_TURN: gl.constexpr = False, ADD: gl.constexpr = False, THREE: gl.constexpr = False,
    KNOWN: gl.constexpr = False, LIKELY: gl.constexpr = 0,
):  # fmt: skip
    """y `[pairs, N]` = activation(x W^T + bias) for the pairs of `items`, or sums of parts of K `[PARTS, pairs, N]`.

    codes, up_codes: TMA descriptors of codes, int32 `[matrices * N, K / 8]` (`K / 4` for codes of 8 bits), boxes of
        `[8 T or 16 T, 32]` (half as many rows where gate and up share a tile); up_*: the same of the up matrix.
    scale: a descriptor of int16 `[matrices * N, K / 32]`, boxes of as many rows and 8 columns. SCALE_TRANSPOSED: of
        int16 or uint8 `[K / 32, matrices * N]`, boxes of 8 rows and as many columns.
    bits: a descriptor of int32 `[matrices * N, b K / 32]` with b words of upper bits to a block, boxes of 8 b columns; not
        read where there are none. BITS_TRANSPOSED: likewise.
    top: a descriptor of int32 `[K / 256, matrices * N]`, d, or d and dmin in float16, boxes of one row; not read where
        there are none.
    x: a descriptor of float16 `[rows, columns]`, boxes of `[BT, 64]`; columns as `elementwise/ring_x.py` orders them,
        and zero from K up to a multiple of 256.
    items: int32, their number and then four each: matrix, first row of x, rows, unused; and the pair (the row of y) of
        each row of x, int32. Not read unless LISTED: else there is one matrix, whose rows of x are those of y. KNOWN: a
        launch of this kernel before the kernel ahead read the same items, and let nobody behind it begin before they were
        there; so weights need not wait. LIKELY: else, of how many matrices most have an item, or 0.
    epilogue: biases float32 `[matrices, N]` of the matrix and of the up matrix, 2^-shift and 2^shift; then, if ADD, a
        residual `[rows, N]` and alpha: y = residual + alpha * (x W^T + bias); if THREE, the second and the third result of
        three maps in one matrix, of which y is the first, and the rows of each, multiples of a tile.
    IN_TURN: parts of K are one unit, whose sums are added in order as `ring_sums.add_parts` adds them: the same bits.
    part_stride: values from one part's sums to the next. tokens: rows of x, unless LISTED.
    Grid: any number of programs.
    """
    how = Tiling(
        FORMAT, SCALE_TRANSPOSED, BITS_TRANSPOSED, GATED, K, SPAN, PARTS, IN_TURN, TILES, BT, STAGES, T, PDL, LISTED, KNOWN,
        LIKELY,
    )  # fmt: skip
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    s_codes = gl.allocate_shared_memory(gl.int32, [STAGES * SPAN * how.PLANES, 16 * T, 32], codes.layout)
    s_x = gl.allocate_shared_memory(gl.float16, [STAGES * SPAN * 4, BT, 64], X)
    A: gl.constexpr = 2 if GATED else 1  # transposed tiles: gate above up
    if SCALE_TRANSPOSED:
        s_scale = gl.allocate_shared_memory(scale.dtype, [STAGES * SPAN, 8 * A, 16 * T // A], scale.layout)
    else:
        s_scale = gl.allocate_shared_memory(gl.int16, [STAGES * SPAN, 16 * T, 8], scale.layout)
    s_bits = s_codes
    if BITS_TRANSPOSED:
        s_bits = gl.allocate_shared_memory(gl.int32, [STAGES * SPAN, 8 * A, 16 * T // A], bits.layout)
    elif how.BITS > 0:
        s_bits = gl.allocate_shared_memory(gl.int32, [STAGES * SPAN, 16 * T, 8 * how.BITS], bits.layout)
    s_top = s_codes
    if how.TOP:
        s_top = gl.allocate_shared_memory(gl.int32, [STAGES * SPAN, A, 16 * T // A], top.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    warm = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(warm.index(0), count=1)
    if PDL and how.KNOWN:
        gdc_launch_dependents()
    stages = Stages(s_codes, s_scale, s_bits, s_top, s_x, full, free, warm)
    gl.warp_specialize(
        [
            (_consume, (y, items, tokens, epilogue, N, part_stride, stages, KIND, BIAS, ADD, THREE, how)),
            (_produce, (
                codes, up_codes, scale, up_scale, bits, up_bits, top, up_top, x, items, tokens, N, stages, how,
            )),
        ],
        [1], [24],
    )  # fmt: skip
