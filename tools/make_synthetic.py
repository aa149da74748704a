"""Writes a full-size GGUF model with random, sane, quantised weights: for speed runs, where only shapes and types matter.

    python tools/make_synthetic.py mistral-7b Q4_K_M mistral.gguf [--layers N] [--vocab OTHER.gguf] [--seed N] [--dry]

Shapes are in synthetic_shapes.toml. Tensor types are those that llama-quantize would choose, with its fallbacks for rows
that are no multiple of 256; those of IQ4_XS and of names that end in _S are one type but for the output. Weights are drawn
per piece of a tensor from the seed and the tensor's name: memory stays below 1 GB, a tensor is the same whatever else is
written, and one process a core fills the file.
"""

from __future__ import annotations

import argparse
import errno
import math
import multiprocessing
import os
import time
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quarrel.errors import QuarrelError
from quarrel.gguf import FORMATS, GGMLType, GGUFFile, GGUFWriter, nbytes, quantize

T = GGMLType
QUANTS = {
    "F32": (T.F32, 0),
    "F16": (T.F16, 1),
    "BF16": (T.BF16, 32),
    "Q4_0": (T.Q4_0, 2),
    "Q8_0": (T.Q8_0, 7),
    "Q4_K_M": (T.Q4_K, 15),
    "Q6_K": (T.Q6_K, 18),
    "MXFP4": (T.Q8_0, 38),
    "Q5_K_S": (T.Q5_K, 16),
    "Q4_K_S": (T.Q4_K, 14),
    "Q3_K_S": (T.Q3_K, 11),
    "Q2_K_S": (T.Q2_K, 21),
    "IQ4_XS": (T.IQ4_XS, 30),
}
FALLBACK = {
    T.Q4_K: T.Q5_0, T.Q5_K: T.Q5_1, T.Q6_K: T.Q8_0, T.Q3_K: T.IQ4_NL, T.Q2_K: T.IQ4_NL, T.IQ4_XS: T.IQ4_NL,
}  # fmt: skip
UNCODED = {"F32": T.F32, "F16": T.F16, "BF16": T.BF16}
POOL_ELEMENTS = 1 << 18
PIECE_BYTES = 16 << 20
_MERGES = (
    "h e|Ġ t|Ġ s|Ġt he|r e|Ġ a|i n|o n|Ġ w|e r|a t|n d|o u|Ġ c|i s|o r|Ġ o|Ġ b|e n|in g|Ġ f|e s|i t|Ġ p|Ġo f|Ġ in|a l|"
    "Ġt o|Ġa nd|a n|l l|Ġ d|Ġ m|Ġ h|a r|Ġ l|i c|o m|en t|i on"
)
BYTE_MERGES = _MERGES.split("|")


