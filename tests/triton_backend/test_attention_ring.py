"""The ring of attention: on a CUDA device of capability 9 as it runs there, elsewhere by its own text in an emulator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import CacheRef, Case, Value
from quarrel.ops.kv import KV_TYPES
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend import run_op
from quarrel.triton_backend.attention import ring, ring_kernels
from quarrel.triton_backend.attention.records import Ring
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.inputs import batch_of, item_bucket, item_starts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import Cache, Slot
from quarrel.triton_backend.runtime.cache import from_host
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.launch import launch as really
from quarrel.triton_backend.runtime.site import Batch, Tables
from tests.poison import check_poison
from tests.triton_backend import gluon_emulator
from tests.triton_backend.cases import EVERYTHING, error_of
from tests.triton_backend.test_attention import batch as made_batch
from tests.triton_backend.test_attention import inside_and_apart

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of maxima over NaN, in the interpreter
    pytest.mark.skipif(not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9"),
]
COMPUTES = ("float16",) if INTERPRETED else ("float16", "bfloat16")


def decode(
    spec: AttentionSpec, seqs: int, keys: int, size: int = 32, kind: str = "auto", shared: int = 0
) -> Case:  # fmt: skip
    dims = {"S": seqs, "Q": 1, "KV": keys, "block_size": size, "kv": KV_TYPES.index(kind), "shared": shared}  # type: ignore[arg-type]
    return Case(spec, dims, f"{kind} blocks of {size}")


SPECS = {
    "heads of 64": AttentionSpec(4, 2, 64, 0.125),
    "groups of 7": AttentionSpec(7, 1, 128, 0.088),
    "groups of 16": AttentionSpec(16, 1, 128, 0.09),
    "window, sinks": AttentionSpec(8, 2, 64, 0.125, window=37, sinks=True),
    "window, cap": AttentionSpec(4, 4, 128, 0.09, window=33, cap=20.0),
    "wide window": AttentionSpec(4, 2, 128, 0.09, window=200),
    "chunks": AttentionSpec(4, 1, 128, 0.09, window=100, chunked=True),
    "cap": AttentionSpec(6, 2, 128, 0.1, cap=15.0),
}
CASES = [
    *(decode(spec, 3, 300, (16, 32, 64)[i % 3]) for i, spec in enumerate(SPECS.values())),
    *(decode(spec, 2, 300, (32, 64)[i % 2], ("int8", "fp8", "fp8_e5m2")[i % 3]) for i, spec in enumerate(SPECS.values())),
    *(decode(SPECS["cap"], 1, keys) for keys in (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 448, 449)),
    *(decode(SPECS["heads of 64"], 2, 500, 32, kind) for kind in ("int8", "fp8", "fp8_e5m2")),
    *(decode(SPECS["groups of 7"], 1, 450, 32, kind) for kind in ("int8", "fp8", "fp8_e5m2")),
    decode(SPECS["groups of 16"], 5, 70, 8),
    decode(SPECS["heads of 64"], 66, 20),  # more than `find` takes at a time
    decode(SPECS["cap"], 4, 90, 16, shared=2),
    *(decode(spec, 5, 100, 32, kind) for spec, kind in zip(SPECS.values(), ("auto", "int8", "fp8") * 3, strict=False)),
]
LONG = [
    decode(AttentionSpec(32, 8, 128, 0.09), 1, keys, 32, kind)
    for keys in (4095, 9000, 33000)
    for kind in ("auto", "int8", "fp8", "fp8_e5m2")
]
"""On a GPU: every place of the ring in turn, many times."""


@pytest.fixture(name="launches")
def _launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Has every decode take the ring; what was launched of it, with its arguments."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        seen.append((kernel, named))
        if kernel is ring_kernels.attend_ring and INTERPRETED:
            emulated(grid, named)
        else:
            really(kernel, grid, *args, **named)

    made = ring.RingLaunch

    class Noted(made):  # type: ignore[valid-type,misc]
        def __init__(self, site: Any, cache: Cache, shape: Any) -> None:
            super().__init__(site, cache, shape)
            # What no split wrote must not be read.
            self._site = SimpleNamespace(launch=launch, generation=site.generation)
            if INTERPRETED:
                self._programs = 3

    monkeypatch.setattr(ring, "serves", lambda *_: True)
    monkeypatch.setattr(ring, "RingLaunch", Noted)
    if INTERPRETED:
        monkeypatch.setattr(ring, "INTERPRETED", False)
        declines = ring.declines
        monkeypatch.setattr(ring, "declines", lambda site, *given: declines(on_hopper(site), *given))
    return seen


def on_hopper(site: Any, **other: Any) -> Any:
    facts = {"generation": 9, "deterministic": site.deterministic, "compute": site.compute}
    return SimpleNamespace(**(facts | other))


def emulated(grid: tuple[int, ...], named: dict[str, Any]) -> None:
    """A launch of `attend_ring`, its arguments as the emulator has them."""
    copies: dict[int, gluon_emulator.Copies] = {}
    constants = {name: named[name] for name in ("S", "R", "ROTATE", "EARLY")}
    arguments = {
        n: constants[n] if n in constants else gluon_emulator.given(named[n], copies)
        for n in ring_kernels.attend_ring.arg_names
        if n != "PDL"
    }
    instead = {"_values": values(256.0), "_as_values": values(1.0)}
    gluon_emulator.run(ring_kernels.attend_ring, grid, arguments | {"PDL": True}, instead)


def values(fp8: float) -> Callable[..., Any]:
    """Of codes, over 128 or 256 as `kv_codes.as_values` gives them; those of fp8 times this."""

    def of(codes: Any, kind: str, compute: Any) -> Any:
        raw = codes.as_subclass(torch.Tensor)
        if kind == "int8":
            raw = raw.view(torch.int8).float() / 128
        elif kind == "fp8":
            raw = raw.view(torch.float8_e4m3fn).float() * (fp8 / 256)
        elif kind == "fp8_e5m2":
            raw = raw.view(torch.float8_e5m2).float() / 256
        return gluon_emulator.value(raw).to(compute)

    return of


POISONED = [c for c in CASES if 1 < c.dims["S"] < 9]
"""A third of them in the emulator, all with QUARREL_TEST_ALL=1."""


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("case", [*CASES, *LONG] if not INTERPRETED else CASES if EVERYTHING else CASES[::2], ids=str)
def test_is_right(backend: TritonBackend, case: Case, compute: Any, launches: list[Any]) -> None:
    assert error_of(backend, ATTENTION, case, compute) <= ATTENTION.tolerance[compute]
    (_, named), *joins = launches
    assert [kernel.__name__ for kernel, _ in joins] == ["join_splits"] * (
        named["seqs"] == 1 or named["items"] > named["seqs"]
    )


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "case",
    [
        decode(AttentionSpec(2, 1, 64, 0.125), 1, 900),
        decode(AttentionSpec(2, 1, 128, 0.1, window=700), 2, 900, 16),
        decode(AttentionSpec(2, 1, 128, 0.1), 1, 900, 32, "fp8"),
        decode(AttentionSpec(2, 1, 64, 0.1), 1, 900, 32, "int8"),
    ],
    ids=str,
)
def test_every_place_of_the_ring_is_used_again(backend: TritonBackend, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split, of fifteen tiles."""
    monkeypatch.setattr(run_op, "item_starts", partial(item_starts, most=1))
    assert error_of(backend, ATTENTION, case, "float16") <= ATTENTION.tolerance["float16"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", POISONED if EVERYTHING or not INTERPRETED else POISONED[::3], ids=str)
def test_reads_nothing_of_others(backend: TritonBackend, case: Case) -> None:
    check_poison(backend, ATTENTION, case, "float16")


@pytest.mark.parametrize(
    "lengths", [(300, 10, 10, 10, 10), (100, 10, 1, 10, 10), (600, 20, 20, 257, 20, 5), (1, 1, 1, 1, 1)]
)
def test_padding_is_neither_read_nor_left_out(lengths: tuple[int, ...], launches: list[Any]) -> None:
    """A captured step has sequences and items that are not there; what the table says of them is anything."""
    spec, seqs, most = AttentionSpec(4, 2, 64, 0.125), len(lengths), 8
    q, starts, kv_len, table, cache = made_batch(spec, [(1, n) for n in lengths])
    items = item_starts(starts, kv_len)
    known = batch_of(starts, kv_len, seqs, items)
    count = item_bucket(known.items, most, splits=known.splits)
    whole = replace(known, T=most, S=most, R=most, items=count)
    missing = most - seqs
    ints = {
        "query_start": np.arange(most + 1),
        "kv_len": np.append(kv_len, np.zeros(missing)),
        "block_table": np.append(table, np.full((missing, table.shape[1]), 50_000)),
    }
    x, y = Value(0, "act", ("T", spec.width), "q"), Value(9, "act", ("T", spec.width), "y")
    values = {name: Value(1 + i, "i32", ("S",), name) for i, name in enumerate(ints)}
    node = Node(ATTENTION, spec, (x, *values.values(), CacheRef(0)), (y,))
    device = torch.device("cpu" if INTERPRETED else "cuda")

    def slot(x: Any, dtype: torch.dtype = torch.int32) -> Slot:
        return Slot(torch.from_numpy(np.asarray(x)).to(dtype).to(device).reshape(-1))

    slots = {0: slot(np.append(q, np.zeros((missing, q.shape[1]))), torch.float16)}
    slots |= {values[name].id: slot(x) for name, x in ints.items()}
    work = Tables(slot(np.append(items, np.full(missing, items[-1]))), slot([table.shape[1]]))
    choices = lower(Program((node,), {v.name: v for v in (x, *values.values())}, {}, ()), REGISTRY)
    rows = {"T": most, "S": most, "R": most, "items": count}
    held = [from_host(cache, torch.float16, device)]
    plan = Plan(choices, slots, {9}, rows, None, held, [], work, "float16", device)  # type: ignore[arg-type]
    plan.fill(255)
    for go in plan.launches:
        go(whole)
    got = plan.slots[9].tensor.float().cpu().numpy().reshape(most, -1)[:seqs]
    want = ATTENTION.reference(spec, q, starts, kv_len, table, cache)[0]
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    assert [kernel.__name__ for kernel, _ in launches] == ["attend_ring", "join_splits"][: 1 + known.splits]


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("style", ["norm", "neox"])
def test_rotating_and_appending_inside_changes_no_bit(style: Any, compute: Any, launches: list[Any]) -> None:
    (_, *inside), (_, *apart) = inside_and_apart(style, compute)
    assert [(kernel.__name__, named.get("ROTATE")) for kernel, named in launches] == [
        ("attend_ring", style), ("join_splits", None), ("attend_ring", ""), ("join_splits", None)
    ]  # fmt: skip
    for one, other in zip(inside, apart, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other)


SPEC = AttentionSpec(32, 8, 128, 0.09)


def cache_of(dim: int = 128, size: int = 32, kind: str = "plain", dtype: torch.dtype = torch.float16) -> Cache:
    k = torch.empty((3, 8, size, dim), dtype=torch.uint8 if kind != "plain" else dtype, device="meta")
    return Cache(k, k, kind)


@pytest.mark.parametrize(
    ("spec", "cache", "site", "reason"),
    [
        (SPEC, cache_of(), {}, None),
        (SPEC, cache_of(dtype=torch.bfloat16), {"compute": "bfloat16"}, None),
        *((replace(SPEC, head_dim=64), cache_of(64, kind=kind), {}, None) for kind in ("plain", "int8", "fp8", "fp8_e5m2")),
        *((SPEC, cache_of(kind=kind), {}, None) for kind in ("int8", "fp8", "fp8_e5m2")),
        *((SPEC, cache_of(size=size), {}, None) for size in (8, 16, 64, 256)),
        *((replace(SPEC, n_heads=8 * group), cache_of(), {}, None) for group in (1, 3, 7, 16)),
        (replace(SPEC, window=128, sinks=True, cap=30.0), cache_of(), {}, None),
        (replace(SPEC, window=128, chunked=True), cache_of(), {}, None),
        (replace(SPEC, spans=True), cache_of(), {}, None),
        *((replace(SPEC, head_dim=d), cache_of(d), {}, f"needs head_dim 64 or 128, got {d}") for d in (32, 80, 96, 256)),
        (replace(SPEC, n_heads=8 * 17), cache_of(), {}, "needs up to 16 query heads a key head, got 17"),
        (SPEC, cache_of(size=48), {}, "needs blocks of a power of two of 8 keys or more, got 48"),
        (SPEC, cache_of(size=4), {}, "needs blocks of a power of two of 8 keys or more, got 4"),
        *((SPEC, cache_of(size=64, kind=kind), {}, None) for kind in ("int8", "fp8", "fp8_e5m2")),
        (SPEC, cache_of(size=16, kind="int8"), {}, "needs blocks of 32 keys or more in int8, got 16"),
        (SPEC, cache_of(size=8, kind="fp8"), {}, "needs blocks of 32 keys or more in fp8, got 8"),
        (SPEC, cache_of(), {"compute": "bfloat16"}, "needs a cache in bfloat16, got torch.float16"),
        (SPEC, cache_of(dtype=torch.float32), {"compute": "float32"}, "needs arithmetic of 16 bits, got float32"),
        *((SPEC, cache_of(), {"generation": g}, "needs compute capability 9") for g in (0, 8, 10, 12)),
        (SPEC, cache_of(), {"deterministic": True}, "its splits follow from a length, and a step is deterministic"),
    ],
)  # fmt: skip
def test_what_it_takes(spec: AttentionSpec, cache: Cache, site: Any, reason: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(ring, "INTERPRETED", False)
    made = on_hopper(SimpleNamespace(deterministic=False, compute="float16"), **site)
    assert ring.declines(made, spec, cache) == reason


WINDOW = replace(SPEC, window=4096)


@pytest.mark.parametrize(
    ("specs", "kind", "generation", "want"),
    [
        ([SPEC], "int8", 9, range(1, 9)),
        ([WINDOW, SPEC], "fp8", 9, range(1, 9)),
        ([SPEC], "plain", 9, range(2, 9)),
        ([replace(SPEC, window=32768)], "plain", 9, range(2, 9)),
        ([WINDOW], "int8", 9, range(0)),
        ([replace(SPEC, head_dim=80)], "plain", 9, range(0)),
        ([SPEC], "int8", 8, range(0)),
        ([], "int8", 9, range(0)),
    ],
)
def test_steps_of_models_with_a_layer_for_it_are_told_apart(
    specs: list[AttentionSpec], kind: str, generation: int, want: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "INTERPRETED", False)
    site = on_hopper(SimpleNamespace(deterministic=False, compute="float16"), generation=generation)
    site.cache = lambda spec: cache_of(spec.head_dim, kind=kind)
    nodes = [SimpleNamespace(spec=spec, inputs=(None,) * 4 + (spec,)) for spec in specs]
    assert ring.deep_sequences(site, nodes) == want  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "codes", "plain"),
    [
        ([16383], False, False),
        ([16384], True, False),
        ([16384, 40000], True, True),
        ([16383, 40000], False, False),
        ([16384] * 5, True, True),
        ([20000] * 8, True, True),
        ([40000] * 7 + [9000], False, False),
        ([40000] * 9, False, False),
    ],
)
def test_a_step_is_deep_by_its_shortest_sequence(keys: list[int], codes: bool, plain: bool) -> None:
    lengths = np.array(keys, np.int32)
    assert [ring.is_deep(lengths, range(n, 9)) for n in (1, 2)] == [codes, plain]
    assert not ring.is_deep(lengths, range(0))


