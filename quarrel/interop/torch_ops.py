"""The Triton kernels as custom operators of PyTorch, `torch.ops.quarrel.*`, usable under torch.compile and in CUDA graphs.

    pack(raw, format, k)                                   uint8 `[n, row_bytes]` as in a GGUF file, to uint8 `[bytes]`
    linear(x, weight, format, n, bias)                     x `[.., k]`, a packed weight, to `[.., n]` in x's type
    rms_norm(x, weight, eps)                               x `[.., k]`, weight `[k]`
    experts(x, ids, weights, gate, up, down, format, down_format, n_experts, width)      ids and weights `[T, used]`
    attention_decode(q, k_cache, v_cache, block_table, kv_len, scale, window, cap)
                                                           one query a sequence: q `[S, heads, dim]`
    attention_prefill(.., query_start, ..)                 ragged: q `[T, heads, dim]`, query_start `[S + 1]`

`format` is a GGUF type's name, such as "Q4_K". Caches are `[blocks, n_kv, block_size, dim]` in q's type; `block_table`,
`kv_len`, `query_start` and `ids` are int32. Activations are float16, bfloat16 or float32. Nothing is read on the host.
Importing this module registers them. On CPU tensors they run in Triton's interpreter, if TRITON_INTERPRET=1 was set before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from quarrel.errors import RequestError, UnsupportedOp
from quarrel.gguf import FORMATS, GGMLType
from quarrel.interop.call import COMPUTE, Prepared, alias, kept, on
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.linear import LINEAR, LinearSpec
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from quarrel.ops.norm import NORM, NormSpec
from quarrel.triton_backend.attention.split_starts import split_starts
from quarrel.triton_backend.attention.splits import MOST_SPLITS, split_keys
from quarrel.triton_backend.formats.pack import packed_bytes, put, view
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.runtime.arrays import Cache, Packed, Slot
from quarrel.triton_backend.runtime.site import Batch, Tables

FORMATS_TAKEN = tuple(type.name for type in NATIVE)
"""Names that `format` may be."""
_AT_ONCE = 64 << 20
"""Bytes of raw rows that are packed at once."""

_LIBRARY = torch.library.Library("quarrel", "DEF")
"""Operators are put in place here rather than by `torch.library.custom_op`, whose own checks take 16 us a call."""
_F = TypeVar("_F", bound=Callable[..., torch.Tensor])


def _operator(fake: Callable[..., torch.Tensor]) -> Callable[[_F], _F]:
    """Makes a function an operator of its name and annotations."""

    def put(body: _F) -> _F:
        name = body.__name__
        schema = torch.library.infer_schema(body, mutates_args=())
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"quarrel::{name}", fake, lib=_LIBRARY)
        return body

    return put


def _like_first(x: torch.Tensor, *_: object) -> torch.Tensor:
    """The result of an op that gives what its first argument is like, without its values."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_pack(raw: torch.Tensor, format: str, k: int) -> torch.Tensor:
    return raw.new_empty(packed_bytes(_type(format), int(raw.shape[0]), k), dtype=torch.uint8)


@_operator(_fake_pack)
def pack(raw: torch.Tensor, format: str, k: int) -> torch.Tensor:
    """Rows of blocks in the layout that the kernels read; a hundredth larger at most."""
    type, n = _type(format), len(raw)
    block = FORMATS[type]
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] * block.elements != k * block.nbytes:
        raise RequestError(
            f"raw is {raw.dtype} {list(raw.shape)}, wanted uint8 [n, {k // block.elements * block.nbytes}] for {k}"
            f" values of {format} a row"
        )
    buffer = torch.empty(packed_bytes(type, n, k), dtype=torch.uint8, device=raw.device)
    packed = view(type, n, k, buffer)
    step = max(1, _AT_ONCE // raw.shape[1])
    for start in range(0, n, step):
        put(packed, type, start, raw[start : start + step].contiguous())
    return buffer


def _fake_linear(
    x: torch.Tensor, weight: torch.Tensor, format: str, n: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], n)


