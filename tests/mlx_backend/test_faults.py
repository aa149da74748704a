"""What breaks kernels elsewhere: NaN and infinity, the ends of half precision, ties, empty and full experts, tails."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType
from quarrel.mlx_backend.backend import MlxBackend
from quarrel.ops import ALL_OPS, EXTRA_OPS, draw, reference
from quarrel.ops.activation import GATED, PLAIN, GatedSpec, PlainSpec
from quarrel.ops.contract import Array, Case, Concrete, Op, rel_error
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE, ExpertDownSpec, ExpertUpSpec, RouteSpec
from quarrel.ops.norm import NORM, NormSpec
from quarrel.ops.rope import ROPE, RopeSpec
from quarrel.ops.sample import SAMPLE, SampleSpec, sample_reference
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec
from tests.mlx_backend.cases import error_on, running, same_bits

ROW_OPS = ("norm", "gated", "plain", "add", "cap", "rope", "expert_up", "expert_down", "gated_norm", "add_row", "route")
RECURRENT = [(CONV, ConvSpec(96, 4)), (SCAN2, Scan2Spec(6, 32, 2, 16)), (SCAN1, Scan1Spec(96, 16))]
UP = ExpertUpSpec(GGMLType.Q8_0, 8, 3, 48, 96, "relu2", gated=False)
DOWN = ExpertDownSpec(GGMLType.Q8_0, 8, 3, 96, 64)


@pytest.fixture(name="backend", scope="module")
def _backend() -> Iterator[MlxBackend]:
    with running() as backend:
        yield backend


def case_with_rows(op: Op) -> Case:
    return next(c for c in op.cases() if c.dims["T"] >= 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ROW_OPS)
def test_a_bad_row_reaches_no_other(backend: MlxBackend, name: str, bad: float) -> None:
    op = {**ALL_OPS, **EXTRA_OPS}[name]
    case = case_with_rows(op)
    inputs = list(op.make(case, np.random.default_rng(0)))  # type: ignore[misc]
    clean = backend.run_op(op, case.spec, inputs, "float16")
    poisoned = np.array(inputs[0])
    poisoned[1] = bad
    got = backend.run_op(op, case.spec, [poisoned, *inputs[1:]], "float16")
    for g, c in zip(got, clean, strict=True):
        assert np.array_equal(np.delete(np.asarray(g), 1, 0), np.delete(np.asarray(c), 1, 0))


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=lambda x: getattr(x, "name", ""))
def test_a_bad_sequence_reaches_no_other(backend: MlxBackend, op: Op, spec: object) -> None:
    """Nor what came before the bad token in its own."""
    inputs = list(op.make(Case(spec, {"S": 3, "Q": 7}), np.random.default_rng(0)))  # type: ignore[misc]
    starts, slots = inputs[-4], inputs[-2]
    clean = backend.run_op(op, spec, inputs, "float16")
    poisoned = np.array(inputs[0])
    poisoned[2] = np.nan  # in the first sequence, of seven tokens
    got = backend.run_op(op, spec, [poisoned, *inputs[1:]], "float16")
    keep = np.delete(np.arange(len(poisoned)), np.arange(2, starts[1]))  # type: ignore[index]
    assert np.array_equal(got[0][keep], clean[0][keep])  # type: ignore[index]
    others = np.delete(np.arange(len(inputs[-1])), slots[0])  # type: ignore[arg-type, index]
    assert np.array_equal(got[1][others], clean[1][others], equal_nan=True)  # type: ignore[index]
    assert np.isnan(got[0][2 : starts[1]]).any()  # type: ignore[index, misc]


def test_a_state_that_is_not_a_number_is_forgotten_with_its_sequence(backend: MlxBackend) -> None:
    for op, spec in RECURRENT:
        inputs = list(op.make(Case(spec, {"S": 1, "Q": 7}), np.random.default_rng(0)))  # type: ignore[misc]
        want = backend.run_op(op, spec, inputs, "float16")
        inputs[-1] = (
            np.where(np.arange(len(inputs[-1])) == inputs[-2][0], np.nan, 0)
            .astype(np.float32)
            .reshape(  # type: ignore[arg-type, index]
                -1,
                *(1 for _ in inputs[-1].shape[1:]),  # type: ignore[union-attr]
            )
            + np.zeros_like(inputs[-1])
        )
        got = backend.run_op(op, spec, inputs, "float16")
        assert np.array_equal(got[0], want[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=lambda x: getattr(x, "name", ""))
def test_a_sequence_without_new_tokens_keeps_its_state(backend: MlxBackend, op: Op, spec: object) -> None:
    *given, starts, kv_len, slots, state = op.make(Case(spec, {"S": 2, "Q": 7}), np.random.default_rng(4))  # type: ignore[misc]
    n = int(starts[1])  # type: ignore[index]
    rows = [x[:n].copy() if isinstance(x, np.ndarray) and len(x) == starts[-1] else x for x in given]  # type: ignore[index]
    lengths = np.array([kv_len[0], 9], np.int32)  # type: ignore[index]
    inputs = (*rows, np.array([0, n, n], np.int32), lengths, slots, state)
    got = backend.run_op(op, spec, inputs, "float32")
    assert np.array_equal(got[1][slots[1]], state[slots[1]])  # type: ignore[index, call-overload]
    for g, w in zip(got, reference.run_op(op, spec, inputs), strict=True):
        assert rel_error(g, w) <= op.tolerance["float32"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=lambda x: getattr(x, "name", ""))
def test_a_prompt_in_pieces_gives_the_same_bits(backend: MlxBackend, op: Op, spec: object) -> None:
    """Two sequences of 9 tokens at once, then in pieces of 1, 6 and 2: results and states."""
    rng = np.random.default_rng(1)
    *given, _, _, _, state = op.make(Case(spec, {"S": 2, "Q": 9}), rng)  # type: ignore[misc]
    rows = [draw.activations(rng, 18, x.shape[1]) for x in given if isinstance(x, np.ndarray)]
    slots = np.array([2, 0], np.int32)

    def run(parts: list[Array], past: int, new: int, state: Array) -> tuple[Array, Array]:
        order = iter(parts)
        whole = [next(order) if isinstance(x, np.ndarray) else x for x in given]
        starts = np.array([0, new, 2 * new], np.int32)
        lengths = np.full(2, past + new, np.int32)
        return backend.run_op(op, spec, (*whole, starts, lengths, slots, state), "float16")  # type: ignore[return-value]

    want, state_wanted = run(rows, 0, 9, state)  # type: ignore[arg-type]
    pieces, at = [], 0
    for new in (1, 6, 2):
        part = [np.concatenate([x[at : at + new], x[9 + at : 9 + at + new]]) for x in rows]
        out, state = run(part, at, new, state)  # type: ignore[arg-type]
        pieces.append(out.reshape(2, new, -1))
        at += new
    assert np.array_equal(np.concatenate(pieces, 1).reshape(want.shape), want)
    assert np.array_equal(state, state_wanted, equal_nan=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [65504.0, 6e-8, 1e-40, 0.0])
def test_the_ends_of_half_precision(backend: MlxBackend, value: float) -> None:
    """The largest number, the smallest, one that the hardware takes for zero, and none."""
    signs = np.sign(np.random.default_rng(0).standard_normal((3, 64)))
    x = (signs * value).astype(np.float32)
    spec = NormSpec("rms", 64, 1e-5)
    inputs = (x, draw.weight(np.random.default_rng(1), GGMLType.F32, 1, 64, 1.0))
    (y,) = backend.run_op(NORM, spec, inputs, "float16")
    (want,) = reference.run_op(NORM, spec, inputs)
    assert np.allclose(y, want, rtol=2e-3, atol=2e-6)  # type: ignore[arg-type]
    (y,) = backend.run_op(PLAIN, PlainSpec("gelu_erf", 64), (x,), "float16")
    assert np.isfinite(y).all()  # type: ignore[arg-type]


def test_numbers_past_half_precision_become_infinite_and_stay_in_their_row(backend: MlxBackend) -> None:
    gate, up = np.ones((3, 577), np.float32), np.ones((3, 577), np.float32)
    gate[1, 7] = 65520.0
    spec = GatedSpec("silu", 577)
    (y,) = backend.run_op(GATED, spec, (gate, up), "float16")
    assert np.isinf(y[1, 7])  # type: ignore[call-overload, index]
    assert np.isfinite(np.delete(y.reshape(-1), 577 + 7)).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("position", [0, 1 << 20])
def test_positions_far_out(backend: MlxBackend, position: int) -> None:
    spec = RopeSpec("norm", 4, 64, 64)
    x, _, freq = ROPE.make(Case(spec, {"T": 1}), np.random.default_rng(0))  # type: ignore[misc]
    inputs = (x, np.array([position], np.int32), freq)
    assert error_on(backend, ROPE, spec, inputs, "float32") <= ROPE.tolerance["float32"]


@pytest.mark.parametrize(
    "spec",
    [
        RouteSpec(10, 4, "softmax", bias=True, n_groups=5, groups_used=3),
        RouteSpec(8, 2, "sigmoid", n_groups=8, groups_used=4),
        RouteSpec(96, 8, "softmax_topk", scale=0.5),
        RouteSpec(1, 1, "softmax_topk"),
    ],
    ids=str,
)
def test_tied_experts_and_the_lowest_wins(backend: MlxBackend, spec: RouteSpec) -> None:
    """Whole numbers as logits make ties in every row; the ids must be the reference's, not only as good."""
    logits, *bias = ROUTE.make(Case(spec, {"T": 11}), np.random.default_rng(3))  # type: ignore[misc]
    for rows in (logits, np.round(logits), logits * 100):  # type: ignore[call-overload, operator]
        got = backend.run_op(ROUTE, spec, (rows, *bias), "float32")
        want = reference.run_op(ROUTE, spec, (rows, *bias))
        assert np.array_equal(got[0], want[0])  # type: ignore[arg-type]
        assert rel_error(got[1], want[1]) <= ROUTE.tolerance["float32"]  # type: ignore[arg-type]


