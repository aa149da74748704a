"""Logits with biases and penalties, by the contract of ops/adjust.py: each program changes and copies a part of a row.

A program compares its ids with every entry of the row's list that falls among them: of the 64 of a usual list two or three.
A step in which no row has a list launches nothing: what is drawn from then are the logits themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.adjust import ADJUST, MOST
from quarrel.ops.contract import Value
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_CHUNK = 2048
_MOST: tl.constexpr = tl.constexpr(MOST)


@triton.jit
def adjust_rows(
    adjusted, logits, ids, from_last, last, rows, list_end, list_ids, list_counts, list_biases,
    repetition, presence, frequency, mask_row, masks, N, WORDS, LAST: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    low = tl.program_id(1) * CHUNK
    i = low + tl.arange(0, CHUNK)
    x = tl.load(logits + row * N + i, mask=i < N, other=0.0)
    x = tl.where(tl.abs(x) == float("inf"), float("-inf"), x)
    token = tl.load(rows + row)
    own = tl.load(ids + token)
    if LAST:
        # As the embedding reads it: the token that the launch before drew, if this id is one.
        before = tl.load(from_last + token)
        drawn = tl.maximum(tl.load(last + tl.maximum(before, 0)), 0)
        own = tl.where(before >= 0, drawn, own)
    counts = (i == own).to(tl.float32)
    bias = tl.zeros([CHUNK], tl.float32)
    first = tl.load(list_end + row - 1, mask=row > 0, other=0)
    for entry in range(first, tl.load(list_end + row)):
        id = tl.load(list_ids + entry)
        if (id >= low) & (id < low + CHUNK):
            counts += tl.where(i == id, tl.load(list_counts + entry), 0.0)
            bias += tl.where(i == id, tl.load(list_biases + entry), 0.0)
    x += bias
    rate = tl.load(repetition + row)
    less = tl.where(x > 0.0, tl.math.div_rn(x, tl.zeros([CHUNK], tl.float32) + rate), x * rate)
    less = tl.where(less > _MOST, _MOST, less)  # a NaN stays one
    less = less - counts * tl.load(frequency + row) - tl.load(presence + row)
    x = tl.where(counts > 0.0, less, x)
    chosen = tl.zeros([CHUNK], tl.int64) + tl.load(mask_row + row)
    words = tl.load(masks + chosen * WORDS + i // 32, mask=(i < N) & (chosen >= 0), other=-1)
    x = tl.where((((words >> (i % 32)) & 1) != 0) | (x != x), x, float("-inf"))
    tl.store(adjusted + row * N + i, x, mask=i < N)


def build_adjust(site: Site, node: Node) -> Launch:
    """ADJUST: logits `[R, n]` float32, ids `[T]`, rows `[R]`, and the lists, to logits `[R, n]`."""
    logits, ids, *lists = (site.slot(v) for v in node.inputs)  # type: ignore[arg-type]
    target, n = site.slot(node.outputs[0]), node.spec.n
    source = node.inputs[1]
    continues = isinstance(source, Value) and source.name == "ids" and site.tables.from_last is not None
    own = target.tensor

    def run(batch: Batch) -> None:
        nonlocal own
        if target.tensor is not logits.tensor:
            own = target.tensor  # buffers may have grown
        target.tensor = own if batch.adjusts else logits.tensor
        if not batch.adjusts:
            return
        from_last, last = (site.tables.from_last, site.tables.last) if continues else (ids, ids)
        assert from_last is not None
        assert last is not None
        site.launch(
            adjust_rows, (batch.R, cdiv(n, _CHUNK)),
            own, logits.tensor, ids.tensor, from_last.tensor, last.tensor, *(each.tensor for each in lists), n,
            node.spec.words, LAST=continues, CHUNK=_CHUNK, early=starts_early(site),
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(ADJUST, "parts of rows", build_adjust),)
