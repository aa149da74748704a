"""Some experts on the device, by use, and the rest on the host: the same results, whichever are where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import FORMATS, GGMLType, dequantize
from quarrel.llm import load
from quarrel.ops.contract import Compute, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.host import ExpertPool, HostExperts, expert_refs
from quarrel.ops.linear import add, linear
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import host as hosted
from quarrel.triton_backend.experts import residency
from quarrel.triton_backend.experts.host import pools_of
from quarrel.triton_backend.experts.pool import Pool
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.site import Batch
from quarrel.triton_backend.step import TritonStep
from tests.paths import need_cases
from tests.triton_backend.test_hosted import TOLERANCE
from tests.triton_backend.test_step import LIMITS, VOCAB, Reference, Weights, batch

K, EXPERTS, USED, N, LAYERS = 32, 5, 2, 32, 2


def program(kind: str) -> Program:
    """Two layers of experts; those of gpt-oss's kind have biases."""
    b, biased, both = Builder(), kind == "oai", kind != "relu2"
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.Q8_0, VOCAB, K))
    gain = WeightRef("gain", GGMLType.F32, 1, K)
    for layer in range(LAYERS):
        with b.at(f"blk.{layer}"):

            def ref(name: str, type: GGMLType, rows: int, k: int, layer: int = layer) -> WeightRef:
                return WeightRef(f"{layer}.{name}", type, rows, k)

            x = norm(b, NormSpec("rms", K, 1e-5), h, gain)
            logits = linear(b, x, ref("router", GGMLType.F32, EXPERTS, K), out="f32")
            ids, weights = route(b, RouteSpec(EXPERTS, USED, "softmax"), logits)
            names = ("gate", "up") if both else ("up",)
            stacks = [ref(n, GGMLType.Q8_0, EXPERTS * N, K) for n in names]
            biases = [ref(n + "_bias", GGMLType.F32, EXPERTS, N) for n in names if biased]
            spec = ExpertUpSpec(GGMLType.Q8_0, EXPERTS, USED, N, K, kind, both, biased)  # type: ignore[arg-type]
            y = expert_up(b, spec, x, ids, *stacks, *biases)
            down, offset = ref("down", GGMLType.F16, EXPERTS * K, N), ref("down_bias", GGMLType.F32, EXPERTS, K)
            second = ExpertDownSpec(GGMLType.F16, EXPERTS, USED, K, N, biased)
            h = add(b, h, expert_down(b, second, y, ids, weights, down, offset if biased else None), 0.5)
    hidden = norm(b, NormSpec("rms", K, 1e-5, out="f32"), gather_rows(b, h, b.input("out_rows")), gain)
    return b.program(hidden=hidden)


@pytest.fixture(name="host", scope="module")
def _host() -> Iterator[CpuBackend]:
    host = CpuBackend(threads=1)
    yield host
    host.close()


def compiled(
    backend: TritonBackend, host: CpuBackend, made: Program, compute: Compute, slots: int, **more: Any
) -> tuple[TritonStep, Pool]:
    paths = tuple(expert_refs(made))
    backend.leave_to_host(HostExperts(host, frozenset(paths), pools=(ExpertPool(paths, slots),), **more))
    step = backend.compile(made, Weights(), LIMITS, compute)
    (pool,) = pools_of(step._choices)
    return step, pool


def error(step: TritonStep, reference: Reference, tokens: int, seed: int) -> float:
    inputs = batch([(0, 0, tokens)], rows=list(range(tokens)), seed=seed)
    return float(rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "compute"), [("silu", "float32"), ("relu2", "float16"), ("oai", "float16")])
def test_steps_match_the_reference_while_experts_move(
    backend: TritonBackend, host: CpuBackend, monkeypatch: pytest.MonkeyPatch, kind: str, compute: Compute
) -> None:
    monkeypatch.setattr(residency, "COST", 0.0)
    monkeypatch.setattr(residency, "DEVIATIONS", 0.0)
    monkeypatch.setattr(hosted, "ROWS", 3)
    made = program(kind)
    step, pool = compiled(backend, host, made, compute, 4)
    reference, before = Reference(made), pool._residency.expert_in.copy()
    for seed, tokens in enumerate((3, 1, 3)):
        assert error(step, reference, tokens, seed) <= TOLERANCE[compute]
    assert pool.chosen == 7 * USED * LAYERS == sum(counts.sum() for counts in step.expert_counts().values())
    assert 0 < pool.found < pool.chosen
    assert pool.moved > 0
    assert not np.array_equal(pool._residency.expert_in, before)
    (way,) = {t.implementation for t in step.explain() if "expert_" in t.op}
    assert way.startswith("4 of 10 experts of 2 layers on the device, by use, the rest in host memory, on ")
    step.close()