def test_logits_that_are_not_numbers_still_choose_experts(backend: MlxBackend) -> None:
    """A kernel takes an id as an address, so nothing in the logits may lead it out of the stack."""
    logits = np.zeros((4, 5), np.float32)
    logits[1], logits[2, 3], logits[3, 1] = np.nan, np.nan, np.inf
    for gate in ("softmax", "softmax_topk", "sigmoid"):
        ids, _ = backend.run_op(ROUTE, RouteSpec(5, 3, gate), (logits,), "float32")  # type: ignore[arg-type]
        assert isinstance(ids, np.ndarray)
        assert ids.min() >= 0
        assert ids.max() < 5
        assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.parametrize("chosen", [0, 7], ids=["the first expert", "the last expert"])
def test_all_tokens_on_one_expert_and_none_on_the_others(backend: MlxBackend, chosen: int) -> None:
    for op, spec in ((EXPERT_UP, UP), (EXPERT_DOWN, DOWN)):
        for tokens in (1, 34):
            inputs = list(op.make(Case(spec, {"T": tokens}), np.random.default_rng(0)))  # type: ignore[misc]
            inputs[1] = np.full((tokens, 3), chosen, np.int32)
            assert error_on(backend, op, spec, tuple(inputs), "float32") <= op.tolerance["float32"]


