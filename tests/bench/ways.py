"""Honest and wrong ways through a model: files as other tools write them, arithmetic rounded in NumPy, planted errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quarrel.errors import UnsupportedOp
from quarrel.gguf import FORMATS, GGMLType, GGUFWriter, quantize
from quarrel.ops import draw, reference
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec
from quarrel.ops.check import CheckedStep
from quarrel.ops.contract import Array, Compute, Concrete, ConstRef, KVArrays, Op, RawWeight, WeightRef
from quarrel.ops.program import Node, Program
from quarrel.ops.step import ComputeChoice, Limits, WeightSource
from tests.reference_backend import ReferenceBackend

Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def _columns(k: int) -> Array:
    return np.where(np.arange(k) % 97 == 3, 30.0, 1.0)


WEIGHTS: Mapping[str, Draw] = {
    "gaussian": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-1.7, 1.7, shape),
    "heavy tails": lambda rng, shape: np.clip(rng.standard_t(2.2, shape), -60, 60) / 2.5,
    "outlier columns": lambda rng, shape: rng.standard_normal(shape) * _columns(shape[1]),
    "uneven gains": lambda rng, shape: rng.standard_normal(shape),
    "outlier gains": lambda rng, shape: rng.standard_normal(shape),
    "random blocks": lambda rng, shape: rng.standard_normal(shape),
}
"""Values of a matrix of about unit size. Of two the gains of the norms are what is odd; the last are codes, scales and
minima drawn as integers, so that each matrix has a mean."""


@dataclass(frozen=True)
class Size:
    """A llama with heads of 64."""

    width: int
    ffn: int
    vocab: int = 512
    layers: int = 2

    @property
    def heads(self) -> int:
        return self.width // 64


TINY, MID = Size(256, 512, 256), Size(768, 2048, 256)


def write(path: Path, kind: str, size: Size, seed: int = 0) -> Path:
    """Q4_K_M, by no rule of our own writer: embeddings of size 1, maps of size 1 / sqrt(k), so that scores and what each
    layer adds are as large as they come."""
    rng, writer = np.random.default_rng(seed), GGUFWriter()
    vocab, kv = size.vocab, max(1, size.heads // 4)
    keys: dict[str, Any] = {
        "block_count": size.layers,
        "context_length": 512,
        "embedding_length": size.width,
        "feed_forward_length": size.ffn,
        "attention.head_count": size.heads,
        "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    writer.add("general.architecture", "llama")
    for key, value in keys.items():
        writer.add(f"llama.{key}", value)
    for key, values in (
        ("tokens", [f"t{i}" for i in range(vocab)]),
        ("scores", [0.0] * vocab),
        ("token_type", [1] * vocab),
    ):
        writer.add(f"tokenizer.ggml.{key}", values)
    writer.add("tokenizer.ggml.model", "llama")

    def matrix(name: str, n: int, k: int, type: GGMLType, gain: Array | None = None) -> None:
        size = 1.0 if name == "token_embd" else k**-0.5
        if kind == "random blocks":
            writer.add_tensor(f"{name}.weight", draw.weight(rng, type, n, k, size).raw, type)
            return
        values = WEIGHTS[kind](rng, (n, k)) * size
        if kind == "outlier gains" and gain is not None:
            values /= gain  # what a gain makes large, the map behind it makes small again
        writer.add_tensor(f"{name}.weight", quantize(values.astype(np.float32), type), type)

    def gain(name: str) -> Array:
        values = np.ones(size.width)
        if kind == "uneven gains":
            values = np.exp(rng.normal(0, 1.2, size.width))
        if kind == "outlier gains":
            values = np.where(np.arange(size.width) % 61 == 5, 100.0, 1.0)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        return values

    q4, q6 = GGMLType.Q4_K, GGMLType.Q6_K
    matrix("token_embd", vocab, size.width, q4)
    matrix("output", vocab, size.width, q6, gain("output_norm"))
    for i in range(size.layers):
        better, blk = (q6, q4)[i % 2], f"blk.{i}."
        before = gain(blk + "attn_norm")
        for name, n, type in (("q", size.heads * 64, q4), ("k", kv * 64, q4), ("v", kv * 64, better)):
            matrix(f"{blk}attn_{name}", n, size.width, type, before)
        matrix(blk + "attn_output", size.width, size.heads * 64, q4)
        before = gain(blk + "ffn_norm")
        for name in ("gate", "up"):
            matrix(f"{blk}ffn_{name}", size.ffn, size.width, q4, before)
        matrix(blk + "ffn_down", size.width, size.ffn, better)
    writer.write(path)
    return path


def rounded(x: Array, compute: Compute) -> Array:
    """float32 values that the format can hold."""
    if compute == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


class _Quiet(CheckedStep):
    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        pass


class Rounded(ReferenceBackend):
    """float16 or bfloat16 in NumPy: weights and what is stored between ops are rounded. Alone, an op is computed whole and
    rounded once; a compiled step rounds after every primitive, and sums its products in float32, in another order."""

    def __init__(self, compute: Compute, fused: bool = True) -> None:
        super().__init__()
        self._compute, self._fused = compute, fused
        self._weights: dict[tuple[int, tuple[int, ...]], tuple[Array, RawWeight]] = {}

    def compute_of(self, choice: ComputeChoice) -> Compute:
        return self._compute

    def compile(self, program: Program, weights: WeightSource, limits: Limits, *more: Any) -> Any:  # type: ignore[override]
        return _Quiet(Rounded(self._compute, fused=False), program, Kept(weights), limits)

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        if op.expand is not None and not self._fused:
            raise UnsupportedOp(self.name, op.name, spec, ["one op after the other"])
        given = [self._weight(x) if isinstance(x, RawWeight) and x.type.name != "F32" else x for x in inputs]
        if op.name == "linear" and not self._fused:
            results: tuple[Concrete, ...] = (_product(*given[:2]),)  # type: ignore[arg-type]
        else:
            results = reference.run_op(op, spec, given)
        kinds = [p.kind for p in op.results(spec)]
        return tuple(self._stored(x, kind) for x, kind in zip(results, [*kinds, *["cache"] * len(results)]))

    def _weight(self, x: RawWeight) -> RawWeight:
        key = x.raw.ctypes.data, x.raw.shape
        if key not in self._weights:
            values = rounded(x.dense(), self._compute)
            # The raw blocks are kept, so that no others come to lie at their address.
            self._weights[key] = x.raw, RawWeight(GGMLType.F32, values.view(np.uint8).reshape(len(values), -1), x.k)
        return self._weights[key][1]

    def _stored(self, x: Concrete, kind: str) -> Concrete:
        if isinstance(x, KVArrays):
            return KVArrays(rounded(x.k, self._compute), rounded(x.v, self._compute), x.type)
        assert isinstance(x, np.ndarray)
        return rounded(x, self._compute) if kind == "act" else x


def _product(x: Array, weight: RawWeight) -> Array:
    """float32 sums of 64 columns each, added up one after the other."""
    dense, y = weight.dense(), np.float32(0)
    for start in range(0, weight.k, 64):
        y = y + x[:, start : start + 64] @ dense[:, start : start + 64].T
    return np.asarray(y, np.float32)


class Kept:
    """Weights that are read once."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self._raw = source, dict[WeightRef, RawWeight]()

    def raw(self, ref: WeightRef) -> RawWeight:
        if ref not in self._raw:
            self._raw[ref] = self._source.raw(ref)
        return self._raw[ref]


