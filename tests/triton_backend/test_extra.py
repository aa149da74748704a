"""Experts, recurrent mixers and encoders: every case, what the cases leave out, and one small model of each family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops import EXTRA_OPS, draw, reference
from quarrel.ops.contract import Array, Case, Compute, Op, rel_error
from quarrel.ops.encode import ENCODE, EncodeSpec
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE, ExpertDownSpec, ExpertUpSpec, RouteSpec
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec
from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.inputs import ENCODER, batch_of, padded_prompts
from quarrel.triton_backend.step import TritonStep
from tests.paths import need_cases
from tests.triton_backend.cases import COMPUTES, EVERYTHING, error_of, error_on

CASES = [
    pytest.param(op, case, compute, id=f"{op.name}-{i}-{compute}")
    for op in EXTRA_OPS.values()
    for i, case in enumerate(op.cases())
    for j, compute in enumerate(COMPUTES)
    if EVERYTHING or j == i % len(COMPUTES)
]
SIZE = 16
LIMITS = Limits(max_tokens=24, max_seqs=4, max_blocks_per_seq=4, n_blocks=16, block_size=SIZE)
EXACT = 1e-5
"""What the reference models allow float32."""


@pytest.mark.parametrize(("op", "case", "compute"), CASES)
def test_case_matches_the_reference(backend: TritonBackend, op: Op, case: Case, compute: Compute) -> None:
    """Buffers hold NaN beforehand, so an element that no kernel writes is an infinite error."""
    assert error_of(backend, op, case, compute) <= op.tolerance[compute]


def test_every_op_has_an_implementation() -> None:
    assert set(EXTRA_OPS) - {"lora"} <= set(REGISTRY.ops())  # which is always taken apart


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_experts_of_every_format(backend: TritonBackend, type: GGMLType) -> None:
    up = Case(ExpertUpSpec(type, 3, 2, 7, 256, "silu"), {"T": 2})
    down = Case(ExpertDownSpec(type, 3, 2, 7, 256), {"T": 2})
    assert error_of(backend, EXPERT_UP, up, "float32") <= EXPERT_UP.tolerance["float32"]
    assert error_of(backend, EXPERT_DOWN, down, "float32") <= EXPERT_DOWN.tolerance["float32"]


@pytest.mark.parametrize("width", [2, 3, 5, 16])
def test_convolutions_of_any_width(backend: TritonBackend, width: int) -> None:
    """Sequences shorter than the taps keep part of their old tail; with 17 tokens there is more than one tile."""
    for most in (1, 3, 17):
        case = Case(ConvSpec(20, width), {"S": 3, "Q": most})
        assert error_of(backend, CONV, case, "float32") <= CONV.tolerance["float32"]


@pytest.mark.parametrize("dim", [16, 24, 96, 256])
def test_encoder_heads_of_any_width(backend: TritonBackend, dim: int) -> None:
    case = Case(EncodeSpec(2, dim, dim**-0.5), {"S": 3, "Q": 19})
    assert error_of(backend, ENCODE, case, "float32") <= ENCODE.tolerance["float32"]


def test_scores_beyond_the_exponential_range(backend: TritonBackend) -> None:
    case = Case(EncodeSpec(1, 32, 40.0), {"S": 2, "Q": 21})
    assert error_of(backend, ENCODE, case, "float32") <= 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        RouteSpec(6, 3, "sigmoid", renormalise=False),
        RouteSpec(10, 4, "softmax", bias=True, n_groups=5, groups_used=3),
        RouteSpec(8, 2, "sigmoid", n_groups=8, groups_used=4),
        RouteSpec(96, 8, "softmax_topk", scale=0.5),
        RouteSpec(1, 1, "softmax_topk"),
    ],
    ids=str,
)
def test_routes_beyond_the_cases(backend: TritonBackend, spec: RouteSpec) -> None:
    """Whole numbers as logits make ties in every row; the ids must be the reference's, not only as good."""
    rng = np.random.default_rng(3)
    logits, *bias = ROUTE.make(Case(spec, {"T": 11}), rng)  # type: ignore[misc]
    for inputs in ((logits, *bias), (np.round(logits), *bias), (logits * 100, *bias)):
        got = backend.run_op(ROUTE, spec, inputs, "float32")
        want = reference.run_op(ROUTE, spec, inputs)
        assert np.array_equal(got[0], want[0])  # type: ignore[arg-type]
        assert rel_error(got[1], want[1]) <= ROUTE.tolerance["float32"]  # type: ignore[arg-type]


