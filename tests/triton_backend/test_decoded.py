"""Weights that are decoded once and kept, within the bytes that a step was given; products with decoded experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel import load
from quarrel.gguf import GGMLType
from quarrel.ops.contract import Compute, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import linear, linear_add
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import decoded, grouped
from quarrel.triton_backend.experts.decoded_kernels import gather_rows as gather_by_expert
from quarrel.triton_backend.experts.maps import ExpertMaps
from quarrel.triton_backend.runtime.arrays import Decoded, Packed, Planes
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from quarrel.triton_backend.step import TritonStep
from tests.paths import need_cases
from tests.triton_backend.test_fuse import program as experts_program
from tests.triton_backend.test_step import LIMITS, Reference, Weights, batch

K, N, ROWS = 64, 96, 140
EACH = 2 * K * N
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def program() -> Any:
    b = Builder()
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q8_0, 130, K))
    x = norm(b, NormSpec("rms", K, 1e-5), h, gain := WeightRef("gain", GGMLType.F32, 1, K))
    y = linear(b, x, WeightRef("up", GGMLType.Q4_0, N, K))
    h = linear_add(b, h, y, WeightRef("down", GGMLType.Q8_0, K, N))
    hidden = norm(b, NormSpec("rms", K, 1e-5, out="f32"), gather_rows(b, h, b.input("out_rows")), gain)
    return b.program(hidden=hidden)


@pytest.mark.parametrize(("room", "kept"), [(2 * EACH - 1, 1), (2 * EACH, 2)])
def test_a_weight_is_decoded_once_where_there_is_room(
    backend: TritonBackend, room: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: Counter[str] = Counter()

    def counted(kernel: Any, *args: Any, **named: Any) -> None:
        ran[kernel.__name__] += 1
        launch(kernel, *args, **named)

    inputs, limits = batch([(0, 0, ROWS)], rows=[0, 7, ROWS - 1]), replace(LIMITS, max_tokens=ROWS, max_blocks_per_seq=9)
    plain = backend.compile(program(), Weights(), limits, "float16")
    step = backend.compile(program(), Weights(), replace(limits, decoded_bytes=room), "float16")
    assert isinstance(step, TritonStep)
    monkeypatch.setattr(step._plan, "launch", counted)
    assert (plain.memory().decoded, step.memory().decoded) == (0, kept * EACH)
    want = plain(inputs, "hidden").hidden
    for _ in range(2):
        np.testing.assert_array_equal(step(inputs, "hidden").hidden, want)  # type: ignore[arg-type]
    assert ran["decode_rows"] == 2 * (2 - kept) + kept
    plain.close()
    step.close()


def stack(format: str = "Q4_0", k: int = K, reused: bool = False) -> Packed:
    empty = torch.empty(0, device=DEVICE)
    return Packed(format, N, k, empty, Planes(*(empty,) * 4), reused)


def test_what_a_capture_records_is_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Decoded([stack()], 8, torch.float16), []
    monkeypatch.setattr("quarrel.triton_backend.runtime.arrays.captures", lambda tensor: len(asked) == 1)
    for _ in range(4):
        made.filled(asked.append)
    assert len(asked) == 2


@dataclass
class Site:
    """What `declines` asks of a plan."""

    generation: int = 9
    compute: Compute = "float16"
    deterministic: bool = False


@pytest.mark.parametrize(
    ("site", "stack", "taken"),
    [
        (Site(), stack("Q2_K", 256), True),
        (Site(compute="bfloat16"), stack(), True),
        (Site(), stack("F16"), False),
        (Site(generation=8), stack(), False),
        (Site(compute="float32"), stack(), False),
        (Site(deterministic=True), stack(), False),
        (Site(), stack("Q4_0", 48), False),
    ],
)
def test_which_stacks_it_takes(site: Any, stack: Packed, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "INTERPRETED", False)
    assert (decoded.declines(site, ExpertMaps([stack], [], 2, 1, "none")) is None) is taken


@pytest.mark.parametrize("first", [0, 2])
def test_rows_lie_by_expert_and_tiles_are_listed(first: int) -> None:
    rng, tokens, used, experts, block = np.random.default_rng(first), 23, 3, 5, 16
    ids = rng.integers(0, experts - 1, tokens * used)  # the last has none
    order = np.argsort(ids, kind="stable").astype(np.int32)
    starts = np.searchsorted(ids[order], np.arange(experts + 1)).astype(np.int32)
    x = rng.standard_normal((tokens, K)).astype(np.float32)
    rows = torch.full((tokens * used, K), float("nan"), dtype=torch.float16, device=DEVICE)
    places = torch.full((4 + 4 * tokens * used,), -1, dtype=torch.int32, device=DEVICE)
    given = (torch.from_numpy(a).to(DEVICE) for a in (x, order, starts))
    launch(
        gather_by_expert, (tokens * used + 1, 2), rows, rows, places, *given, tokens * used, K, first,
        experts - first, PADDED=8, PER_TOKEN=used, EIGHT=False, BT=block, C=K // 2, early=False,
    )  # fmt: skip
    np.testing.assert_array_equal(rows.cpu().numpy(), x[order // used].astype(np.float16))
    table, want, counts = places.cpu().numpy(), [], np.bincount(ids, minlength=experts)
    for e in range(first, experts):
        want += [[e - first, starts[e], starts[e + 1], len(want)]] * -(-counts[e] // block)
    for i, place in enumerate(want):
        place = want[i] = list(place)
        place[3] = min(j for j, other in enumerate(want) if other[0] == place[0])
    assert table[0] == len(want)
    np.testing.assert_array_equal(table[4 : 4 + 4 * len(want)].reshape(-1, 4), want)


@pytest.mark.parametrize(("kind", "room"), [("silu", 0), ("relu2", 1 << 30), ("oai", 1 << 30)])
def test_steps_match_the_reference(backend: TritonBackend, kind: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "DECODE_FROM", 0)
    monkeypatch.setattr(decoded, "PIECE", 1)  # an expert at a time, where none is kept
    made = experts_program(kind)
    step = backend.compile(made, Weights(), replace(LIMITS, decoded_bytes=room), "float16")
    assert all("decoded" in t.implementation for t in step.explain() if t.op.startswith("expert"))
    assert bool(step.memory().decoded) is bool(room)
    inputs = batch([(0, 0, 21)], rows=list(range(21)), seed=3)
    assert rel_error(step(inputs, "hidden").hidden, Reference(made)(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
    step.close()


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, True), ({"decoded_weights": "never"}, False), ({"deterministic": True}, False), ({"compute": "float32"}, False)],
)
def test_a_loaded_model_keeps_what_it_decodes(backend: TritonBackend, options: dict[str, Any], kept: bool) -> None:
    name, given = need_cases("mixtral") / "model-q4_0x.gguf", {"compute": "float16", **options}
    with load(name, backend=backend, n_ctx=64, max_seqs=1, **given) as llm:
        told = llm.explain()
    assert (told.plan.decoded > 0) is (told.memory.decoded > 0) is kept
    assert told.memory.decoded <= told.plan.decoded
