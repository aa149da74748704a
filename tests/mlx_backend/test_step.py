"""A small program compiled into a step: prefill, decode and mixed batches against the reference; what a step promises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quarrel.errors import BackendUnavailable, RequestError
from quarrel.gguf import GGMLType
from quarrel.mlx_backend.backend import MlxBackend, create
from quarrel.mlx_backend.runtime.launch import batch_of
from quarrel.mlx_backend.step import MlxStep
from quarrel.ops import draw
from quarrel.ops.activation import CAP, CapSpec
from quarrel.ops.adjust import adjust
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec, attention, rope_append
from quarrel.ops.contract import ConstRef, KVArrays, RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.kv import KVType
from quarrel.ops.linear import linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.logprobs import logprobs
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.reference import run_program
from quarrel.ops.registry import backend as backend_called
from quarrel.ops.rope import RopeSpec
from quarrel.ops.sample import sample
from quarrel.ops.step import Limits, SampleInputs, StepInputs
from quarrel.ops.windows import by_window
from tests.expert_counts import check_counts
from tests.lists import check_lists
from tests.logprobs import check_log_probabilities
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.transfers import check_transfer
from tools.metal_emulator import metal_kernel

WIDTH, VOCAB, HEADS, KV_HEADS, DIM, FFN = 256, 130, 4, 2, 64, 96
SIZE = 16
LIMITS = Limits(max_tokens=48, max_seqs=4, max_blocks_per_seq=6, n_blocks=20, block_size=SIZE)
EXACT = 2e-5


class Weights:
    """Random rows of each weight, made when they are asked for."""

    def raw(self, ref: WeightRef) -> RawWeight:
        rng = np.random.default_rng(sum(ref.name.encode()))
        return draw.weight(rng, ref.type, ref.rows, ref.k, 1.0 if ref.name == "gain" else 0.08)


def build() -> Program:
    b = Builder()
    pre = NormSpec("rms", WIDTH, 1e-5)
    gain = WeightRef("gain", GGMLType.F32, 1, WIDTH)
    table = WeightRef("embd", GGMLType.Q6_K, VOCAB, WIDTH)
    q, k, v = (WeightRef(n, GGMLType.Q4_K, h * DIM, WIDTH) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    freq = ConstRef("freq", tuple(10000.0 ** (-2.0 * i / DIM) for i in range(DIM // 2)))
    h = embedding(b, b.input("ids"), table, 2.0)
    for layer in range(2):
        with b.at(f"blk.{layer}"):
            qx, kx, vx = norm_linear(b, pre, h, [gain], [(q, None), (k, None), (v, None)])
            cache = b.cache(KVLayer(KV_HEADS, DIM, 21 * layer))
            spec = RopeAppendSpec(RopeSpec("norm", HEADS, DIM, DIM), RopeSpec("norm", KV_HEADS, DIM, DIM))
            qx = rope_append(b, spec, qx, kx, vx, freq, cache)
            y = attention(b, AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, window=21 * layer), qx, cache)
            h = linear_add(b, h, y, WeightRef("o", GGMLType.Q8_0, WIDTH, HEADS * DIM), scale=0.7)
            gate, up = (WeightRef(n, GGMLType.Q4_K, FFN, WIDTH) for n in ("gate", "up"))
            y = norm_gate_up(b, pre, h, [gain], (gate, None), (up, None), "silu")
            h = linear_add(b, h, y, WeightRef("down", GGMLType.Q8_0, WIDTH, FFN))
    h = gather_rows(b, h, b.input("out_rows"))
    hidden = norm(b, NormSpec("rms", WIDTH, 1e-5, out="f32"), h, gain)
    logits = linear(b, hidden, table, out="f32")
    tokens = sample(b, adjust(b, logits, b.input("ids"), b.input("out_rows")))
    told, best = logprobs(b, logits, tokens)
    return b.program(hidden=hidden, logits=logits, tokens=tokens, logprobs=told, best=best)


PROGRAM = build()


def greedy(rows: int) -> SampleInputs:
    zero = np.zeros(rows, np.float32)
    return SampleInputs(zero, np.zeros(rows, np.int32), np.ones(rows, np.float32), zero, np.full(rows, 0.5, np.float32))


def batch(parts: list[tuple[int, int, int]], rows: list[int] | None = None, seed: int = 0) -> StepInputs:
    """Parts are (first block, tokens in the cache, new tokens); each sequence has blocks of its own, in order."""
    rng = np.random.default_rng(seed)
    new = np.array([n for _, _, n in parts], np.int32)
    positions = np.concatenate([np.arange(past, past + n) for _, past, n in parts]).astype(np.int32)
    first = np.repeat([b for b, _, _ in parts], new)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    kv_len = np.array([past + n for _, past, n in parts], np.int32)
    width = -(-int(kv_len.max()) // SIZE)
    table = np.stack([(b + np.arange(width)) % LIMITS.n_blocks for b, _, _ in parts]).astype(np.int32)
    ids = rng.integers(0, VOCAB, len(positions)).astype(np.int32)
    wanted = np.array(starts[1:] - 1 if rows is None else rows, np.int32)
    slots = (first * SIZE + positions).astype(np.int32)
    return StepInputs(ids, positions, slots, starts, kv_len, table, wanted, greedy(len(wanted)))


class Reference:
    """The same steps in NumPy."""

    def __init__(self, kv: KVType = "auto") -> None:
        empty = np.zeros((LIMITS.n_blocks, SIZE, KV_HEADS, DIM), np.float32)
        self._caches = [KVArrays(empty, empty, kv) for _ in PROGRAM.caches]

    def __call__(self, inputs: StepInputs) -> Any:
        return run_program(PROGRAM, Weights(), self._caches, inputs)


@pytest.fixture(name="fast")
def _fast() -> Iterator[MlxBackend]:
    with running(FAST) as backend:
        yield backend


@pytest.fixture(name="step")
def _step(fast: MlxBackend) -> Iterator[MlxStep]:
    step = fast.compile(PROGRAM, Weights(), LIMITS, "float32")
    yield step
    step.close()


PREFILL = [(0, 0, 21), (6, 0, 3)]
MIXED = [(0, 21, 1), (6, 3, 9), (12, 0, 5)]
DECODE = [(0, 22, 1), (6, 12, 1), (12, 5, 1)]


def test_steps_match_the_reference(step: MlxStep) -> None:
    reference = Reference()
    for parts in (PREFILL, MIXED, DECODE):
        inputs = batch(parts, seed=len(parts))
        want = reference(inputs)
        assert rel_error(step(inputs, "logits").logits, want["logits"]) < EXACT  # type: ignore[arg-type]
    # The same step again writes the same keys, so it may be asked for its other results.
    assert rel_error(step(inputs, "hidden").hidden, want["hidden"]) < EXACT  # type: ignore[arg-type]
    assert step(inputs, "tokens").tokens.tolist() == want["tokens"].tolist()  # type: ignore[union-attr]
    both = step(inputs, "both")
    assert both.tokens.tolist() == want["tokens"].tolist()  # type: ignore[union-attr]
    assert rel_error(both.logits, want["logits"]) < EXACT  # type: ignore[arg-type]


@pytest.mark.parametrize("kv", ["int8", "fp8_e5m2"])
def test_a_cache_of_codes_in_whole_steps(fast: MlxBackend, kv: KVType) -> None:
    """Prefill, mixed and decode steps; blocks are copied with their scales."""
    step, reference = fast.compile(PROGRAM, Weights(), replace(LIMITS, kv_cache=kv), "float32"), Reference(kv)
    for seed, parts in enumerate((PREFILL, MIXED)):
        inputs = batch(parts, seed=seed)
        error = rel_error(step(inputs, "logits").logits, reference(inputs)["logits"])  # type: ignore[arg-type]
        assert error <= 2e-2  # a code may flip where a rounding decides between two
    want = step(batch([(0, 22, 1)], seed=4), "logits").logits
    step.copy_blocks([(0, 13), (1, 14)])
    assert np.array_equal(step(batch([(13, 22, 1)], seed=4), "logits").logits, want)  # type: ignore[arg-type]
    assert step.memory().cache == len(PROGRAM.caches) * 2 * LIMITS.n_blocks * SIZE * KV_HEADS * (DIM + 4)
    step.close()


def test_log_probabilities_are_those_of_the_logits(step: MlxStep) -> None:
    check_log_probabilities(step, batch(PREFILL))


def test_layers_with_a_window_have_blocks_of_their_own(fast: MlxBackend, step: MlxStep) -> None:
    """Bit for bit what one table gives, when blocks behind the window are others' already."""
    grouped = by_window(PROGRAM)
    assert grouped.window_groups == 1
    twice = replace(LIMITS, n_blocks=2 * LIMITS.n_blocks, window_groups=1)
    theirs = fast.compile(grouped, Weights(), twice, "float32")
    for parts in ([(0, 0, 37), (6, 0, 2)], [(0, 37, 1), (6, 2, 1)]):
        inputs = batch(parts, seed=len(parts))
        tables = inputs.block_table + LIMITS.n_blocks
        if parts[0][1]:
            tables[0, 0] = tables[0, 1]
            theirs.copy_blocks([(39, LIMITS.n_blocks)])
        slots = inputs.slots + LIMITS.n_blocks * SIZE
        apart = replace(inputs, window_slots=slots[None], window_tables=tables[None])
        assert np.array_equal(theirs(apart, "logits").logits, step(inputs, "logits").logits)  # type: ignore[arg-type]
    theirs.close()