def test_logits_that_are_not_numbers_still_choose_experts(backend: TritonBackend) -> None:
    """A kernel takes an id as an address, so nothing in the logits may lead it out of the stack."""
    logits = np.zeros((4, 5), np.float32)
    logits[1], logits[2, 3], logits[3, 1] = np.nan, np.nan, np.inf
    for gate in ("softmax", "softmax_topk", "sigmoid"):
        ids, _ = backend.run_op(ROUTE, RouteSpec(5, 3, gate), (logits,), "float32")  # type: ignore[arg-type]
        assert isinstance(ids, np.ndarray)
        assert ids.min() >= 0
        assert ids.max() < 5
        assert all(len(set(row)) == 3 for row in ids.tolist())


RECURRENT = [(CONV, ConvSpec(20, 4)), (SCAN2, Scan2Spec(3, 20, 1, 12)), (SCAN1, Scan1Spec(20, 5))]


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=lambda x: getattr(x, "name", ""))
def test_a_prompt_in_pieces_gives_the_same_bits(backend: TritonBackend, op: Op, spec: object) -> None:
    """Two sequences of 9 tokens at once, then in pieces of 1, 6 and 2: results and states."""
    rng = np.random.default_rng(1)
    *given, _, _, _, state = op.make(Case(spec, {"S": 2, "Q": 9}), rng)  # type: ignore[misc]
    rows = [draw.activations(rng, 18, x.shape[1]) for x in given if isinstance(x, np.ndarray)]
    slots = np.array([2, 0], np.int32)

    def run(parts: list[Array], past: int, new: int, state: Array) -> tuple[Array, Array]:
        order = iter(parts)
        whole = [next(order) if isinstance(x, np.ndarray) else x for x in given]
        starts = np.array([0, new, 2 * new], np.int32)
        return backend.run_op(op, spec, (*whole, starts, np.full(2, past + new, np.int32), slots, state), "float32")

    want, state_wanted = run(rows, 0, 9, state)
    pieces, at = [], 0
    for new in (1, 6, 2):
        part = [np.concatenate([x[at : at + new], x[9 + at : 9 + at + new]]) for x in rows]
        out, state = run(part, at, new, state)
        pieces.append(out.reshape(2, new, -1))
        at += new
    assert np.array_equal(np.concatenate(pieces, 1).reshape(want.shape), want)
    assert np.array_equal(state, state_wanted, equal_nan=True)


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=lambda x: getattr(x, "name", ""))
def test_slots_that_no_sequence_has_keep_their_state(backend: TritonBackend, op: Op, spec: object) -> None:
    inputs = op.make(Case(spec, {"S": 2, "Q": 3}), np.random.default_rng(2))  # type: ignore[misc]
    slots, before = inputs[-2:]
    after = backend.run_op(op, spec, inputs, "float32")[-1]
    others = [i for i in range(len(before)) if i not in slots]  # type: ignore[arg-type, operator]
    assert len(others) == 2
    assert np.array_equal(after[others], before[others], equal_nan=True)  # type: ignore[index]
    assert np.isfinite(after[slots]).all()  # type: ignore[index]


@pytest.mark.parametrize(
    ("op", "spec", "change", "match"),
    [
        (CONV, ConvSpec(8, 3), (-2, np.array([4, 0], np.int32)), "state_slots lies in 0..4"),
        (CONV, ConvSpec(8, 3), (-1, np.zeros((4, 3, 8), np.float32)), "no float32 array"),
        (
            EXPERT_UP,
            ExpertUpSpec(GGMLType.Q8_0, 3, 2, 4, 32, "silu"),
            (1, np.full((2, 2), 3, np.int32)),
            "ids lies in 3..3",
        ),
    ],
)
def test_addresses_out_of_range_are_refused(
    backend: TritonBackend, op: Op, spec: object, change: tuple[int, Array], match: str
) -> None:
    inputs = list(op.make(Case(spec, {"S": 2, "Q": 1, "T": 2}), np.random.default_rng(0)))  # type: ignore[misc]
    inputs[change[0]] = change[1]
    with pytest.raises(RequestError, match=match):
        backend.run_op(op, spec, inputs, "float32")


def batch(parts: list[tuple[int, int, Array]]) -> StepInputs:
    """Parts are (place, tokens before, new tokens); a place is a state slot and four blocks. Every row is asked for."""
    new = np.array([len(ids) for _, _, ids in parts], np.int32)
    positions = np.concatenate([np.arange(past, past + len(ids)) for _, past, ids in parts]).astype(np.int32)
    place = np.array([p for p, _, _ in parts], np.int32)
    slots = (np.repeat(place, new) * 4 * SIZE + positions).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    kv_len = np.array([past + len(ids) for _, past, ids in parts], np.int32)
    table = (place[:, None] * 4 + np.arange(4)).astype(np.int32)
    ids = np.concatenate([ids for _, _, ids in parts])
    rows = np.arange(len(ids), dtype=np.int32)
    return StepInputs(ids, positions, slots, starts, kv_len, table, rows, None, place)


