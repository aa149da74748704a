"""Requests whose numbers diverge, beside sound ones that share steps, blocks and slots with them: these get what they get
alone, bit for bit, with prefixes reused, snapshots taken and sequences preempted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.gguf import GGUFFile, GGUFWriter
from quarrel.llm import plan
from quarrel.llm.memory import Plan
from tests.paths import need_cases

MODELS = {
    "gemma2": "model-q4_0x.gguf",
    "gemma3": "model-q4_0x.gguf",
    "gptoss": "model-mxfp4-bf16.gguf",
    "granitehybrid": "model-q4_k_m.gguf",
}
HUGE = ("attn_k.weight", "attn_v.weight", "ssm_in.weight")
BLOCKS = {"gptoss": 15}
"""Of 32 tokens, 20 for other models: fewer than six sequences grow to, and enough to keep some prefixes."""
OPTIONS: dict[str, Any] = {"max_tokens": 70, "temperature": 0.0, "logprobs": 1}


def write_huge(model: Path, path: Path) -> Path:
    """An adapter of finite numbers whose products are not."""
    writer = GGUFWriter()
    with GGUFFile.open(model) as file:
        architecture = file.metadata["general.architecture"]
        kept = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": architecture}
        for key, value in {**kept, "adapter.lora.alpha": 1.0}.items():
            writer.add(key, value)
        for name, tensor in file.tensors.items():
            if name.endswith(HUGE):
                k, rows = tensor.dims
                writer.add_tensor(f"{name}.lora_a", np.full((1, k), 1e19, np.float32))
                writer.add_tensor(f"{name}.lora_b", np.full((rows, 1), 1e20, np.float32))
    writer.write(path)
    return path


def prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Of which every other one goes on from the one before it."""
    drawn = [rng.integers(3, 250, int(n)).tolist() for n in rng.integers(3, 100, count)]
    return [[1, *(drawn[i - 1] if i % 2 else ()), *ids] for i, ids in enumerate(drawn)]


def told(result: quarrel.Result) -> tuple[Any, ...]:
    assert result.logprobs is not None
    return result.finish_reason, result.token_ids, [entry.logprob for entry in result.logprobs]


@pytest.mark.parametrize("name", MODELS)
def test_sound_requests_beside_diverged_ones_get_what_they_get_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = need_cases(name, MODELS[name]), np.random.default_rng(0)
    options: dict[str, Any] = {"backend": "cpu", "n_ctx": 256, "max_seqs": 6}
    adapters = {"huge": write_huge(model, tmp_path / "huge.gguf")}
    sound, bad = prompts(rng, 15), prompts(rng, 5)
    with quarrel.load(model, **options) as llm:
        alone = [told(llm.generate(ids, **OPTIONS)) for ids in sound]
    as_planned = plan.plan_limits

    def short(*args: Any, **kwargs: Any) -> Plan:
        made = as_planned(*args, **kwargs)
        return replace(made, limits=replace(made.limits, n_blocks=BLOCKS.get(name, 20)))

    monkeypatch.setattr(plan, "plan_limits", short)
    with quarrel.load(model, **options, adapters=adapters) as llm:
        for _ in range(2):
            streams = []
            for i, ids in enumerate(sound):
                if i % 3 == 0:
                    streams.append(llm.stream(bad[i // 3], adapter="huge", **OPTIONS))
                streams.append(llm.stream(ids, **OPTIONS))
            results = [stream.wait() for stream in streams]
            assert {r.finish_reason for r in results[::4]} == {"error"}
            assert [told(r) for i, r in enumerate(results) if i % 4] == alone
        assert llm.activity().preempted > 0
        # Of the hybrid's snapshots, none or one or two outlive so little memory.
        assert name == "granitehybrid" or llm.stats().known_tokens > 100
