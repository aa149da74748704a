"""The one forward pass: walks a spec and says which blocks run on which tensors, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

from quarrel.errors import UnsupportedModel
from quarrel.models import altup, per_layer
from quarrel.models.encoder import encoder
from quarrel.models.feedforward import FEED_FORWARDS
from quarrel.models.kind import Block, gains, mapped
from quarrel.models.mixers import MIXERS, Attention, LatentAttention
from quarrel.models.spec import EncoderSpec, Layer, Mixer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import cap
from quarrel.ops.adjust import adjust
from quarrel.ops.contract import CacheRef, StateRef, Value, WeightRef
from quarrel.ops.embedding import embedding, gather_rows, put_rows
from quarrel.ops.encode import mean_rows
from quarrel.ops.linear import Linear, add, linear, linear_add
from quarrel.ops.logprobs import logprobs
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.sample import sample


def assemble(spec: ModelSpec | EncoderSpec, tensors: Tensors, *, stream: bool = False) -> Program:
    """The program of a model: token ids in; out `hidden` and, for decoders, `logits`, `tokens` and how likely they are,
    of the rows asked for. stream: and `stream`, what is `hidden` of every row."""
    if isinstance(spec, EncoderSpec) and spec.layers:
        program, n_layers = _both_ways(spec, tensors), spec.n_layers
    elif isinstance(spec, EncoderSpec):
        program, n_layers = encoder(spec, tensors), spec.n_layers
    else:
        program, n_layers = _decoder(spec, tensors, stream), len(spec.layers)
    tensors.check_all_read(n_layers)
    return tensors.traced(program)


def predicting(spec: ModelSpec) -> Layer | None:
    """The layer that a block which predicts further tokens (MTP, nextn) has: as the model's last with attention."""
    return next((layer for layer in reversed(spec.layers) if isinstance(layer.mixer, Attention | LatentAttention)), None)


def assemble_predictor(spec: ModelSpec, tensors: Tensors) -> Program:
    """The program of the block behind the layers that predicts a further token (DeepSeek-V3, 2024). In: a token's id, and
    the model's `stream` at the token before; out: `tokens`, those after it, and its own `stream`, to go on from.

    x = eh_proj (rms(embedding), rms(stream));   stream = rms(layer x);   logits = head stream

    Raises UnsupportedModel where the file has none.
    """
    b, il, layer = Builder(), len(spec.layers), predicting(spec)
    prefix = f"blk.{il}."
    if layer is None or f"{prefix}nextn.eh_proj.weight" not in tensors:
        raise UnsupportedModel(
            "the file has no block that predicts further tokens (nextn, MTP): take a file that has one, or a smaller model"
            " of the same vocabulary as the draft, or leave the draft out"
        )
    block = Block(tensors, f"{prefix}nextn.", spec.n_embd, NormSpec(spec.norm, spec.n_embd, spec.norm_eps))
    with b.at(f"blk.{il}.nextn"):
        table = _own(block, "embed_tokens.weight", "token_embd.weight")
        e = embedding(b, b.input("ids"), tensors.matrix(table, spec.n_vocab, spec.n_embd), spec.embedding_scale)
        e = norm(b, block.norm, e, *block.gains("enorm"))
        h = norm(b, block.norm, b.input("stream", spec.n_embd), *block.gains("hnorm"))
        n, joined = spec.n_embd, f"{block.prefix}eh_proj.weight"
        x = linear(b, e, tensors.column_range(joined, n, 2 * n, 0, n), out="f32")
        x = linear_add(b, x, h, tensors.column_range(joined, n, 2 * n, n, 2 * n))
    x = run_layer(b, spec, tensors, il, layer, x, {})
    with b.at("output"):
        x = gather_rows(b, x, b.input("out_rows"))
        final = replace(block.norm, out="f32")
        gain = _own(block, "shared_head_norm.weight", f"{spec.final_norm}.weight").removesuffix(".weight")
        hidden = norm(b, final, x, *gains(tensors, gain, final))
        head = tensors.matrix(_own(block, "shared_head_head.weight", _head(tensors)), spec.n_vocab, spec.n_embd)
        return b.program(stream=hidden, tokens=sample(b, _logits(b, spec, tensors, hidden, head)))