def test_an_expert_pair_gives_the_same_bits_whatever_shares_its_tile(backend: MlxBackend) -> None:
    inputs = list(EXPERT_UP.make(Case(UP, {"T": 40}), np.random.default_rng(0)))  # type: ignore[misc]
    (whole,) = backend.run_op(EXPERT_UP, UP, inputs, "float16")
    inputs[0], inputs[1] = inputs[0][7:19].copy(), inputs[1][7:19].copy()  # type: ignore[index, union-attr]
    (part,) = backend.run_op(EXPERT_UP, UP, inputs, "float16")
    assert np.array_equal(part, whole[7:19])  # type: ignore[arg-type, index]


@pytest.mark.parametrize("name", ["norm", "gated", "rope", "expert_up", "expert_down", "route", "embedding", "gather_rows"])
def test_no_tokens_at_all(backend: MlxBackend, name: str) -> None:
    op = {**ALL_OPS, **EXTRA_OPS}[name]
    case = op.cases()[0]
    inputs: list[Concrete] = list(op.make(case, np.random.default_rng(0)))  # type: ignore[misc]
    for i, param in enumerate(op.params(case.spec)):
        if param.axes.startswith(("T", "R")):
            inputs[i] = inputs[i][:0]  # type: ignore[index]
    for got in backend.run_op(op, case.spec, inputs, "float16"):
        assert got.size == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["transposed", "strided", "stride 0", "offset"])
def test_layouts_of_inputs(backend: MlxBackend, layout: str) -> None:
    """Refused unless contiguous; a contiguous part of a larger array is as good as one of its own."""
    spec = NormSpec("rms", 64, 1e-6, groups=5)
    x, gain = NORM.make(Case(spec, {"T": 7}), np.random.default_rng(0))  # type: ignore[misc]
    assert isinstance(x, np.ndarray)
    if layout == "offset":
        whole = np.concatenate([np.full((3, 320), np.nan, np.float32), x])
        part, own = (backend.run_op(NORM, spec, (a, gain), "float16") for a in (whole[3:], x))
        assert same_bits(part, own)
        return
    bad = {
        "transposed": np.asfortranarray(x),
        "strided": np.repeat(x, 2, 0)[::2],
        "stride 0": np.broadcast_to(x[:1], x.shape),
    }[layout]
    with pytest.raises(RequestError, match="contiguous"):
        backend.run_op(NORM, spec, (bad, gain), "float16")


