"""A shared expert among the chosen ones: what is packed so, which rows go there, and that nothing else comes out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops import draw
from quarrel.ops.activation import GatedSpec, gated, plain
from quarrel.ops.contract import RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear, linear_add
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.step import Limits
from quarrel.triton_backend import fuse
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import joined
from quarrel.triton_backend.formats.pack import rows_of
from quarrel.triton_backend.formats.weights import Blank, Weights, fit_beside
from quarrel.triton_backend.fusion import Fusion
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.step import TritonStep
from tests.models.test_reference_logits import chunk, specify
from tests.paths import need_cases
from tests.triton_backend.test_fuse import launched
from tests.triton_backend.test_step import LIMITS, VOCAB, Reference, batch
from tests.triton_backend.test_step import Weights as Drawn

K, N, EXPERTS, USED = 96, 32, 8, 2
FEW = ["norm_rows", "gate_rows", "route_rows", "group_pairs", "grouped_tiles", "grouped_tiles", "mix_pairs"]


def ref(name: str, type: GGMLType, rows: int, k: int) -> WeightRef:
    return WeightRef(name, type, rows, k)


def program(
    wide: int, gates: bool, rated: bool = False, adds: bool = True, own: GGMLType = GGMLType.Q4_0, width: int = 0,
    rate_type: GGMLType = GGMLType.F32, router_type: GGMLType = GGMLType.F32,
) -> Program:  # fmt: skip
    """A layer whose shared expert is so many times as wide as the others; `rated`: with a weight of its own."""
    b, ff = Builder(), width or wide * N
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    x = norm(b, NormSpec("rms", K, 1e-5), h, ref("gain", GGMLType.F32, 1, K))
    logits = linear(b, x, ref("router", router_type, EXPERTS, K), out="f32")
    ids, weights = route(b, RouteSpec(EXPERTS, USED, "softmax", scale=2.5), logits)
    names, kind = (("gate", "up"), "silu") if gates else (("up",), "relu2")
    stacks = [ref(name, GGMLType.Q5_0, EXPERTS * N, K) for name in names]
    y = expert_up(b, ExpertUpSpec(GGMLType.Q5_0, EXPERTS, USED, N, K, kind, gates), x, ids, *stacks)  # type: ignore[arg-type]
    y = expert_down(
        b, ExpertDownSpec(GGMLType.Q4_0, EXPERTS, USED, K, N), y, ids, weights, ref("down", GGMLType.Q4_0, EXPERTS * K, N)
    )
    up = linear(b, x, ref("up_s", GGMLType.Q5_0, ff, K))
    if gates:
        up = gated(b, GatedSpec("silu", ff), linear(b, x, ref("gate_s", GGMLType.Q5_0, ff, K)), up)
    else:
        up = plain(b, "relu2", up)
    if rated:
        rate = linear(b, x, ref("rate", rate_type, 1, K))
        up = gated(b, GatedSpec("sigmoid", ff, per_row=True), rate, up)
    h = (
        linear_add(b, y, up, ref("down_s", own, K, ff))
        if not adds
        else add(b, h, linear_add(b, y, up, ref("down_s", own, K, ff)), 0.22)
    )
    hidden = norm(
        b, NormSpec("rms", K, 1e-5, out="f32"), gather_rows(b, h, b.input("out_rows")), ref("gain", GGMLType.F32, 1, K)
    )
    return b.program(hidden=hidden)


def joins_of(made: Program, kept: set[int] | None = None, joins: bool = True) -> list[Fusion]:
    found = fuse.find(made.nodes, "float16", {made.outputs["hidden"].id} if kept is None else kept, joins)
    return [f for f in found if f.packs is not None]


@pytest.mark.parametrize(
    ("wide", "gates", "rated", "adds", "rows"),
    [
        (1, True, False, True, (1, 3)),
        (1, True, True, True, (1, 3)),
        (1, False, False, False, (3,)),
        (2, False, False, True, (1, 2, 5, 33)),
        (3, True, False, True, (1, 3)),
    ],
    ids=["as wide", "with a gate of its own", "no stream", "twice as wide", "three times as wide"],
)
def test_steps_match_the_reference(
    backend: TritonBackend, wide: int, gates: bool, rated: bool, adds: bool, rows: tuple[int, ...]
) -> None:
    made = program(wide, gates, rated, adds)
    step, reference = backend.compile(made, Drawn(), LIMITS, "float16"), Reference(made)
    assert isinstance(step, TritonStep)
    for tokens in rows:
        inputs = replace(batch([(0, 0, tokens)], rows=list(range(min(4, tokens))), seed=3))
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
    (counts,) = step.expert_counts().values()
    assert len(counts) == EXPERTS
    assert counts.sum() == sum(rows) * USED
    step.close()


def test_a_few_rows_need_no_launch_for_the_shared_expert(backend: TritonBackend) -> None:
    step = backend.compile(program(2, gates=False), Drawn(), LIMITS, "float16")
    assert isinstance(step, TritonStep)
    if INTERPRETED:  # a GPU has further kernels
        assert launched(step, 2)[1 : 1 + len(FEW)] == FEW
        assert "gather" in launched(step, 2)[1 + len(FEW)]
    notes = [line.implementation for line in step.explain() if line.op in ("expert_up", "expert_down")]
    assert all(note.endswith("; 2 to 32 rows with the shared expert as 2 more of the chosen") for note in notes)
    step.close()


@pytest.mark.parametrize(("wide", "copies"), [(1, 0), (2, 1)])
def test_only_a_down_in_parts_is_packed_twice(backend: TritonBackend, wide: int, copies: int) -> None:
    sizes = []
    for own in (GGMLType.Q4_0, GGMLType.Q8_0):  # of another format than the others: it stays by itself
        step = backend.compile(program(wide, gates=False, own=own), Drawn(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        sizes.append(step._plan.weights.nbytes() - step._plan.weights.matrix(ref("down_s", own, K, wide * N)).nbytes)
        step.close()
    # Planes begin at multiples of 256 bytes.
    assert abs(sizes[0] - sizes[1] - copies * K * wide * N // 32 * 18) < 4096


def test_which_layers_are_joined() -> None:
    made = program(2, gates=False)
    (few,) = joins_of(made)
    assert (few.least, few.rows) == (joined.LEAST, joined.ROWS)
    names = [made.nodes[i].op.name for i in sorted(few.parts)]
    assert names == ["route", "expert_up", "expert_down", "linear", "plain", "linear_add", "add"]
    ids = next(n for n in made.nodes if n.op.name == "route").outputs[0].id
    assert not joins_of(made, joins=False)
    assert not joins_of(made, kept={ids})
    assert not joins_of(program(2, gates=False, own=GGMLType.Q8_0))
    assert not joins_of(program(1, gates=False, width=48))
    assert joins_of(program(2, gates=False, adds=False))


def test_deterministic_steps_compute_every_row_alike(backend: TritonBackend) -> None:
    step = backend.compile(program(1, gates=True), Drawn(), replace(LIMITS, deterministic=True), "float16")
    assert isinstance(step, TritonStep)
    assert not step._plan.notes
    step.close()


class Source:
    def __init__(self, *weights: tuple[WeightRef, RawWeight]) -> None:
        self._weights = dict(weights)

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._weights[ref]


def test_parts_of_columns_lie_behind_a_stack_and_by_themselves() -> None:
    stack, wide = ref("stack", GGMLType.Q8_0, 512, 64), ref("wide", GGMLType.Q8_0, 40, 192)
    rng = np.random.default_rng(5)
    drawn = [(r, draw.weight(rng, r.type, r.rows, r.k)) for r in (stack, wide)]
    made = Weights(Source(*drawn), torch.device("cpu"), "float16")
    made.beside([stack, wide], 3)
    alone, whole = made.matrix(wide), made.matrix(stack).whole
    assert whole is not None
    assert alone.whole is None
    assert (alone.n, alone.k, whole.n, whole.k) == (40, 192, 512 + 3 * 40, 64)
    parts = rows_of(whole, 512, 120).planes
    values = parts.codes.float().view(3, 40, 2, 32) * parts.scale.float()[..., None].view(3, 40, 2, 1)
    dense = values.permute(1, 0, 2, 3).reshape(40, 192).numpy()
    np.testing.assert_array_equal(dense, drawn[1][1].dense())
    twin = Blank("float16")
    twin.beside([stack, wide], 3)
    assert (twin.matrix(wide).n, twin.matrix(wide).k) == (40, 192)
    assert twin.matrix(stack).whole is not None


def test_what_fits_behind_a_stack() -> None:
    stack = ref("stack", GGMLType.Q6_K, 512, 512)
    assert fit_beside([stack, ref("wide", GGMLType.Q6_K, 40, 1024)], 2)
    assert not fit_beside([stack, ref("wide", GGMLType.Q6_K, 40, 1024)])
    assert not fit_beside([ref("few", GGMLType.Q6_K, 300, 512), ref("wide", GGMLType.Q6_K, 40, 1024)], 2)
    # No whole block in a part.
    assert not fit_beside([ref("stack", GGMLType.Q6_K, 512, 384), ref("wide", GGMLType.Q6_K, 40, 768)], 2)


CASES = [
    (("nemotron_h_moe", "q4_k_m"), 2), (("nemotron_h_moe", "q4_0x"), 2), (("ernie4_5moe", "q4_k_m"), 2),
    (("deepseek2", "q4_k_m"), 1), (("qwen3next", "q4_k_m"), 1), (("glm47flash", "q4_0x"), 1),
]  # fmt: skip
EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1" or not INTERPRETED


@pytest.mark.parametrize(("case", "more"), CASES if EVERYTHING else CASES[:1])
def test_whole_models_say_the_same(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str], more: int
) -> None:
    """Two tokens with the shared expert among the chosen and beside them; where there is time, one more that decodes."""
    arch, variant = case
    folder, came = need_cases(arch), []
    ids = np.load(folder / "tokens.npy").reshape(-1)[:3].astype(np.int32)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        tensors = Tensors(file)
        program = assemble(specify(file, folder, variant), tensors)
        limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=4, n_blocks=4, block_size=16)
        for joins in (False, True):
            said: Callable[[object], bool] = (lambda _: True) if joins else (lambda _: False)
            monkeypatch.setattr("quarrel.triton_backend.plan.joins", said)
            step = backend.compile(program, tensors, limits, "float16")
            assert isinstance(step, TritonStep)
            assert {note.split(" as ")[1][0] for note in step._plan.notes.values()} == ({str(more)} if joins else set())
            came.append([step(chunk(ids, a, z), "logits").logits for a, z in ((0, 2), (2, 3))[: 1 + EVERYTHING]])
            step.close()
    for alone, together in zip(*came, strict=True):
        assert alone is not None
        assert together is not None
        assert rel_error(together, alone) < 5e-3