def _own(block: Block, name: str, otherwise: str) -> str:
    """A tensor of a predicting block, or the model's."""
    return block.prefix + name if block.has(name) else otherwise


def _head(tensors: Tensors) -> str:
    return "output.weight" if "output.weight" in tensors else "token_embd.weight"


def _logits(b: Builder, spec: ModelSpec, tensors: Tensors, hidden: Value, head: WeightRef) -> Value:
    """`[R, V]`."""
    logits = linear(b, hidden, head, tensors.optional("output.bias", spec.n_vocab), out="f32")
    return cap(b, logits, spec.logit_scale, spec.logit_cap) if spec.logit_scale != 1.0 or spec.logit_cap else logits


def _decoder(spec: ModelSpec, tensors: Tensors, stream: bool) -> Program:
    b = Builder()
    embeddings = tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd)
    with b.at("token_embd"):
        h = embedding(b, b.input("ids"), embeddings, spec.embedding_scale)  # [T, E]
        if spec.embedding_norm:
            plain = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
            h = norm(b, plain, h, tensors.ones(spec.n_embd))
        h = _images(b, spec, h, 0)
    with b.at("per_layer"):
        p = per_layer.inputs(b, spec, tensors, h) if spec.per_layer else None
    if spec.streams > 1:
        with b.at("altup"):
            h = altup.begin(b, spec, tensors, h)
    kept: dict[int, list[CacheRef | StateRef]] = {}
    for il, layer in enumerate(spec.layers):
        h = _behind(b, spec, tensors, il, layer, h, p, kept)
        h = _images(b, spec, h, il + 1)
    with b.at("output"):
        final = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
        last = gains(tensors, spec.final_norm, final)
        further = {"stream": norm(b, final, h, *last)} if stream else {}
        h = gather_rows(b, h, b.input("out_rows"))  # [R, E]
        if spec.streams > 1:
            h = altup.end(b, spec, tensors, h)
        hidden = norm(b, final, h, *last)
        logits = _logits(b, spec, tensors, hidden, tensors.matrix(_head(tensors), spec.n_vocab, spec.n_embd))
        tokens = sample(b, adjust(b, logits, b.input("ids"), b.input("out_rows")))  # [R]
        likely, best = logprobs(b, logits, tokens)  # [R, 1 + top] and [R, top]
    return b.program(hidden=hidden, logits=logits, tokens=tokens, logprobs=likely, best=best, **further)


def _images(b: Builder, spec: ModelSpec, h: Value, part: int) -> Value:
    """The stream with this part of the images' rows in it; the first is in the place of what a token's id stands for."""
    if part >= spec.image_parts:
        return h
    rows, images = b.input("image_rows"), b.input("images", spec.image_parts * spec.n_embd)
    return put_rows(b, h, rows, images, part * spec.n_embd, add=part > 0)


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
        computed = run_layer(b, spec, tensors, il, layer, first, kept)
        with b.at(f"blk.{il}.out"):
            h = altup.correct(b, block, spec, predicted, first, computed)
            return altup.to_others(b, spec, h, per_layer.part(b, block, spec, il, altup.scaled(b, block, spec, h), p))
    h = run_layer(b, spec, tensors, il, layer, h, kept)
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
        h = run_layer(b, spec, tensors, il, layer, h, {})
    with b.at("output"):
        h = norm(b, final, h, *gains(tensors, "output_norm", final))
        return b.program(hidden=gather_rows(b, h, b.input("out_rows")), mean=mean_rows(b, h))


class Stack(Protocol):
    """What layers need to know of the model that they are part of."""

    @property
    def norm(self) -> Literal["rms", "layer"]: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def n_embd(self) -> int: ...


def run_layer(
    b: Builder,
    spec: Stack,
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
    if after is None and out is not None and not block.bounded([out]):
        return linear_add(b, h, y, *out, scale=scale)
    y = y if out is None else mapped(b, block.tensors, y, out)
    if after is None:
        return add(b, h, y, scale)
    post = replace(block.norm, eps=layer.post_norm_eps or block.norm.eps)
    return add(b, h, norm(b, post, y, *block.gains(after)), scale)
