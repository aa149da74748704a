"""A small program compiled into a step: prefill, decode and mixed batches against the reference; what a step promises."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops import draw
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
from quarrel.ops.rope import RopeSpec
from quarrel.ops.sample import sample
from quarrel.ops.step import Limits, SampleInputs, StepInputs
from quarrel.ops.windows import by_window
from quarrel.triton_backend import step as step_module
from quarrel.triton_backend.attention import ring
from quarrel.triton_backend.attention.rope import left_to_attention
from quarrel.triton_backend.backend import TritonBackend, create
from quarrel.triton_backend.inputs import PROMPTS, InputBuffer, batch_of, padded_prompts
from quarrel.triton_backend.runtime.buffers import place
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.site import Batch
from quarrel.triton_backend.step import TritonStep
from tests.lists import check_lists
from tests.logprobs import check_log_probabilities
from tests.paths import need_cases
from tests.transfers import check_transfer

WIDTH, VOCAB, HEADS, KV_HEADS, DIM, FFN = 256, 130, 4, 2, 32, 96
SIZE = 16
LIMITS = Limits(max_tokens=48, max_seqs=4, max_blocks_per_seq=6, n_blocks=20, block_size=SIZE)
EXACT = 2e-5
"""Between float32 sums in another order and float64: the references of the contract allow 2e-6 an op."""


class Weights:
    """Random rows of each weight, made when they are asked for."""

    def __init__(self, vectors: frozenset[str] = frozenset({"gain"})) -> None:
        self._vectors = vectors

    def raw(self, ref: WeightRef) -> RawWeight:
        rng = np.random.default_rng(sum(ref.name.encode()))
        return draw.weight(rng, ref.type, ref.rows, ref.k, 1.0 if ref.name in self._vectors else 0.08)


def build(output: GGMLType = GGMLType.F16) -> Program:
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
            h = linear_add(b, h, y, WeightRef("o", output, WIDTH, HEADS * DIM), scale=0.7)
            gate, up = (WeightRef(n, GGMLType.Q5_0, FFN, WIDTH) for n in ("gate", "up"))
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

    def __init__(self, program: Program = PROGRAM, kv: KVType = "auto") -> None:
        self._program = program
        empty = np.zeros((LIMITS.n_blocks, SIZE, KV_HEADS, DIM), np.float32)
        self._caches = [KVArrays(empty, empty, kv) for _ in PROGRAM.caches]

    def __call__(self, inputs: StepInputs) -> Any:
        return run_program(self._program, Weights(), self._caches, inputs)


@pytest.fixture(name="step")
def _step(backend: TritonBackend) -> Iterator[TritonStep]:
    step = backend.compile(PROGRAM, Weights(), LIMITS, "float32")
    yield step
    step.close()


PREFILL = [(0, 0, 21), (6, 0, 3)]
MIXED = [(0, 21, 1), (6, 3, 9), (12, 0, 5)]
DECODE = [(0, 22, 1), (6, 12, 1), (12, 5, 1)]


def test_steps_match_the_reference(step: TritonStep) -> None:
    reference = Reference()
    for parts in (PREFILL, MIXED, DECODE):
        inputs = batch(parts, seed=len(parts))
        want = reference(inputs)
        assert rel_error(step(inputs, "logits").logits, want["logits"]) < EXACT  # type: ignore[arg-type]
    # The same step again writes the same keys, so it may be asked for its other results.
    assert rel_error(step(inputs, "hidden").hidden, want["hidden"]) < EXACT  # type: ignore[arg-type]
    assert step(inputs, "tokens").tokens.tolist() == want["tokens"].tolist()  # type: ignore[union-attr]


def test_a_step_of_prompts_is_padded_to_a_size_that_is_captured(backend: TritonBackend) -> None:
    """To 16, 32 or 48 tokens and four sequences, which changes no row: prompts alone, and beside one that decodes."""
    padded, plain = (backend.compile(PROGRAM, Weights(), LIMITS, "float32") for _ in range(2))
    padded._capture = True  # which begins with the second of a size
    mixed = [(0, 22, 1), (6, 3, 9), (12, 0, 25)]
    full = [(0, 23, 1), (3, 0, 3), (6, 12, 9), (12, 25, 6)]  # what is added makes a fifth sequence
    for parts in (PREFILL, MIXED, mixed, full):
        inputs = batch(parts, seed=len(parts))
        for want in ("logits", "tokens") if parts is MIXED else ("logits",):
            got, wanted = (step(inputs, want) for step in (padded, plain))  # type: ignore[arg-type]
            assert np.array_equal(getattr(got, want), getattr(wanted, want))
    assert sorted({(b.T, b.S, b.R, b.items > 0) for b, _ in padded._seen}) == [
        (16, 4, 4, True), (32, 4, 2, False), (32, 5, 4, True), (48, 4, 4, True),
    ]  # fmt: skip
    cached = zip(padded._plan.caches, plain._plan.caches, strict=True)
    assert all(torch.equal(a.k[: LIMITS.n_blocks], b.k[: LIMITS.n_blocks]) for a, b in cached)
    # More rows than sequences are for scoring.
    assert padded_prompts(batch(PREFILL, rows=list(range(5))), LIMITS, PROMPTS) is None
    for step in (padded, plain):
        step.close()


def test_a_step_keeps_so_many_graphs(step: TritonStep, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    monkeypatch.setattr(step_module, "MOST_GRAPHS", 2)
    monkeypatch.setattr(step, "_captured", lambda batch, want: [lambda: replayed.append(batch.T)])
    monkeypatch.setattr(step, "_run", lambda batch, want: None)
    sizes = [Batch(t, 1, 1, False, True, 0) for t in (16, 32, 48)]
    for size in (*sizes, *sizes, sizes[0]):
        step._replay(size, "tokens")
    assert replayed == [16, 32, 48, 16]
    assert [b.T for b, _ in step._graphs] == [48, 16]


def test_steps_behind_many_keys_are_told_apart(step: TritonStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plan with layers for `attention/ring.py` alone: graphs of other models are not captured twice."""
    seen: list[bool] = []
    monkeypatch.setattr(step, "_run", lambda batch, want: seen.append(batch.deep))
    monkeypatch.setattr(ring, "DEEP", 20)
    assert not step._deep
    for sequences in (step._deep, range(1, 9)):
        monkeypatch.setattr(step, "_deep", sequences)
        parts = [(0, 30, 1)], [(0, 15, 1)], [(0, 30, 1), (6, 20, 1)], [(0, 30, 1), (6, 5, 1)], [(0, 30, 1), (6, 20, 2)]
        for some in parts:
            step(batch(some), "hidden")
    assert seen == [False] * 5 + [True, False, True, False, False]


