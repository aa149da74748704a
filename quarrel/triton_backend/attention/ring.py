"""Decode by a ring of TMA copies (`ring_kernels.py`): who may take it, its descriptors and its launches.

It takes the splits of `splits.py`, as `attend_one` does, and a second launch joins them where there are any, so nothing on
the host depends on how many keys a sequence has: a captured step serves all lengths of its bucket.

It serves 5 to 16 sequences, and up to 8 behind many keys. A step of 12 layers of Mistral-7B on an H200, us (2026-11-29):

| | 8 x 128 | 8 x 640 | 8 x 4000 | 16 x 128 | 16 x 640 | 32 x 128 | 32 x 2000 | 64 x 2000 | 128 x 128 | 128 x 640 |
|---|---|---|---|---|---|---|---|---|---|---|
| `attend_one`, `attend_warps` | 818 | 1080 | 1983 | 923 | 1279 | 1112 | 2009 | 3094 | 2052 | 2842 |
| this one | 795 | 1010 | 1324 | 903 | 1123 | 1120 | 2073 | 3361 | 2320 | 3033 |

A layer of Mistral-7B on an H200 behind 32,000 keys: 1 sequence 32.1 us for 47.7 in int8, 31.3 for 50.8 in fp8, 42.0 for
41.2 in 16 bits; 8 sequences 174 for 356, 167 for 388, 259 for 337.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Array
from quarrel.ops.program import Node
from quarrel.triton_backend.attention.decode import combine
from quarrel.triton_backend.attention.records import Keys, Ring, Shape
from quarrel.triton_backend.attention.splits import MANY_SEQS, MOST_SPLITS, SEVERAL_SEQS, STEP
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import DTYPES, Cache
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

try:  # Gluon is no stable interface: without the names of Triton 3.6 to 3.9 other kernels run
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quarrel.triton_backend.attention import ring_kernels as kernels
    from quarrel.triton_backend.attention.ring_form import chunks_of, meeting_rows
except (ImportError, AttributeError):  # pragma: no cover
    kernels = None  # type: ignore[assignment]

DIMS = (64, 128)
MOST_GROUP = 16
MOST_ROWS = 1 << 30
"""Rows of a cache, `blocks * n_kv * block_size`: the number of a row that no cache has."""
DEEP, MOST_SEQS = 16384, 8
"""Keys of each sequence from which a step of up to so many gains.

On an H200, times as fast as the kernels before in int8 / fp8 / 16 bits: one sequence behind 16,384 keys 1.05 / 1.15 / 0.89,
behind 32,000 1.49 / 1.63 / 0.98; two 1.37 / 1.52 / 1.03 and 1.81 / 1.98 / 1.11; eight 1.64 / 1.88 / 1.40 and 2.05 / 2.33 /
1.30. On an H100 one sequence behind 8192 keys 0.75 / 0.80 / 0.85; 32 and 128 sequences never gain.
"""
_SHARED = 113 << 10
"""Of one of two programs to a multiprocessor, which has 228 KB and keeps 1 KB of each."""
_MOST_STAGES = 6
_WARPS, _KEYS = 4, 16
"""A warpgroup of consumers, as registers are moved between whole ones; a step of the second product to a warp."""
_REGISTERS = 128
"""For each thread of both warpgroups, so that two programs fit; the producers' go to the consumers."""


def declines(site: Site, spec: AttentionSpec, cache: Cache) -> str | None:
    """Why a layer is not for it, or None."""
    if kernels is None or INTERPRETED or site.generation != 9:
        return "needs compute capability 9"
    if site.deterministic:
        return "its splits follow from a length, and a step is deterministic"
    if site.compute == "float32":
        return "needs arithmetic of 16 bits, got float32"
    if spec.head_dim not in DIMS:
        return f"needs head_dim {' or '.join(map(str, DIMS))}, got {spec.head_dim}"
    if spec.n_heads // spec.n_kv > MOST_GROUP:
        return f"needs up to {MOST_GROUP} query heads a key head, got {spec.n_heads // spec.n_kv}"
    size = cache.block_size
    if size & (size - 1) or size < 8:
        return f"needs blocks of a power of two of 8 keys or more, got {size}"
    if cache.kind != "plain" and size < STEP:
        # A copy lands at a multiple of 128 bytes, and the scales of a block follow those of the block before it.
        return f"needs blocks of {STEP} keys or more in {cache.kind}, got {size}"
    if cache.kind == "plain" and cache.k.dtype != DTYPES[site.compute]:
        return f"needs a cache in {site.compute}, got {cache.k.dtype}"
    rows = cache.k.numel() // spec.head_dim
    return None if rows <= MOST_ROWS else f"needs a cache of up to {MOST_ROWS} rows, got {rows}"


def _all_see(spec: AttentionSpec) -> bool:
    """Whether queries see as many keys as it takes."""
    return not 0 < spec.window < DEEP