@_operator(_fake_linear)
def linear(x: torch.Tensor, weight: torch.Tensor, format: str, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + bias`."""
    k = x.shape[-1]
    rows = _rows(x)

    def make() -> Prepared:
        spec = LinearSpec(_type(format), n, k, bias is not None)
        biases = () if bias is None else (_shaped("the bias", bias, n),)
        return Prepared(LINEAR, spec, (None, _packed(weight, format, n, k), *biases), COMPUTE[x.dtype], x.device)

    built = kept(weight, (format, n, k, x.dtype, x.device, None if bias is None else _place(bias)), make)
    (y,) = built((rows,), _live(rows))
    return y.view(*x.shape[:-1], n)


@_operator(_like_first)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`."""
    rows = _rows(x)

    def make() -> Prepared:
        bound = (None, _shaped("the weight", weight, rows.shape[1]))
        return Prepared(NORM, NormSpec("rms", rows.shape[1], eps), bound, COMPUTE[x.dtype], x.device)

    (y,) = kept(weight, (eps, rows.shape[1], x.dtype, x.device, _place(weight)), make)((rows,), _live(rows))
    return y.view(x.shape)


@_operator(_like_first)
def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    format: str,
    down_format: str,
    n_experts: int,
    width: int,
) -> torch.Tensor:
    """`sum_j weights[t, j] * down_e(silu(gate_e x) * up_e x)`, e = ids[t, j]; `format` is gate's and up's."""
    tokens, k = x.shape
    used = ids.shape[-1]
    _shaped("ids", ids, tokens, used)
    _shaped("weights", weights, tokens, used)
    rows, chosen = _rows(x), ids.to(torch.int32).contiguous()

    def make_up() -> Prepared:
        spec = ExpertUpSpec(_type(format), n_experts, used, width, k, "silu")
        stacks = (_packed(w, format, n_experts * width, k) for w in (gate, up))
        return Prepared(EXPERT_UP, spec, (None, None, *stacks), COMPUTE[x.dtype], x.device)

    def make_down() -> Prepared:
        spec = ExpertDownSpec(_type(down_format), n_experts, used, k, width)
        stack = _packed(down, down_format, n_experts * k, width)
        return Prepared(EXPERT_DOWN, spec, (None, None, None, stack), COMPUTE[x.dtype], x.device)

    use = (n_experts, used, width, k, x.dtype, x.device)
    (y,) = kept(gate, ("up", format, _place(up), *use), make_up)((rows, chosen), _live(rows))
    (out,) = kept(down, ("down", down_format, *use), make_down)((y, chosen, weights.float().contiguous()), _live(rows))
    return out.view(tokens, k).to(x.dtype)


@_operator(_like_first)
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> torch.Tensor:
    """Each sequence's newest token, whose key is in the cache already."""
    seqs = q.shape[0]
    split = split_keys(seqs)
    lengths = kv_len.to(torch.int32).contiguous()
    with on(q.device):
        starts, query_start = split_starts(lengths)
    most = min(MOST_SPLITS, -(-block_table.shape[1] * k_cache.shape[2] // split))
    batch = Batch(seqs, seqs, seqs, decode=True, prefill=False, items=seqs * most)
    return _attend(q, k_cache, v_cache, block_table, lengths, query_start, starts, batch, scale, window, cap)


@_operator(_like_first)
def attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    kv_len: torch.Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> torch.Tensor:
    """Any number of new tokens a sequence, causal, whose keys are in the cache already."""
    starts = torch.zeros_like(query_start)
    # Who has one new token is on the device: all go the way of prompts.
    batch = Batch(q.shape[0], kv_len.shape[0], kv_len.shape[0], decode=False, prefill=True, items=0)
    return _attend(q, k_cache, v_cache, block_table, kv_len, query_start, starts, batch, scale, window, cap)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    kv_len: torch.Tensor,
    query_start: torch.Tensor,
    starts: torch.Tensor,
    batch: Batch,
    scale: float,
    window: int,
    cap: float,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    if {k_cache.dtype, v_cache.dtype} != {q.dtype} or k_cache.shape != v_cache.shape or k_cache.dim() != 4:
        raise RequestError(
            f"caches are {k_cache.dtype} {list(k_cache.shape)} and {v_cache.dtype} {list(v_cache.shape)}, wanted two of"
            f" {q.dtype} [blocks, n_kv, block_size, {dim}]"
        )
    if k_cache.shape[3] != dim or heads % k_cache.shape[1]:
        raise RequestError(
            f"q is {list(q.shape)} and the caches {list(k_cache.shape)}, wanted [tokens, heads, dim] and [blocks, n_kv,"
            " block_size, dim] with heads a multiple of n_kv"
        )
    seqs = batch.S
    _shaped("kv_len", kv_len, seqs)
    _shaped("query_start", query_start, seqs + 1)
    _shaped("block_table", table, seqs, table.shape[-1])

    def make() -> Prepared:
        spec = AttentionSpec(heads, k_cache.shape[1], dim, scale, window, cap, False)
        bound = (None, None, None, None, Cache(alias(k_cache.contiguous()), alias(v_cache.contiguous())))
        return Prepared(ATTENTION, spec, bound, COMPUTE[q.dtype], q.device, deterministic=batch.prefill)

    use = (heads, dim, scale, window, cap, batch.prefill, q.dtype, q.device, k_cache.shape, _place(v_cache))
    width = torch.full((1,), table.shape[1], dtype=torch.int32, device=q.device)
    ints = [each.to(torch.int32).contiguous() for each in (query_start, kv_len, table)]
    stays = k_cache.is_contiguous() and v_cache.is_contiguous()
    (y,) = (kept(k_cache, use, make) if stays else make())(
        (q.contiguous(), *ints), batch, Tables(Slot(starts), Slot(width))
    )
    return y.view(tokens, heads, dim)


def _type(format: str) -> GGMLType:
    if format not in FORMATS_TAKEN:
        raise UnsupportedOp("triton", "linear", format, [f"wanted one of {', '.join(FORMATS_TAKEN)}"])
    return GGMLType[format]


def _packed(weight: torch.Tensor, format: str, n: int, k: int) -> Packed:
    type = _type(format)
    if weight.dtype != torch.uint8 or weight.numel() != packed_bytes(type, n, k):
        raise RequestError(
            f"the weight is {weight.dtype} {list(weight.shape)}, wanted {packed_bytes(type, n, k)} bytes, as"
            f" torch.ops.quarrel.pack makes them of {n} rows of {k} values of {format}"
        )
    return view(type, n, k, alias(weight))


def _shaped(name: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """The tensor, if it has that shape: kernels read as many numbers as the others say."""
    if tensor.shape != shape:
        raise RequestError(f"{name} is {tensor.dtype} {list(tensor.shape)}, wanted {list(shape)}")
    return tensor


def _rows(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in COMPUTE:
        raise RequestError(f"activations are {x.dtype}, wanted {', '.join(map(str, COMPUTE))}")
    return cast(torch.Tensor, x.reshape(-1, x.shape[-1]).contiguous())


def _live(rows: torch.Tensor) -> Batch:
    tokens = rows.shape[0]
    return Batch(tokens, 0, 0, decode=tokens == 1, prefill=tokens > 1, items=1)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's data is and how it lies."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
