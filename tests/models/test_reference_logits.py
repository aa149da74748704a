"""Every architecture in NumPy against results from two independent implementations, and proof that the limit is sharp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quarrel.gguf import GGUFFile
from quarrel.models import ARCHITECTURES, EncoderSpec, Keys, ModelSpec, Tensors, assemble, gpt_oss, read_spec
from quarrel.models.feedforward import Experts
from quarrel.models.mixers import GatedDelta
from quarrel.models.rope import plain
from quarrel.models.spec import Layer
from quarrel.ops.contract import rel_error
from quarrel.ops.reference import empty_cache, run_program
from quarrel.ops.step import StepInputs
from tests.paths import CASE_SETS, need_cases

Loaded = tuple[GGUFFile, ModelSpec, np.ndarray, np.ndarray]

TRANSFORMERS = (
    *("llama32", "mistral", "tinyllama", "smollm2", "qwen2", "qwen3", "qwen3_yarn"),
    *("granite", "granite4micro", "phi3", "phi3_longrope", "gemma2", "gemma3"),
)
OTHERS = (
    *("mixtral", "granitemoe", "qwen3moe", "gptoss", "gptoss_trunc", "nemotron", "nemotron_h", "nemotron_h_moe"),
    *("granitehybrid", "granitehybrid_dense", "mamba", "mamba2", "bert", "nomic_bert"),
    "zoo",  # one small llama in every block format
)
LIMITS = {"glm47flash": 2e-5, "gemma3n": 5e-5, **{f"gemma4{kind}/q4_k_m": 2e-3 for kind in ("", "_e", "_moe")}}


def limit(folder: str, variant: str = "") -> float:
    """What float32 may differ from the truth by; the first two above owe more to the truth's own choices of eps and
    deviation, the others to its table of GELU in float16."""
    return LIMITS.get(f"{folder}/{variant}", LIMITS.get(folder, 1e-5))


def variants() -> list[tuple[str, str]]:
    """Folder and variant of every file: those of the lists, and what of the second set this version runs."""
    first, second = CASE_SETS
    files = [p for a in (*TRANSFORMERS, *OTHERS) for p in sorted((first / a).glob("model-*.gguf"))]
    files += [p for p in sorted(second.glob("*/model-*.gguf")) if architecture(p) in ARCHITECTURES]
    return [(p.parent.name, p.name[6:-5]) for p in files] or [(a, "q4_0x") for a in (*TRANSFORMERS, *OTHERS)]


def few_variants() -> list[tuple[str, str]]:
    """One file of each folder, and all that have a truth of their own or are there for their formats; all of them with
    QUARREL_TEST_ALL=1. tests/cpu_backend/test_models.py compares every file with the same truth."""
    if os.environ.get("QUARREL_TEST_ALL") == "1":
        return variants()
    first = dict(reversed(variants()))
    return [(a, v) for a, v in variants() if a in ("zoo", "llama32", "gptoss") or first[a] == v]


def architecture(path: Path) -> str:
    with GGUFFile.open(path) as file:
        return file.metadata.str("general.architecture")


def wanted(folder: Path, variant: str) -> np.ndarray:
    """The truth for a variant: exact arithmetic on its own weights, or on the original ones where the file holds those."""
    names = (f"logits_{variant}_deq.npy", "logits_hf.npy", "hidden_hf.npy")
    return np.load(next(path for name in names if (path := folder / name).exists()))


def specify(file: GGUFFile, folder: Path, variant: str) -> ModelSpec | EncoderSpec:
    """The file's spec; two gpt-oss truths were computed with YaRN's bounds rounded, which the file cannot say."""
    rounded = folder.name == "gptoss_trunc" or (folder.name, variant) == ("gptoss", "mxfp4_moe")
    if rounded:
        return gpt_oss.spec(Keys(file.metadata, "gpt-oss"), Tensors(file), 32768, truncate=True)
    return read_spec(file)


def chunk(ids: np.ndarray, start: int, end: int, block_size: int = 16) -> StepInputs:
    """Tokens `start:end` of one sequence, the earlier ones already in the cache; state in slot 1."""
    each = np.arange(start, end, dtype=np.int32)
    table = np.arange(-(-len(ids) // block_size), dtype=np.int32)[None]
    starts = np.array([0, end - start], np.int32)
    slot = np.array([1], np.int32)
    return StepInputs(ids[start:end], each, each, starts, np.array([end], np.int32), table, each - start, None, slot)


def forward(file: GGUFFile, spec: ModelSpec | EncoderSpec, ids: np.ndarray, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Logits, or an encoder's hidden states, of every position; fed in pieces cut at `cuts`."""
    tensors = Tensors(file)
    program = assemble(spec, tensors)
    blocks = -(-len(ids) // 16)
    # NaN, so that a key or a state that was never written cannot go unnoticed
    pools = [empty_cache(c, blocks, 16, fill=np.nan) for c in program.caches]
    states = [np.full((2, *s.shape), np.nan, np.float32) for s in program.states]
    name = "logits" if "logits" in program.outputs else "hidden"
    bounds = (0, *cuts, len(ids))
    parts = [run_program(program, tensors, pools, chunk(ids, a, z), states)[name] for a, z in pairwise(bounds)]
    return np.concatenate(parts)


@pytest.fixture(name="case")
def _case(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    arch, variant = request.param
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        ids = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)
        yield file, specify(file, folder, variant), ids, wanted(folder, variant)


@pytest.mark.parametrize("case", few_variants(), indirect=True, ids="-".join)
def test_outputs_match_two_independent_implementations(case: Loaded) -> None:
    file, spec, ids, want = case
    assert rel_error(forward(file, spec, ids)[-len(want) :], want) < limit(
        file.paths[0].parent.name, file.paths[0].name[6:-5]
    )


@pytest.mark.parametrize(
    "case",
    [(name, "q4_0x") for name in ("mistral", "granitehybrid", "mamba", "nemotron_h", "qwen3next", "lfm2", "falcon_h1")],
    indirect=True,
)
def test_pieces_of_a_prompt_give_what_the_whole_gives(case: Loaded) -> None:
    file, spec, ids, want = case
    assert rel_error(forward(file, spec, ids, cuts=(7, 8, 40)), want) < 1e-5


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


def _deltas(spec: ModelSpec, **change: object) -> ModelSpec:
    def changed(layer: Layer) -> Layer:
        return replace(layer, mixer=replace(layer.mixer, **change)) if isinstance(layer.mixer, GatedDelta) else layer  # type: ignore[arg-type]

    return replace(spec, layers=tuple(changed(l) for l in spec.layers))


def _one_rope(spec: ModelSpec, il: int) -> ModelSpec:
    return _mixers(spec, rope=spec.layers[il].mixer.rope)


def _mixers(spec: ModelSpec, of: Callable[[Any], bool] = lambda mixer: True, **change: object) -> ModelSpec:
    changed = (replace(l, mixer=replace(l.mixer, **change)) if of(l.mixer) else l for l in spec.layers)  # type: ignore[arg-type]
    return replace(spec, layers=tuple(changed))


def _slides(mixer: Any) -> bool:
    return mixer.window > 0


def _full(mixer: Any) -> bool:
    return mixer.window == 0


def _gates(spec: ModelSpec, deviations: float) -> ModelSpec:
    few = (replace(l, ffn=replace(l.ffn, deviations=deviations)) if l.ffn.deviations else l for l in spec.layers)  # type: ignore[union-attr, call-arg]
    return replace(spec, layers=tuple(few))


def _experts(spec: ModelSpec, **change: object) -> ModelSpec:
    def changed(layer: Layer) -> Layer:
        return replace(layer, ffn=replace(layer.ffn, **change)) if isinstance(layer.ffn, Experts) else layer  # type: ignore[arg-type]

    return replace(spec, layers=tuple(changed(l) for l in spec.layers))


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
        pytest.param(("qwen3moe", "q4_0x"), lambda s: _experts(s, renormalise=False), id="top-k normalisation"),
        pytest.param(("nemotron_h_moe", "q4_0x"), lambda s: _experts(s, scale=1.0), id="expert scale"),
        pytest.param(("gptoss", "mxfp4-bf16"), lambda s: _experts(s, used=1), id="top-1 only"),
        pytest.param(("deepseek2", "q4_0x"), lambda s: _experts(s, n_groups=1, groups_used=1), id="expert groups"),
        pytest.param(("deepseek2", "q4_0x"), lambda s: _mixers(s, scale=64**-0.5), id="YaRN's scale of scores"),
        pytest.param(("deepseek2_lite", "q4_0x"), lambda s: _experts(s, renormalise=True), id="weights as they are"),
        pytest.param(("gemma4", "q4_0x"), lambda s: _mixers(s, value_norm=False), id="values' norm"),
        pytest.param(("gemma4", "q4_0x"), lambda s: _mixers(s, scale=0.2), id="scores as they are"),
        pytest.param(("gemma4", "q4_0x"), lambda s: _mixers(s, _full, rope=s.layers[0].mixer.rope), id="two rotations"),
        pytest.param(
            ("gemma4_e", "q4_0x"), lambda s: _mixers(s, lambda m: m.reads == 4, reads=3), id="whose keys are read"
        ),
        pytest.param(("gemma3n", "q4_0x"), lambda s: _gates(s, 1.0), id="how few gates count"),
        pytest.param(("gemma3n", "q4_0x"), lambda s: _mixers(s, lambda m: m.reads == 19, reads=14), id="and there"),
        pytest.param(("gemma_embedding", "q4_0x"), lambda s: _mixers(s, _slides, window=36), id="half a window a side"),
        pytest.param(("modern_bert", "q4_0x"), lambda s: _mixers(s, _slides, window=36), id="half of another"),
        pytest.param(("smollm3", "q4_0x"), lambda s: _one_rope(s, 0), id="no layer without positions"),
        pytest.param(("olmo3", "q4_0x"), lambda s: _one_rope(s, 3), id="YaRN in all layers"),
        pytest.param(("hunyuan_dense", "q4_0x"), lambda s: _mixers(s, late_norm=False), id="norm before rope"),
        pytest.param(("ernie4_5moe", "q4_0x"), lambda s: _experts(s, gate="softmax_topk"), id="bias on chosen logits"),
        pytest.param(("granite_swa", "q4_0x"), lambda s: _one_rope(s, 1), id="no rope pattern"),
        pytest.param(("qwen35", "q4_0x"), lambda s: _deltas(s, grouped=True), id="heads side by side"),
        pytest.param(("qwen3next", "q4_0x"), lambda s: _deltas(s, grouped=False), id="heads in turn"),
        pytest.param(("muse_glimmer", "q4_0x"), lambda s: replace(s, embedding_norm=False), id="no norm of embeddings"),
        pytest.param(("muse_glimmer", "q4_0x"), lambda s: _one_rope(s, 1), id="positions in full layers"),
    ],
    indirect=["case"],
)
def test_a_single_wrong_detail_is_far_outside_the_limit(case, fault) -> None:  # type: ignore[no-untyped-def]
    file, spec, ids, want = case
    assert rel_error(forward(file, fault(spec), ids), want) > 1e-2