def serves(batch: Batch, spec: AttentionSpec, kind: str) -> bool:
    """Whether a layer of this step, over a cache of this kind, is for it."""
    if SEVERAL_SEQS <= batch.S < MANY_SEQS and (kind == "plain" or batch.items > 4 * batch.S):
        return True
    return batch.deep and _all_see(spec)


def deep_sequences(site: Site, nodes: Sequence[Node]) -> range:
    """How many sequences a step may have to be `deep`: none without a layer for it among these of ATTENTION."""
    caches = [(node.spec, site.cache(node.inputs[4])) for node in nodes]  # type: ignore[arg-type]
    kinds = {cache.kind for spec, cache in caches if _all_see(spec) and declines(site, spec, cache) is None}
    if not kinds:
        return range(0)
    return range(2 if kinds == {"plain"} else 1, MOST_SEQS + 1)


def is_deep(kv_len: Array, sequences: range) -> bool:
    """Whether each sequence of a step has as many keys as it takes, if they are as many as `deep_sequences` says."""
    count = len(kv_len)
    return count in sequences and int(kv_len.min()) >= DEEP


def form(dim: int, group: int, bits: int, codes: bool) -> Ring:
    """As many stages as fit beside the queries and the barriers."""
    stage = 2 * _WARPS * _KEYS * (dim * bits // 8 + (4 if codes else 0))
    met = 4 * _WARPS * meeting_rows(group) * (dim // chunks_of(dim, bits))
    return Ring(_WARPS, _KEYS, min(_MOST_STAGES, (_SHARED - 2 * 16 * dim - 1024 - met) // stage))


class RingLaunch:
    """Launches over one layer's cache."""

    def __init__(self, site: Site, cache: Cache, shape: Shape) -> None:
        self._site, self._shape = site, shape
        group = shape.HEADS // shape.KV_HEADS
        self._ring = form(shape.DIM, group, cache.k.element_size() * 8, cache.kind != "plain")
        self._programs = 2 * multiprocessors(cache.k.device)
        self._copies = copies_of(Keys(cache.k, cache.v, *cache.both_scales), shape)
        # A program a query head.
        self._each = shape._replace(KV_HEADS=shape.HEADS, SHARE=1)

    def __call__(self, batch: Batch, given: dict[str, Any], output: Any, sinks: torch.Tensor, form: str) -> None:
        """`given` are the arguments that `attend_one` has too."""
        site, shape, early = self._site, self._shape, starts_early(self._site)
        site.launch(
            kernels.attend_ring, (min(self._programs, batch.items * shape.KV_HEADS),), out=output.plain, sinks=sinks,
            items=batch.items, **given, **self._copies, S=shape, R=self._ring, warps=self._ring.W, early=early,
            maxnreg=_REGISTERS,
        )  # fmt: skip
        if not batch.splits:
            return
        site.launch(
            join_splits, (batch.S, shape.HEADS), output=output, partial=given["partial"], sinks=sinks,
            sequences=given["sequences"], item_start=given["item_start"], S=self._each,
            AT_ONCE=min(MOST_SPLITS, 8192 // shape.WIDE), FORM=form, warps=8, early=early,
        )  # fmt: skip


def copies_of(cache: Keys, shape: Shape) -> dict[str, Any]:
    """Descriptors of keys and values, and of their scales, as `attend_ring` has them."""
    bits = cache.k.element_size() * 8
    box, columns = min(shape.SIZE, STEP), min(shape.DIM, 1024 // bits)
    layout = gl.NVMMASharedLayout(columns * bits // 8, bits, 2)
    k, v = (TensorDescriptor.from_tensor(x.view(-1, shape.DIM), [box, columns], layout) for x in (cache.k, cache.v))
    copies = {"k_copy": k, "v_copy": v, "k_scale_copy": k, "v_scale_copy": v}
    if shape.KIND != "plain":
        layout = gl.NVMMASharedLayout(0, 32, 2)
        for name, x in (("k_scale_copy", cache.k_scale), ("v_scale_copy", cache.v_scale)):
            copies[name] = TensorDescriptor.from_tensor(x.view(-1, box), [1, box], layout)
    return copies


@triton.jit
def join_splits(
    output, partial, sinks, sequences, item_start, S: tl.constexpr, AT_ONCE: tl.constexpr, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Adds the splits that `attend_ring` left, in order. Grid (sequences, n_kv); arguments as those of `attend_one`."""
    seq = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if splits <= 1:  # more new tokens than one, or all is done
        return
    p_out = output.plain + token * S.HEADS * S.DIM
    first = tl.program_id(1) * (S.HEADS // S.KV_HEADS)
    combine(p_out, output.int8x2, partial, sinks, first_item, splits, first, S, AT_ONCE, 1, FORM)