def test_a_norm_that_nobody_reads_as_integers_leaves_the_logits_alone(
    backend: TritonBackend, host: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token's router and its norm are one launch, whose programs run in any order on a GPU: here the norm's last."""
    made = program("oai")
    step, _ = compiled(backend, host, made, "float16", 3)
    routers, errors, choose = [n for n in made.nodes if n.op.name == "linear"], [], hosted.Layer.choose

    def checked(layer: hosted.Layer, inputs: Any, batch: Batch) -> None:
        node = routers[layer.number]
        logits, x = (step._plan.slots[v.id].tensor.float().cpu().numpy() for v in (node.outputs[0], node.inputs[0]))  # type: ignore[union-attr]
        errors.append(rel_error(logits[:EXPERTS], Weights().raw(node.inputs[1]).dense() @ x[:K]))  # type: ignore[arg-type]
        choose(layer, inputs, batch)

    monkeypatch.setattr(hosted.Layer, "choose", checked)
    step(batch([(0, 0, 1)], rows=[0], seed=1), "hidden")
    assert len(errors) == LAYERS
    assert max(errors) < 1e-3
    step.close()


def test_the_host_does_nothing_where_all_are_there(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made, host = program("silu"), CpuBackend(threads=1)
    step, pool = compiled(backend, host, made, "float32", EXPERTS * LAYERS)
    host.close()
    monkeypatch.setattr(hosted.Layer, "on_host", None)
    assert error(step, Reference(made), 3, 0) <= TOLERANCE["float32"]
    assert (pool.chosen, pool.found, pool.moved) == (3 * USED * LAYERS, 3 * USED * LAYERS, 0)
    step.close()


def test_what_is_not_there_multiplies_zeros(backend: TritonBackend, host: CpuBackend) -> None:
    """Experts on the device that nobody chose are not finite, and nothing comes of it."""
    made = program("oai")
    step, pool = compiled(backend, host, made, "float16", 3)
    pool._residency.slot_of[:] = -1
    for stack in pool._stacks:
        for plane in set(stack.planes) if isinstance(stack, Packed) else (stack,):
            plane.view(-1)[: plane.numel() // 4 * 3].fill_(float("nan") if plane.is_floating_point() else -1)
    pool._residency._step_bytes = 0  # nothing comes
    step._plan.fill(255)
    reference = Reference(made)
    for tokens in (1, 3):
        assert error(step, reference, tokens, 7) <= TOLERANCE["float16"]
    assert (pool.chosen, pool.found) == (4 * USED * LAYERS, 0)
    step.close()


@pytest.mark.parametrize("type", NATIVE, ids=lambda t: t.name)
def test_blocks_of_zero_bytes_are_zeros(type: GGMLType) -> None:
    assert not dequantize(np.zeros((1, FORMATS[type].nbytes), np.uint8), type).any()


def test_rows_that_pad_a_batch_are_nobodys(backend: TritonBackend, host: CpuBackend) -> None:
    made = program("silu")
    step, pool = compiled(backend, host, made, "float32", 4)
    inputs = batch([(0, 0, 1), (6, 0, 1), (12, 0, 1)], seed=5)
    want, chosen = step(inputs, "hidden").hidden, pool.chosen
    step._plan.fill(255)
    step._inputs.send(inputs, 4)
    step._run(Batch(4, 4, 4, True, False, 4), "hidden")
    assert np.array_equal(step._read(step._outputs["hidden"], {"R": 3}), want)  # type: ignore[arg-type]
    assert pool.chosen == 2 * chosen == 2 * 3 * USED * LAYERS
    step.close()


def test_many_rows_take_whole_layers_to_the_device(backend: TritonBackend, host: CpuBackend) -> None:
    made = program("silu")
    step, pool = compiled(backend, host, made, "float16", 4, streams=True, stream_from=3)
    reference = Reference(made)
    few, many = (error(step, reference, tokens, 3) for tokens in (2, 3))
    assert many < 1e-3
    assert few <= TOLERANCE["float16"]  # the host's 8 bits
    assert pool.chosen == (2 * USED * LAYERS if INTERPRETED else 0)  # a GPU pads two tokens of a prompt to 16
    step.close()


def test_memory_is_what_the_slots_take(backend: TritonBackend, host: CpuBackend) -> None:
    made = program("oai")
    whole = backend.compile(made, Weights(), LIMITS, "float16")
    refs = [ref for found in expert_refs(made).values() for ref in found]
    step, pool = compiled(backend, host, made, "float16", 3)
    one = [replace(ref, rows=ref.rows // EXPERTS) for ref in expert_refs(made)["blk.0"]]
    assert pool.nbytes <= 4 * backend.device_bytes(one, "float16")
    assert step.memory().weights == whole.memory().weights - pool_bytes(backend, refs) + pool.nbytes
    assert sum(s.nbytes if isinstance(s, Packed) else 4 * s.numel() for s in pool._stacks) == pool.nbytes
    step.close()
    whole.close()


def pool_bytes(backend: TritonBackend, refs: list[WeightRef]) -> int:
    """Matrices as they are packed, biases as float32."""
    matrices = [ref for ref in refs if not ref.name.endswith("bias")]
    return backend.device_bytes(matrices, "float16") + sum(4 * r.rows * r.k for r in refs if r not in matrices)


EVERY = 884736
"""Bytes of all experts of the tiny mixtral, in the file."""


def test_a_loaded_model_keeps_to_its_expert_memory(backend: TritonBackend) -> None:
    name = need_cases("mixtral") / "model-q4_0x.gguf"
    with load(name, backend=backend, n_ctx=64, max_seqs=1, expert_memory=EVERY // 2) as llm:
        told = llm.explain()
    assert (told.plan.host, told.plan.host_layers) == (EVERY, 2)
    assert EVERY // 2 - EVERY // 8 < told.plan.resident <= EVERY // 2
    assert abs(told.memory.weights - told.plan.weights) < 4096
    (way,) = {c.implementation for c in told.choices if c.op.startswith("expert_")}
    assert way.startswith("3 of 8 experts of 2 layers on the device, by use")
    assert backend._host is None
