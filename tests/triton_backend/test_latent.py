"""Steps of a layer with latent attention: fewer launches, the same values."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from quarrel.gguf import GGMLType
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec, attention, rope_append
from quarrel.ops.contract import ConstRef, KVArrays, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.heads import head_linear
from quarrel.ops.kv import KVType
from quarrel.ops.linear import linear_add, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.reference import run_program
from quarrel.ops.rope import RopeSpec
from quarrel.triton_backend import fuse
from quarrel.triton_backend.attention.splits import STEP
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_step import LIMITS, SIZE, VOCAB, Weights, batch

WIDTH, HEADS, ROT, RANK, NOPE, VALUE = 96, 3, 16, 64, 32, 96


def latent(values: GGMLType = GGMLType.Q4_0, style: Literal["norm", "neox"] = "norm", normed: bool = True) -> Program:
    """Two layers as those of GLM-4.7-Flash."""
    b = Builder()

    def ref(name: str, type: GGMLType, rows: int, k: int) -> WeightRef:
        return WeightRef(name, type, rows, k)

    def gain(k: int) -> WeightRef:
        return ref("gain", GGMLType.F32, 1, k)

    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, WIDTH))
    freq = ConstRef("freq", tuple(10000.0 ** (-2.0 * i / ROT) for i in range(ROT // 2)))
    for layer in range(2):
        with b.at(f"blk.{layer}"):
            maps = [(ref(n, GGMLType.Q4_0, rows, WIDTH), None) for n, rows in (("a", 64), ("c", RANK), ("k", ROT))]
            q, c, k = norm_linear(b, NormSpec("rms", WIDTH, 1e-5), h, [gain(WIDTH)], maps)
            wide = ref("b", GGMLType.Q4_0, HEADS * (NOPE + ROT), 64)
            (q,) = norm_linear(b, NormSpec("rms", 64, 1e-5), q, [gain(64)], [(wide, None)])
            if normed:
                c = norm(b, NormSpec("rms", RANK, 1e-6), c, gain(RANK))
            q = head_linear(b, q, ref("kb", GGMLType.Q8_0, HEADS * RANK, NOPE), HEADS, ROT)
            cache = b.cache(KVLayer(1, ROT, latent=RANK))
            ropes = RopeSpec(style, HEADS, ROT + RANK, ROT, 1.2), RopeSpec(style, 1, ROT, ROT, 1.2)
            q = rope_append(b, RopeAppendSpec(*ropes, RANK), q, k, c, freq, cache)
            y = attention(b, AttentionSpec(HEADS, 1, ROT, 0.2, latent=RANK), q, cache)
            y = head_linear(b, y, ref("vb", values, HEADS * VALUE, RANK), HEADS)
            h = linear_add(b, h, y, ref("o", GGMLType.Q8_0, WIDTH, HEADS * VALUE))
    h = gather_rows(b, h, b.input("out_rows"))
    return b.program(hidden=norm(b, NormSpec("rms", WIDTH, 1e-5, out="f32"), h, gain(WIDTH)))


LONG = replace(LIMITS, max_tokens=160, max_blocks_per_seq=12)
STEPS = [[(0, 0, 150), (12, 0, 3)], [(0, 150, 1)], [(12, 3, 1)], [(0, 151, 1), (12, 4, 1)], [(0, 152, 1), (12, 5, 9)]]
"""Prompts, one token with several splits of its keys and one with one, one of each sequence, one token beside a prompt."""
EDGES = [[(0, past, new)] for past, new in ((0, 1), (1, 1), (2, 29), (31, 1), (32, 1), (33, 31), (64, 1), (65, 1))]
"""One token without older keys, one that fills a split, one that begins another."""


def reference(program: Program, steps: list[list[tuple[int, int, int]]] = STEPS) -> list[np.ndarray]:
    shape = LIMITS.n_blocks, SIZE, 1
    caches = [KVArrays(np.zeros((*shape, ROT), np.float32), np.zeros((*shape, RANK), np.float32)) for _ in range(2)]
    return [run_program(program, Weights(), caches, batch(parts, seed=3))["hidden"] for parts in steps]


def run(
    backend: TritonBackend,
    program: Program,
    kv: KVType = "auto",
    steps: list[list[tuple[int, int, int]]] = STEPS,
    filler: float = 0.0,
) -> tuple[list[np.ndarray], list[Counter[str]], list[np.ndarray]]:
    """Results and launches of each step, and what is in the caches then, which the `filler` was in before."""
    step = backend.compile(program, Weights(), replace(LONG, kv_cache=kv), "float16")
    assert isinstance(step, TritonStep)
    really, outputs, names = step._plan.launch, [], []
    for cache in step._plan.caches:
        cache.k.fill_(filler)
        cache.v.fill_(filler)
    for parts in steps:
        seen: Counter[str] = Counter()

        def launch(kernel: Any, *args: Any, seen: Counter[str] = seen, **told: Any) -> None:
            seen[kernel.__name__] += 1
            really(kernel, *args, **told)

        step._plan.launch = launch
        outputs.append(step(batch(parts, seed=3), "hidden").hidden)
        names.append(seen)
    caches = [t.cpu().numpy().copy() for c in step._plan.caches for t in (c.k, c.v)]
    step.close()
    return outputs, names, caches


def by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, rotation, append, attention and the map of values, each in its own launch."""
    monkeypatch.setattr(fuse, "_latent", lambda *_: [])