def test_layers_with_a_window_have_blocks_of_their_own(backend: TritonBackend, step: TritonStep) -> None:
    """Bit for bit what one table gives, when blocks behind the window are others' already."""
    grouped = by_window(PROGRAM)
    assert grouped.window_groups == 1
    assert len(left_to_attention(grouped.nodes, set())) == len(left_to_attention(PROGRAM.nodes, set())) == 2
    twice = replace(LIMITS, n_blocks=2 * LIMITS.n_blocks, window_groups=1)
    theirs = backend.compile(grouped, Weights(), twice, "float32")
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


def test_half_precision_stays_close(backend: TritonBackend) -> None:
    step = backend.compile(PROGRAM, Weights(), LIMITS, "float16")
    inputs = batch(PREFILL)
    assert step.compute == "float16"
    assert rel_error(step(inputs, "logits").logits, Reference()(inputs)["logits"]) < 5e-3  # type: ignore[arg-type]


def test_a_step_has_no_more_splits_than_its_plan_says(step: TritonStep) -> None:
    inputs = replace(batch(DECODE), kv_len=np.array([32_000, 300, 5], np.int32))
    assert step._item_starts(inputs).tolist() == [0, 63, 66, 67]  # the interpreter has no places to fill
    step._plan.most_splits, step._plan.rows["items"] = 33, 1000
    assert step._item_starts(inputs).tolist() == [0, 33, 36, 37]
    assert step._item_starts(inputs, 8)[-1] == 63 + 2 + 1
    assert [step._items(37, n) for n in (1, 2, 4)] == [64, 66, 64]
    assert step._items(67, 4) == 132