@dataclass(frozen=True)
class Planted:
    """A weight source with an error."""

    source: WeightSource
    spoil: Callable[[WeightRef, RawWeight], RawWeight]

    def raw(self, ref: WeightRef) -> RawWeight:
        return self.spoil(ref, self.source.raw(ref))


def _wrong_scale(ref: WeightRef, w: RawWeight) -> RawWeight:
    """The first of each row's superblocks an eighth too large, in one matrix."""
    if ref.name != "blk.1.attn_output.weight":
        return w
    raw = w.raw.copy()
    scale = raw[:, : FORMATS[w.type].nbytes][:, :4].copy().view(np.float16)
    raw[:, :4] = (scale * np.float16(1.125)).view(np.uint8)
    return RawWeight(w.type, raw, w.k)


def _dropped_rows(ref: WeightRef, w: RawWeight) -> RawWeight:
    """32 rows of one matrix are never computed."""
    if ref.name != "blk.0.ffn_down.weight":
        return w
    raw = w.raw.copy()
    raw[32:64] = 0
    return RawWeight(w.type, raw, w.k)


def _nodes(program: Program, change: Callable[[Node], Node]) -> Program:
    return replace(program, nodes=tuple(map(change, program.nodes)))


def _wrong_rope(node: Node) -> Node:
    """Halves are rotated where pairs are meant, in the first layer."""
    if not isinstance(node.spec, RopeAppendSpec) or node.path != "blk.0.attn":
        return node
    q, k = (replace(r, style="neox") for r in (node.spec.q, node.spec.k))
    return replace(node, spec=replace(node.spec, q=q, k=k))


def _slow_rope(node: Node) -> Node:
    """Frequencies of a base that is a tenth larger."""
    inputs = tuple(ConstRef(i.name, tuple(f**1.01 for f in i.data)) if isinstance(i, ConstRef) else i for i in node.inputs)
    return replace(node, inputs=inputs)


def _missing_key(node: Node) -> Node:
    """The oldest of 33 keys is not read, in one layer."""
    if not isinstance(node.spec, AttentionSpec) or node.path != "blk.1.attn":
        return node
    return replace(node, spec=replace(node.spec, window=32))


ERRORS: Mapping[str, Callable[[Program, WeightSource], tuple[Program, WeightSource]]] = {
    "wrong scale": lambda program, weights: (program, Planted(weights, _wrong_scale)),
    "dropped rows": lambda program, weights: (program, Planted(weights, _dropped_rows)),
    "wrong rope": lambda program, weights: (_nodes(program, _wrong_rope), weights),
    "slow rope": lambda program, weights: (_nodes(program, _slow_rope), weights),
    "missing key": lambda program, weights: (_nodes(program, _missing_key), weights),
}
"""What a compiled step does wrong, that its ops alone do right."""


def planted(kind: type[Any], error: str) -> type[Any]:
    """A backend whose compiled steps have this error."""

    class Wrong(kind):  # type: ignore[misc]
        def compile(self, program: Program, weights: WeightSource, *more: Any) -> Any:
            return super().compile(*ERRORS[error](program, weights), *more)

    return Wrong