def test_half_precision_stays_close(fast: MlxBackend) -> None:
    step = fast.compile(PROGRAM, Weights(), LIMITS, "auto")
    inputs = batch(PREFILL)
    assert step.compute == "float16"
    assert rel_error(step(inputs, "logits").logits, Reference()(inputs)["logits"]) < 5e-3  # type: ignore[arg-type]
    step.close()


def test_a_sequence_does_not_see_its_neighbours(step: MlxStep) -> None:
    """Decoding alone, beside others that decode, or beside a prompt gives the same bits."""
    step(batch([*PREFILL, (12, 0, 5)]), "hidden")
    whole = batch(DECODE, seed=3)
    want = step(whole, "logits").logits
    for i, part in enumerate(DECODE):
        got = step(replace(batch([part]), ids=whole.ids[i : i + 1]), "logits").logits
        assert np.array_equal(got[0], want[i])  # type: ignore[index]
    mixed = batch([(16, 0, 7), DECODE[1]])
    ids = np.concatenate([mixed.ids[:7], whole.ids[1:2]])
    assert np.array_equal(step(replace(mixed, ids=ids), "logits").logits[1], want[1])  # type: ignore[index]


def test_biases_and_penalties_change_what_is_drawn(step: MlxStep) -> None:
    check_lists(step, batch([(0, 0, 9), (6, 0, 3), (12, 0, 1)]), batch([(0, 9, 1), (6, 3, 1), (12, 1, 1)]))