def compiled(
    backend: TritonBackend, name: str, variant: str, compute: Compute = "float32"
) -> tuple[TritonStep, Array, Array]:
    """A reference model with its first 8 tokens (encoders: all) and what they give."""
    folder = need_cases(name)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    hidden = folder / "hidden_hf.npy"
    want = np.load(hidden if hidden.exists() else folder / "logits_hf.npy")
    count = len(ids) if hidden.exists() else 8
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        tensors = Tensors(file)
        limits = replace(LIMITS, max_tokens=max(LIMITS.max_tokens, count))
        step = backend.compile(assemble(read_spec(file), tensors), tensors, limits, compute)
    return step, ids[:count], want[:count]


@pytest.mark.parametrize(
    ("name", "variant", "pieces"),
    [
        ("mixtral", "q4_0x", [8]),
        ("nemotron_h_moe", "q4_0x", [7, 1]),
        ("gptoss", "mxfp4-bf16", [8]),
        ("mamba", "q4_0x", [7, 1]),
        ("granitehybrid", "q4_0x", [8]),
    ],
)
def test_a_model_of_each_family_gives_its_logits(
    backend: TritonBackend, name: str, variant: str, pieces: list[int]
) -> None:
    """Prefill, and for the recurrent ones a step of decode on top of it."""
    step, ids, want = compiled(backend, name, variant)
    ends = np.cumsum(pieces)
    parts = [(1, int(end) - n, ids[end - n : end]) for end, n in zip(ends, pieces, strict=True)]
    got = [step(batch([part]), "logits").logits for part in parts]
    step.close()
    assert rel_error(np.concatenate(got), want) <= EXACT  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_encoders_give_their_hidden_states(backend: TritonBackend, name: str) -> None:
    step, ids, want = compiled(backend, name, "q4_0x")
    assert rel_error(step(batch([(0, 0, ids)]), "hidden").hidden, want) <= EXACT  # type: ignore[arg-type]
    if name == "bert":
        far = replace(batch([(0, 0, ids[:1])]), positions=np.array([128], np.int32))
        with pytest.raises(RequestError, match="positions 128 to 128, wanted 0 to 127"):
            step(far, "hidden")
    step.close()


def test_an_encoder_s_full_steps_and_its_norms(backend: TritonBackend) -> None:
    """Padded as for a captured step, with a fourth text, of the one token that is missing, it gives the same bits; sums,
    norms and roundings are one launch each in 16-bit arithmetic, but for the last norm, which no linear map reads."""
    limits = replace(LIMITS, max_tokens=8)
    with GGUFFile.open(need_cases("nomic_bert") / "model-q4_0x.gguf") as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        steps = [backend.compile(program, tensors, limits, compute) for compute in ("float16", "float32")]
    norms = [n for n in program.nodes if n.op.name == "norm"]
    names = [[taken.op for taken in step.explain()] for step in steps]
    assert names[0].count("post_norm") == len(norms) - 1 == names[0].count("linear_add") + len(norms) - 2
    assert "post_norm" not in names[1]
    ids = np.arange(3, 10, dtype=np.int32)
    inputs = batch([(0, 0, ids[:3]), (1, 0, ids[3:4]), (2, 0, ids[4:])])
    inputs = replace(inputs, out_rows=inputs.query_start[1:] - 1)
    rounded, exact = (step(inputs, "hidden").hidden for step in steps)
    assert rel_error(rounded, exact) <= 5e-3  # type: ignore[arg-type]
    mean = steps[1](inputs, "mean").mean
    assert padded_prompts(inputs, replace(limits, max_tokens=24), ENCODER).query_start.tolist() == [0, 3, 4, 7, 16]  # type: ignore[union-attr]
    shapes = [ENCODER.tokens(tokens, 16000) for tokens in (1, 17, 2049, 4096, 4097, 9000, 15000)]
    assert shapes == [16, 32, 4096, 4096, 6144, 10240, 16000]
    assert padded_prompts(replace(inputs, out_rows=np.arange(7, dtype=np.int32)), limits, ENCODER) is None
    # Rows of results have room for as many as there may be tokens.
    assert padded_prompts(inputs, replace(limits, max_tokens=7, max_seqs=8), ENCODER) is not None
    each = replace(inputs, query_start=np.arange(8, dtype=np.int32), kv_len=np.ones(7, np.int32))
    assert padded_prompts(each, replace(limits, max_tokens=7, max_seqs=8), ENCODER) is None
    steps[1]._capture = True  # which begins with the second of a shape
    assert np.array_equal(steps[1](inputs, "mean").mean, mean)  # type: ignore[arg-type]
    assert np.array_equal(steps[1](inputs, "hidden").hidden, exact)  # type: ignore[arg-type]
    assert len(steps[1]._seen) == 2
    for step in steps:
        step.close()


