"""Rows by index: token embeddings decoded out of packed weights, and the rows whose results are wanted."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.contract import Value
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, PUT_ROWS, EmbeddingSpec, GatherRowsSpec, PutRowsSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.formats.exact import decode_blocks
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_BLOCKS = 16  # blocks of 32 columns to a program: 512 values, few enough that one token still spreads over the chip
_ROWS = 4
_COLUMNS = 512


@triton.jit(do_not_specialize=["tokens"])
def embed(
    y, ids, from_last, last, w, tokens, alpha, K,
    LAST: tl.constexpr, FORMAT: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    ok = token < tokens
    row = tl.load(ids + token, mask=ok, other=0)
    if LAST:
        # The token that the launch before drew, if this id is one; where nothing could be drawn it is -1.
        before = tl.load(from_last + token, mask=ok, other=-1)
        drawn = tl.maximum(tl.load(last + tl.maximum(before, 0), mask=ok, other=0), 0)
        row = tl.where(before >= 0, drawn, row)
    row = row.to(tl.int64)
    block = tl.program_id(1) * NB + tl.arange(0, NB)
    low, high = decode_blocks(FORMAT, w, row, block, ok, K)  # [R, NB, 16]
    column = (block * 32)[None, :, None] + tl.arange(0, 16)[None, None, :]
    p_y = y + token[:, None, None] * K + column
    tl.store(p_y, low * alpha, mask=ok[:, None, None] & (column < K))
    tl.store(p_y + 16, high * alpha, mask=ok[:, None, None] & (column + 16 < K))


@triton.jit
def gather(y, x, rows, K, WIDTH, C: tl.constexpr, MEAN: tl.constexpr, PDL: tl.constexpr):
    """WIDTH values of x `[.., K]` from a row on, or the mean of MEAN rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    target = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + target).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    value = tl.load(x + source * K + column, mask=column < WIDTH, other=0.0)
    if MEAN:
        for row in range(1, MEAN):
            value += tl.load(x + (source + row) * K + column, mask=column < WIDTH, other=0.0)
        value = value * (1.0 / MEAN)
    tl.store(y + target * WIDTH + column, value, mask=column < WIDTH)


@triton.jit
def put(y, x, rows, source, K, WIDTH, START, C: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    """y[t] = x[t], and in its place or added to it columns START to START + K of row rows[t] of `source` `[.., WIDTH]`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    column = tl.program_id(1) * C + tl.arange(0, C)
    ok = column < K
    value = tl.load(x + token * K + column, mask=ok, other=0.0)
    there = column < tl.where(row >= 0, K, 0)
    new = tl.load(source + row * WIDTH + START + column, mask=there, other=0.0)
    value = tl.where(there, value + new if ADD else new, value)
    tl.store(y + token * K + column, value, mask=ok)


def build_embedding(site: Site, node: Node) -> Launch:
    """EMBEDDING: ids `[T]` int32 below n, y `[T, k]` float32."""
    spec: EmbeddingSpec = node.spec
    ids, ref = node.inputs
    source, target = site.slot(ids), site.slot(node.outputs[0])  # type: ignore[arg-type]
    weight = site.weight(ref)  # type: ignore[arg-type]
    # Only the step's own ids are replaced by tokens that are still on the device.
    continues = isinstance(ids, Value) and ids.name == "ids" and site.tables.from_last is not None

    def run(batch: Batch) -> None:
        from_last, last = (site.tables.from_last, site.tables.last) if continues else (source, source)
        assert from_last is not None
        assert last is not None
        site.launch(
            embed, (cdiv(batch.T, _ROWS), cdiv(spec.k, _BLOCKS * 32)),
            target.tensor, source.tensor, from_last.tensor, last.tensor, weight.planes, batch.T, spec.scale, spec.k,
            LAST=continues, FORMAT=weight.format, R=_ROWS, NB=_BLOCKS, early=starts_early(site),
        )  # fmt: skip

    return run


def build_gather_rows(site: Site, node: Node) -> Launch:
    """GATHER_ROWS: x `[T, k]` float32, rows `[R]` int32 below T."""
    x, rows = node.inputs
    source, index, target = site.slot(x), site.slot(rows), site.slot(node.outputs[0])  # type: ignore[arg-type]
    spec: GatherRowsSpec = node.spec

    def run(batch: Batch) -> None:
        site.launch(
            gather, (batch.R, cdiv(spec.width, _COLUMNS)), target.tensor, source.tensor, index.tensor, spec.k, spec.width,
            C=_COLUMNS, MEAN=spec.n if spec.mean else 0, early=starts_early(site),
        )  # fmt: skip

    return run


def build_put_rows(site: Site, node: Node) -> Launch:
    """PUT_ROWS: x `[T, k]` float32, rows `[T]` int32, source `[.., width]` float32."""
    x, index, source, target = (site.slot(v) for v in (*node.inputs, *node.outputs))  # type: ignore[arg-type]
    spec: PutRowsSpec = node.spec

    def run(batch: Batch) -> None:
        site.launch(
            put, (batch.T, cdiv(spec.k, _COLUMNS)), target.tensor, x.tensor, index.tensor, source.tensor, spec.k,
            spec.width, spec.start, C=_COLUMNS, ADD=spec.add, early=starts_early(site),
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (
    Implementation(EMBEDDING, "decoded rows", build_embedding),
    Implementation(GATHER_ROWS, "rows", build_gather_rows),
    Implementation(PUT_ROWS, "rows", build_put_rows),
)