def test_takes_deep_steps_of_layers_that_see_many_keys() -> None:
    shallow = Batch(1, 1, 1, True, False, 33)
    deep = replace(shallow, deep=True)
    given = [(batch, spec) for batch in (shallow, deep) for spec in (SPEC, WINDOW)]
    for kind in ("plain", "int8"):
        assert [ring.serves(*one, kind) for one in given] == [False, False, True, False]


@pytest.mark.parametrize(
    ("seqs", "each", "plain", "codes"), [(4, 16, 0, 0), (5, 1, 1, 0), (8, 4, 1, 0), (16, 16, 1, 1), (17, 4, 0, 0)]
)
def test_takes_steps_of_several_sequences(seqs: int, each: int, plain: int, codes: int) -> None:
    batch = Batch(seqs, seqs, seqs, True, False, seqs * each)
    assert [ring.serves(batch, WINDOW, kind) for kind in ("plain", "fp8")] == [plain, codes]


@pytest.mark.parametrize(
    ("row", "box", "problem"),
    [
        (32, 32, None),
        (16, 16, "byte 64 of shared memory"),
        (6, 4, "a row of a copy is at, or of, 24 bytes"),
        (4, 2, "a box's row of a copy is at, or of, 8 bytes"),
    ],
)
def test_copies_begin_where_tma_lets_them(row: int, box: int, problem: str | None) -> None:
    """Scales of blocks of 16 keys went 64 bytes behind each other: "misaligned address" on an H100."""
    given = SimpleNamespace(base=torch.zeros(2, row), block_shape=[1, box], layout=SimpleNamespace(swizzle_byte_width=0))
    to = gluon_emulator.Shared(torch.zeros(4, box), gluon_emulator.Type(torch.float32)).slice(1, 1)
    with nullcontext() if problem is None else pytest.raises(AssertionError, match=problem):
        gluon_emulator.Machine().copy(gluon_emulator.Copies(given), [0, 0], gluon_emulator.Barrier(1, 1), to)


@pytest.mark.parametrize(
    ("dim", "bits", "want"),
    [(128, 16, Ring(4, 16, 3)), (128, 8, Ring(4, 16, 5)), (64, 16, Ring(4, 16, 6)), (64, 8, Ring(4, 16, 6))],
)  # fmt: skip
def test_two_programs_fit_a_multiprocessor(dim: int, bits: int, want: Ring) -> None:
    assert ring.form(dim, 8, bits, bits == 8) == want
    assert ring.form(128, 9, 16, False).STAGES == 2


def test_a_wait_that_nobody_ends_is_found() -> None:
    machine, bar = gluon_emulator.Machine(), gluon_emulator.Barrier()
    machine.init(bar, 1)
    with pytest.raises(gluon_emulator.Deadlock, match="parity 0"):
        machine.specialize([(lambda: machine.wait(bar, 0), ()), (lambda: machine.wait(bar, 1), ())], [1], None)