def test_padding_a_decode_batch_changes_no_bit(step: TritonStep) -> None:
    """What a captured bucket does: more sequences, rows and splits than are there."""
    step(batch([*PREFILL, (12, 0, 5)]), "hidden")
    inputs = batch(DECODE, seed=3)
    want = step(inputs, "logits").logits
    counts = batch_of(inputs.query_start, inputs.kv_len, 3)
    step._inputs.send(inputs, 4)
    step._run(replace(counts, T=4, S=4, R=4, items=8), "logits")
    got = step._read(step._outputs["logits"], {"R": 3})
    assert np.array_equal(got, want)  # type: ignore[arg-type]


def test_a_step_of_each_size_finds_its_inputs_at_fixed_places_and_copies_no_more() -> None:
    """A graph keeps the addresses of the size that it was captured in, whatever comes between."""
    buffer = InputBuffer(LIMITS, torch.device("cpu"))
    seen = []
    for parts in (DECODE[:1], PREFILL, DECODE[:1]):
        inputs = batch(parts)
        buffer.send(inputs)
        for name, want in (("slots", inputs.slots), ("kv_len", inputs.kv_len), ("block_table", inputs.block_table)):
            assert buffer.slots[name].tensor[: want.size].tolist() == want.ravel().tolist()
        seen.append({name: slot.tensor.data_ptr() for name, slot in buffer.slots.items()})
    assert seen[0] == seen[2]
    assert seen[0] != seen[1]
    # One array of 16 bytes each, then the table and the entries of lists.
    assert seen[0]["block_table"] - min(seen[0].values()) == 16 * (len(seen[0]) - 4)


def test_more_rows_than_sequences_are_given(step: TritonStep) -> None:
    inputs = batch([(0, 0, 19)], rows=list(range(19)))
    assert rel_error(step(inputs, "logits").logits, Reference()(inputs)["logits"]) < EXACT  # type: ignore[arg-type]


def test_no_rows_are_no_results(step: TritonStep) -> None:
    inputs = batch([(0, 0, 5)], rows=[])
    assert step(inputs, "logits").logits.shape == (0, VOCAB)  # type: ignore[union-attr]


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_the_host_reads_and_writes_the_cache(backend: TritonBackend, kv: KVType) -> None:
    step, reference = backend.compile(PROGRAM, Weights(), replace(LIMITS, kv_cache=kv), "float32"), Reference(kv=kv)
    prompt = batch([(0, 0, 20)])
    reference(prompt)
    there = batch([(15, 20, 1)], seed=4)
    there = replace(there, block_table=np.array([[15, 14]], np.int32), slots=np.array([14 * SIZE + 4], np.int32))
    caches = reference._caches if kv == "auto" else ()
    check_transfer(step, "float32" if kv == "auto" else kv, prompt, batch([(0, 20, 1)], seed=4), there, caches)
    step.close()


def test_copied_blocks_hold_the_same_keys(step: TritonStep) -> None:
    prompt = batch([(0, 0, 20)])
    step(prompt, "hidden")
    want = step(batch([(0, 20, 1)], seed=4), "logits").logits
    step.copy_blocks([(0, 8), (1, 9)])
    got = step(batch([(8, 20, 1)], seed=4), "logits").logits
    assert np.array_equal(got, want)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="wanted 0 to 19"):
        step.copy_blocks([(0, 20)])


def test_rows_do_not_depend_on_the_batch(step: TritonStep) -> None:
    together = step(batch(PREFILL, seed=5), "logits").logits
    ids = batch(PREFILL, seed=5).ids
    alone = replace(batch([(6, 0, 3)]), ids=ids[21:])
    assert np.array_equal(step(alone, "logits").logits, together[1:])  # type: ignore[arg-type, index]


def test_the_residual_stream_stays_in_its_place_until_somebody_reads_an_older_value() -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), WeightRef("table", GGMLType.F16, 32, 64))
    added = [h]
    for i in range(3):
        x = norm(b, NormSpec("rms", 64, 1e-5), added[-1], WeightRef(f"gain{i}", GGMLType.F32, 1, 64))
        added.append(linear_add(b, added[-1], x, WeightRef(f"w{i}", GGMLType.F16, 64, 64)))
    norm(b, NormSpec("rms", 64, 1e-5), added[1], WeightRef("gain", GGMLType.F32, 1, 64))
    nodes = b.program().nodes
    places, _ = place(nodes, set(), set(), {"T": 7}, torch.float16, {})
    offsets = [places[v.id].offset for v in added]
    assert offsets[0] == offsets[1] != offsets[2] == offsets[3]


