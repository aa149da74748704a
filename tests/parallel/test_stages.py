"""A pipeline gives the tokens of one process: its stages against the reference logits, its micro-batches against whole
steps, and its processes, one of which is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import EngineFault, RequestError
from quarrel.gguf import GGUFFile
from quarrel.gguf.resolve import resolve
from quarrel.models import Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.contract import WeightRef, rel_error
from quarrel.ops.program import Program
from quarrel.ops.step import Limits, Lists, Masks, SampleInputs, Step, StepInputs
from quarrel.parallel.pieces import joined, pieces
from tests.models.test_reference_logits import chunk, limit, specify, wanted
from tests.parallel.lockstep import Member, together
from tests.parallel.test_team import children
from tests.paths import need_cases

DEMO = resolve("demo").paths[0]
CASES = [
    ("llama32", "q4_0x", 1),
    ("granitehybrid", "q4_0x", 1),
    ("gemma3", "q4_0x", 1),
    ("glm47flash", "q4_0x", 1),
    ("mamba2", "q4_k_m", 1),
    ("llama32", "q4_0x", 2),
    ("mixtral", "q4_k_m", 2),
    ("granitehybrid", "q4_k_m", 2),
    ("glm47flash", "q4_0x", 2),
]


@pytest.mark.parametrize(("arch", "variant", "each"), CASES)
def test_stages_give_the_models_logits(arch: str, variant: str, each: int) -> None:
    """Two stages of `each` members, which cut the layers of their stage."""
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        spec = specify(file, folder, variant)

        def member(group: Member) -> np.ndarray:
            backend = CpuBackend(threads=1)
            if each > 1:
                backend.join(group)
            steps: list[Step] = []
            for rank in (each + group.rank, group.rank):  # the last stage is that of the first process
                own, tensors = shard(spec, Tensors(file), rank, 2 * each, stages=2)
                steps.append(backend.compile(assemble(own, tensors), tensors, limits, "float32"))
            found = []
            for first, end in ((0, 9), (9, 10), (10, len(ids))):
                inputs = chunk(ids, first, end)
                found.append(steps[1](replace(inputs, stream=steps[0](inputs, "hidden").stream), "logits").logits)
            return np.concatenate(found)  # type: ignore[arg-type]

        made = together(each, member)
    truth = wanted(folder, variant)
    assert all(rel_error(logits[-len(truth) :], truth) < limit(arch, variant) for logits in made)
    assert all(np.array_equal(logits, made[0]) for logits in made)


def test_a_stage_reads_its_own_tensors_alone() -> None:
    with GGUFFile.open(DEMO) as file:
        programs = [assemble(*shard(read_spec(file), Tensors(file), rank, 3, stages=3)) for rank in (1, 2, 0)]  # type: ignore[arg-type]
        names = [weights(program) for program in programs]
    assert all(len(found) > 3 for found in names)
    tied = {"token_embd.weight"}  # embeds in the first, scores in the last
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert names[0] & names[2] <= tied
    assert sum(len(p.caches) for p in programs) == len({n.split(".")[1] for n in set().union(*names) if n[:4] == "blk."})


def weights(program: Program) -> set[str]:
    return {ref.name for node in program.nodes for ref in node.inputs if isinstance(ref, WeightRef)}


def test_a_model_of_which_more_crosses_is_refused_by_name() -> None:
    with GGUFFile.open(next(need_cases("gemma3n").glob("model-q4_0x.gguf"))) as file:
        spec, tensors = shard(read_spec(file), Tensors(file), 0, 2, stages=2)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"blk\.\S+ reads more of the layers before.*use tensor_parallel"):
            assemble(spec, tensors)


def ragged(lengths: list[int], before: list[int], rng: np.random.Generator) -> StepInputs:
    """Sequences of so many new tokens behind so many old ones, each in eight blocks of 16; all rows are wanted."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(before, lengths)]).astype(np.int32)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    rows = rng.permutation(starts[-1])[: starts[-1] // 2].astype(np.int32)
    n = len(rows)
    end = np.cumsum(rng.integers(0, 4, n)).astype(np.int32)
    size = int(end[-1])
    listed = rng.permutation(4096)[:size].astype(np.int32)
    floats: Any = lambda low, high, count: rng.uniform(low, high, count).astype(np.float32)  # noqa: E731
    lists = Lists(end, listed, np.ones(size, np.float32), floats(-3, 3, size), *(floats(1, 2, n) for _ in range(3)))
    masks = Masks(rng.integers(-1, 2, n).astype(np.int32), rng.integers(1, 1 << 30, (2, 4096 // 32)).astype(np.int32))
    sample = SampleInputs(
        floats(0, 2, n), np.zeros(n, np.int32), floats(0.5, 1, n), floats(0, 0.1, n), floats(0, 1, n), lists, masks
    )
    return StepInputs(
        rng.integers(0, 4096, starts[-1]).astype(np.int32),
        positions,
        (owner * 128 + positions).astype(np.int32),
        starts,
        np.add(lengths, before).astype(np.int32),
        np.arange(8 * len(lengths), dtype=np.int32).reshape(-1, 8),
        rows,
        sample=sample,
    )


@pytest.mark.parametrize("want", ["all", "hidden"])
def test_micro_batches_are_the_step(want: Any) -> None:
    rng = np.random.default_rng(1)
    limits = Limits(max_tokens=64, max_seqs=4, max_blocks_per_seq=8, n_blocks=32, block_size=16)
    backend = CpuBackend(threads=1)
    with GGUFFile.open(DEMO) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        whole, cut = (backend.compile(program, tensors, limits, "float32") for _ in range(2))
        before = [0, 0, 0]
        for lengths in ([3, 40, 1], [1, 1, 1], [33, 2, 5]):
            inputs = ragged(lengths, before, rng)
            parts = pieces(inputs, want, 3, 7)
            assert len(parts) == min(3, sum(lengths) // 7 or 1)
            got = joined(parts, [cut(part.inputs, part.want) for part in parts])
            for name, made in vars(whole(inputs, want)).items():
                assert (made is None) == (getattr(got, name) is None), name
                assert made is None or np.array_equal(getattr(got, name), made), name
            before = [b + n for b, n in zip(before, lengths)]


def test_three_processes_give_the_tokens_of_one_and_a_lost_one_is_replaced() -> None:
    pytest.importorskip("torch.distributed")
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 512, "max_seqs": 3, "threads": 3}
    prompts = ["Once upon a time", "The king", [5] * 300]
    ask: dict[str, Any] = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "logit_bias": {262: 2.0}, "logprobs": 1}
    with quarrel.load("demo", **options) as llm:
        alone = [(r.token_ids, r.logprobs) for r in llm.generate(prompts, **ask)]
    with quarrel.load("demo", **options, pipeline_parallel=3) as llm:
        assert [(r.token_ids, r.logprobs) for r in llm.generate(prompts, **ask)] == alone
        before = children()
        assert len(before) == 2
        os.kill(before[-1], signal.SIGKILL)
        with pytest.raises(EngineFault, match=r"device \d is lost"):
            llm.generate(prompts[0], max_tokens=3)
        assert [(r.token_ids, r.logprobs) for r in llm.generate(prompts, **ask)] == alone
    assert children() == []


def test_two_stages_of_two_processes_give_the_tokens_of_one() -> None:
    pytest.importorskip("torch.distributed")
    options: dict[str, Any] = {"backend": "cpu", "compute": "float32", "n_ctx": 512, "max_seqs": 3, "threads": 4}
    prompts = ["Once upon a time", "The king", [5] * 300]
    ask: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with quarrel.load("demo", **options) as llm:
        alone = [r.token_ids for r in llm.generate(prompts, **ask)]
    with quarrel.load("demo", **options, pipeline_parallel=2, tensor_parallel=2) as llm:
        assert len(children()) == 3
        assert [r.token_ids for r in llm.generate(prompts, **ask)] == alone
    assert children() == []


def test_what_a_pipeline_cannot_have_is_refused() -> None:
    with pytest.raises(RequestError, match="leave them or pipeline_parallel out"):
        quarrel.load("demo", backend="cpu", pipeline_parallel=2, draft="demo")
    with (
        GGUFFile.open(DEMO) as file,
        pytest.raises(RequestError, match="the model has 10 layers for 11 devices: use fewer"),
    ):
        shard(read_spec(file), Tensors(file), 0, 11, stages=11)  # type: ignore[arg-type]
