"""The memory plan: a context that fits, and a sentence where none does."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.cpu_backend.backend import CpuBackend, create
from quarrel.errors import OutOfMemory, RequestError
from quarrel.gguf import GGMLType, GGUFFile
from quarrel.llm.memory import (
    BLOCK,
    Device,
    Plan,
    cache_bytes_per_token,
    cache_tokens,
    give_back,
    largest_matrices,
    plan_encoder,
    plan_limits,
    scratch_bytes,
    state_bytes,
)
from quarrel.models import EncoderSpec, ModelSpec, Tensors, assemble, read_spec
from quarrel.ops.contract import WeightRef
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import linear
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program, StateLayer
from quarrel.ops.step import Limits
from tests.paths import need_cases

GIB = 1 << 30
PROGRAM = Program((), {}, {}, (KVLayer(8, 64),) * 16)


def spec(context: int = 131072) -> ModelSpec:
    return ModelSpec("llama", 128256, 2048, context, "rms", 1e-5, ())


def planned(free: float, program: Program = PROGRAM, context: int = 131072, **options: Any) -> Plan:
    given = {"compute": "float16", "weights": GIB, "n_ctx": None, "max_seqs": 8, "device": Device.of(int(free), None)}
    return plan_limits(program, spec(context), **{**given, **options})


def plan(free: float, program: Program = PROGRAM, context: int = 131072, **options: Any) -> tuple[Limits, int]:
    made = planned(free, program, context, **options)
    assert made.total <= made.budget
    return made.limits, made.n_ctx


def test_a_token_s_cache_is_counted_by_layer_and_width() -> None:
    assert cache_bytes_per_token(PROGRAM, "float16") == 16 * 2 * 8 * 64 * 2 == cache_bytes_per_token(PROGRAM, "int8")
    assert cache_bytes_per_token(PROGRAM, "float32") == 2 * cache_bytes_per_token(PROGRAM, "float16")


def test_with_memory_to_spare_the_default_is_8192_for_each_sequence() -> None:
    limits, length = plan(80 * GIB)
    assert length == 8192
    assert (limits.max_blocks_per_seq, limits.n_blocks) == (256, 8 * 256 + 1)
    assert limits.max_tokens >= limits.max_seqs == 8
    assert plan(80 * GIB, context=4096)[1] == 4096
    assert plan(80 * GIB, n_ctx=100)[0].max_blocks_per_seq == 4


def test_with_less_memory_fewer_sequences_share_the_cache() -> None:
    limits, length = plan(3 * GIB)  # 2 GiB left, half of it for caches of 256 MiB
    assert length == 8192
    assert limits.n_blocks == 3 * 256 + 1


def test_recurrent_states_are_paid_for_once_a_sequence() -> None:
    recurrent = dataclasses.replace(PROGRAM, states=(StateLayer((1 << 20,)),) * 64)
    assert plan(4 * GIB, recurrent)[1] == 8192  # 8 of 256 MiB
    with pytest.raises(OutOfMemory):
        plan(3 * GIB, recurrent)
    assert plan(3 * GIB, recurrent, max_seqs=1)[1] == 8192


@pytest.mark.filterwarnings("ignore:the context is reduced")
def test_the_cache_never_takes_more_than_is_left() -> None:
    block = BLOCK * cache_bytes_per_token(PROGRAM, "float16")
    for spare in range(3 * block, 6 * block, block // 7):
        made = planned(GIB + 4 * (512 * 16 * 2048 + 8 * 128256) + spare)
        assert made.limits.n_blocks * block == made.cache <= made.budget - made.weights - made.scratch
        assert made.limits.n_blocks * BLOCK >= made.n_ctx + BLOCK


def test_the_context_is_reduced_only_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"the context is reduced from 8192 to \d+ tokens: 1\.20 GiB are free"):
        limits, length = plan(1.2 * GIB)
    assert 64 <= length < 8192
    assert length % BLOCK == 0
    assert limits.n_blocks == length // BLOCK + 1
    used = limits.n_blocks * BLOCK * cache_bytes_per_token(PROGRAM, "float16")
    assert used < 0.2 * GIB


def test_an_explicit_context_is_never_reduced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(8 * GIB, n_ctx=131072)[1] == 131072
    with pytest.raises(
        OutOfMemory, match=r"a context of 131072 4\.00 GiB.*4\.00 GiB are free.*use n_ctx=\d+ or less"
    ) as refusal:
        plan(4 * GIB, n_ctx=131072)
    suggested = int(str(refusal.value).split("n_ctx=")[1].split()[0])
    assert plan(4 * GIB, n_ctx=suggested)[1] == suggested
    with pytest.raises(OutOfMemory):
        plan(4 * GIB, n_ctx=suggested + BLOCK)


def test_what_does_not_fit_at_all_says_what_would() -> None:
    with pytest.raises(
        OutOfMemory, match=r"needs 1\.0\d GiB \(weights 1\.00 GiB.* 0\.50 GiB are free; weights of 0\.4"
    ) as refusal:
        plan(0.5 * GIB)
    fits = float(str(refusal.value).split("weights of ")[1].split()[0])
    planned(0.5 * GIB, weights=int((fits - 0.01) * GIB), n_ctx=64)
    with pytest.raises(OutOfMemory, match="no model fits that"):
        plan(1 << 20)


def test_a_budget_is_bytes_or_a_share_and_never_more_than_is_free() -> None:
    assert Device.of(1000, None).budget == Device.of(1000, 5000).budget == 1000
    assert Device.of(1000, 0.25).budget == 250
    assert Device.of(1000, 1.0).budget == 1000
    assert Device.of(1000, 1).budget == 1


def test_a_budget_holds_for_all_of_it() -> None:
    device = Device.of(80 * GIB, 3 * GIB)
    assert planned(0, device=device).limits == planned(3 * GIB).limits
    with pytest.raises(OutOfMemory, match=r"1\.00 GiB of the 80\.00 GiB that are free may be used.*or give more"):
        planned(0, device=Device.of(80 * GIB, GIB))


def test_graphs_and_decoded_matrices_are_paid_for_where_there_are_any() -> None:
    plain, captured = planned(3 * GIB), planned(3 * GIB, device=Device.of(3 * GIB, None, captures=True))
    assert plain.graphs == 0
    assert captured.graphs > 0
    assert captured.longest < plain.longest


@pytest.mark.filterwarnings("ignore:the context is reduced")
def test_a_step_is_shorter_where_its_values_would_crowd_out_the_cache() -> None:
    device = Device.of(80 * GIB, None, step_tokens=2048)
    plans = [planned(0, device=dataclasses.replace(device, budget=GIB + left)) for left in (8 * GIB, GIB, GIB // 4)]
    assert [made.limits.max_tokens for made in plans] == [2048, 2048, 512]
    assert all(made.scratch < 0.27 * (made.budget - made.weights) for made in plans)


def test_the_longest_context_is_the_longest_that_loads() -> None:
    longest = planned(3 * GIB).longest
    assert planned(3 * GIB, n_ctx=longest).n_ctx == longest
    with pytest.raises(OutOfMemory):
        planned(3 * GIB, n_ctx=longest + BLOCK)


@pytest.mark.parametrize("case", ["llama32", "granitehybrid", "mixtral", "nemotron_h", "mamba", "qwen35"])
def test_a_step_takes_no_more_scratch_than_planned(case: str) -> None:
    with GGUFFile.open(need_cases(case, "model-q4_0x.gguf")) as file:
        tensors, facts = Tensors(file), read_spec(file)
        assert isinstance(facts, ModelSpec)
        program, backend = assemble(facts, tensors), create(2)
        made = plan_limits(program, facts, compute="int8", device=Device.of(8 * GIB, None), weights=0, n_ctx=64, max_seqs=8)
        step = backend.compile(program, tensors, made.limits)
        # The CPU has room for a row of logits of every token, pages that it touches for those asked for alone.
        rows = 4 * made.limits.max_tokens * facts.n_vocab
        assert step.memory().activations - rows <= made.scratch
        assert step.memory().cache <= made.cache + made.states
        step.close()
        backend.close()
        assert scratch_bytes(program, 1024, 8) > 1.9 * scratch_bytes(program, 512, 8)
        assert largest_matrices(program) > 0


def test_an_encoder_is_planned_for_whole_texts() -> None:
    with GGUFFile.open(need_cases("bert", "model-q4_0x.gguf")) as file:
        facts = read_spec(file)
        assert isinstance(facts, EncoderSpec)
        made = plan_encoder(facts, device=Device.of(GIB, None), weights=1000, n_ctx=None, max_seqs=4)
        assert made.limits.max_tokens >= made.n_ctx
        assert made.total <= GIB
        with pytest.raises(OutOfMemory, match="texts of"):
            plan_encoder(facts, device=Device.of(GIB, 1 << 20), weights=1000, n_ctx=None, max_seqs=4)


def test_the_budget_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import quarrel

    with quarrel.load("demo", backend="cpu", n_ctx=128, memory=64 << 20) as llm:
        told = llm.explain()
        assert told.plan.budget == 64 << 20
        assert told.plan.total <= 64 << 20
        assert told.plan.longest >= 128
    monkeypatch.setenv("QUARREL_MEMORY", "12MB")
    with pytest.raises(OutOfMemory, match="may be used"):
        quarrel.load("demo", backend="cpu")
    with pytest.raises(RequestError, match=r"memory is 2\.5"):
        quarrel.load("demo", backend="cpu", memory=2.5)


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(RequestError, match="n_ctx is 4097, wanted 1 to 4096"):
        plan(80 * GIB, context=4096, n_ctx=4097)


def test_states_are_counted_once_a_sequence() -> None:
    program = dataclasses.replace(PROGRAM, states=(StateLayer((64, 64, 128)),) * 8)
    assert state_bytes(program) == 8 * 64 * 64 * 128 * 4
    with pytest.warns(UserWarning, match="reduced"):
        assert plan(1.3 * GIB, program)[1] < plan(1.3 * GIB, max_seqs=1)[1]


def test_a_model_without_a_cache_has_any_context_it_was_made_for() -> None:
    program = Program((), {}, {}, (), (StateLayer((16, 128)),))
    limits, length = plan(2 * GIB, program, n_ctx=131072)
    assert (length, limits.n_blocks) == (131072, 8 * 4096 + 1)


def test_windows_are_planned_beside_whole_contexts() -> None:
    """Twelve layers of 24 with a window of 128, as in gpt-oss: 32,768 tokens take half of what they took."""
    grouped = Program((), {}, {}, (KVLayer(8, 64),) * 12, window=128, window_groups=1)
    block, (limits, length) = BLOCK * cache_bytes_per_token(grouped, "float16"), plan(80 * GIB, grouped, n_ctx=32768)
    assert (length, limits.max_blocks_per_seq, limits.window_groups) == (32768, 1024, 1)
    # Four blocks of a window lie in five, one is being filled; once those of a step's tokens, and one text to copy from.
    assert limits.n_blocks == 8 * (1024 + 6) + limits.max_tokens // BLOCK + 2
    assert cache_tokens(grouped, limits) // 32768 == 8
    plain = Program((), {}, {}, (KVLayer(8, 64),) * 24)
    before = plan(80 * GIB, plain, n_ctx=32768)[0].n_blocks * 2 * block
    assert limits.n_blocks * block < 0.51 * before
    # The longest context is the one that an explicit n_ctx gets.
    for free in (1.6 * GIB, 1.7 * GIB, 2 * GIB):
        longest = planned(free, grouped, n_ctx=64, max_seqs=1).longest
        assert plan(free, grouped, n_ctx=longest, max_seqs=1)[1] == longest
        with pytest.raises(OutOfMemory, match=f"n_ctx={longest}"):
            plan(free, grouped, n_ctx=longest + 1, max_seqs=1)


def test_the_plan_of_a_file_agrees_with_the_step_that_is_made_from_it() -> None:
    import quarrel

    path = need_cases("llama32", "model-q4_0x.gguf")
    with GGUFFile.open(path) as file:
        program = assemble(read_spec(file), Tensors(file))
    with quarrel.load(path, backend="cpu", n_ctx=64, max_seqs=2) as llm:
        told = llm.explain()
    assert told.memory.cache == told.cache_tokens * cache_bytes_per_token(program, "int8")


def test_a_cache_of_codes_is_planned_and_taken() -> None:
    import quarrel

    assert cache_bytes_per_token(PROGRAM, "float16", "fp8") * 2 * 64 == cache_bytes_per_token(PROGRAM, "float16") * 68
    path = need_cases("llama32", "model-q4_0x.gguf")
    with GGUFFile.open(path) as file:
        program = assemble(read_spec(file), Tensors(file))
    with quarrel.load(path, backend="cpu", n_ctx=64, max_seqs=2, kv_cache="int8") as llm:
        told = llm.explain()
        assert llm.generate([1, 2, 3], max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    per_token = sum(2 * c.n_kv * (c.head_dim + 4) for c in program.caches)
    assert told.memory.cache == told.plan.cache == told.cache_tokens * per_token
    assert told.plan.limits.kv_cache == "int8"
    with pytest.raises(
        RequestError, match="kv_cache is 'int4', wanted one of auto, float16, bfloat16, int8, fp8, fp8_e5m2"
    ):
        quarrel.load("demo", kv_cache="int4")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="attention is 'flash', wanted one of auto, own, cudnn"):
        quarrel.load("demo", attention="flash")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="attention is 'cudnn', which the cpu backend has not"):
        quarrel.load("demo", backend="cpu", attention="cudnn")


@pytest.mark.parametrize(("name", "value"), [("deterministic", True), ("decoded_weights", "never")])
def test_fp8_is_refused_where_no_weights_are_kept(name: str, value: Any) -> None:
    import quarrel

    with pytest.raises(RequestError, match=f"compute is 'fp8', whose weights are kept .*: leave out {name}") as raised:
        quarrel.load("demo", compute="fp8", **{name: value})
    assert raised.value.fields == ("compute", name)


def test_decoded_weights_take_most_of_what_is_left_and_no_more_than_they_are() -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), table := WeightRef("table", GGMLType.Q4_K, 32000, 4096))
    for name in ("one", "two", "two"):
        linear(b, h, WeightRef(name, GGMLType.Q4_K, 4096, 4096), WeightRef("bias", GGMLType.F32, 1, 4096))
    linear(b, gather_rows(b, h, b.input("out_rows")), table)
    program = dataclasses.replace(b.program(), caches=PROGRAM.caches)
    roomy = planned(40 * GIB, program)
    assert (roomy.decoded, roomy.with_decoded(program).decoded) == (0, 2 * 2 * 4096**2)
    tight = dataclasses.replace(roomy, budget=roomy.total + 1000)
    kept = tight.with_decoded(program)
    assert (kept.decoded, kept.limits.decoded_bytes, kept.spare) == (900, 900, 100)
    assert dataclasses.replace(roomy, budget=roomy.total - 1).with_decoded(program).decoded == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_a_thread_has_freed_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) << 12

    with ThreadPoolExecutor(1) as thread:
        many = thread.submit(lambda: [bytes(2000 + i % 7) for i in range(20_000)]).result()
        many[:-1] = []  # the last one keeps what lies before it from going back by itself
        full = resident()
        give_back()
    assert full - resident() > 20 << 20


def test_a_closed_model_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import quarrel
    from quarrel.llm import model

    calls: list[None] = []
    monkeypatch.setattr(model, "give_back", lambda: calls.append(None))
    with quarrel.load("demo", backend="cpu", n_ctx=64):
        assert not calls
    assert len(calls) == 1


def test_what_a_backend_keeps_of_weights_beside_them_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> int:
        with quarrel.load("demo", backend="cpu", n_ctx=64) as llm:
            return llm.explain().plan.weights

    before = planned()
    monkeypatch.setattr(CpuBackend, "copies_bytes", lambda self, program, compute: 5 << 20, raising=False)
    assert planned() == before + (5 << 20)