@dataclass(frozen=True)
class Shape:
    """One entry of synthetic_shapes.toml."""

    arch: str
    layers: tuple[str, ...]
    embedding: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: Mapping[str, Any]
    keys: Mapping[str, Any]
    ff: int = 0
    expert_ff: int = 0
    shared_ff: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_type: str = ""
    gated: bool = True
    bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    tied: bool = False
    second_norm: str = "ffn_norm"
    norm_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    """Query, key and value in one matrix, gate and up in another."""
    post_norms: bool = False
    latent: Mapping[str, int] = field(default_factory=dict)
    """Latent attention's q_rank, rank, nope, rope and value."""
    local: Mapping[str, int] = field(default_factory=dict)
    """Gemma 4: head_dim and kv_heads of layers with a window, whose word has a w."""
    keys_are_values: bool = False
    """Of layers without a window."""
    per_layer: int = 0
    shared_kv: int = 0
    """Layers at the end that read the keys of others."""
    encoder: str = ""
    """How an encoder knows positions: "learned" or "rope"."""
    delta: Mapping[str, int] = field(default_factory=dict)
    """Heads of a gated delta net, and its taps; attention beside it has output gates in `attn_q`."""
    taps: int = 0
    """Of a short convolution."""
    final_norm: str = "output_norm"
    ssm: Mapping[str, int] = field(default_factory=dict)
    rope_scaling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    type: GGMLType
    draw: Callable[[np.random.Generator, int], np.ndarray]
    """Raw bytes of a piece, as many as asked for."""

    @property
    def nbytes(self) -> int:
        return nbytes(self.type, self.shape[::-1])

    def piece(self, seed: int, i: int) -> np.ndarray:
        """Piece i: the same whatever else is written, and by whom."""
        count = min(self.piece_bytes, self.nbytes - i * self.piece_bytes)
        return self.draw(np.random.default_rng([seed, zlib.crc32(self.name.encode()), i]), count)

    @property
    def n_pieces(self) -> int:
        return -(-self.nbytes // self.piece_bytes)

    @property
    def piece_bytes(self) -> int:
        """Whole blocks."""
        return PIECE_BYTES // unit(self.type) * unit(self.type)


def unit(kind: GGMLType) -> int:
    """Bytes that are drawn together: a block, or 32 values of a type without blocks."""
    return FORMATS[kind].nbytes * max(1, 32 // FORMATS[kind].elements)


def load_shapes() -> dict[str, Shape]:
    with Path(__file__).with_name("synthetic_shapes.toml").open("rb") as file:
        table = tomllib.load(file)
    shapes = {}
    for name, entry in table.items():
        layers = tuple(entry.pop("layers").split()) * entry.pop("repeat", 1)
        shapes[name] = Shape(layers=layers, **entry)
    return shapes


def more_bits(i: int, n: int) -> bool:
    """The layers of n to which llama-quantize gives better types: the first and last eighth, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def tensor_type(quant: str, name: str, k: int, place: tuple[int, int], experts: int, tied: bool) -> GGMLType:
    """The type llama-quantize gives to a weight matrix of k columns; `place` is (index, count) for the choice of layers."""
    base = QUANTS[quant][0]
    stem = name.split(".")[-2]
    kind = base
    if quant in UNCODED:
        return UNCODED[quant]
    if stem == "output" or (tied and stem == "token_embd"):
        kind = T.Q8_0 if base is T.Q8_0 or k % 256 else T.Q6_K
    elif quant == "MXFP4":
        kind = T.MXFP4 if stem.endswith("_exps") else T.Q8_0
    elif stem in ("attn_v", "attn_k") and experts == 8:
        kind = T.Q8_0
    elif quant == "Q4_K_M" and stem == "attn_output" and experts == 8:
        kind = T.Q5_K
    elif quant == "Q4_K_M" and (stem == "attn_v" or stem.startswith("ffn_down")) and more_bits(*place):
        kind = T.Q6_K
    if k % FORMATS[kind].elements:
        kind = FALLBACK.get(kind, kind)
    return T.F16 if k % FORMATS[kind].elements else kind


class Plan:
    """Lists the tensors of a shape. Embeddings stand out and output projections are small, so that tokens keep apart
    through the layers and routers spread them over the experts."""

    def __init__(self, shape: Shape, quant: str, layers: int, vocab: int) -> None:
        self.shape = shape
        self.quant = quant
        self.layers = shape.layers[:layers]
        self.vocab = vocab
        self.tensors: list[Tensor] = []
        self.pools: dict[tuple[GGMLType, float], np.ndarray] = {}
        self.wanted_pools: set[tuple[GGMLType, float]] = set()
        self._top()
        attention = 0
        n_attention = sum("a" in layer for layer in self.layers)
        for i, parts in enumerate(self.layers):
            self._layer(i, parts, (attention, n_attention))
            attention += "a" in parts

    def _top(self) -> None:
        s = self.shape
        self._matrix("token_embd", (self.vocab, s.embedding), std=0.02 if s.tied else 1.0)
        if s.encoder:
            self._normal("token_types.weight", (2, s.embedding), 0.02)
            if s.encoder == "learned":
                self._normal("position_embd.weight", (s.keys["context_length"], s.embedding), 0.02)
            self._norm("token_embd_norm", s.embedding)
            return
        self._norm(s.final_norm, s.embedding)
        if not s.tied:
            self._matrix("output", (self.vocab, s.embedding))
        if s.per_layer:
            width = s.per_layer * len(self.layers)
            self._matrix("per_layer_token_embd", (self.vocab, width), std=1.0)
            self._matrix("per_layer_model_proj", (width, s.embedding))
            self._norm("per_layer_proj_norm", s.per_layer)
        if s.local:
            turns = np.where(np.arange(s.head_dim // 2) < s.head_dim // 8, 1.0, 1e30)
            self._float("rope_freqs.weight", turns.shape, lambda _: turns)
        if s.rope_scaling:
            factors = _llama3_factors(s)
            self._float("rope_freqs.weight", factors.shape, lambda _: factors)

    def _layer(self, i: int, parts: str, attention: tuple[int, int]) -> None:
        s, blk, place = self.shape, f"blk.{i}.", (i, len(self.layers))
        if not s.encoder:
            self._norm(blk + "attn_norm", s.embedding)
        if "m" in parts:
            self._mamba2(blk)
        if "s" in parts:
            self._mamba1(blk)
        if "g" in parts:
            self._delta(blk)
        if "c" in parts:
            self._matrix(blk + "shortconv.in_proj", (3 * s.embedding, s.embedding))
            self._taps(blk + "shortconv.conv.weight", s.embedding, s.taps)
            self._matrix(blk + "shortconv.out_proj", (s.embedding, s.embedding), std=0.005)
        if "l" in parts:
            self._latent(blk)
        if "w" in parts or ("a" in parts and s.local):
            self._gemma4(blk, i, "w" in parts)
        elif "a" in parts:
            q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
            biased = s.bias or s.qkv_bias
            if s.fused:
                self._matrix(blk + "attn_qkv", (q + 2 * kv, s.embedding), attention, bias=biased)
            else:
                self._matrix(blk + "attn_q", (2 * q if s.delta else q, s.embedding), bias=biased)
                self._matrix(blk + "attn_k", (kv, s.embedding), bias=biased)
                self._matrix(blk + "attn_v", (kv, s.embedding), attention, bias=biased)
            self._matrix(blk + "attn_output", (s.embedding, q), std=0.005, bias=s.bias)
            for name in ("attn_q_norm", "attn_k_norm") if s.qk_norm else ():
                self._ones(f"{blk}{name}.weight", s.head_dim)
            if s.sinks:
                self._normal(blk + "attn_sinks.weight", (s.heads,), 1.0)
        if s.encoder:
            self._norm(blk + "attn_output_norm", s.embedding)
            self._norm(blk + "layer_output_norm", s.embedding)
        elif s.second_norm and ("d" in parts or "e" in parts):
            self._norm(blk + s.second_norm, s.embedding)
        for name in ("post_attention_norm", "post_ffw_norm") if s.post_norms else ():
            self._norm(blk + name, s.embedding)
        if "e" in parts:
            self._normal(blk + "ffn_gate_inp.weight", (s.experts, s.embedding), 0.02)
            if s.bias:
                self._normal(blk + "ffn_gate_inp.bias", (s.experts,), 0.02)
            if s.expert_bias:
                self._normal(blk + "exp_probs_b.bias", (s.experts,), 0.01)
            if s.local:
                self._beside(blk, place)
            else:
                self._feed_forward(blk, "_exps", (s.experts,), s.expert_ff, place, s.bias)
            if s.shared_ff:
                self._feed_forward(blk, "_shexp", (), s.shared_ff, place, False)
                if s.delta:
                    self._normal(blk + "ffn_gate_inp_shexp.weight", (1, s.embedding), 0.02)
        if "d" in parts:
            self._feed_forward(blk, "", (), s.ff, place, s.bias)

    def _latent(self, blk: str) -> None:
        s, m = self.shape, self.shape.latent
        query = s.heads * (m["nope"] + m["rope"])
        self._matrix(blk + "attn_q_a", (m["q_rank"], s.embedding))
        self._norm(blk + "attn_q_a_norm", m["q_rank"])
        self._matrix(blk + "attn_q_b", (query, m["q_rank"]))
        self._matrix(blk + "attn_kv_a_mqa", (m["rank"] + m["rope"], s.embedding))
        self._norm(blk + "attn_kv_a_norm", m["rank"])
        self._matrix(blk + "attn_k_b", (s.heads, m["rank"], m["nope"]))
        self._matrix(blk + "attn_v_b", (s.heads, m["value"], m["rank"]))
        self._matrix(blk + "attn_output", (s.embedding, s.heads * m["value"]), std=0.005)

    def _gemma4(self, blk: str, i: int, local: bool) -> None:
        """Attention with a window or without, and what follows both halves."""
        s, place = self.shape, (i, len(self.layers))
        dim, n_kv = (s.local["head_dim"], s.local["kv_heads"]) if local else (s.head_dim, s.kv_heads)
        own = i < len(self.layers) - _shared(s, self.layers)
        self._matrix(blk + "attn_q", (s.heads * dim, s.embedding))
        if own:
            self._matrix(blk + "attn_k", (n_kv * dim, s.embedding))
            self._ones(blk + "attn_k_norm.weight", dim)
        if own and (local or not s.keys_are_values):
            self._matrix(blk + "attn_v", (n_kv * dim, s.embedding), place)
        self._matrix(blk + "attn_output", (s.embedding, s.heads * dim), std=0.005)
        self._ones(blk + "attn_q_norm.weight", dim)
        self._ones(blk + "layer_output_scale.weight", 1)
        if s.per_layer:
            self._matrix(blk + "inp_gate", (s.per_layer, s.embedding))
            self._matrix(blk + "proj", (s.embedding, s.per_layer))
            self._norm(blk + "post_norm", s.embedding)

    def _beside(self, blk: str, place: tuple[int, int]) -> None:
        """Experts beside a dense feed-forward, gate and up in one tensor."""
        s = self.shape
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            self._norm(blk + name, s.embedding)
        self._ones(blk + "ffn_gate_inp.scale", s.embedding)
        self._ones(blk + "ffn_down_exps.scale", s.experts)
        self._matrix(blk + "ffn_gate_up_exps", (s.experts, 2 * s.expert_ff, s.embedding))
        self._matrix(blk + "ffn_down_exps", (s.experts, s.embedding, s.expert_ff), place, std=0.005)

    def _feed_forward(
        self, blk: str, suffix: str, stack: tuple[int, ...], ff: int, place: tuple[int, int], bias: bool
    ) -> None:
        width = self.shape.embedding
        if self.shape.fused and self.shape.gated and not self.shape.encoder:
            self._matrix(f"{blk}ffn_up{suffix}", (*stack, 2 * ff, width), bias=bias)
        else:
            self._gate_and_up(blk, suffix, (*stack, ff, width), bias)
        self._matrix(f"{blk}ffn_down{suffix}", (*stack, width, ff), place, std=0.005, bias=bias)

    def _gate_and_up(self, blk: str, suffix: str, shape: tuple[int, ...], bias: bool) -> None:
        for part in ("gate", "up") if self.shape.gated else ("up",):
            self._matrix(f"{blk}ffn_{part}{suffix}", shape, bias=bias)

    def _mamba1(self, blk: str) -> None:
        s, m = self.shape, self.shape.ssm
        inner, state, rank = m["inner_size"], m["state_size"], m["time_step_rank"]
        self._matrix(blk + "ssm_in", (2 * inner, s.embedding))
        self._conv(blk, inner)
        self._matrix(blk + "ssm_x", (rank + 2 * state, inner))
        self._matrix(blk + "ssm_dt", (inner, rank))
        self._time_steps(blk, inner)
        self._float(blk + "ssm_a", (inner, state), lambda rng: -np.tile(np.arange(1.0, state + 1), (inner, 1)))
        self._ones(blk + "ssm_d", inner)
        self._matrix(blk + "ssm_out", (s.embedding, inner), std=0.005)

    def _delta(self, blk: str) -> None:
        s, m = self.shape, self.shape.delta
        keys, values = m["group_count"] * m["state_size"], m["inner_size"]
        self._matrix(blk + "attn_qkv", (2 * keys + values, s.embedding))
        self._matrix(blk + "attn_gate", (values, s.embedding))
        for name in ("ssm_alpha", "ssm_beta"):
            self._matrix(blk + name, (m["time_step_rank"], s.embedding))
        self._taps(blk + "ssm_conv1d.weight", 2 * keys + values, m["conv_kernel"])
        self._time_steps(blk, m["time_step_rank"])
        self._float(blk + "ssm_a", (m["time_step_rank"],), lambda rng: rng.uniform(-16, -1, m["time_step_rank"]))
        self._ones(blk + "ssm_norm.weight", values // m["time_step_rank"])
        self._matrix(blk + "ssm_out", (s.embedding, values), std=0.005)

    def _taps(self, name: str, channels: int, taps: int) -> None:
        self._float(name, (channels, taps), lambda rng: rng.uniform(-0.5, 0.5, (channels, taps)))

    def _conv(self, blk: str, channels: int) -> None:
        self._taps(blk + "ssm_conv1d.weight", channels, self.shape.ssm["conv_kernel"])
        self._normal(blk + "ssm_conv1d.bias", (channels,), 0.02)

    def _time_steps(self, blk: str, count: int) -> None:
        """softplus of this is log-uniform in 0.001..0.1, the range that models start training with."""
        ends = math.log(1e-3), math.log(0.1)
        self._float(blk + "ssm_dt.bias", (count,), lambda rng: np.log(np.expm1(np.exp(rng.uniform(*ends, count)))))

    def _mamba2(self, blk: str) -> None:
        s, m = self.shape, self.shape.ssm
        inner, heads, groups = m["inner_size"], m["time_step_rank"], m["group_count"]
        channels = inner + 2 * groups * m["state_size"]
        self._matrix(blk + "ssm_in", (inner + channels + heads, s.embedding))
        self._conv(blk, channels)
        self._time_steps(blk, heads)
        self._float(blk + "ssm_a", (heads, 1), lambda rng: rng.uniform(-16, -1, (heads, 1)))
        self._ones(blk + "ssm_d", heads, 1)
        self._ones(blk + "ssm_norm.weight", *((groups, inner // groups) if groups > 1 else (inner,)))
        self._matrix(blk + "ssm_out", (s.embedding, inner), std=0.005)

    def _matrix(
        self, name: str, shape: tuple[int, ...], place: tuple[int, int] = (0, 1), std: float = 0.02, bias: bool = False
    ) -> None:
        s, name_in_file = self.shape, name + ".weight"
        kind = tensor_type(self.quant, name_in_file, shape[-1], place, s.experts, s.tied)
        if s.expert_type and name.endswith("_exps"):
            kind = T[s.expert_type]
        self.tensors.append(Tensor(name_in_file, shape, kind, lambda rng, count: self._blocks(rng, kind, count, std)))
        self.wanted_pools.add((kind, std))
        if bias:
            self._normal(name + ".bias", shape[:-1], 0.02)

    def _norm(self, name: str, n: int) -> None:
        self._ones(name + ".weight", n)
        if self.shape.norm_bias:
            self._normal(name + ".bias", (n,), 0.02)

    def _ones(self, name: str, *shape: int) -> None:
        self._float(name, shape, lambda _: np.ones(shape))

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> None:
        self._float(name, shape, lambda rng: rng.standard_normal(shape, np.float32) * np.float32(std))

    def _float(self, name: str, shape: tuple[int, ...], values: Callable[[np.random.Generator], np.ndarray]) -> None:
        assert math.prod(shape) * 4 <= PIECE_BYTES, f"{name} of {shape} is too large for one piece"
        self.tensors.append(Tensor(name, shape, T.F32, lambda rng, _: quantize(values(rng), T.F32).reshape(-1)))

    def make_pools(self) -> None:
        """What pieces are drawn from, made before processes are forked, which then share it."""
        for kind, std in sorted(self.wanted_pools):
            self._pool(kind, std)

    def _pool(self, kind: GGMLType, std: float) -> np.ndarray:
        if (kind, std) not in self.pools:
            # Its own generator: the pool must not depend on which tensor asked first.
            x = np.random.default_rng(POOL_ELEMENTS).standard_normal(POOL_ELEMENTS, np.float32) * np.float32(std)
            self.pools[kind, std] = quantize(x.reshape(-1, max(32, FORMATS[kind].elements)), kind)  # [blocks, bytes]
        return self.pools[kind, std]

    def _blocks(self, rng: np.random.Generator, kind: GGMLType, size: int, std: float) -> np.ndarray:
        """Raw blocks, drawn one by one from a pool of quantised normal values: no two rows are alike."""
        pool = self._pool(kind, std)
        return pool.take(rng.integers(0, len(pool), -(-size // pool.shape[1])), axis=0).reshape(-1)[:size]


def _shared(shape: Shape, layers: Sequence[str]) -> int:
    """Layers that read the keys of others: none in a model that was cut short."""
    return shape.shared_kv if len(layers) == len(shape.layers) else 0


def _llama3_factors(shape: Shape) -> np.ndarray:
    r = shape.rope_scaling
    wavelength = 2 * np.pi * shape.keys["rope.freq_base"] ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    smooth = (r["original"] / wavelength - r["low"]) / (r["high"] - r["low"])
    smooth = np.clip(smooth, 0, 1)
    return 1 / ((1 - smooth) / r["factor"] + smooth)


def synthetic_vocab(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer keys of a byte-level vocabulary of the wanted size: specials at their ids, bytes, merges, filler."""
    special = {int(i): text for i, text in spec["special"].items()}
    if spec["pre"] == "bert-bge":
        return word_pieces(spec, special)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    text = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    text += [merge.replace(" ", "") for merge in BYTE_MERGES]
    text += [f"Ġw{i}" for i in range(spec["size"] - len(special) - len(text))]
    pieces = iter(text)
    return {
        "model": "gpt2",
        "pre": spec["pre"],
        "tokens": [special.get(i) or next(pieces) for i in range(spec["size"])],
        "token_type": [3 if i in special else 1 for i in range(spec["size"])],
        "merges": BYTE_MERGES,
        "bos_token_id": spec["bos"],
        "eos_token_id": spec["eos"],
        "padding_token_id": spec["pad"],
        "add_bos_token": False,
        "add_eos_token": False,
    }


def word_pieces(spec: Mapping[str, Any], special: Mapping[int, str]) -> dict[str, Any]:
    """The tokenizer keys of a WordPiece vocabulary: specials, characters at the head of a word and inside, filler."""
    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    text = [*(f"▁{c}" for c in letters), *letters]
    pieces = iter([*text, *(f"▁w{i}" for i in range(spec["size"] - len(special) - len(text)))])
    tokens = [special.get(i) or next(pieces) for i in range(spec["size"])]
    ids = {text: i for i, text in special.items()}
    return {
        "model": "bert",
        "pre": spec["pre"],
        "tokens": tokens,
        "token_type": [3 if i in special else 1 for i in range(spec["size"])],
        "token_type_count": 2,
        "bos_token_id": ids["[CLS]"],
        "eos_token_id": ids["[SEP]"],
        "seperator_token_id": ids["[SEP]"],
        "unknown_token_id": ids["[UNK]"],
        "padding_token_id": ids["[PAD]"],
        "mask_token_id": ids["[MASK]"],
        "add_bos_token": True,
        "add_eos_token": True,
    }


def model_keys(shape: Shape, layers: Sequence[str], vocab: int) -> dict[str, Any]:
    """The keys that a converter writes, without the architecture's prefix; an array where the value differs by layer."""
    hybrid = bool(shape.ssm or shape.taps)
    if shape.encoder:
        return {
            "block_count": len(layers),
            "embedding_length": shape.embedding,
            "attention.head_count": shape.heads,
            "feed_forward_length": shape.ff,
        } | dict(shape.keys)
    keys: dict[str, Any] = {
        "block_count": len(layers),
        "embedding_length": shape.embedding,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": [shape.kv_heads if "a" in layer else 0 for layer in layers]
        if hybrid
        else shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head_dim,
        "vocab_size": vocab,
    }
    if shape.local:
        windows = ["w" in layer for layer in layers]
        keys["attention.head_count_kv"] = [shape.local["kv_heads"] if w else shape.kv_heads for w in windows]
        keys |= {"attention.sliding_window_pattern": windows, "attention.shared_kv_layers": _shared(shape, layers)}
        keys["embedding_length_per_layer_input"] = shape.per_layer
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            keys |= {name: shape.head_dim, f"{name}_swa": shape.local["head_dim"]}
    if shape.ff:
        keys["feed_forward_length"] = shape.ff
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.experts_used}
    if shape.arch == "nemotron_h_moe":
        keys["feed_forward_length"] = [shape.expert_ff if "e" in layer else 0 for layer in layers]
    if shape.delta:
        keys["attention.recurrent_layers"] = ["g" in layer for layer in layers]
    if shape.taps:
        keys["shortconv.l_cache"] = shape.taps
    keys |= {f"ssm.{name}": value for name, value in (*shape.ssm.items(), *shape.delta.items())}
    return keys | dict(shape.keys)


def report(plan: Plan) -> str:
    """Parameters, bytes, and the bytes that one decoded token reads: its own experts, one row of an untied embedding."""
    parameters = total = read = 0
    kinds: Counter[str] = Counter()
    for tensor in plan.tensors:
        size = nbytes(tensor.type, tensor.shape[::-1])
        parameters += math.prod(tensor.shape)
        total += size
        kinds[tensor.type.name] += size
        if "_exps." in tensor.name:
            size = size * plan.shape.experts_used // plan.shape.experts
        elif tensor.name == "token_embd.weight" and not plan.shape.tied:
            size //= tensor.shape[0]
        read += size
    mixture = ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in kinds.most_common())
    return (
        f"{len(plan.tensors)} tensors, {parameters / 1e9:.3f} G parameters, {total} bytes of weights,"
        f" {read} read per decoded token; {mixture}"
    )