def test_explain_and_memory(step: TritonStep) -> None:
    taken = step.explain()
    assert [t.op for t in taken].count("attention") == 2
    declined = [reason for t in taken for reason in t.declined]
    assert all(t.implementation for t in taken), declined
    memory = step.memory()
    row = 2 * (LIMITS.n_blocks + 1) * SIZE * KV_HEADS * DIM * 4
    assert memory.cache == 2 * row
    assert memory.weights > 0
    assert memory.activations > 0
    assert memory.weights_in_place == 0


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a CUDA device")
@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_captured_steps_give_the_bits_of_plain_ones(compute: Any) -> None:
    steps = [create(graphs).compile(PROGRAM, Weights(), LIMITS, compute) for graphs in (True, False)]
    for step in steps:
        step(batch(PREFILL, seed=1), "hidden")
    for past in range(21, 30):
        inputs = batch([(0, past, 1), (6, past - 18, 1)], seed=past)
        captured, plain = (step(inputs, "logits").logits for step in steps)
        assert np.array_equal(captured, plain)  # type: ignore[arg-type]
    assert len(steps[0]._graphs) == 1
    for new in (3, 9, 7):
        inputs = batch([(0, 30, 1), (6, 12, new), (12, 0, 4)], seed=new)
        captured, plain = (step(inputs, "logits").logits for step in steps)
        assert rel_error(captured, plain) < (EXACT if compute == "float32" else 2e-3)  # type: ignore[arg-type]
    assert len(steps[0]._graphs) == 2
    assert not steps[1]._graphs
    # More rows than the buffers hold replaces them, and the graphs with them.
    many = batch([(12, 0, 19)], rows=list(range(19)))
    assert np.array_equal(*(step(many, "logits").logits for step in steps))  # type: ignore[arg-type]
    again = batch([(0, 30, 1), (6, 12, 1)], seed=9)
    for _ in range(3):
        assert np.array_equal(*(step(again, "logits").logits for step in steps))  # type: ignore[arg-type]
    for step in steps:
        step.close()


