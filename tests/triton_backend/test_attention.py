"""Attention over the paged cache beyond the contract's cases: several splits, mixed batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.ops import draw
from quarrel.ops.attention import ATTENTION, ROPE_APPEND, AttentionSpec, RopeAppendSpec
from quarrel.ops.contract import Array, CacheRef, Case, ConstRef, KVArrays, RawWeight, Value, WeightRef
from quarrel.ops.kv import KV_TYPES, KVType
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.ops.rope import RopeSpec
from quarrel.triton_backend import run_op
from quarrel.triton_backend.attention import paged as attention
from quarrel.triton_backend.attention.paged import Warps, tiles, warps_for
from quarrel.triton_backend.attention.splits import MANY_SEQS, SPLIT, splits_of_one
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.inputs import item_bucket, item_starts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.cache import from_host
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.launch import launch as really
from quarrel.triton_backend.runtime.site import Batch, Tables
from tests.triton_backend.cases import COMPUTES, DEVICE, error_of, error_on

SPEC = AttentionSpec(4, 2, 64, 0.125)


def batch(spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int = 0) -> tuple[Any, ...]:
    """Inputs for sequences of (new tokens, keys in all), block size 32."""
    rng = np.random.default_rng(seed)
    new, kv_len = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    width = -(-int(kv_len.max()) // 32)
    table = rng.permutation(len(new) * width).reshape(-1, width).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    shape = (table.size, 32, spec.n_kv, spec.head_dim)
    cache = KVArrays(rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32))
    q = rng.standard_normal((int(new.sum()), spec.width), dtype=np.float32) * 2
    return q, starts, kv_len, table, cache


FORMS = (None, Warps(1, 32, 3), Warps(2, 16, 3))
WAYS = (*((c, None) for c in COMPUTES), *((c, form) for c in COMPUTES[1:] for form in FORMS[1:]))


@pytest.fixture(name="form", params=FORMS, ids=lambda form: "attend_one" if form is None else f"{form.heads} heads")
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes sequences with one new token, however few they are."""
    monkeypatch.setattr(attention, "warps_for", lambda *_: request.param)