def build(shape: Shape, quant: str, *, name: str, layers: int, vocab: Path | None, seed: int) -> tuple[GGUFWriter, Plan]:
    writer = GGUFWriter()
    writer.add("general.architecture", shape.arch)
    writer.add("general.type", "model")
    writer.add("general.name", f"synthetic {name} {quant}")
    writer.add("general.quantization_version", 2)
    writer.add("general.file_type", QUANTS[quant][1])
    size = shape.vocab["size"]
    if vocab is None:
        for key, value in synthetic_vocab(shape.vocab).items():
            writer.add(f"tokenizer.ggml.{key}", value)
    else:
        with GGUFFile.open(vocab) as source:
            size = len(source.metadata.strs("tokenizer.ggml.tokens"))
            for key, value in source.metadata.items():
                if key.startswith("tokenizer."):
                    writer.add(key, value, source.metadata.kind(key))
    plan = Plan(shape, quant, layers, size)
    for key, value in model_keys(shape, plan.layers, size).items():
        writer.add(f"{shape.arch}.{key}", value)
    for tensor in plan.tensors:
        writer.add_tensor(tensor.name, partial(_pieces, tensor, seed), tensor.type, tensor.shape)
    return writer, plan


def _pieces(tensor: Tensor, seed: int) -> Iterator[np.ndarray]:
    return (tensor.piece(seed, i) for i in range(tensor.n_pieces))


