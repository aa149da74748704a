"""Layers on the host: the two programs are the model's, and their step is the whole model's step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGUFFile
from quarrel.gguf.resolve import resolve
from quarrel.models import EncoderSpec, Tensors, assemble, read_spec
from quarrel.models.stages import borders, two_stages
from quarrel.ops.contract import CacheRef, StateRef, WeightRef, rel_error
from quarrel.ops.program import Program
from quarrel.ops.step import Limits
from quarrel.parallel.host_layers import compile_stages
from tests.models.test_reference_logits import chunk, limit, specify, variants, wanted
from tests.parallel.test_stages import ragged
from tests.paths import need_cases

DEMO = resolve("demo").paths[0]


def calls(program: Program) -> Iterator[tuple[Any, ...]]:
    for node in program.nodes:
        kept = [i.layer if isinstance(i, CacheRef) else i.index for i in node.inputs if isinstance(i, CacheRef | StateRef)]
        yield node.path, node.op, node.spec, [i for i in node.inputs if isinstance(i, WeightRef)], len(kept)


@pytest.mark.parametrize("arch", sorted({arch for arch, _ in variants()}))
def test_every_decoder_can_be_divided(arch: str) -> None:
    variant = next(v for a, v in variants() if a == arch)
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        spec = specify(file, folder, variant)
        if isinstance(spec, EncoderSpec):
            return
        whole = assemble(spec, Tensors(file))
    found = borders(whole)
    assert found[0] == 1
    assert found[-1] == len(spec.layers)
    for count in {found[0], found[len(found) // 2], found[-1]}:
        first, rest = two_stages(whole, count)
        assert [*[*calls(first)][:-1], *calls(rest)] == [*calls(whole)]  # but for the rows that are asked for
        assert (*first.caches, *rest.caches) == whole.caches
        assert (*first.states, *rest.states) == whole.states
        assert set(first.outputs) - {"hidden"} == set(rest.inputs) & {"stream", "per_layer"}


@pytest.mark.parametrize("arch", ["llama32", "granitehybrid", "gemma3", "gemma3n", "glm47flash", "mixtral"])
def test_both_stages_give_the_models_logits(arch: str) -> None:
    folder = need_cases(arch)
    ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
    limits = Limits(max_tokens=len(ids), max_seqs=2, max_blocks_per_seq=8, n_blocks=8, block_size=16)
    host, device = CpuBackend(threads=1), CpuBackend(threads=1)
    with GGUFFile.open(folder / "model-q4_0x.gguf") as file:
        program, tensors = assemble(specify(file, folder, "q4_0x"), Tensors(file)), Tensors(file)
        stages = two_stages(program, borders(program)[len(borders(program)) // 2 - 1])
        step = compile_stages(stages, host, device, tensors, limits, "float32")
        found = [step(chunk(ids, a, z), "logits").logits for a, z in ((0, 9), (9, 10), (10, len(ids)))]
        where = {t.path for t in step.explain() if t.implementation.startswith("on the host: ")}
        step.close()
    truth = wanted(folder, "q4_0x")
    assert rel_error(np.concatenate(found)[-len(truth) :], truth) < limit(arch, "q4_0x")  # type: ignore[arg-type]
    assert any(path.startswith("blk.0.") for path in where)
    assert not any(path.startswith(f"blk.{borders(program)[-1] - 1}.") for path in where)


def test_tokens_of_the_launch_before_reach_the_host_and_rows_come_in_micro_batches() -> None:
    rng = np.random.default_rng(1)
    limits = Limits(max_tokens=512, max_seqs=4, max_blocks_per_seq=16, n_blocks=64, block_size=16)
    backend = CpuBackend(threads=1)
    with GGUFFile.open(DEMO) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors, stream=True)
        whole = backend.compile(program, tensors, limits, "float32")
        cut = compile_stages(two_stages(program, 4), backend, backend, tensors, limits, "float32")
        starts = []
        first = cut.first
        cut.first = lambda inputs, want: [starts.append(len(inputs.ids)), first(inputs, want)][1]  # type: ignore[assignment]
        before = [0, 0, 0]
        for lengths in ([3, 120, 5], [1, 1, 1], [1, 1, 1]):
            inputs = ragged(lengths, before, rng)
            inputs = replace(inputs, out_rows=inputs.query_start[1:] - 1)
            sample = ragged([2] * 3, [0] * 3, rng).sample
            last = np.array([2, 0, 1], np.int32) if sum(lengths) == 3 else None
            inputs = replace(inputs, sample=sample, from_last=last)
            got, made = cut.launch(inputs, "logprobs").result(), whole(inputs, "logprobs")
            for name in ("tokens", "logprobs", "best", "stream"):
                assert np.array_equal(getattr(got, name), getattr(made, name)), name
            before = [b + n for b, n in zip(before, lengths)]
        assert starts == [64, 64, 3, 3]


def test_the_cache_of_both_stages_is_read_and_written_whole_or_by_layers() -> None:
    limits = Limits(max_tokens=64, max_seqs=1, max_blocks_per_seq=4, n_blocks=8, block_size=16)
    backend = CpuBackend(threads=1)
    with GGUFFile.open(DEMO) as file:
        tensors = Tensors(file)
        program = assemble(read_spec(file), tensors)
        step = compile_stages(two_stages(program, 3), backend, backend, tensors, limits, "float32")
    shapes, rng = step.form().block_shapes(2), np.random.default_rng(2)
    given = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    step.write_blocks([5, 2], given)
    for layer in range(len(given) // 2):
        step.write_blocks([1, 7], given[2 * layer : 2 * layer + 2], layer)
    step.write_blocks([0, 3], given[4:8], 2)  # of either stage
    into = [np.empty(shape, np.uint8) for shape in shapes]
    for blocks in ([5, 2], [1, 7]):
        found = step.read_blocks(blocks, into)
        step.transferred()()
        assert all(a is b for a, b in zip(found, into, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(given, into, strict=True))
    some = step.read_blocks([0, 3])
    assert [np.array_equal(a, b) for a, b in zip(given, some, strict=True)] == [4 <= i < 8 for i in range(len(given))]
    step.pin(into[0])()
    step.close()


def test_requests_get_the_same_tokens_with_any_number_of_layers_on_the_host() -> None:
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 512, "max_seqs": 2, "threads": 1}
    prompts = ["Once upon a time", "The king", [5] * 300]
    ask: dict[str, Any] = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "logit_bias": {262: 2.0}, "logprobs": 1}
    found = []
    for more in ({}, {"gpu_layers": 6}, {"gpu_layers": 0, "draft": DEMO}, {"gpu_layers": 99}):
        with quarrel.load("demo", **options, **more) as llm:
            found.append([(r.token_ids, r.logprobs) for r in llm.generate(prompts, **ask)])
            found.append([(r.token_ids, r.logprobs) for r in llm.generate(prompts, **ask)])  # of what is kept
    assert all(each == found[0] for each in found)
