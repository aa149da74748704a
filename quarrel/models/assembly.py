"""The one forward pass: walks a spec and says which blocks run on which tensors, in which order."""

from __future__ import annotations

from quarrel.models.blocks import (
    Block,
    attend,
    experts,
    gains,
    gated_ffn,
    join,
    mamba1,
    mamba2,
    plain_ffn,
    whole,
)
from quarrel.models.encoder import encoder
from quarrel.models.spec import (
    Attention,
    EncoderSpec,
    Experts,
    FeedForward,
    GatedFFN,
    Layer,
    Mamba1,
    Mixer,
    ModelSpec,
)
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import cap
from quarrel.ops.collective import all_gather, all_reduce, all_reduce_add, broadcast
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import Linear, add, linear
from quarrel.ops.logprobs import logprobs
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.sample import sample


def assemble(spec: ModelSpec | EncoderSpec, tensors: Tensors) -> Program:
    """The program of a model: token ids in; out `hidden` and, for decoders, `logits`, `tokens` and how likely they are,
    of the rows asked for."""
    if isinstance(spec, EncoderSpec):
        program, n_layers = encoder(spec, tensors), spec.n_layers
    else:
        program, n_layers = _decoder(spec, tensors), len(spec.layers)
    tensors.check_all_read(n_layers)
    return program


def _decoder(spec: ModelSpec, tensors: Tensors) -> Program:
    b = Builder()
    embeddings = tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd)
    pre = NormSpec(spec.norm, spec.n_embd, spec.norm_eps)
    share = tensors.share
    h: Value | None = None
    if share is None or share.owns(0):
        with b.at("token_embd"):
            h = embedding(b, b.input("ids"), embeddings, spec.embedding_scale)  # [T, E]
    for il, layer in enumerate(spec.layers):
        if share is None or share.owns(il):
            assert h is not None
            h = _layer(b, Block(tensors, f"blk.{il}.", spec.n_embd, pre), layer, h)
        source = None if share is None else share.hands_on(il)
        if share is not None and source is not None:
            with b.at(f"blk.{il}.out"):
                h = broadcast(b, h if source == share.rank else None, spec.n_embd, source)
    assert h is not None
    with b.at("output"):
        h = gather_rows(b, h, b.input("out_rows"))  # [R, E]
        final = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
        hidden = norm(b, final, h, *gains(tensors, "output_norm", final))
        tied = "output.weight" not in tensors
        rows = spec.n_vocab if share is None else share.vocabulary[1] - share.vocabulary[0]
        head = embeddings if tied else tensors.matrix("output.weight", rows, spec.n_embd)
        logits = _logits(b, spec, tensors, hidden, head)  # [R, V]
        if spec.logit_scale != 1.0 or spec.logit_cap:
            logits = cap(b, logits, spec.logit_scale, spec.logit_cap)
        tokens = sample(b, logits)  # [R]
        told, best = logprobs(b, logits, tokens)  # [R, 1 + top] and [R, top]
    return b.program(hidden=hidden, logits=logits, tokens=tokens, logprobs=told, best=best)


def _logits(b: Builder, spec: ModelSpec, tensors: Tensors, hidden: Value, head: WeightRef) -> Value:
    """Scores of the whole vocabulary; where devices share it, each computes those of its rows."""
    share = tensors.share
    if share is None:
        return linear(b, hidden, head, tensors.optional_vector("output.bias", spec.n_vocab), out="f32")
    start, stop = share.vocabulary
    if head.rows == spec.n_vocab:
        head = head.split(start, stop - start, spec.n_vocab - stop)[1]
    own = linear(b, hidden, head, tensors.optional_vector("output.bias", stop - start), out="f32")
    return all_gather(b, own, start, spec.n_vocab)


def _layer(b: Builder, block: Block, layer: Layer, h: Value) -> Value:
    if layer.mixer is not None:
        with b.at(f"{block.prefix}attn"):
            y, out = _mix(b, block, layer.mixer, h)
            h = _add(b, block, layer, h, y, out, "attn")
    if layer.ffn is not None:
        with b.at(f"{block.prefix}ffn"):
            y, into = _feed(b, block, layer.ffn, h, layer.ffn_norm)
            h = _add(b, block, layer, h, y, into, "ffn")
    return h


def _mix(b: Builder, block: Block, mixer: Mixer, h: Value) -> tuple[Value, Linear]:
    if isinstance(mixer, Attention):
        y = attend(b, block, mixer, h)
        return y, block.linear("attn_output", block.n_embd, mixer.n_heads * mixer.head_dim)
    y = mamba1(b, block, mixer, h) if isinstance(mixer, Mamba1) else mamba2(b, block, mixer, h)
    rows, gathered = block.rows("attn"), block.gathers("attn")
    n = block.n_embd if rows is None else rows[0][1] - rows[0][0]
    return y, block.linear("ssm_out", n, mixer.inner if gathered is None else gathered[1])


def _feed(b: Builder, block: Block, ffn: FeedForward, h: Value, before: str) -> tuple[Value, Linear | None]:
    if isinstance(ffn, Experts):
        return experts(b, block, ffn, h, before), None
    y = gated_ffn(b, block, ffn, h, before) if isinstance(ffn, GatedFFN) else plain_ffn(b, block, ffn, h, before)
    return y, block.linear("ffn_down", block.n_embd, ffn.width)


def _add(b: Builder, block: Block, layer: Layer, h: Value, y: Value, out: Linear | None, half: str) -> Value:
    """Projects `y` and adds it to the residual stream, normalised once more where the layer says so."""
    part = whole(b, block, half, y, out)
    if not layer.post_norms:
        scale = layer.residual_scale
        return join(b, h, y, out, scale) if part is None else all_reduce_add(b, h, part, scale)
    if part is not None:
        y = all_reduce(b, part)
    elif out is not None:
        y = linear(b, y, *out)
    return add(b, h, norm(b, block.norm, y, *block.gains(_POST_NORMS[half])), layer.residual_scale)


_POST_NORMS = {"attn": "post_attention_norm", "ffn": "post_ffw_norm"}
