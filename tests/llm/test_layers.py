"""Which layers leave a device that is too small: as few as needed, where the model allows it, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import OutOfMemory, RequestError
from tests.paths import need_cases

OPTIONS: dict[str, Any] = {"n_ctx": 64, "max_seqs": 1, "decoded_weights": "never"}


class Small(CpuBackend):
    """A device with so much memory of its own."""

    name = "triton"
    step_tokens = 128

    def __init__(self, free: int) -> None:
        super().__init__(threads=1)
        self._free = free

    def free_bytes(self) -> int:
        return self._free

    part = None  # type: ignore[assignment]  # what the host computes


def needed() -> int:
    with quarrel.load("demo", backend=Small(1 << 40), **OPTIONS) as llm:
        return llm.explain().plan.total


def test_as_few_layers_leave_as_make_the_rest_fit() -> None:
    whole, found = needed(), []
    for missing in (0, 1, 3 << 20):
        with quarrel.load("demo", backend=Small(whole - missing), gpu_layers="auto", **OPTIONS) as llm:
            e = llm.explain()
            text = llm.generate("Once", max_tokens=3).text
        found.append(0 if e.host_layers is None else e.host_layers.layers)
        assert e.plan.total <= whole - missing
        assert text
    assert found[0] == 0
    assert 0 < found[1] < found[2] < 10


def test_a_model_that_does_not_fit_is_refused_with_how_many_layers_would() -> None:
    with pytest.raises(OutOfMemory, match=r"or leave .*gpu_layers='auto', which has 9 of its 10 layers on") as raised:
        quarrel.load("demo", backend=Small(needed() - 1), **OPTIONS)
    assert "gpu_layers" in raised.value.fields
    with pytest.raises(OutOfMemory, match="the model needs"):
        quarrel.load("demo", backend=Small(1 << 20), gpu_layers="auto", **OPTIONS)


def test_the_host_must_have_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda self: 1 << 20)
    with pytest.raises(OutOfMemory, match="the layers that gpu_layers leaves to the host: the model needs") as raised:
        quarrel.load("demo", backend=Small(1 << 40), gpu_layers=2, **OPTIONS)
    assert "gpu_layers" in raised.value.fields


def test_both_have_room_for_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has the smaller cache: the device plans no more blocks than that."""
    with quarrel.load("demo", backend=Small(1 << 40), gpu_layers=5, **{**OPTIONS, "max_seqs": 8}) as llm:
        roomy = llm.explain()
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda self: roomy.plan.total)
    with quarrel.load("demo", backend=Small(1 << 40), gpu_layers=5, **{**OPTIONS, "max_seqs": 8}) as llm:
        e = llm.explain()
    assert e.host_layers is not None
    assert e.plan.limits.n_blocks <= roomy.plan.limits.n_blocks
    assert e.memory.cache == e.plan.cache
    assert e.host_layers.memory.cache == e.host_layers.plan.cache


def case(arch: str) -> Path:
    return next(need_cases(arch).glob("model-q4_0x.gguf"))


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        ("demo", {"tensor_parallel": 2}, "the host has layers beside one device only: leave tensor_parallel out"),
        ("demo", {"pipeline_parallel": 2}, "the host has layers beside one device only: leave pipeline_parallel out"),
        ("bert", {}, "an encoder runs whole on one device: leave gpu_layers out"),
        ("gemma4_e", {"gpu_layers": 3}, "the 5 last layers of this model share keys.*: wanted 5 or more, or 0$"),
    ],
)
def test_what_cannot_be_is_one_sentence(model: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match) as raised:
        quarrel.load(model if model == "demo" else case(model), backend="cpu", **{"gpu_layers": 1, **options})
    assert "gpu_layers" in raised.value.fields


@pytest.mark.parametrize("arch", ["granitehybrid", "gemma3", "gemma4_e"])
def test_states_and_windows_are_kept_on_both_sides(arch: str, tmp_path: Path) -> None:
    """A hybrid's snapshots, a model's window groups: prompts that begin alike get the whole model's tokens."""
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 256, "max_seqs": 2, "threads": 1}
    ask: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    prompt, found = [5, 6, 7] * 30, []
    for layers in (99, 2 if arch == "granitehybrid" else 5):
        with quarrel.load(case(arch), **options, gpu_layers=layers) as llm:
            said = [*prompt, *llm.generate(prompt, **ask).token_ids]
            llm.prefixes.save(said, tmp_path / "text")
            result = llm.generate([*said, 7], **ask)
            found.append((said, result.token_ids, result.logprobs, result.usage.cached_tokens))
    with quarrel.load(case(arch), **options, gpu_layers=layers) as llm:
        llm.prefixes.restore(tmp_path / "text")
        result = llm.generate([*said, 7], **ask)
        found.append((said, result.token_ids, result.logprobs, result.usage.cached_tokens))
    assert found[0] == found[1] == found[2]
    assert found[0][3] > 64