def write(writer: GGUFWriter, plan: Plan, seed: int, path: Path, jobs: int) -> int:
    """Writes the file with `jobs` processes, which share nothing but the pools; returns its size.

    Making pages of memory and copying into them is what takes time: one process fills 1 to 2 GB/s of a memory file
    system, sixteen are bound by its locks at 10 GB/s and more.
    """
    header, starts = writer.layout()
    last = plan.tensors[-1]
    size = starts[last.name] + last.nbytes
    work = [(t, i) for t in sorted(plan.tensors, key=lambda t: -t.nbytes) for i in range(t.n_pieces)]
    plan.make_pools()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.truncate(size)
            stream.write(header)
        processes = [_FORK.Process(target=_fill, args=(part, starts, work[i::jobs], seed)) for i in range(jobs)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise OSError(errno.EIO, "a process that filled the file failed", str(path))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


_FORK = multiprocessing.get_context("fork")


def _fill(path: Path, starts: Mapping[str, int], work: Sequence[tuple[Tensor, int]], seed: int) -> None:
    with path.open("r+b", buffering=0) as stream:
        for tensor, i in work:
            stream.seek(starts[tensor.name] + i * tensor.piece_bytes)
            left = memoryview(tensor.piece(seed, i))
            while left:
                left = left[stream.write(left) :]


def main() -> None:
    shapes = load_shapes()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("quant", choices=QUANTS)
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--layers", type=int, help="keep only the first N layers")
    parser.add_argument("--vocab", type=Path, help="take the tokenizer of this GGUF file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that write, by default one a core")
    parser.add_argument("--dry", action="store_true", help="only print the sizes")
    args = parser.parse_args()
    shape = shapes[args.shape]
    layers = len(shape.layers) if args.layers is None else args.layers
    if not 1 <= layers <= len(shape.layers):
        parser.error(f"--layers is {layers}, wanted 1 to {len(shape.layers)}")
    try:
        writer, plan = build(shape, args.quant, name=args.shape, layers=layers, vocab=args.vocab, seed=args.seed)
        print(report(plan))
        if not args.dry:
            began = time.perf_counter()
            size = write(writer, plan, args.seed, args.out, args.jobs)
            print(f"{args.out}: {size} bytes in {time.perf_counter() - began:.1f} s")
    except QuarrelError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
