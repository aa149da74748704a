"""The one forward pass: walks a spec and says which blocks run on which tensors, in which order."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models import altup, per_layer
from quarrel.models.encoder import encoder
from quarrel.models.feedforward import FEED_FORWARDS
from quarrel.models.kind import Block, gains
from quarrel.models.mixers import MIXERS
from quarrel.models.spec import EncoderSpec, Layer, Mixer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import cap
from quarrel.ops.contract import CacheRef, StateRef, Value
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.encode import mean_rows
from quarrel.ops.linear import Linear, add, linear, linear_add
from quarrel.ops.logprobs import logprobs
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.sample import sample


def assemble(spec: ModelSpec | EncoderSpec, tensors: Tensors) -> Program:
    """The program of a model: token ids in; out `hidden` and, for decoders, `logits`, `tokens` and how likely they are,
    of the rows asked for."""
    if isinstance(spec, EncoderSpec) and spec.layers:
        program, n_layers = _both_ways(spec, tensors), spec.n_layers
    elif isinstance(spec, EncoderSpec):
        program, n_layers = encoder(spec, tensors), spec.n_layers
    else:
        program, n_layers = _decoder(spec, tensors), len(spec.layers)
    tensors.check_all_read(n_layers)
    return tensors.traced(program)


def _decoder(spec: ModelSpec, tensors: Tensors) -> Program:
    b = Builder()
    embeddings = tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd)
    with b.at("token_embd"):
        h = embedding(b, b.input("ids"), embeddings, spec.embedding_scale)  # [T, E]
        if spec.embedding_norm:
            plain = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
            h = norm(b, plain, h, tensors.ones(spec.n_embd))
    with b.at("per_layer"):
        p = per_layer.inputs(b, spec, tensors, h) if spec.per_layer else None
    if spec.streams > 1:
        with b.at("altup"):
            h = altup.begin(b, spec, tensors, h)
    kept: dict[int, list[CacheRef | StateRef]] = {}
    for il, layer in enumerate(spec.layers):
        h = _behind(b, spec, tensors, il, layer, h, p, kept)
    with b.at("output"):
        h = gather_rows(b, h, b.input("out_rows"))  # [R, E]
        if spec.streams > 1:
            h = altup.end(b, spec, tensors, h)
        final = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
        hidden = norm(b, final, h, *gains(tensors, spec.final_norm, final))
        tied = "output.weight" not in tensors
        head = embeddings if tied else tensors.matrix("output.weight", spec.n_vocab, spec.n_embd)
        logits = linear(b, hidden, head, tensors.optional("output.bias", spec.n_vocab), out="f32")  # [R, V]
        if spec.logit_scale != 1.0 or spec.logit_cap:
            logits = cap(b, logits, spec.logit_scale, spec.logit_cap)
        tokens = sample(b, logits)  # [R]
        likely, best = logprobs(b, logits, tokens)  # [R, 1 + top] and [R, top]
    return b.program(hidden=hidden, logits=logits, tokens=tokens, logprobs=likely, best=best)


def _behind(
    b: Builder,
    spec: ModelSpec,
    tensors: Tensors,
    il: int,
    layer: Layer,
    h: Value,
    p: Value | None,
    kept: dict[int, list[CacheRef | StateRef]],
) -> Value:
    """The stream behind a layer of a decoder, or its streams. p: what the layers get of the tokens by themselves."""
    block = Block(tensors, f"blk.{il}.", spec.n_embd, NormSpec(spec.norm, spec.n_embd, spec.norm_eps))
    if spec.streams > 1:
        assert p is not None
        with b.at(f"blk.{il}.altup"):
            predicted, first = altup.predict(b, block, spec, h)
        computed = _layer(b, spec, tensors, il, layer, first, kept)
        with b.at(f"blk.{il}.out"):
            h = altup.correct(b, block, spec, predicted, first, computed)
            return altup.to_others(b, spec, h, per_layer.part(b, block, spec, il, altup.scaled(b, block, spec, h), p))
    h = _layer(b, spec, tensors, il, layer, h, kept)
    with b.at(f"blk.{il}.out"):
        if p is not None:
            h = add(b, h, per_layer.part(b, block, spec, il, h, p))
        if layer.out_scale:
            h = cap(b, h, tensors.number(f"{block.prefix}layer_output_scale.weight"), 0.0)
    return h


def _both_ways(spec: EncoderSpec, tensors: Tensors) -> Program:
    """An encoder whose layers are a decoder's, but for their attention."""
    b = Builder()
    final = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
    with b.at("token_embd"):
        table = tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd)
        h = embedding(b, b.input("ids"), table, spec.embedding_scale)
        if spec.embedding_norm:
            h = norm(b, final, h, *gains(tensors, "token_embd_norm", final))
    for il, layer in enumerate(spec.layers):
        h = _layer(b, spec, tensors, il, layer, h, {})
    with b.at("output"):
        h = norm(b, final, h, *gains(tensors, "output_norm", final))
        return b.program(hidden=gather_rows(b, h, b.input("out_rows")), mean=mean_rows(b, h))


def _layer(
    b: Builder,
    spec: ModelSpec | EncoderSpec,
    tensors: Tensors,
    il: int,
    layer: Layer,
    h: Value,
    kept: dict[int, list[CacheRef | StateRef]],
) -> Value:
    """`kept`: caches and states of the mixers so far, by layer."""
    pre = NormSpec(spec.norm, spec.n_embd, spec.norm_eps)
    for name, kinds, half, before, after in (
        ("attn", MIXERS, layer.mixer, layer.attn_norm, "post_attention_norm"),
        ("ffn", FEED_FORWARDS, layer.ffn, layer.ffn_norm, "post_ffw_norm"),
    ):
        if half is None:
            continue
        kind = kinds[type(half)]
        block = Block(tensors, f"blk.{il}.", spec.n_embd, pre, before if layer.pre_norms else "")
        with b.at(f"blk.{il}.{name}"):
            state = [b.cache(s) if isinstance(s, KVLayer) else b.state(*s.shape) for s in kind.state(half)]
            if isinstance(half, Mixer):
                state = kept[il] = state if half.reads is None else kept[half.reads]
            read = h
            y, out = kind.block(b, block, half, read, *state)
            h = _add(b, read, y, out, layer, block, after if layer.post_norms else None)
            if layer.laurel and isinstance(half, Mixer):
                h = altup.laurel(b, block, layer, read, h)
    return h


def _add(b: Builder, h: Value, y: Value, out: Linear | None, layer: Layer, block: Block, after: str | None) -> Value:
    """`h + scale * out(y)`, or `h + scale * y` where the block has projected already; with a norm before the sum if `after`
    names one."""
    scale = layer.residual_scale
    if after is None:
        return add(b, h, y, scale) if out is None else linear_add(b, h, y, *out, scale=scale)
    y = y if out is None else linear(b, y, *out)
    post = replace(block.norm, eps=layer.post_norm_eps or block.norm.eps)
    return add(b, h, norm(b, post, y, *block.gains(after)), scale)