def test_ids_come_from_the_launch_before(step: MlxStep) -> None:
    step(batch([*PREFILL, (12, 0, 5)]), "hidden")
    first = step.launch(batch(DECODE, seed=4), "tokens")
    then = replace(batch([(b, past + 1, 1) for b, past, _ in DECODE]), from_last=np.array([2, -1, 0], np.int32))
    pending = step.launch(then, "logits")
    tokens = first.result().tokens
    assert tokens is not None
    ids = np.array([tokens[2], then.ids[1], tokens[0]], np.int32)
    want = step(replace(then, ids=ids, from_last=None), "logits").logits
    assert np.array_equal(pending.result().logits, want)  # type: ignore[arg-type]


def test_a_row_without_a_token_counts_as_id_0(step: MlxStep) -> None:
    step(batch(PREFILL), "hidden")
    step._last = mx.array([-1], mx.int32)
    then = replace(batch([(0, 21, 1)]), from_last=np.array([0], np.int32))
    want = step(replace(then, ids=np.zeros(1, np.int32), from_last=None), "logits").logits
    assert np.array_equal(step(then, "logits").logits, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ["qwen3moe", "granitehybrid"])
def test_every_choice_of_an_expert_is_counted(fast: MlxBackend, architecture: str) -> None:
    check_counts(fast, architecture)


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_the_host_reads_and_writes_the_cache(fast: MlxBackend, kv: KVType) -> None:
    step, reference = fast.compile(PROGRAM, Weights(), replace(LIMITS, kv_cache=kv), "float32"), Reference(kv=kv)
    prompt = batch([(0, 0, 20)])
    reference(prompt)
    there = batch([(15, 20, 1)], seed=4)
    there = replace(there, block_table=np.array([[15, 14]], np.int32), slots=np.array([14 * SIZE + 4], np.int32))
    caches = reference._caches if kv == "auto" else ()
    check_transfer(step, "float32" if kv == "auto" else kv, prompt, batch([(0, 20, 1)], seed=4), there, caches)
    step.close()


