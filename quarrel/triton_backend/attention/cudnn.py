"""Attention of whole prompts by cuDNN, through PyTorch's `scaled_dot_product_attention`, beside `attention.py`'s kernels.

It takes sequences whose keys are all of this step, LEAST tokens or more, where every sequence with more than one new token
is such a one: what is causal for cuDNN begins with the first key. Keys and values come out of the cache's blocks in one
launch. cuDNN makes a plan for each length that it has not met, so lengths are rounded up to ROUND; keys that are added lie
behind every real query. On a CPU, which the interpreter has, PyTorch's own attention stands in for cuDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Array, WeightRef
from quarrel.ops.embedding import EMBEDDING
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.ops.step import AttentionChoice
from quarrel.triton_backend.runtime.arrays import DTYPES
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Prompt, Site

LEAST = 2048
"""Tokens from which cuDNN is faster, copies of keys, values and results included, and a step is long enough for the host to
launch them: on an H200, a layer of Mistral-7B takes 103 us where ours take 129; 295 and 409 for 4096 tokens, 41 and 45 for
1024. Steps of 2048 tokens, a prompt's first alone, gain 1 % at most, and a new length costs 60 ms: by request only."""
LEAST_UNASKED = 4096
"""As many as a whole step has: one length, so the 60 ms are paid once, and 3.6 % are gained."""
FROM: dict[AttentionChoice, int] = {"own": 0, "auto": LEAST_UNASKED, "cudnn": LEAST}
"""Tokens of a prompt from which it is cuDNN's, by the limits' choice; 0 for never."""
ROUND = 256
LEAST_VALUES = 6 << 20
"""Of weights that a node of the program multiplies a token with, on average, from which `auto` takes it. No graph holds a
step with cuDNN, and the host needs some two launches of 40 us a node, in which the device multiplies 4096 rows with so many
values: 2.5 million in Granite-4-h-tiny, where four of 40 layers attend, 7 in TinyLlama, 36 in Mistral-7B."""
MAX_HEAD_DIM = 128
_TILE = 4096  # values of a head's rows to a program
_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@triton.jit(do_not_specialize=["seq", "tokens", "rows"])
def attend_gather(
    to, keys, values, table, table_width, seq, tokens, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A sequence's keys and values out of the cache: `to` [2, HEADS, rows, DIM], zeros from `tokens` on."""
    token = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    block = tl.load(p_table + token // SIZE, mask=token < tokens, other=0).to(tl.int64)
    d = tl.arange(0, WIDE)[None, :]
    source = ((block * HEADS + head) * SIZE + token % SIZE)[:, None] * DIM + d
    target = (head.to(tl.int64) * rows + token)[:, None] * DIM + d
    there = (token < tokens)[:, None] & (d < DIM)
    mask = (token < rows)[:, None] & (d < DIM)
    tl.store(to + target, tl.load(keys + source, mask=there, other=0.0), mask=mask)
    tl.store(to + target + HEADS * rows.to(tl.int64) * DIM, tl.load(values + source, mask=there, other=0.0), mask=mask)


def prompts_of(query_start: Array, kv_len: Array, least: int) -> tuple[Prompt, ...]:
    """The whole prompts of a batch, if every sequence with more than one new token is one of `least` tokens or more."""
    if least == 0 or int(query_start[-1]) < least:
        return ()
    new = np.diff(query_start)
    several = np.flatnonzero(new > 1)
    if not len(several) or int(new[several].min()) < least or not np.array_equal(new[several], kv_len[several]):
        return ()
    return tuple((int(seq), int(query_start[seq]), int(new[seq])) for seq in several)


def tokens_from(choice: AttentionChoice, nodes: Sequence[Node], captured: bool) -> int:
    """Tokens of a prompt from which it is cuDNN's, 0 for never. `captured`: steps without it are graphs."""
    if choice == "auto" and captured and values_of(nodes) < LEAST_VALUES:
        return 0
    return FROM[choice]


def values_of(nodes: Sequence[Node]) -> float:
    """Values of weights that a node multiplies a token with, on average over those that every token of a step passes."""
    every = [n for n in nodes if n.op is not EMBEDDING and n.outputs and n.outputs[0].dims[:1] == ("T",)]
    return sum(map(_values, every)) / max(1, len(every))


def _values(node: Node) -> float:
    size = sum(w.rows * w.k for w in node.inputs if isinstance(w, WeightRef) and w.rows > 1)
    spec = node.spec
    return size * spec.used / spec.n_experts if isinstance(spec, ExpertUpSpec | ExpertDownSpec) else size


def refusal(site: Site, node: Node) -> str | None:
    """Why cuDNN never takes this attention, or None."""
    spec: AttentionSpec = node.spec
    cache = site.cache(node.inputs[4])  # type: ignore[arg-type]
    if spec.sinks or spec.cap or spec.spans:
        return "no sinks, no cap of scores, nothing seen ahead"
    if site.compute == "float32" or cache.k.dtype != DTYPES[site.compute]:
        return "needs 16-bit arithmetic, and keys and values kept in it"
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
        return f"needs head_dim in eights up to {MAX_HEAD_DIM}, got {spec.head_dim}"
    if cache.k.device.type != "cuda":
        return None
    kept = {"dtype": cache.k.dtype, "device": cache.k.device}
    q, k = (torch.empty(1, heads, ROUND, spec.head_dim, **kept) for heads in (spec.n_heads, spec.n_kv))
    with preferred():
        params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, True, spec.n_heads != spec.n_kv)
        return None if torch.backends.cuda.can_use_cudnn_attention(params) else "this PyTorch has no cuDNN that takes it"


def build(site: Site, node: Node) -> Callable[[Batch], bool] | None:
    """What attends to the prompts of a step, if it can: it says whether it did. None where it never would."""
    if site.cudnn_from == 0 or refusal(site, node) is not None:
        return None
    spec: AttentionSpec = node.spec
    heads, n_kv, dim = spec.n_heads, spec.n_kv, spec.head_dim
    q, table = site.slot(node.inputs[0]), site.slot(node.inputs[3])  # type: ignore[arg-type]
    cache, target = site.cache(node.inputs[4]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    room = site.scratch("T", 2 * n_kv * dim, cache.k.dtype)
    tile = max(1, _TILE // power_of_two(dim))

    def attend(prompt: Prompt) -> None:
        seq, begin, tokens = prompt
        # Rows behind the last are other sequences', or of a step before: whatever they hold, they are queries of their own.
        most = min(q.tensor.numel() // spec.width - begin, room.tensor.numel() // (2 * n_kv * dim))
        rows = min(cdiv(tokens, ROUND) * ROUND, most)
        gathered = room.tensor[: 2 * n_kv * rows * dim]
        site.launch(
            attend_gather, (cdiv(rows, tile), n_kv), gathered, cache.k, cache.v, table.tensor,
            site.tables.table_width.tensor, seq, tokens, rows, HEADS=n_kv, SIZE=cache.block_size, DIM=dim,
            WIDE=power_of_two(dim), R=tile,
        )  # fmt: skip
        if gathered.device.type == "meta":  # kernels are being listed; the library's are not ours
            return
        keys, values = gathered.view(2, 1, n_kv, rows, dim)
        queries = q.tensor[begin * spec.width : (begin + rows) * spec.width].view(1, rows, heads, dim).transpose(1, 2)
        with preferred():
            found = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=spec.scale, enable_gqa=heads != n_kv
            )
        out = target.tensor[begin * spec.width : (begin + tokens) * spec.width].view(tokens, heads, dim)
        out.copy_(found[0].transpose(0, 1)[:tokens])

    def run(batch: Batch) -> bool:
        if not batch.prompts or (spec.window and max(tokens for _, _, tokens in batch.prompts) > spec.window):
            return False
        for prompt in batch.prompts:
            attend(prompt)
        return True

    return run


@contextmanager
def preferred() -> Iterator[None]:
    """cuDNN first, the others still there: the setting is the process's, and other threads may be using PyTorch."""
    with sdpa_kernel(_ORDER, set_priority=True):
        yield
