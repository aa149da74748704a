"""Rows of several residual streams (`ops/streams.py`), float32.

A program of `mix` owns BLOCK columns of a row in all its streams, so that each value is read once; one of `match` owns a
row, which it walks twice, for the sums and to write. Both are bound by the bytes that they move.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.streams import MATCH_STREAMS, MIX_STREAMS, PICK_STREAMS, MatchSpec, MixSpec, PickSpec
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims

BLOCK = 256


@triton.jit
def pick_rows(y, x, gain, N, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, COUNT, N / BLOCK)."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * WIDTH + (FIRST + stream) * N + at, mask=at < N, other=0.0)
    value *= tl.load(gain + at, mask=at < N, other=0.0)
    tl.store(y + (row * COUNT + stream) * N + at, value, mask=at < N)


@triton.jit
def mix_rows(
    y, base, x, coefs, N, offset, STREAMS: tl.constexpr, INPUTS: tl.constexpr, COEFS: tl.constexpr, FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for j in tl.static_range(STREAMS):
        to = (row * STREAMS + j) * N + at
        value = tl.load(base + to, mask=at < N, other=0.0)
        if j >= FIRST:
            for i in tl.static_range(INPUTS):
                factor = offset
                if COEFS:
                    factor += tl.load(coefs + (row * STREAMS + j) * INPUTS + i)
                value += factor * tl.load(x + (row * INPUTS + i) * N + at, mask=at < N, other=0.0)
        tl.store(y + to, value, mask=at < N)


@triton.jit
def match_rows(y, ref, x, N, least, STREAMS: tl.constexpr, MEAN: tl.constexpr, C: tl.constexpr):
    """A program a row; C columns at a time."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C)
    p_ref, p_x = ref + row * N, x + row * (STREAMS - 1) * N
    p_y = y + row * N * (1 if MEAN else STREAMS)
    power = tl.zeros([C], tl.float32)
    for start in range(0, N, C):
        at = start + column
        value = tl.load(p_ref + at, mask=at < N, other=0.0)
        power += value * value
    target = tl.sum(power, 0)
    for start in range(0, N, C):
        at = start + column
        value = tl.load(p_ref + at, mask=at < N, other=0.0)
        tl.store(p_y + at, value / STREAMS if MEAN else value, mask=at < N)
    for j in tl.static_range(STREAMS - 1):
        power = tl.zeros([C], tl.float32)
        for start in range(0, N, C):
            at = start + column
            value = tl.load(p_x + j * N + at, mask=at < N, other=0.0).to(tl.float32)
            power += value * value
        own = tl.sum(power, 0)
        scale = tl.sqrt(target / tl.where(own < least * N, least * N, own))  # a NaN stays one
        for start in range(0, N, C):
            at = start + column
            value = tl.load(p_x + j * N + at, mask=at < N, other=0.0).to(tl.float32) * scale
            if MEAN:
                # The same thread wrote it.
                tl.store(p_y + at, tl.load(p_y + at, mask=at < N, other=0.0) + value / STREAMS, mask=at < N)
            else:
                tl.store(p_y + (j + 1) * N + at, value, mask=at < N)


def build_pick(site: Site, node: Node) -> Launch:
    """PICK_STREAMS: x `[T, streams * n]`, gain `[n]` float32."""
    spec: PickSpec = node.spec
    x, y = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    gain = site.vector(node.inputs[1])  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        site.launch(
            pick_rows, (batch.count(axis), spec.count, cdiv(spec.n, BLOCK)), y.tensor, x.tensor, gain, spec.n,
            WIDTH=spec.width, FIRST=spec.first, COUNT=spec.count, BLOCK=BLOCK,
        )  # fmt: skip

    return run


def build_mix(site: Site, node: Node) -> Launch:
    """MIX_STREAMS: base `[T, streams * n]`, x `[T, inputs * n]`, coefs `[T, streams * inputs]`."""
    spec: MixSpec = node.spec
    base, x, coefs = (site.slot(v) for v in (*node.inputs, node.inputs[0])[:3])  # type: ignore[arg-type]
    y = site.slot(node.outputs[0])
    axis, _ = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        site.launch(
            mix_rows, (batch.count(axis), cdiv(spec.n, BLOCK)), y.tensor, base.tensor, x.tensor, coefs.tensor, spec.n,
            spec.offset, STREAMS=spec.streams, INPUTS=spec.inputs, COEFS=spec.coefs, FIRST=spec.first, BLOCK=BLOCK,
        )  # fmt: skip

    return run


def build_match(site: Site, node: Node) -> Launch:
    """MATCH_STREAMS: ref `[T, n]` float32, x `[T, (streams - 1) * n]`."""
    spec: MatchSpec = node.spec
    ref, x = (site.slot(v) for v in node.inputs)  # type: ignore[arg-type]
    y = site.slot(node.outputs[0])
    axis, _ = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        site.launch(
            match_rows, (batch.count(axis),), y.tensor, ref.tensor, x.tensor, spec.n, spec.least, STREAMS=spec.streams,
            MEAN=spec.mean, C=min(power_of_two(spec.n), 2048),
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (
    Implementation(PICK_STREAMS, "rows", build_pick),
    Implementation(MIX_STREAMS, "all streams at once", build_mix),
    Implementation(MATCH_STREAMS, "rows", build_match),
)