@pytest.mark.parametrize("entry", [-1, 10**6])
def test_block_tables_that_lead_out_of_the_cache_are_refused(backend: MlxBackend, entry: int) -> None:
    op = ALL_OPS["attention"]
    case = op.cases()[1]
    inputs = list(op.make(case, np.random.default_rng(0)))  # type: ignore[misc]
    inputs[3] = np.array(inputs[3])
    inputs[3][0, 0] = entry
    with pytest.raises(RequestError, match="block_table"):
        backend.run_op(op, case.spec, inputs, "float16")


Controls = tuple[float, int, float, float, float]


def drawn(backend: MlxBackend, logits: Array, controls: list[Controls]) -> tuple[Array, Array]:
    """Tokens here and by the reference; the controls are temperature, top_k, top_p, min_p and the uniform number."""
    t, k, p, m, u = zip(*controls, strict=True)
    rows = (np.float32(t), np.int32(k), np.float32(p), np.float32(m), np.float32(u))
    inputs = (np.ascontiguousarray(logits, np.float32), *(np.ascontiguousarray(r) for r in rows))
    spec = SampleSpec(logits.shape[1])
    (got,) = backend.run_op(SAMPLE, spec, inputs)
    (want,) = sample_reference(spec, *inputs)  # type: ignore[arg-type]
    return got, want  # type: ignore[return-value]


@pytest.mark.parametrize("n", [1, 100, 4096, 8193])
def test_a_token_is_always_inside_the_vocabulary(backend: MlxBackend, n: int) -> None:
    plain = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    tail = np.where(np.arange(n) < n - n // 3, -5.0, 0.0)
    one_infinite, some_nan = plain.copy(), plain.copy()
    one_infinite[n // 2] = np.inf
    some_nan[:: max(1, n // 7)] = np.nan
    rows = [plain, tail, np.zeros(n), np.full(n, -np.inf), np.full(n, np.nan), one_infinite, some_nan]
    for temperature in (0.0, 0.8):
        got, want = drawn(backend, np.stack(rows), [(temperature, 0, 1.0, 0.0, 0.999)] * len(rows))
        assert got.tolist() == want.tolist()
        assert got[3] == got[4] == -1
        assert got.max() < n
        assert temperature > 0 or got[2] == 0


def test_all_sampling_controls_together(backend: MlxBackend) -> None:
    grid = list(product((0.7, 1.5), (0, 1, 7, 299, 300, 1000), (1.0, 0.9, 0.01, 0.0), (0.0, 0.1), (0.0, 0.37, 0.9999)))
    grid = grid[::11]
    logits = np.random.default_rng(0).standard_normal((len(grid), 300), dtype=np.float32) * 3
    got, want = drawn(backend, logits, grid)
    assert got.tolist() == want.tolist()


def test_ties_at_a_threshold_are_all_kept(backend: MlxBackend) -> None:
    logits = np.array([1, 3, 2, 2, 2, 0, 2, -1], np.float32)
    at_k = [(1.0, 2, 1.0, 0.0, u) for u in np.linspace(0, 0.999, 6)]
    at_p = [(1.0, 0, 0.5, 0.0, u) for u in np.linspace(0, 0.999, 6)]
    got, want = drawn(backend, np.tile(logits, (12, 1)), at_k + at_p)
    assert got.tolist() == want.tolist()
    assert {1, 2, 3, 4, 6} >= set(got[:6].tolist()) > {1}


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 100.0])
def test_extreme_temperatures(backend: MlxBackend, temperature: float) -> None:
    logits = np.random.default_rng(3).standard_normal((4, 777), dtype=np.float32) * 30
    got, want = drawn(backend, logits, [(temperature, 0, 0.95, 0.0, u) for u in (0.0, 0.3, 0.6, 0.99)])
    assert got.tolist() == want.tolist()


def test_negative_zero_is_zero_and_signs_are_ordered(backend: MlxBackend) -> None:
    logits = np.array([[-0.0, 0.0, -1.0, 1e-3, -1e-3, -3.0]], np.float32)
    for k in (1, 2, 3, 5):
        got, want = drawn(backend, np.tile(logits, (4, 1)), [(1.0, k, 1.0, 0.0, u) for u in (0.0, 0.4, 0.7, 0.99)])
        assert got.tolist() == want.tolist(), k
