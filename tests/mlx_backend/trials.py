"""Single calls of ops at the sizes of released models and at the edges of kernels, drawn on a few rows.

Each is run as it is, and again with bugs in its kernels (`test_planted_bugs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from quarrel.gguf import FORMATS, GGMLType
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from quarrel.ops import reference
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Array, Case, Compute, Concrete, KVArrays, Op
from quarrel.ops.linear import (
    LINEAR,
    LINEAR_ADD,
    NORM_GATE_UP,
    NORM_LINEAR,
    LinearAddSpec,
    LinearSpec,
    NormGateUpSpec,
    NormLinearSpec,
)
from quarrel.ops.moe import EXPERT_DOWN, ExpertDownSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.sample import SAMPLE, SampleSpec
from quarrel.ops.state import GATED_NORM, GatedNormSpec
from tests.mlx_backend.cases import error_of

FEW = 67
"""Rows of a matrix, wherever a model has thousands."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One call: `make(rng)` draws its inputs. `parts`: SIMD-groups to rows of W, as for a matrix of more rows."""

    op: Op
    spec: Any
    make: Callable[[np.random.Generator], tuple[Concrete, ...]]
    compute: Compute = "float16"
    batch: Batch | None = None
    parts: int = 0

    def error(self) -> float:
        """Of the worst result or row, over the tolerance."""
        inputs, want = self._drawn()
        with _parts(self.parts):
            got = run_op(REGISTRY, self.op, self.spec, inputs, self.compute, self.batch)
        return error_of(self.op, self.spec, got, want) / self.op.tolerance[self.compute]

    @cache  # noqa: B019 (trials live as long as the module that names them)
    def _drawn(self) -> tuple[tuple[Concrete, ...], tuple[Concrete, ...]]:
        inputs = self.make(np.random.default_rng(0))
        return inputs, reference.run_op(self.op, self.spec, inputs)


