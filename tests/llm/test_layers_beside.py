"""Layers on the host beside all else that a request may want: the tokens are those of the whole model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quarrel
from quarrel.llm import LLM
from tests.llm.preempted import preempt_after
from tests.llm.test_adapters import write_adapter
from tests.paths import need_cases
from tests.sight import EYES
from tools.eyes.pictures import Scene, drawn

ASK: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
ALL = 99


def answers(llm: LLM, **more: Any) -> list[Any]:
    return [(r.token_ids, r.logprobs) for r in llm.generate(["Once upon a time", "The king"], **ASK, **more)]


def test_adapters(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def pair() -> Any:
        return tuple(rng.standard_normal(shape).astype(np.float32) * 0.3 for shape in ((4, 256), (256, 4)))

    names = [f"blk.{layer}.attn_{what}.weight" for layer in (0, 9) for what in ("q", "output")]
    adapters = {"a": write_adapter(tmp_path / "a.gguf", {name: pair() for name in names})}
    found = []
    for layers in (ALL, 5):
        with quarrel.load("demo", backend="cpu", n_ctx=64, threads=1, gpu_layers=layers, adapters=adapters) as llm:
            assert (llm.explain().host_layers is None) == (layers == ALL)
            found.append((answers(llm), answers(llm, adapter="a")))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_models_own_block_that_drafts() -> None:
    model, found = need_cases("glm4moe", "model-q4_0x.gguf"), []
    for more in ({"gpu_layers": ALL}, {"gpu_layers": 1, "draft": "mtp"}):
        options: Any = {"backend": "cpu", "n_ctx": 128, "threads": 1, **more}
        with quarrel.load(model, **options) as llm:
            found.append([r.token_ids for r in llm.generate([[7 * i % 256 for i in range(70)], [3]], **ASK)])
            guessed = llm.stats().guessed_tokens
    assert guessed > 0
    assert found[0] == found[1]


def test_images() -> None:
    image = drawn(Scene("circle", "red", "white"), random.Random(1))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What colour is it?"}]
    found = []
    for layers in (ALL, 1):
        with quarrel.load(EYES / "trained" / "model.gguf", backend="cpu", n_ctx=128, threads=1, gpu_layers=layers) as llm:
            assert (llm.explain().host_layers is None) == (layers == ALL)
            found.append(llm.chat([{"role": "user", "content": parts}], max_tokens=6, temperature=0.0).text)
    assert found[0] == found[1]
    assert found[0] == "Red."


def test_sequences_whose_blocks_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with quarrel.load("demo", backend="cpu", n_ctx=64, threads=1, gpu_layers=5) as llm:
        wanted = llm.generate("Once upon a time", **ASK)
        found = preempt_after(monkeypatch, 3)
        assert llm.generate("Once upon a time", **ASK).token_ids == wanted.token_ids
        assert found == [1]
