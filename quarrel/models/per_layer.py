"""Per-layer embeddings (Gemma 3n, Gemma 4 E): each layer gets a vector of the token alone, from a table of its own.

p[l] = (table[id][l] * sqrt(P) + rms(map(h0)[l] / sqrt(E)) * gain) / sqrt(2)      P values a layer, h0 the first stream
h   += rms(proj(gelu(gate h) * p[l])) * gain                                      behind the feed-forward
"""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.models.kind import Block
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import Value
from quarrel.ops.embedding import embedding
from quarrel.ops.linear import add, linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder


def inputs(b: Builder, spec: ModelSpec, tensors: Tensors, h: Value) -> Value:
    """What every layer gets, `[T, layers * P]` float32; h is the stream in front of the first."""
    n, each = len(spec.layers), spec.per_layer
    table = tensors.matrix("per_layer_token_embd.weight", tensors.shape("per_layer_token_embd.weight")[0], n * each)
    own = embedding(b, b.input("ids"), table, math.sqrt(each / 2))
    mapped = linear(b, h, tensors.matrix("per_layer_model_proj.weight", n * each, spec.n_embd))
    # Instead of dividing by sqrt(E): a norm differs by its eps only.
    by = NormSpec("rms", each, spec.norm_eps * spec.n_embd, groups=n)
    mapped = norm(b, by, mapped, tensors.vector("per_layer_proj_norm.weight", each))
    return add(b, own, mapped, math.sqrt(0.5))


def part(b: Builder, block: Block, spec: ModelSpec, il: int, h: Value, p: Value) -> Value:
    """What is added to the stream h behind layer `il`, `[T, E]` float32."""
    n, each = len(spec.layers), spec.per_layer
    gate = linear(b, h, *block.linear("inp_gate", each, spec.n_embd))
    y = gated(b, GatedSpec("gelu_tanh", each, width=n * each, start=il * each), gate, p)
    y = linear(b, y, *block.linear("proj", spec.n_embd, each))
    return norm(b, replace(block.norm, out="f32"), y, *block.gains("post_norm"))