@pytest.fixture(name="recurrent")
def _recurrent(backend: TritonBackend) -> Iterator[tuple[TritonStep, Array]]:
    step, ids, _ = compiled(backend, "mamba2", "q4_0x")
    yield step, ids
    step.close()


def test_padding_a_decode_batch_changes_no_bit_and_no_state(backend: TritonBackend) -> None:
    """What a captured bucket does: a fourth sequence that is not there, whose state goes to the slot past the last.

    The model has recurrent layers, attention and experts.
    """
    step, ids, _ = compiled(backend, "nemotron_h_moe", "q4_0x")
    states = step._plan.states
    step(batch([(0, 0, ids[:3]), (1, 0, ids[:1]), (3, 0, ids[:2])]), "hidden")
    saved = [s.clone() for s in states]
    inputs = batch([(0, 3, ids[3:4]), (1, 1, ids[1:2]), (3, 2, ids[2:3])])
    want = step(inputs, "logits").logits
    after = [s.clone() for s in states]
    for state, old in zip(states, saved, strict=True):
        state.copy_(old)
    counts = batch_of(inputs.query_start, inputs.kv_len, 3)
    step._inputs.send(inputs, 4)
    step._run(replace(counts, T=4, S=4, R=4, items=4), "logits")
    assert np.array_equal(step._read(step._outputs["logits"], {"R": 3}), want)  # type: ignore[arg-type]
    assert all(bool((s[:4] == a[:4]).all()) for s, a in zip(states, after, strict=True))
    step.close()


def test_padding_a_step_of_prompts_changes_no_state_and_counts_no_expert(backend: TritonBackend) -> None:
    padded, ids, _ = compiled(backend, "nemotron_h_moe", "q4_0x")
    plain, _, _ = compiled(backend, "nemotron_h_moe", "q4_0x")
    padded._capture = True  # which begins with the second of a size
    for inputs in (
        batch([(0, 0, ids[:3]), (1, 0, ids[:2])]),
        batch([(0, 3, ids[3:4]), (1, 2, ids[2:9]), (3, 0, ids[:9])]),
    ):
        inputs = replace(inputs, out_rows=inputs.query_start[1:] - 1)
        assert np.array_equal(*(step(inputs, "logits").logits for step in (padded, plain)))  # type: ignore[arg-type]
        states = zip(padded._plan.states, plain._plan.states, strict=True)
        assert all(np.array_equal(a[:2], b[:2]) for a, b in states)
        counts = zip(*(step.expert_counts().values() for step in (padded, plain)), strict=True)
        assert all(a.tolist() == b.tolist() for a, b in counts)
    assert len(padded._seen) == 2
    for step in (padded, plain):
        step.close()


def test_a_slot_given_to_a_new_sequence_starts_from_zero(recurrent: tuple[TritonStep, Array]) -> None:
    step, ids = recurrent
    prompt = batch([(2, 0, ids[:4])])
    first = step(prompt, "logits").logits
    step(batch([(2, 4, ids[4:6])]), "logits")
    assert np.array_equal(step(prompt, "logits").logits, first)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slots", "match"), [(None, "fill StepInputs.state_slots"), ([4], "state slots"), ([0, 1], "state slots")]
)
def test_a_recurrent_model_wants_a_slot_for_each_sequence(
    recurrent: tuple[TritonStep, Array], slots: list[int] | None, match: str
) -> None:
    step, ids = recurrent
    given = None if slots is None else np.array(slots, np.int32)
    with pytest.raises(RequestError, match=match):
        step(replace(batch([(0, 0, ids[:2])]), state_slots=given), "logits")


def test_memory_counts_the_states(recurrent: tuple[TritonStep, Array]) -> None:
    step, _ = recurrent
    states = sum(s.numel() * 4 for s in step._plan.states)
    assert step.memory().cache == states > 0


def test_experts_take_more_tokens_than_a_tile(backend: TritonBackend) -> None:
    spec = ExpertUpSpec(GGMLType.Q4_0, 5, 2, 33, 64, "silu")
    inputs = EXPERT_UP.make(Case(spec, {"T": 70}), np.random.default_rng(4))  # type: ignore[misc]
    for compute in COMPUTES:
        assert error_on(backend, EXPERT_UP, spec, inputs, compute) <= EXPERT_UP.tolerance[compute]
