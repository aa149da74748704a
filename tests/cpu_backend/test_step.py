"""The step: refusals, block copies, memory, several sequences at once, any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.weights import Weights
from quarrel.errors import RequestError
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble, read_spec
from quarrel.ops.contract import RawWeight, WeightRef
from quarrel.ops.step import Limits, SampleInputs, Step, StepInputs
from tests.lists import check_lists
from tests.logprobs import check_log_probabilities
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

LIMITS = Limits(max_tokens=64, max_seqs=4, max_blocks_per_seq=4, n_blocks=16, block_size=16)


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    with GGUFFile.open(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")) as file:
        yield file


def compiled(model: GGUFFile, threads: int = 2) -> tuple[CpuBackend, Step]:
    backend, tensors = CpuBackend(threads=threads), Tensors(model)
    return backend, backend.compile(assemble(read_spec(model), tensors), tensors, LIMITS)


@pytest.fixture(name="step")
def _step(model: GGUFFile) -> Iterator[Step]:
    backend, step = compiled(model)
    yield step
    step.close()
    backend.close()


def batch(lengths: list[int], done: list[int], first_block: list[int]) -> StepInputs:
    """New tokens of several sequences; sequence s lies in blocks first_block[s], first_block[s] + 1, ..."""
    positions = [np.arange(d, d + n, dtype=np.int32) for n, d in zip(lengths, done, strict=True)]
    slots = [p + 16 * b for p, b in zip(positions, first_block, strict=True)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = np.array([[b, b + 1, b + 2, b + 3] for b in first_block], np.int32)
    at = np.concatenate(positions)
    ids = (at * 7 + np.repeat(first_block, lengths) * 3) % 26 + 262
    ends = np.array(done, np.int32) + np.array(lengths, np.int32)
    return StepInputs(ids.astype(np.int32), at, np.concatenate(slots), starts, ends, table, starts[1:] - 1)


def greedy(rows: int) -> SampleInputs:
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    return SampleInputs(zeros, np.zeros(rows, np.int32), ones, zeros, zeros)


def test_sequences_do_not_see_each_other(step: Step) -> None:
    alone = [step(batch([n], [0], [b]), "logits").logits for n, b in ((5, 0), (9, 4), (1, 8))]
    together = step(batch([5, 9, 1], [0, 0, 0], [0, 4, 8]), "logits").logits
    assert np.array_equal(np.concatenate(alone), together)


def test_tokens_are_the_arg_max_of_the_logits(step: Step) -> None:
    inputs = batch([5, 9], [0, 0], [0, 4])
    logits = step(inputs, "logits").logits
    tokens = step(replace(inputs, sample=greedy(2)), "tokens").tokens
    assert tokens is not None
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_tokens_and_logits_of_one_step_are_those_of_two(step: Step) -> None:
    inputs = replace(batch([7, 3], [0, 0], [0, 4]), sample=greedy(2))
    both = step(inputs, "both")
    assert both.tokens is not None
    assert both.logits is not None
    assert (both.tokens == step(inputs, "tokens").tokens).all()
    assert (both.logits == step(inputs, "logits").logits).all()


def test_biases_and_penalties_change_what_is_drawn(step: Step) -> None:
    rows = greedy(3)
    inputs = replace(batch([5, 9, 1], [0, 0, 0], [0, 4, 8]), sample=rows)
    check_lists(step, inputs, replace(batch([1, 1, 1], [5, 9, 1], [0, 4, 8]), sample=rows))


def test_log_probabilities_are_those_of_the_logits(step: Step) -> None:
    check_log_probabilities(step, replace(batch([7, 3], [0, 0], [0, 4]), sample=greedy(2)))


def test_an_id_that_was_not_drawn_counts_as_the_first(step: Step) -> None:
    inputs = replace(batch([1], [0], [0]), sample=greedy(1))
    step._last = np.array([-1], np.int32)  # type: ignore[attr-defined]
    ran = step(replace(inputs, from_last=np.zeros(1, np.int32)), "logits").logits
    assert ran is not None
    assert (ran == step(replace(inputs, ids=np.zeros(1, np.int32)), "logits").logits).all()


def test_the_number_of_threads_changes_nothing(model: GGUFFile) -> None:
    results = []
    for threads in (1, 2, 3):
        backend, step = compiled(model, threads)
        parts = [step(batch([33], [0], [0]), "logits").logits, step(batch([1], [33], [0]), "logits").logits]
        results.append(np.concatenate(parts))
        step.close()
        backend.close()
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_hidden_states_do_not_need_the_head(step: Step) -> None:
    hidden = step(batch([5], [0], [0]), "hidden").hidden
    assert hidden.shape == (1, 32)
    assert np.isfinite(hidden).all()


def test_copied_blocks_hold_the_same_keys(step: Step) -> None:
    step(batch([16], [0], [0]), "logits")
    want = step(batch([1], [16], [0]), "logits").logits
    step.copy_blocks([(0, 8)])
    moved = batch([1], [16], [8])
    original = batch([1], [16], [0])
    got = step(replace(moved, ids=original.ids), "logits").logits
    assert np.array_equal(got, want)


def test_memory_is_accounted_for(step: Step) -> None:
    memory = step.memory()
    assert memory.cache == 2 * 16 * 16 * 32 * 2
    assert 0 < memory.weights_in_place < memory.weights
    assert memory.activations > 0


def test_explain_names_an_implementation_for_every_node(step: Step) -> None:
    lines = step.explain()
    assert {line.op for line in lines} >= {"embedding", "norm_linear", "rope_append", "attention", "linear_add", "sample"}
    assert all(line.implementation for line in lines)
    (linear,) = {(line.implementation, line.declined) for line in lines if line.op == "linear_add"}
    assert linear[0] == "linear + residual (float32 tile for any rows)"
    reasons = {"int8 matvec": "a block format", "int8 tile": "a block format", "bfloat16 tile": "BF16"}
    assert linear[1] == tuple(f"{kernel}: needs {what}, got F32" for kernel, what in reasons.items())


def test_refusals(step: Step) -> None:
    good = batch([5], [0], [0])
    for bad, reason in (
        (replace(good, ids=good.ids + 10**6), "token ids outside"),
        (replace(good, slots=good.slots + 16 * 16), "slots outside the cache"),
        (replace(good, block_table=good.block_table + 16), "block table outside the cache"),
        (replace(good, kv_len=good.kv_len + 64), "more keys than the block table holds"),
        (replace(good, out_rows=good.out_rows + 5), "out_rows outside the step"),
    ):
        with pytest.raises(RequestError, match=reason):
            step(bad, "logits")
    with pytest.raises(RequestError, match="wants its sampling inputs, got none"):
        step(good, "tokens")
    step.close()
    with pytest.raises(RequestError, match="the step is closed"):
        step(good, "logits")


def test_recurrent_models_want_state_slots() -> None:
    from tests.paths import need_cases

    with GGUFFile.open(next(need_cases("mamba2").glob("*.gguf"))) as file:
        backend, tensors = CpuBackend(threads=1), Tensors(file)
        step = backend.compile(assemble(read_spec(file), tensors), tensors, LIMITS)
        good = batch([3], [0], [0])
        for slots, found in (
            (None, "none"),
            (np.array([4], np.int32), r"\[4\]"),
            (np.array([0, 1], np.int32), r"\[0, 1\]"),
        ):
            with pytest.raises(RequestError, match=f"one state slot below 4 per sequence, got {found}"):
                step(replace(good, state_slots=slots), "logits")
        assert np.isfinite(step(replace(good, state_slots=np.array([3], np.int32)), "logits").logits).all()
        step.close()
        backend.close()


def test_a_type_without_kernels_is_dequantised_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    from quarrel.ops.contract import rel_error
    from quarrel.ops.linear import LINEAR, LinearSpec

    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (8, 54), dtype=np.uint8)
    raw[:, 52:54] = np.array([0.01], np.float16).view(np.uint8)
    weight = RawWeight(GGMLType.TQ1_0, raw, 256)
    x = rng.standard_normal((3, 256), dtype=np.float32)
    backend = CpuBackend(threads=1)
    for compute, tolerance in (("auto", 1e-3), ("float32", 1e-6)):
        (y,) = backend.run_op(LINEAR, LinearSpec(GGMLType.TQ1_0, 8, 256), (x, weight), compute)  # type: ignore[arg-type]
        assert rel_error(y, x @ weight.dense().T) < tolerance
    assert "TQ1_0 tensors are dequantised to F16 at load: no kernel reads them" in caplog.text
    backend.close()


def test_a_type_without_kernels_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    class Source:
        def raw(self, ref: WeightRef) -> RawWeight:
            return RawWeight(ref.type, np.zeros((1, 54), np.uint8), 256)

    weights = Weights(Source(), "int8")
    for name in "abc":
        weights.matrix(WeightRef(name, GGMLType.TQ1_0, 1, 256))
    weights.finish()
    assert [r.getMessage() for r in caplog.records] == [
        "TQ1_0 tensors are dequantised to F16 at load: no kernel reads them"
    ]


def test_positions_outside_a_learned_table_are_refused() -> None:
    with GGUFFile.open(need_cases("bert") / "model-q4_0x.gguf") as file:
        rows = file.tensors["position_embd.weight"].shape[0]
        backend, step = compiled(file)
        inputs = replace(batch([2], [0], [0]), positions=np.array([0, rows], np.int32))
        with pytest.raises(RequestError, match=f"positions 0 to {rows}, wanted 0 to {rows - 1}"):
            step(inputs, "hidden")
        step.close()
        backend.close()


def test_a_model_file_is_only_read(model: GGUFFile, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "again.gguf")
    before = path.read_bytes()
    with GGUFFile.open(path) as file:
        backend, step = compiled(file)
        step(batch([20], [0], [0]), "logits")
        step.close()
        backend.close()
    assert path.read_bytes() == before