def test_one_graph_is_captured_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one process have threads of their own, and PyTorch captures for one of them."""
    inside: list[int] = []
    found: list[int] = []

    @contextmanager
    def capture(graph: object, **options: object) -> Iterator[None]:
        inside.append(1)
        yield
        inside.pop()

    def launched(batch: Batch) -> None:
        time.sleep(0.02)
        found.append(len(inside))
        assert not gc.isenabled()  # what it would close waits for this thread

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(step_module, "_stream", lambda device: None)
    batch = Batch(1, 1, 1, True, False, 1)
    threads = [threading.Thread(target=step_module._graph, args=([launched], batch)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1]
    assert not inside
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a CUDA device")
def test_models_in_threads_of_their_own_capture_side_by_side() -> None:
    steps = [create().compile(PROGRAM, Weights(), LIMITS, "float16") for _ in range(2)]
    parts = [(0, 20, 1), (6, 12, 1), (12, 5, 1)]

    def run(step: TritonStep) -> list[Any]:
        return [step(batch(parts[:count], seed=count), "logits").logits for count in (1, 1, 2, 2, 3, 3)]

    with ThreadPoolExecutor(len(steps)) as pool:
        first, second = pool.map(run, steps)
    assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
    for step in steps:
        assert len(step._graphs) == 3
        step.close()


def test_closing_twice_is_closing_once(backend: TritonBackend) -> None:
    step = backend.compile(PROGRAM, Weights(), LIMITS, "float32")
    step.close()
    step.close()


def test_closing_gives_the_memory_back_at_once(backend: TritonBackend) -> None:
    """Not when garbage is next collected: another model may want to be loaded now."""
    step = backend.compile(PROGRAM, Weights(), LIMITS, "float32")
    step(batch([(0, 0, 5)]), "logits")
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(step._plan)
        step.close()
        assert held() is None
    finally:
        gc.enable()


def test_packing_reports_its_progress(backend: TritonBackend) -> None:
    seen: list[tuple[int, int]] = []
    backend.compile(PROGRAM, Weights(), LIMITS, "float32", lambda done, whole: seen.append((done, whole))).close()
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": np.array([VOCAB] * 5, np.int32)}, "token ids outside 0..129"),
        ({"slots": np.full(5, 10_000, np.int32)}, "slots outside the cache"),
        ({"block_table": np.full((1, 1), 20, np.int32)}, "block table outside the cache"),
        ({"block_table": np.zeros((1, 7), np.int32)}, "at most 6 blocks"),
        ({"out_rows": np.array([5], np.int32)}, "out_rows outside the step"),
        ({"sample": greedy(2)}, "sampling controls"),
        ({"sample": None}, "without sampling controls"),
    ],
)
def test_unusable_inputs_are_refused(step: TritonStep, change: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        step(replace(batch([(0, 0, 5)]), **change), "tokens")


def test_a_result_the_program_lacks_is_refused(backend: TritonBackend) -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q6_K, VOCAB, WIDTH))
    step = create().compile(b.program(hidden=gather_rows(b, h, b.input("out_rows"))), Weights(), LIMITS, "float32")
    with pytest.raises(RequestError, match="no logits: ask for one of hidden"):
        step(batch([(0, 0, 5)]), "logits")


def test_a_reference_model_gives_its_logits(backend: TritonBackend) -> None:
    folder = need_cases("gemma2")
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:24]
    want = np.load(folder / "logits_hf.npy")[:24]
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        tensors = Tensors(file)
        step = backend.compile(assemble(read_spec(file), tensors), tensors, replace(LIMITS, max_tokens=24), "float32")
        inputs = replace(batch([(0, 0, 24)], rows=list(range(24))), ids=ids)
        assert rel_error(step(inputs, "logits").logits, want) < 1e-5  # type: ignore[arg-type]
        step.close()


def test_one_sequence_in_half_precision(backend: TritonBackend) -> None:
    """Matvecs, their halved activations from norm and attention, and a token that is still on the device."""
    program = build(GGMLType.Q8_0)
    step, reference = backend.compile(program, Weights(), LIMITS, "float16"), Reference(program)
    first = batch([(0, 0, 6)], seed=1)
    want = reference(first)["tokens"]
    assert np.array_equal(step(first, "tokens").tokens, want)  # type: ignore[arg-type]
    past = int(first.kv_len[0])
    inputs = replace(batch([(0, past, 1)], seed=2), ids=np.array(want, np.int32))
    wanted = reference(inputs)
    later = replace(inputs, ids=np.zeros(1, np.int32), from_last=np.zeros(1, np.int32))
    pending = step.launch(later, "tokens")
    assert np.array_equal(pending.result().tokens, wanted["tokens"])  # type: ignore[arg-type]
    assert rel_error(step(inputs, "logits").logits, wanted["logits"]) <= 1e-2  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="from_last"):
        step(replace(inputs, from_last=np.ones(1, np.int32)), "tokens")
    step.close()


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_three_maps_packed_as_rows_of_one(backend: TritonBackend, compute: Any) -> None:
    b, wide = Builder(), 256
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q6_K, VOCAB, wide))
    q, k, v = (WeightRef(name, GGMLType.Q4_K, rows, wide) for name, rows in (("q", 512), ("k", 256), ("v", 256)))
    gain = WeightRef("gain", GGMLType.F32, 1, wide)
    for i, y in enumerate(norm_linear(b, NormSpec("rms", wide, 1e-5), h, [gain], [(q, None), (k, None), (v, None)])):
        h = linear_add(b, h, y, WeightRef(f"o{i}", GGMLType.Q8_0, wide, (512, wide, wide)[i]))
    program = b.program(hidden=gather_rows(b, h, b.input("out_rows")))
    step = backend.compile(program, Weights(), LIMITS, compute)
    assert len({id(step._plan.weight(ref).whole) for ref in (q, k, v)}) == 1
    assert step._plan.weight(q).whole is not None
    for tokens in (1, 7):
        inputs = batch([(0, 0, tokens)], rows=list(range(tokens)))
        want = run_program(program, Weights(), [], inputs)["hidden"]
        assert rel_error(step(inputs, "hidden").hidden, want) <= (1e-5 if compute == "float32" else 1e-2)  # type: ignore[arg-type]
    step.close()


def test_deterministic_steps_give_the_same_logits(backend: TritonBackend) -> None:
    """Other tiles for fewer tokens, more launches for many: still the reference's results."""
    program = build(GGMLType.Q8_0)
    step = backend.compile(program, Weights(), replace(LIMITS, deterministic=True), "float16")
    reference = Reference(program)
    for seed, parts in enumerate((PREFILL, [(0, 21, 1), (6, 3, 1)])):
        inputs = batch(parts, seed=seed)
        assert rel_error(step(inputs, "logits").logits, reference(inputs)["logits"]) <= 1e-2  # type: ignore[arg-type]
    step.close()


