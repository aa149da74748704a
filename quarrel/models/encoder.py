"""The encoders' forward pass: embeddings of token, type and position, then layers normalised after each half."""

from __future__ import annotations

from quarrel.models.feedforward import GatedFFN, PlainFFN
from quarrel.models.kind import Block
from quarrel.models.mixers.attention import Attention, encoded, qkv
from quarrel.models.spec import EncoderSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import GatedSpec, gated, plain
from quarrel.ops.contract import Value
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.encode import add_row, mean_rows
from quarrel.ops.linear import add, linear, linear_add
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program


def encoder(spec: EncoderSpec, tensors: Tensors) -> Program:
    """Token ids in; `hidden` of the rows asked for out, before pooling, and the `mean` of each sequence's."""
    b = Builder()
    after = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
    with b.at("token_embd"):
        h = embedding(b, b.input("ids"), tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd))
        h = add_row(b, h, tensors.first_row("token_types.weight", spec.n_embd))
        if spec.learned_positions:
            table = tensors.matrix("position_embd.weight", spec.context_length, spec.n_embd)
            h = add(b, h, embedding(b, b.input("positions"), table))
        h = norm(b, after, h, *Block(tensors, "", spec.n_embd, after).gains("token_embd_norm"))
    for il in range(spec.n_layers):
        block = Block(tensors, f"blk.{il}.", spec.n_embd, after)
        with b.at(f"blk.{il}.attn"):
            y = _attend(b, block, spec, h)
            h = linear_add(b, h, y, *block.linear("attn_output", spec.n_embd, spec.n_embd))
            h = norm(b, after, h, *block.gains("attn_output_norm"))
        with b.at(f"blk.{il}.ffn"):
            y = _feed(b, block, spec, h)
            h = linear_add(b, h, y, *block.linear("ffn_down", spec.n_embd, y.dims[1]))  # type: ignore[arg-type]
            h = norm(b, after, h, *block.gains("layer_output_norm"))
    with b.at("output"):
        return b.program(hidden=gather_rows(b, h, b.input("out_rows")), mean=mean_rows(b, h))


def _attend(b: Builder, block: Block, spec: EncoderSpec, h: Value) -> Value:
    a = spec.attention
    assert isinstance(a, Attention)
    q, k, v = (linear(b, h, *part) for part in qkv(block, a))
    return encoded(b, a, q, k, v)


def _feed(b: Builder, block: Block, spec: EncoderSpec, h: Value) -> Value:
    ffn = spec.ffn
    assert isinstance(ffn, GatedFFN | PlainFFN)
    up = linear(b, h, *block.linear("ffn_up", ffn.width, spec.n_embd))
    if isinstance(ffn, PlainFFN):
        return plain(b, ffn.activation, up)
    gate = linear(b, h, *block.linear("ffn_gate", ffn.width, spec.n_embd))
    return gated(b, GatedSpec(ffn.activation, ffn.width), gate, up)