def test_copied_blocks_stand_for_their_sources(step: MlxStep) -> None:
    step(batch(PREFILL), "hidden")
    step.copy_blocks([(0, 14), (1, 15)])
    here, there = batch([(0, 21, 1)], seed=9), batch([(14, 21, 1)], seed=9)
    assert np.array_equal(step(here, "logits").logits, step(there, "logits").logits)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"cache blocks \(3, 20\) are copied where there are 20: wanted 0 to 19"):
        step.copy_blocks([(3, 20)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from_last": np.array([0, -1, -1], np.int32)}, "from_last past the 0 tokens"),
        ({"positions": np.array([-1, 12, 5], np.int32)}, "positions outside"),
        ({"block_table": np.zeros((2, 2), np.int32)}, "a block table of 2 rows for 3 sequences"),
        ({"block_table": np.zeros((3, 7), np.int32)}, "7 blocks for a sequence of at most 6"),
        ({"state_slots": np.array([0, 1, 4], np.int32)}, "state slots that are not one of 0..3"),
        ({"sample": greedy(2)}, "sampling controls for other than 3 rows"),
        ({"ids": np.array([0, 1, VOCAB], np.int32)}, "token ids outside 0..129"),
    ],
)
def test_unusable_inputs_are_refused(step: MlxStep, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        step(replace(batch(DECODE), **change), "logits")


def test_a_closed_step_says_so(step: MlxStep) -> None:
    assert step.memory().cache == 2 * 2 * 20 * SIZE * KV_HEADS * DIM * 4
    (taken,) = {(t.implementation, t.declined) for t in step.explain() if t.op == "norm_linear"}
    reason = "matmul: needs normalised rows, which MLX's rms_norm makes in a launch of its own"
    assert taken == ("matvec with norm", (reason,))
    gc.collect()
    gc.disable()  # memory goes at once, not when garbage is next collected
    try:
        plan = weakref.ref(step._plan)  # type: ignore[arg-type]
        step.close()
        assert plan() is None
    finally:
        gc.enable()
    step.close()
    with pytest.raises(RequestError, match="the step is closed"):
        step(batch(DECODE), "logits")


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_decode_steps_of_one_shape_share_a_trace(fast: MlxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac, but for mx.compile, which the emulator cannot be traced by."""
    traced: list[Any] = []
    monkeypatch.setattr("quarrel.mlx_backend.step.emulated", lambda: False)
    monkeypatch.setattr(mx, "compile", lambda function: traced.append(function) or function)
    step, reference = fast.compile(PROGRAM, Weights(), LIMITS, "float32"), Reference()
    counts = []
    later = [[(b, past + n, 1) for b, past, _ in DECODE] for n in (1, 2)]
    for parts in (PREFILL, MIXED, DECODE, *later, later[1][:2]):
        inputs = batch(parts, seed=len(counts))
        got = step(inputs, "logits").logits
        assert rel_error(got, reference(inputs)["logits"]) < EXACT  # type: ignore[arg-type]
        counts.append(len(traced))
    assert counts == [0, 0, 1, 1, 1, 2]
    step.close()


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_a_decode_step_is_traced_with_the_kernels_of_mlx_itself(fast: MlxBackend, tmp_path: Path) -> None:
    """What mx.compile needs: no launch looks at a value, and MLX's own maker takes every kernel and call of ours."""
    step = fast.compile(PROGRAM, Weights(), LIMITS, "auto")
    inputs = batch(DECODE)
    call = batch_of(inputs.query_start, inputs.out_rows, 3, 3, SIZE)
    arrays = step._arrays(inputs, "tokens")
    from quarrel.mlx_backend.step import _bound, _flat

    refs, ids = list(step._resident), [PROGRAM.inputs[name].id for name in arrays]
    plan, tokens = step._open(), PROGRAM.outputs["tokens"]

    def go(*flat: mx.array) -> list[mx.array]:
        given, resident = flat[: len(ids)], _bound(refs, flat[len(ids) :], step._after)
        (out,), _ = plan.run(call, dict(zip(ids, given)), resident, (tokens,))
        return [out]

    emulator = mx.fast.metal_kernel
    mx.fast.metal_kernel = _MLX_MAKER
    try:
        mx.export_function(str(tmp_path / "step"), go, *arrays.values(), *_flat(step._resident))
    finally:
        mx.fast.metal_kernel = emulator
    assert (tmp_path / "step").stat().st_size > 10_000
    step.close()


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_kernels_are_built_while_a_model_loads(fast: MlxBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: set[str] = set()

    class Recorder(metal_kernel):
        def launch(self, call: Any, settings: Any) -> Any:
            texts.add(self.text(call).text)
            return super().launch(call, settings)

    given: dict[str, int] = {}
    monkeypatch.setattr(mx.fast, "metal_kernel", Recorder)
    monkeypatch.setattr("quarrel.mlx_backend.backend.emulated", lambda: False)
    monkeypatch.setattr("quarrel.mlx_backend.backend._working_set", lambda: 1 << 34)
    monkeypatch.setattr(mx, "set_wired_limit", lambda n: given.update(wired=n))
    monkeypatch.setattr(mx, "set_cache_limit", lambda n: given.update(cache=n))
    shown: list[tuple[int, int]] = []
    step = fast.compile(PROGRAM, Weights(), LIMITS, "float32", lambda done, whole: shown.append((done, whole)))
    built, reference = set(texts), Reference()
    for parts in (PREFILL, MIXED, DECODE):
        inputs = batch(parts)
        want = reference(inputs)
        assert step(inputs, "tokens").tokens.tolist() == want["tokens"].tolist()  # type: ignore[union-attr]
    step(inputs, "logprobs")
    assert built
    assert texts == built
    assert given["wired"] == 1 << 34
    assert (1 << 31) < given["cache"] < (1 << 32)
    # One bar: weights, then kernels.
    whole = shown[-1][1]
    assert shown == sorted(shown)
    assert shown[-1] == (whole, whole)
    assert sum(0.9 * whole - 1 <= done < whole for done, _ in shown) > 3
    step.close()


def _lazy_maker(**text: Any) -> Callable[..., list[mx.array]]:
    """Stands in for MLX's kernel maker: results on MLX's CPU stream that are zero, and wait for every input."""

    def call(inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **launch: Any) -> list[mx.array]:
        zeros = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes)]
        return mx.depends(zeros, list(inputs))

    return call


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_steps_that_overlap_copy_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX writes into an old array only where nothing in flight holds it, and a step in flight does."""
    monkeypatch.setattr(mx.fast, "metal_kernel", _lazy_maker)
    step = create().compile(PROGRAM, Weights(), replace(LIMITS, n_blocks=1000), "float32")
    inputs = batch(DECODE)
    step(inputs, "tokens")
    matrix = mx.random.normal((200, 200))
    mx.eval(matrix)
    cache, before = step.memory().cache, mx.get_active_memory()
    assert cache > 2**24
    # What the next step waits for, so that the ones behind it are in flight together.
    step._last = mx.linalg.svd(matrix, stream=mx.cpu)[1][:3].astype(mx.int32) * 0
    mx.reset_peak_memory()
    later = replace(inputs, from_last=np.arange(3, dtype=np.int32))
    pending = [step.launch(later, "tokens") for _ in range(6)]
    assert pending[-1].result().tokens is not None
    assert mx.get_peak_memory() - before < cache / 8
    step.close()


_MLX_MAKER = mx.fast.metal_kernel


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")
def test_without_metal_the_backend_says_what_to_use() -> None:
    backend = backend_called("mlx")
    reason = "MLX finds no Metal device: use an Apple silicon Mac, or the cpu backend"
    assert backend.unavailable() == reason
    with pytest.raises(BackendUnavailable, match=f"the mlx backend cannot run here: {reason}"):
        create().run_op(CAP, CapSpec(1), (np.zeros((1, 1), np.float32),))
    with pytest.raises(BackendUnavailable, match=reason):
        backend.compile(PROGRAM, Weights(), LIMITS)