@contextmanager
def _parts(parts: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if parts:
            patch.setattr("quarrel.mlx_backend.linear.matvec.parts_of", lambda rows, k: parts)
        yield


def linear(
    form: Op,
    types: Sequence[GGMLType],
    k: int,
    parts: int = 0,
    rows: int = 1,
    single: bool = True,
    n: int = FEW,
    bits: int = 0,
) -> Trial:
    """A linear op of `form` with weights of `types` (norm_linear: any number, gate and up: two); `bits`: of codes in
    Q4_1 and Q8_1 of LINEAR, where they have fewer."""
    maps = tuple(LinearSpec(t, n, k) for t in types)
    norm = NormSpec("rms", k, 1e-5)
    specs = {
        "linear": lambda: maps[0],
        "linear_add": lambda: LinearAddSpec(maps[0], 0.5),
        "norm_linear": lambda: NormLinearSpec(norm, maps),
        "norm_gate_up": lambda: NormGateUpSpec(norm, maps[0], maps[-1], "silu"),
    }
    spec = specs[form.name]()
    kinds = Rows(np.full(rows, single))
    make = form.make
    assert make is not None
    case = Case(spec, {"T": rows, "bits": bits})
    return Trial(form, spec, lambda rng: make(case, rng), batch=Batch(kinds, kinds), parts=parts)


def of_case(op: Op, case: Case, compute: Compute = "float16") -> Trial:
    """A case as contracts have them."""
    make = op.make
    assert make is not None
    return Trial(op, case.spec, lambda rng: make(case, rng), compute)


def attention(spec: AttentionSpec, lengths: Sequence[tuple[int, int]], compute: Compute = "float32") -> Trial:
    """Sequences of (new tokens, keys in all), block size 32."""
    return Trial(ATTENTION, spec, lambda rng: attention_inputs(spec, lengths, rng), compute)


def attention_inputs(
    spec: AttentionSpec, lengths: Sequence[tuple[int, int]], rng: np.random.Generator
) -> tuple[Array, Array, Array, Array, KVArrays]:
    """q, query_start, kv_len, block_table and cache."""
    new, kv_len = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    width = -(-int(kv_len.max()) // 32)
    table = rng.permutation(len(new) * width).reshape(-1, width).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    shape = (table.size, 32, spec.n_kv, spec.head_dim)
    cache = KVArrays(rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32))
    q = rng.standard_normal((int(new.sum()), spec.width), dtype=np.float32) * 2
    return q, starts, kv_len, table, cache


@dataclass(frozen=True)
class Model:
    """Widths of a released model's layers: of the stream, of query, key and value together, of heads and of ffn."""

    width: int
    qkv: int
    heads: int
    ffn: int


MODELS = {
    "SmolLM2-135M": Model(576, 960, 576, 1536),
    "Qwen3-0.6B": Model(1024, 4096, 2048, 3072),
    "Llama-3.2-1B": Model(2048, 3072, 2048, 8192),
    "Qwen3-4B": Model(2560, 6144, 4096, 9728),
    "Gemma-3-4B": Model(2560, 4096, 2048, 10240),
    "gpt-oss-20b": Model(2880, 5120, 4096, 2880),
    "Phi-3-mini": Model(3072, 9216, 3072, 8192),
    "Qwen2.5-7B": Model(3584, 4608, 3584, 18944),
    "Mistral-7B": Model(4096, 6144, 4096, 14336),
    "Qwen3-8B": Model(4096, 6144, 4096, 12288),
    "Qwen3-14B": Model(5120, 7168, 5120, 17408),
    "Llama-3-70B": Model(8192, 10240, 8192, 28672),
}


def of_model(model: Model, parts_of: Callable[[int, int], int]) -> list[Trial]:
    """The maps of a decoded token in Q4_K and Q6_K, Q8_0 where rows are no whole superblocks; `parts_of(rows, k)`."""

    def types(k: int, *wanted: GGMLType) -> list[GGMLType]:
        return [t if k % FORMATS[t].elements == 0 else GGMLType.Q8_0 for t in wanted]

    q4, q6, w = GGMLType.Q4_K, GGMLType.Q6_K, model.width
    return [
        linear(NORM_LINEAR, types(w, q4, q4, q6), w, parts_of(model.qkv, w)),
        linear(LINEAR_ADD, types(model.heads, q4), model.heads, parts_of(w, model.heads)),
        linear(NORM_GATE_UP, types(w, q4, q4), w, parts_of(2 * model.ffn, w)),
        linear(LINEAR_ADD, types(model.ffn, q6), model.ffn, parts_of(w, model.ffn)),
    ]


def every_cut(rng: np.random.Generator) -> tuple[Concrete, ...]:
    """Rows for `sample` with every mix of top_k, top_p and min_p; the last four have infinities of both signs."""
    rows, n = 204, 100
    logits = rng.standard_normal((rows, n), dtype=np.float32) * 2
    logits[-4:, ::9] = rng.choice(np.array([-np.inf, np.inf], np.float32), logits[-4:, ::9].shape)
    k, p, m = np.meshgrid([0, 3, 40], [1.0, 0.9, 0.5], [0.0, 0.02], indexing="ij")
    at = np.arange(rows) % k.size
    cuts = k.reshape(-1)[at].astype(np.int32), *(x.reshape(-1)[at].astype(np.float32) for x in (p, m))
    temperature = np.where(at % 4 == 3, 0, 1.0).astype(np.float32)
    temperature[-4:] = 0, 0.7, 1.3, 0
    return logits, temperature, *cuts, rng.random(rows, dtype=np.float32)


def far_apart(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    """Inputs of attention whose scores are hundreds apart, and exact: of few bits, as the scale is."""
    assert ATTENTION.make is not None
    q, *between, cache = ATTENTION.make(case, rng)
    assert isinstance(q, np.ndarray)
    assert isinstance(cache, KVArrays)
    with np.errstate(over="ignore"):  # rows that nobody may read hold 1e38
        k, v = (np.round(x * 8) / 8 for x in (cache.k, cache.v))
    return np.round(q * 4) / 4, *between, replace(cache, k=k, v=v)


FAR_APART = Case(AttentionSpec(5, 1, 16, 8.0, latent=32), {"S": 9, "Q": 2, "KV": 70, "block_size": 16})
HEADS = AttentionSpec(4, 2, 64, 0.125)
FORMS: tuple[tuple[Op, int], ...] = ((LINEAR, 1), (LINEAR_ADD, 1), (NORM_LINEAR, 2), (NORM_GATE_UP, 2))
"""The linear ops, and how many matrices each is tried with."""
LONG = [(1, 900), (1, 40), (1, 601)]
ALIGNED = [(3, n) for n in range(60, 92)]
"""A window of 40 keys begins at each of the places of a tile."""

TRIALS: dict[str, Trial] = {
    **{f"{op.name}, two groups share rows": linear(op, [GGMLType.Q4_K] * n, 4096, 2, 2) for op, n in FORMS},
    **{f"{op.name}, a tail": linear(op, [GGMLType.F16] * n, 77) for op, n in FORMS},
    "linear, a tail, shared": linear(LINEAR, [GGMLType.BF16], 4101, 2),
    "linear, a tail, prompt": linear(LINEAR, [GGMLType.F16], 77, rows=3, single=False),
    "linear, prompt": linear(LINEAR, [GGMLType.Q5_K], 512, rows=70, single=False),
    "decode, window 256": attention(replace(HEADS, window=256), LONG),
    "decode, window 300": attention(replace(HEADS, window=300), LONG),
    "decode, window 600": attention(replace(HEADS, window=600), LONG),
    "decode, chunks of 300": attention(replace(HEADS, window=300, chunked=True), LONG),
    "decode, long": attention(HEADS, [(1, 2048), (1, 2049), (1, 8193), (1, 64), (1, 65)]),
    "decode, groups of 7": attention(AttentionSpec(7, 1, 64, 0.125), LONG),
    "prompt, window at every place": attention(replace(HEADS, window=40), ALIGNED),
    "prompt, groups of 3": attention(AttentionSpec(3, 1, 32, 0.18), [(40, 40), (23, 90)]),
    "prompt, groups of 5": attention(AttentionSpec(5, 1, 32, 0.18), [(40, 40), (23, 90)]),
    "linear, one block": linear(LINEAR, [GGMLType.Q4_0], 32, n=2),
    "prompt, chunks": attention(replace(HEADS, window=24, chunked=True), [(70, 160), (9, 40)]),
    "sample, every cut": Trial(SAMPLE, SampleSpec(100), every_cut, "float32"),
    "latent, scores far apart": Trial(ATTENTION, FAR_APART.spec, lambda rng: far_apart(FAR_APART, rng)),
    "prompt, groups of 12": attention(AttentionSpec(12, 1, 32, 0.18), [(40, 40), (23, 90)]),
}

LARGE: dict[str, Trial] = {
    "attention": attention(AttentionSpec(64, 8, 128, 0.09), [(1, 40), (3, 9)], "float16"),
    "linear": TRIALS["norm_linear, two groups share rows"],
    "gate and up": TRIALS["norm_gate_up, two groups share rows"],
    "a prompt's rows": TRIALS["linear, prompt"],
    "an expert's rows": of_case(EXPERT_DOWN, Case(ExpertDownSpec(GGMLType.Q4_K, 4, 2, 128, 256), {"T": 2})),
    "gated norm": of_case(GATED_NORM, Case(GatedNormSpec(128, 64, 1e-5), {"T": 2})),
}
"""Template constants of models of 70 billion weights, for rules that nothing need run for."""
