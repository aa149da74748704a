"""The log probabilities of drawn tokens and of the best of their rows, by the contract of ops/logprobs.py.

Two launches: each of P chunks of a row lists its own best and sums exp(logit - its highest) in float64; one program a row
lists the best of the lists and puts the sums together. A key holds the rank of a logit (sample.py) above what its id lacks
of the largest, so that no two are equal, and of equal logits the lowest id is the best. A list is `TOP` maxima, each taken
out when it is found. A row's result has the same bits in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.ops.logprobs import LOGPROBS
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early
from quarrel.triton_backend.sampling.sample import finite, rank

_CHUNK = 4096
_LAST_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def list_chunks(keys, tops, sums, logits, N, P: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = finite(tl.load(logits + row * N + i, mask=i < N, other=float("-inf")))
    top = tl.max(x, 0)
    base = tl.where(top > float("-inf"), top, 0.0).to(tl.float64)
    tl.store(tops + row * P + chunk, top)
    tl.store(sums + row * P + chunk, tl.sum(tl.exp(x.to(tl.float64) - base), 0))
    # Padded lanes can never win: 0 is no token's key, not even that of minus infinity.
    key = tl.where(i < N, (rank(x) << 31) + _LAST_ID - i, 0)
    for j in range(TOP):
        best = tl.max(key, 0)
        tl.store(keys + (row * P + chunk) * TOP + j, best)
        key = tl.where(key == best, 0, key)


@triton.jit
def tell(
    logprobs, best, keys, tops, sums, logits, tokens, N,
    P: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * N
    logprobs += row * (TOP + 1)
    best += row * TOP
    token = tl.load(tokens + row)
    if token < 0:
        tl.store(logprobs, float("-inf"))
        for j in range(TOP):
            tl.store(logprobs + 1 + j, float("-inf"))
            tl.store(best + j, 0)
        return
    c = tl.arange(0, PADDED)
    highest = tl.load(tops + row * P + c, mask=c < P, other=float("-inf")).to(tl.float64)
    top = tl.max(highest, 0)
    parts = tl.load(sums + row * P + c, mask=c < P, other=0.0)
    total = top + tl.log(tl.sum(parts * tl.exp(highest - top), 0))
    tl.store(logprobs, (finite(tl.load(logits + token)).to(tl.float64) - total).to(tl.float32))
    k = tl.arange(0, KEYS)
    key = tl.load(keys + row * P * TOP + k, mask=k < P * TOP, other=0)
    for j in range(TOP):
        found = tl.max(key, 0)
        id = (found & _LAST_ID) ^ _LAST_ID
        tl.store(best + j, id.to(tl.int32))
        tl.store(logprobs + 1 + j, (finite(tl.load(logits + id)).to(tl.float64) - total).to(tl.float32))
        key = tl.where(key == found, 0, key)


def build_logprobs(site: Site, node: Node) -> Launch:
    """LOGPROBS: logits `[R, n]` float32 and tokens `[R]` int32 to log probabilities `[R, 1 + top]` and ids `[R, top]`."""
    logits, tokens = (site.slot(i) for i in node.inputs)  # type: ignore[arg-type]
    logprobs, best = (site.slot(o) for o in node.outputs)
    n, top = node.spec.n, node.spec.top
    axis = node.outputs[0].dims[0]
    assert isinstance(axis, str)
    chunks = cdiv(n, _CHUNK)
    tops = site.scratch(axis, chunks)
    sums, keys = site.scratch(axis, chunks, torch.float64), site.scratch(axis, chunks * top, torch.int64)

    def run(batch: Batch) -> None:
        rows, early = batch.count(axis), starts_early(site)
        lists = (keys.tensor, tops.tensor, sums.tensor)
        site.launch(
            list_chunks, (rows, chunks), *lists, logits.tensor, n, P=chunks, CHUNK=_CHUNK, TOP=top, warps=8, early=early
        )
        site.launch(
            tell, (rows,), logprobs.tensor, best.tensor, *lists, logits.tensor, tokens.tensor, n,
            P=chunks, PADDED=power_of_two(chunks), KEYS=power_of_two(chunks * top), TOP=top, early=early,
        )  # fmt: skip

    return run


IMPLEMENTATIONS = (Implementation(LOGPROBS, "lists of chunks", build_logprobs),)