@pytest.mark.parametrize("values", [GGMLType.Q4_0, GGMLType.F32])
def test_the_values_of_heads_are_rounded_where_they_are_made(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, values: GGMLType
) -> None:
    program = latent(values)
    outputs, names, _ = run(backend, program)
    monkeypatch.setattr(Plan, "int8x2_target", lambda *_: (None, True))
    alone, names_alone, _ = run(backend, program)
    assert all(np.array_equal(a, b) for a, b in zip(outputs, alone, strict=True))
    assert all(rel_error(a, b) < 5e-3 for a, b in zip(outputs, reference(program), strict=True))
    rounded = {"int8x2_rows": 2}
    assert [b - a for a, b in zip(names, names_alone)] == [{}, rounded, rounded, {}, {}]


@pytest.mark.parametrize(("style", "normed"), [("norm", True), ("neox", False)])
def test_decode_normalises_rotates_and_appends_in_the_launch_of_attention_with_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, style: Literal["norm", "neox"], normed: bool
) -> None:
    program = latent(style=style, normed=normed)
    outputs, names, caches = run(backend, program)
    by_themselves(monkeypatch)
    alone, names_alone, caches_alone = run(backend, program)
    for a, b in zip((*outputs, *caches), (*alone, *caches_alone), strict=True):
        # A GPU's threads may add the squares of a norm in another order.
        assert np.array_equal(a, b) if INTERPRETED else rel_error(a, b) < 1e-3
    assert all(rel_error(a, b) < 5e-3 for a, b in zip(outputs, reference(program), strict=True))
    both = {"rope_append_rows": 2, **({"norm_rows": 2} if normed else {})}
    one = both | {"combine_latent": 2}
    assert [b - a for a, b in zip(names, names_alone)] == [{}, one, one, both, {}]


def test_keys_at_the_edges_of_splits(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    program = latent()
    outputs, _, _ = run(backend, program, steps=EDGES, filler=float("nan"))
    by_themselves(monkeypatch)
    alone, _, _ = run(backend, program, steps=EDGES, filler=float("nan"))
    for one, other, right in zip(outputs, alone, reference(program, EDGES), strict=True):
        assert rel_error(one, right) < 5e-3
        assert np.array_equal(one, other) if INTERPRETED else rel_error(one, other) < 1e-3


def test_a_cache_of_codes_is_written_by_a_launch_of_its_own(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = latent()
    outputs, names, _ = run(backend, program, "int8")
    by_themselves(monkeypatch)
    alone, names_alone, _ = run(backend, program, "int8")
    assert all(np.array_equal(a, b) for a, b in zip(outputs, alone, strict=True))
    assert names == names_alone
    assert all(rel_error(a, b) < 2e-2 for a, b in zip(outputs, reference(program), strict=True))


def test_one_sequence_over_compressed_keys_alone_has_splits_of_a_tile(backend: TritonBackend) -> None:
    program, (one, two) = latent(), (batch([(0, 150, 1)]), batch([(0, 150, 1), (12, 4, 1)]))
    step = backend.compile(program, Weights(), LONG, "float16")
    assert isinstance(step, TritonStep)
    assert step._item_starts(one).tolist() == [0, -(-151 // STEP)]
    assert step._item_starts(two).tolist() == [0, 2, 3]
    step.close()
