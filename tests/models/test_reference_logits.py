"""Every architecture in NumPy against logits from two independent implementations, and proof that the limit is sharp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble, read_spec
from quarrel.models.rope import plain
from quarrel.ops.contract import KVArrays, rel_error
from quarrel.ops.reference import run_program
from quarrel.ops.step import StepInputs
from tests.paths import CASES, need_cases

ARCHITECTURES = (
    *("llama32", "mistral", "tinyllama", "smollm2", "qwen2", "qwen3", "qwen3_yarn"),
    *("granite", "granite4micro", "phi3", "phi3_longrope", "gemma2", "gemma3"),
)


def variants() -> list[tuple[str, str]]:
    found = [(a, p.name[6:-5]) for a in ARCHITECTURES for p in sorted((CASES / a).glob("model-*.gguf"))]
    return found or [(a, "q4_0x") for a in ARCHITECTURES]


def wanted(folder: Path, variant: str) -> np.ndarray:
    exact = folder / f"logits_{variant}_deq.npy"
    return np.load(exact if exact.exists() else folder / "logits_hf.npy")


def one_sequence(ids: np.ndarray, block_size: int = 16) -> StepInputs:
    n = len(ids)
    each = np.arange(n, dtype=np.int32)
    table = np.arange(-(-n // block_size), dtype=np.int32)[None]
    return StepInputs(ids, each, each, np.array([0, n], np.int32), np.array([n], np.int32), table, each)


def forward(file: GGUFFile, spec: ModelSpec, ids: np.ndarray) -> np.ndarray:
    tensors = Tensors(file)
    program = assemble(spec, tensors)
    inputs = one_sequence(ids)
    blocks = inputs.block_table.shape[1]
    empty = (np.zeros((blocks, 16, c.n_kv, c.head_dim), np.float32) for c in program.caches)
    return run_program(program, tensors, [KVArrays(e, e) for e in empty], inputs)["logits"]


@pytest.fixture(name="case")
def _case(request: pytest.FixtureRequest) -> Iterator[tuple[GGUFFile, np.ndarray, np.ndarray]]:
    arch, variant = request.param
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        yield file, np.load(folder / "tokens.npy").reshape(-1).astype(np.int32), wanted(folder, variant)


@pytest.mark.parametrize("case", variants(), indirect=True, ids="-".join)
def test_logits_match_two_independent_implementations(case: tuple[GGUFFile, np.ndarray, np.ndarray]) -> None:
    file, ids, want = case
    assert rel_error(forward(file, read_spec(file), ids)[-len(want) :], want) < 1e-5


def _widen(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec, layers=tuple(replace(l, mixer=replace(l.mixer, window=l.mixer.window and 17)) for l in spec.layers)
    )


def _swap_pairs(spec: ModelSpec) -> ModelSpec:
    def other(layer):  # type: ignore[no-untyped-def]
        style = "neox" if layer.mixer.rope.style == "norm" else "norm"
        return replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, style=style)))

    return replace(spec, layers=tuple(other(l) for l in spec.layers))


def _plain_rope(spec: ModelSpec) -> ModelSpec:
    rope = spec.layers[0].mixer.rope
    assert rope is not None
    unscaled = replace(rope, freq=tuple(plain(500000.0, rope.n_rot)), magnitude=1.0)
    return replace(spec, layers=tuple(replace(l, mixer=replace(l.mixer, rope=unscaled)) for l in spec.layers))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(("llama32", "q4_0x"), lambda s: replace(s, norm_eps=1e-6), id="eps"),
        pytest.param(("llama32", "q4_0x"), _swap_pairs, id="rope pairs"),
        pytest.param(("llama32", "q4_0x"), _plain_rope, id="rope factors"),
        pytest.param(("granite", "q4_0x"), lambda s: replace(s, logit_scale=1.0), id="logit scale"),
        pytest.param(("granite", "q4_0x"), lambda s: replace(s, embedding_scale=1.0), id="embedding scale"),
        pytest.param(("gemma2", "q4_0x"), lambda s: replace(s, logit_cap=0.0), id="final cap"),
        pytest.param(("gemma3", "q4_0x"), _widen, id="window"),
    ],
    indirect=["case"],
)
def test_a_single_wrong_detail_is_far_outside_the_limit(case, fault) -> None:  # type: ignore[no-untyped-def]
    file, ids, want = case
    assert rel_error(forward(file, fault(read_spec(file)), ids), want) > 1e-2