@pytest.fixture(name="way", params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An arithmetic, for 16 bits with each of what takes sequences with one new token."""
    compute, form = request.param
    monkeypatch.setattr(attention, "warps_for", lambda *_: form)
    return compute


@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, window=300), replace(SPEC, cap=10.0), AttentionSpec(6, 2, 80, 0.11, window=700)],
    ids=["plain", "window", "cap", "groups of 3"],
)
def test_decode_over_several_splits(backend: TritonBackend, spec: AttentionSpec, way: Any) -> None:
    inputs = batch(spec, [(1, 1101), (1, SPLIT), (1, SPLIT + 1), (1, 3)])
    assert error_on(backend, ATTENTION, spec, inputs, way) <= ATTENTION.tolerance[way]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("most", [2, 5])
def test_decode_over_at_most_so_many_splits(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(run_op, "item_starts", partial(item_starts, most=most))
    inputs = batch(SPEC, [(1, 1101), (1, SPLIT + 1), (1, 3)])
    assert item_starts(inputs[1], inputs[2], most=most).tolist() == [0, most, most + 2, most + 3]
    assert error_on(backend, ATTENTION, SPEC, inputs, "float16") <= ATTENTION.tolerance["float16"]


@pytest.mark.usefixtures("form")
def test_many_sequences_have_longer_splits(backend: TritonBackend) -> None:
    lengths = [1 + i % 7 for i in range(MANY_SEQS - 3)] + [SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 40]
    inputs = batch(SPEC, [(1, n) for n in lengths])
    assert item_starts(inputs[1], inputs[2])[-1] == MANY_SEQS + 1
    assert error_on(backend, ATTENTION, SPEC, inputs, "float16") <= ATTENTION.tolerance["float16"]


@pytest.mark.parametrize(
    ("seqs", "items", "spec", "size", "kind", "want"),
    [
        (1, 64, SPEC, 32, "plain", None),
        (16, 1024, SPEC, 32, "fp8", None),
        (64, 256, SPEC, 32, "plain", None),
        (17, 272, SPEC, 32, "plain", Warps(1, 32, 3)),  # more than 1024 keys a sequence
        (64, 1024, SPEC, 16, "plain", Warps(1, 16, 5)),
        (65, 65, SPEC, 64, "plain", Warps(2, 32, 3)),
        (128, 128, AttentionSpec(32, 8, 128, 0.1), 32, "plain", Warps(4, 16, 3)),
        (128, 128, AttentionSpec(9, 3, 128, 0.1), 32, "plain", Warps(1, 32, 3)),
        (128, 128, AttentionSpec(8, 4, 256, 0.1), 32, "plain", None),  # more than its registers hold
        (128, 128, AttentionSpec(32, 1, 128, 0.1), 32, "plain", None),
        (32, 512, AttentionSpec(8, 8, 80, 0.1), 32, "plain", Warps(1, 32, 3)),
        (32, 512, AttentionSpec(8, 8, 80, 0.1), 32, "int8", None),
        (128, 128, SPEC, 8, "plain", None),
    ],
)
def test_what_takes_sequences_with_one_new_token(
    seqs: int, items: int, spec: AttentionSpec, size: int, kind: str, want: Warps | None
) -> None:
    form = warps_for(seqs, items, spec, size, kind)
    assert form == want
    assert form is None or size % form.keys == spec.n_kv % form.heads == 0


def test_several_sequences_share_their_keys_among_more_warps() -> None:
    one, _ = attention.tiles("float16", 128, 4, hopper=True)
    assert attention.several(one, 128) == replace(one, warps=8)
    assert attention.several(one, 64) == one
    wide, _ = attention.tiles("float16", 256, 2, hopper=True)
    assert attention.several(wide, 256) == wide


def test_one_sequence_has_more_warps_where_programs_are_few() -> None:
    eight = [(wide, few) for wide in (32, 64, 128, 256) for few in (True, False) if _single(wide, 128 if few else 129) == 8]
    assert eight == [(64, True), (64, False), (128, True)]


def _single(wide: int, programs: int) -> int:
    return attention.single(attention.tiles("float16", wide, 4, hopper=True)[0], wide, programs).warps


def test_heads_or_blocks_that_a_form_does_not_divide_are_not_left_out(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in (Warps(4, 32, 3), Warps(1, 64, 3)):
        monkeypatch.setattr(attention, "warps_for", lambda *_, form=form: form)
        with pytest.raises(AssertionError, match="2 key heads and blocks of 32 keys"):
            run(backend, batch(SPEC, [(1, 70)]), "float16")


def test_sinks_over_several_splits(backend: TritonBackend, way: Any) -> None:
    spec = replace(SPEC, sinks=True, window=128)
    _, *_, sinks = ATTENTION.make(Case(spec, {"S": 1, "Q": 1, "KV": 0, "block_size": 32}), np.random.default_rng(0))  # type: ignore[misc]
    inputs = (*batch(spec, [(1, 612), (1, 5), (9, 40)]), sinks)
    assert error_on(backend, ATTENTION, spec, inputs, way) <= ATTENTION.tolerance[way]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("spec", [replace(SPEC, cap=20.0), replace(SPEC, window=150, sinks=True)], ids=["cap", "window"])
def test_codes_over_several_splits(backend: TritonBackend, spec: AttentionSpec, kind: KVType) -> None:
    case = Case(spec, {"S": 2, "Q": 1, "KV": 300, "block_size": 32, "kv": KV_TYPES.index(kind)})
    assert error_of(backend, ATTENTION, case, "float16") <= ATTENTION.tolerance["float16"]


def test_decode_and_prefill_in_one_batch(backend: TritonBackend) -> None:
    inputs = batch(SPEC, [(1, 600), (40, 100), (1, 1), (2, 2), (17, 33), (1, 64)])
    assert error_on(backend, ATTENTION, SPEC, inputs, "float32") <= ATTENTION.tolerance["float32"]


WIDE = AttentionSpec(4, 2, 256, 0.06)


@pytest.mark.parametrize(
    "spec",
    [
        WIDE,
        AttentionSpec(2, 1, 512, 0.05),
        AttentionSpec(6, 2, 160, 0.08, cap=10.0),
        replace(WIDE, window=70, sinks=True),
        replace(WIDE, window=96, chunked=True),
    ],
    ids=["256", "512", "160, cap", "window, sinks", "chunks"],
)
@pytest.mark.parametrize("keys", [1, 2, 33, SPLIT, SPLIT + 1, 500])
def test_one_sequence_of_wide_heads_has_a_program_to_each(
    backend: TritonBackend, spec: AttentionSpec, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the reference, with one split and several, and near the kernel that it stands for."""
    taken: list[int] = []
    tile = attention.head_tile
    monkeypatch.setattr(attention, "head_tile", lambda items, wide: (taken.append(items), tile(items, wide))[1])
    inputs = batch(spec, [(1, keys)])
    if spec.sinks:
        *_, sinks = ATTENTION.make(Case(spec, {"S": 1, "Q": 1, "KV": 0, "block_size": 32}), np.random.default_rng(0))  # type: ignore[misc]
        inputs = (*inputs, sinks)
    limit = ATTENTION.tolerance["float16"]
    assert error_on(backend, ATTENTION, spec, inputs, "float16") <= limit
    assert taken == [-(-keys // SPLIT)]
    (one,) = backend.run_op(ATTENTION, spec, inputs, "float16")
    monkeypatch.setattr(attention, "HEAD_PROGRAMS", 0)
    (other,) = backend.run_op(ATTENTION, spec, inputs, "float16")
    np.testing.assert_allclose(one, other, atol=limit * np.abs(other).max())  # type: ignore[arg-type]
    assert len(taken) == 2


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp8_e5m2"])
def test_one_sequence_of_wide_heads_over_codes(backend: TritonBackend, kind: KVType) -> None:
    for spec, keys in (WIDE, 20), (replace(WIDE, cap=20.0), 300):
        case = Case(spec, {"S": 1, "Q": 1, "KV": keys, "block_size": 32, "kv": KV_TYPES.index(kind)})
        assert error_of(backend, ATTENTION, case, "float16") <= ATTENTION.tolerance["float16"]


def test_which_sequences_have_a_program_to_each_head() -> None:
    buckets = [item_bucket(splits_of_one(keys), 1) for keys in (1, SPLIT, 4 * SPLIT, 4 * SPLIT + 1, 16 * SPLIT)]
    assert [attention.head_tile(items, 256) for items in buckets] == [(16, 4)] * 3 + [(32, 8)] * 2
    assert [8 * items <= attention.HEAD_PROGRAMS for items in buckets] == [True] * 5
    assert attention.head_tile(1, 512) == (8, 4)


@pytest.mark.parametrize("window", [31, 32, 33, 64])
def test_window_edges(backend: TritonBackend, window: int) -> None:
    spec = replace(SPEC, window=window)
    inputs = batch(spec, [(35, 99), (1, 97)])
    assert error_on(backend, ATTENTION, spec, inputs, "float32") <= ATTENTION.tolerance["float32"]


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_sequence_does_not_depend_on_its_batch(backend: TritonBackend, compute: Any) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(1, 600), (40, 100), (1, 7), (3, 70)])
    whole = run(backend, (q, starts, kv_len, table, cache), compute)
    for s in range(4):
        a, b = int(starts[s]), int(starts[s + 1])
        one = (q[a:b].copy(), np.array([0, b - a], np.int32), kv_len[s : s + 1], table[s : s + 1].copy(), cache)
        alone = run(backend, one, compute)
        if INTERPRETED or compute != "float32":
            assert np.array_equal(alone, whole[a:b]), s
        else:  # compilers fuse products and sums as they like
            np.testing.assert_allclose(alone, whole[a:b], rtol=1e-5, atol=1e-6)


def test_a_chunk_of_a_prompt_gives_the_same_rows(backend: TritonBackend) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(75, 75)])
    whole = run(backend, (q, starts, kv_len, table, cache), "float16")
    for a, b in ((0, 20), (20, 75)):
        part = (q[a:b].copy(), np.array([0, b - a], np.int32), np.array([b], np.int32), table, cache)
        assert np.array_equal(run(backend, part, "float16"), whole[a:b])


