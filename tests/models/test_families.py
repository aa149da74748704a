"""What the reference models are too small or too new to show of their families: other keys, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.gguf import GGUFFile, Metadata
from quarrel.models import ModelSpec, RopeScaling, Tensors, assemble, read_spec
from quarrel.models.feedforward import Experts
from quarrel.models.mixers import Attention
from quarrel.ops.contract import rel_error
from tests.models.test_reference_logits import forward, wanted
from tests.paths import need_cases


def spec_of(file: GGUFFile, scaling: RopeScaling | None = None, **keys: object) -> ModelSpec:
    """The spec of a file some of whose keys (with __ for a dot, below the architecture) are others."""
    arch = file.metadata.str("general.architecture")
    changed = Metadata(dict(file.metadata) | {f"{arch}.{k.replace('__', '.')}": v for k, v in keys.items()})
    original, file.metadata = file.metadata, changed
    try:
        spec = read_spec(file, scaling=scaling)
    finally:
        file.metadata = original
    assert isinstance(spec, ModelSpec)
    return spec


def attentions(spec: ModelSpec) -> list[Any]:
    assert all(isinstance(layer.mixer, Attention) for layer in spec.layers)
    return [layer.mixer for layer in spec.layers]


@pytest.fixture(name="opened")
def _opened(request: pytest.FixtureRequest) -> Any:
    with GGUFFile.open(need_cases(request.param, "model-q4_0x.gguf")) as file:
        yield file


@pytest.mark.parametrize("opened", ["llama4"], indirect=True)
def test_llama4_has_chunks_and_every_fourth_layer_grows_with_position(opened: GGUFFile) -> None:
    mixers = attentions(spec_of(opened))
    assert [(a.window, a.chunked, a.rope is None, a.unit_norm) for a in mixers] == [
        *[(8192, True, False, True)] * 3,
        (0, False, True, False),
    ]
    grown = mixers[3].temperature
    assert (grown.size, grown.shift, grown.factors) == (8192, 1, (1.0,))
    long = attentions(spec_of(opened, context_length=3 * 8192))[3].temperature
    assert long.factors == pytest.approx([1 + 0.1 * math.log(1 + i) for i in range(4)])
    plain = attentions(spec_of(opened, attention__sliding_window=0))
    assert all(a.window == 0 and a.rope is not None and a.temperature is None for a in plain)
    assert not any(a.unit_norm for a in attentions(spec_of(opened, expert_count=128)))


@pytest.mark.parametrize("opened", ["llama4"], indirect=True)
def test_llama4_within_a_chunk_is_as_without_and_beyond_it_is_not(opened: GGUFFile) -> None:
    folder = need_cases("llama4")
    ids, truth = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:24], wanted(folder, "q4_0x")
    got = forward(opened, spec_of(opened, attention__sliding_window=16), ids, cuts=(5, 17))
    assert rel_error(got[:15], truth[:15]) < 1e-5
    assert rel_error(got[16:], truth[16:24]) > 1e-2


@pytest.mark.parametrize("opened", ["llama4"], indirect=True)
def test_inputs_of_several_experts_are_not_weighted(opened: GGUFFile) -> None:
    with pytest.raises(UnsupportedModel, match="2 experts a token"):
        assemble(spec_of(opened, expert_used_count=2), Tensors(opened))


@pytest.mark.parametrize("opened", ["mistral3"], indirect=True)
def test_mistral3_grows_by_its_trained_context_if_it_says_so(opened: GGUFFile) -> None:
    (first, *_) = attentions(spec_of(opened))
    assert (first.temperature.size, first.temperature.shift, len(first.temperature.factors)) == (16, 0, 17)
    assert first.rope.magnitude == pytest.approx(1.0)
    (without, *_) = attentions(spec_of(opened, attention__temperature_scale=0.0, rope__scaling__yarn_log_multiplier=0.0))
    assert without.temperature is None
    assert without.rope.magnitude == pytest.approx(1 + 0.1 * math.log(16))
    with pytest.raises(ModelError, match="65536 steps at most"):
        spec_of(opened, context_length=1 << 24)


@pytest.mark.parametrize("opened", ["exaone4"], indirect=True)
def test_exaone4_of_64_layers_has_windows_and_full_layers_without_positions(opened: GGUFFile) -> None:
    assert {(a.window, a.rope is None) for a in attentions(spec_of(opened))} == {(0, False)}
    large = attentions(spec_of(opened, block_count=64))
    assert [(a.window, a.rope is None) for a in large] == [*[(4096, False)] * 3, (0, True)] * 16


@pytest.mark.parametrize("opened", ["olmo3"], indirect=True)
def test_the_files_magnitude_of_yarn_is_that_of_its_own_factor(opened: GGUFFile) -> None:
    full = [a for a in attentions(spec_of(opened, rope__scaling__yarn_attn_factor=1.5)) if not a.window]
    assert {a.rope.magnitude for a in full} == {1.5}
    wider = [a for a in attentions(spec_of(opened, RopeScaling("yarn", 16.0))) if not a.window]
    assert {round(a.rope.magnitude, 5) for a in wider} == {round(1 + 0.1 * math.log(16), 5)}


@pytest.mark.parametrize("opened", ["glm4moe"], indirect=True)
def test_values_of_layers_may_be_those_of_predicting_blocks_too(opened: GGUFFile) -> None:
    whole = spec_of(opened, feed_forward_length=[352, 96, 96, 96])
    assert whole == spec_of(opened, feed_forward_length=[352, 96, 96])
    assert [isinstance(layer.ffn, Experts) for layer in whole.layers] == [False, True, True]
    with pytest.raises(ModelError, match="feed_forward_length"):
        spec_of(opened, feed_forward_length=[352, 96, 96, 96, 96])


@pytest.mark.parametrize("opened", ["ernie4_5moe"], indirect=True)
def test_experts_stand_in_every_nth_layer_after_the_dense_ones(opened: GGUFFile) -> None:
    each = spec_of(opened, interleave_moe_layer_step=2, leading_dense_block_count=0)
    assert [isinstance(layer.ffn, Experts) for layer in each.layers] == [False, True, False]
    with pytest.raises(UnsupportedModel, match="expert_gating_func is 4"):
        spec_of(opened, expert_gating_func=4)


@pytest.mark.parametrize("opened", ["cohere2"], indirect=True)
def test_halves_side_by_side_read_the_same_stream(opened: GGUFFile) -> None:
    """One after the other they are another model."""
    folder = need_cases("cohere2")
    ids, truth = np.load(folder / "tokens.npy").reshape(-1).astype(np.int32)[:12], wanted(folder, "q4_0x")[:12]
    spec = spec_of(opened)
    apart = tuple(replace(l, mixer=l.mixer.parts[0], ffn=l.mixer.parts[1], ffn_norm="attn_norm") for l in spec.layers)  # type: ignore[union-attr]
    assert rel_error(forward(opened, spec, ids), truth) < 1e-5
    assert rel_error(forward(opened, replace(spec, layers=apart), ids), truth) > 1e-2


@pytest.mark.parametrize("opened", ["gemma3n"], indirect=True)
def test_gemma3n_of_old_files_shares_keys_and_has_few_gates_as_llama_cpp_writes_it(opened: GGUFFile) -> None:
    arch = "gemma3n."
    told = (
        "shared_kv_layers",
        "activation_sparsity_scale",
        "sliding_window_pattern",
        "altup.num_inputs",
        "per_layer_input",
    )
    keys = {k: v for k, v in opened.metadata.items() if not (k.startswith(arch) and k.endswith(told))}
    said, opened.metadata = opened.metadata, Metadata(keys)
    bare = read_spec(opened)
    opened.metadata = said
    assert bare == read_spec(opened)
    with pytest.raises(UnsupportedModel, match="active_idx is 1; Quarrel wants 0"):
        spec_of(opened, altup__active_idx=1)
    with pytest.raises(ModelError, match="num_inputs"):
        spec_of(opened, altup__num_inputs=1)