def test_more_logits_than_a_tile_has_rows(backend: TritonBackend) -> None:
    """The hidden states that they are made of are float32, whatever the arithmetic is."""
    inputs = batch([(0, 0, 70), (6, 0, 60)], rows=list(range(130)))
    step = backend.compile(PROGRAM, Weights(), replace(LIMITS, max_tokens=140), "float16")
    assert rel_error(step(inputs, "logits").logits, Reference()(inputs)["logits"]) <= 1e-2  # type: ignore[arg-type]
    step.close()


def test_log_probabilities_are_those_of_the_logits(step: TritonStep) -> None:
    check_log_probabilities(step, batch([(0, 0, 9), (6, 0, 3)]))


def test_biases_and_penalties_change_what_is_drawn(step: TritonStep) -> None:
    check_lists(step, batch([(0, 0, 9), (6, 0, 3), (12, 0, 1)]), batch([(0, 9, 1), (6, 3, 1), (12, 1, 1)]))


def test_a_row_without_a_token_continues_as_id_0_and_both_are_what_each_is(step: TritonStep) -> None:
    """A row of NaN draws -1; its sequence is over, but its next step may have been launched already."""
    prompt = batch([(0, 0, 9)])
    both = step(prompt, "both")
    assert np.array_equal(both.tokens, step(prompt, "tokens").tokens)  # type: ignore[arg-type]
    assert np.array_equal(both.logits, step(prompt, "logits").logits)  # type: ignore[arg-type]
    assert both.tokens is not None
    assert both.logits is not None
    assert both.tokens[0] == both.logits[0].argmax()
    known = replace(batch([(0, 9, 1)]), ids=np.zeros(1, np.int32))
    want = step(known, "logits").logits
    step._inputs.last.tensor[0] = -1
    later = replace(known, ids=np.full(1, 7, np.int32), from_last=np.zeros(1, np.int32))
    got = step(later, "logits").logits
    assert np.isfinite(got).all()  # type: ignore[call-overload]
    assert np.array_equal(got, want)  # type: ignore[arg-type]
    step._inputs.last.tensor[0] = int(both.tokens[0])
    assert not np.array_equal(step(later, "logits").logits, want)  # type: ignore[arg-type]


def test_a_cache_of_codes_in_whole_steps(backend: TritonBackend) -> None:
    """Prefill, mixed and decode steps; blocks are copied with their scales."""
    limits = replace(LIMITS, kv_cache="fp8")
    step, reference = backend.compile(PROGRAM, Weights(), limits, "float32"), Reference(kv="fp8")
    for seed, parts in enumerate((PREFILL, MIXED)):
        inputs = batch(parts, seed=seed)
        error = rel_error(step(inputs, "logits").logits, reference(inputs)["logits"])  # type: ignore[arg-type]
        assert error <= 2e-2  # a code may flip where a rounding decides between two
    want = step(batch([(0, 22, 1)], seed=4), "logits").logits
    step.copy_blocks([(0, 13), (1, 14)])
    assert np.array_equal(step(batch([(13, 22, 1)], seed=4), "logits").logits, want)  # type: ignore[arg-type]
    values = 2 * (limits.n_blocks + 1) * SIZE * KV_HEADS * 2
    assert step.memory().cache == values * (DIM + 4)
    step.close()