def test_a_sequence_without_new_tokens_is_passed_over(backend: TritonBackend) -> None:
    inputs = batch(SPEC, [(1, 40), (0, 20), (3, 20)])
    assert error_on(backend, ATTENTION, SPEC, inputs, "float32") <= ATTENTION.tolerance["float32"]


def test_keys_of_a_tile_follow_from_the_head_alone() -> None:
    """A split is whole tiles: what makes rows independent of their batch."""
    for compute in ("float32", "float16", "bfloat16"):
        for dim in (16, 64, 80, 96, 128, 256):
            decode, prefill = tiles(compute, dim, 8)  # type: ignore[arg-type]
            assert SPLIT % decode.keys == SPLIT % prefill.keys == 0


def run(backend: TritonBackend, inputs: tuple[Any, ...], compute: Any) -> Array:
    (out,) = backend.run_op(ATTENTION, SPEC, inputs, compute)
    assert isinstance(out, np.ndarray)
    return out


class _NoWeights:
    def raw(self, ref: WeightRef) -> RawWeight:
        raise AssertionError(ref)


def inside_and_apart(style: Any, compute: Any) -> list[tuple[list[str], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A step without prompts leaves rotation and append to the attention, one with prompts does not: what each launches,
    its rows and the cache after it."""
    rope = [RopeSpec(style, n, 64, 64, 1.1) for n in (4, 2)]
    values = [Value(i, "act", ("T", 64 * n), name) for i, (n, name) in enumerate(((4, "q"), (2, "k"), (2, "v")))]
    names = ("positions", "slots", "query_start", "kv_len", "block_table")
    ints = {name: Value(3 + i, "i32", ("T",), name) for i, name in enumerate(names)}
    turned, y = Value(8, "act", ("T", 256), "q"), Value(9, "act", ("T", 256), "y")
    freq = ConstRef("freq", tuple(10000.0 ** (-i / 32) for i in range(32)))
    nodes = (
        Node(ROPE_APPEND, RopeAppendSpec(*rope), (*values, ints["positions"], freq, ints["slots"], CacheRef(0)), (turned,)),
        Node(ATTENTION, SPEC, (turned, *(ints[n] for n in names[2:]), CacheRef(0)), (y,)),
    )
    _, starts, kv_len, table, cache = batch(SPEC, [(1, SPLIT + 9), (1, 1), (1, 66)])
    last = kv_len - 1
    arrays = {
        "positions": last,
        "slots": table[range(3), last // 32] * 32 + last % 32,
        "query_start": starts,
        "kv_len": kv_len,
    }
    arrays["block_table"] = table.reshape(-1)
    given = draw.activations(np.random.default_rng(3), 3, 512)
    parts = np.split(given, [256, 384], axis=1)
    found = []
    for several in (False, True):
        held = from_host(cache, DTYPES[compute], DEVICE)
        flat = [torch.from_numpy(p.reshape(-1).copy()).to(DEVICE, DTYPES[compute]) for p in parts]
        slots = {v.id: Slot(x) for v, x in zip(values, flat)}
        slots |= {v.id: Slot(torch.from_numpy(arrays[n].astype(np.int32)).to(DEVICE)) for n, v in ints.items()}
        items = item_starts(starts, kv_len)
        width = torch.tensor([table.shape[1]], dtype=torch.int32, device=DEVICE)
        work = Tables(Slot(torch.from_numpy(items).to(DEVICE)), Slot(width))
        launched: list[str] = []

        def launch(kernel: Any, *args: Any, **told: Any) -> None:
            launched.append(kernel.__name__)  # noqa: B023
            really(kernel, *args, **told)

        choices = lower(Program(nodes, {v.name: v for v in (*values, *ints.values())}, {}, ()), REGISTRY)
        rows = {"T": 3, "S": 3, "R": 3, "items": int(items[-1])}
        weights = Weights(_NoWeights(), held.k.device, compute)
        plan = Plan(choices, slots, {y.id}, rows, weights, [held], [], work, compute, held.k.device, launch)
        plan.fill(255)
        for go in plan.launches:
            go(Batch(3, 3, 3, True, several, int(items[-1])))
        found.append((launched, plan.slots[y.id].tensor.clone(), held.k, held.v))
    return found


@pytest.mark.parametrize("style", ["norm", "neox"])
def test_rotating_and_appending_inside_changes_no_bit(style: Any, way: Any) -> None:
    (launched, *inside), (more, *apart) = inside_and_apart(style, way)
    name = "attend_one" if attention.warps_for(3, 3, SPEC, 32, "plain") is None else "attend_warps"
    assert (launched, more) == ([name], ["rope_append_rows", name, "attend_many"])
    for one, other in zip(inside, apart, strict=True):
        assert not one.isnan().any()
        if INTERPRETED or one.dtype != torch.float32:
            assert torch.equal(one, other)
        else:  # compilers fuse products and sums as they like
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
