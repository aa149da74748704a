"""Several residual streams, of which the layers compute the first: AltUp (Baykal et al. 2023), with LAuReL (Menghani et al.
2024) beside each mixer, as in Gemma 3n.

m(x)      = tanh(altup_router rms(x) / E)                      one number a stream
P_j       = H_j + sum_i C[j, i] H_i                            C = altup_predict_coef m(H_0), before a layer
c         = the layer of P_0
H_j       = P_j + (1 + K_j) (c - P_0)                          K = altup_correct_coef m(c), behind it
laurel    : (P_0 + mixer + x + rms(laurel_r laurel_l x)) / sqrt(2), x the mixer's input

The streams beyond the first begin as maps of it and end in maps back, each made as large as the first.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.models.kind import Block
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import cap
from quarrel.ops.contract import Value
from quarrel.ops.heads import head_linear
from quarrel.ops.linear import add, linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.streams import MixSpec, match_streams, mix_streams, pick_streams


def begin(b: Builder, spec: ModelSpec, tensors: Tensors, h: Value) -> Value:
    """The streams in front of the first layer, `[T, streams * E]`, of the embeddings h."""
    maps = tensors.stack("altup_proj.weight", spec.streams - 1, spec.n_embd, spec.n_embd)
    return match_streams(b, h, linear(b, h, maps, out="f32"))


def predict(b: Builder, block: Block, spec: ModelSpec, streams: Value) -> tuple[Value, Value]:
    """What the streams will be, `[T, streams * E]`, and the first of them, `[T, E]`."""
    n, e = spec.streams, spec.n_embd
    ones = block.tensors.ones(e)
    m = _modalities(b, block, n, pick_streams(b, streams, ones, n))
    coefs = linear(b, m, block.matrix("altup_predict_coef.weight", n * n, n), out="f32")
    predicted = mix_streams(b, MixSpec(e, n, n), streams, streams, coefs)
    return predicted, pick_streams(b, predicted, ones, n)


def correct(b: Builder, block: Block, spec: ModelSpec, predicted: Value, first: Value, computed: Value) -> Value:
    """The streams behind a layer that computed this of the `first` of those predicted."""
    n = spec.streams
    coefs = linear(b, _modalities(b, block, n, computed), block.matrix("altup_correct_coef.weight", n, n), out="f32")
    surprise = add(b, computed, first, -1.0)
    return mix_streams(b, MixSpec(spec.n_embd, n, 1, offset=1.0), predicted, surprise, coefs)


def scaled(b: Builder, block: Block, spec: ModelSpec, streams: Value) -> Value:
    """The first stream as per-layer embeddings see it, `[T, E]`."""
    return pick_streams(b, streams, block.vector("altup_correct_scale.weight", spec.n_embd), spec.streams)


def to_others(b: Builder, spec: ModelSpec, streams: Value, part: Value) -> Value:
    """The streams, with `[T, E]` added to all but the first."""
    return mix_streams(b, MixSpec(spec.n_embd, spec.streams, 1, False, 1.0, 1), streams, part)


def end(b: Builder, spec: ModelSpec, tensors: Tensors, streams: Value) -> Value:
    """The mean of the streams, mapped back, `[R, E]`. What is mapped is normalised first: only its direction counts."""
    n, e = spec.streams, spec.n_embd
    ones = tensors.ones(e)
    others = pick_streams(b, streams, ones, n, 1, n - 1)
    others = norm(b, NormSpec("rms", e, 1e-20, n - 1), others, ones)
    maps = tensors.stack("altup_unembd_proj.weight", n - 1, e, e)
    return match_streams(b, pick_streams(b, streams, ones, n), head_linear(b, others, maps, n - 1), mean=True)


def laurel(b: Builder, block: Block, layer: Layer, before: Value, h: Value) -> Value:
    """The stream behind a mixer, h, which read `before`, with the low-rank map beside it."""
    wide = replace(block.norm, out="f32")
    x = norm(b, wide, before, *block.gains(layer.attn_norm))
    low = linear(b, x, *block.linear("laurel_l", layer.laurel, block.n_embd))
    y = linear(b, low, *block.linear("laurel_r", block.n_embd, layer.laurel))
    y = norm(b, wide, y, *block.gains("laurel_post_norm"))
    return cap(b, add(b, add(b, h, x), y), math.sqrt(0.5), 0.0)


def _modalities(b: Builder, block: Block, n: int, x: Value) -> Value:
    y = norm(b, block.norm, x, *block.gains("altup_router_norm"))
    return cap(b, linear(b, y, *block.linear("altup_router", n, block.n_embd), out="f32"), 1.0 / block.n_embd, 1.0)
