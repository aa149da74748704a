"""A draft model changes how many steps a text takes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import quarrel
from quarrel.errors import UnsupportedModel
from tests.paths import need_cases
from tests.tiny_model import PIECES, write_tiny_model

OPTIONS: tuple[dict[str, float | int], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 4, "top_k": 0, "top_p": 1, "min_p": 0},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 0.1},
)


def texts(llm: quarrel.LLM) -> list[tuple[int, ...]]:
    return [llm.generate("Once upon a time", max_tokens=60, ignore_eos=True, **o).token_ids for o in OPTIONS]  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False])
def test_the_text_is_the_one_without_a_draft_model(own: bool, tmp_path: Path) -> None:
    large = "demo" if own else str(write_tiny_model(tmp_path / "large.gguf"))
    small = "demo" if own else str(write_tiny_model(tmp_path / "small.gguf", seed=1))
    with quarrel.load(large, n_ctx=128, backend="cpu") as plain:
        wanted = texts(plain)
    with quarrel.load(large, n_ctx=128, backend="cpu", draft=small) as llm:
        assert texts(llm) == wanted
        stats, made = llm.stats(), llm.explain()
        assert stats.drafted_tokens > 20
        assert made.draft is not None
        assert (made.draft.model, made.draft.plan.n_ctx) == (small, 128)
        assert made.plan.total + made.draft.plan.total <= made.plan.free
        if own:
            assert stats.drafted_right > 0.9 * stats.drafted_tokens
            assert stats.steps < 60


def test_another_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    small = write_tiny_model(tmp_path / "small.gguf")
    with pytest.raises(UnsupportedModel, match=rf"another vocabulary \(\d+ and {len(PIECES)} tokens; id \d+ is"):
        quarrel.load("demo", n_ctx=64, backend="cpu", draft=small)


def test_a_recurrent_draft_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="draft model has recurrent layers, whose state"):
        quarrel.load("demo", n_ctx=64, backend="cpu", draft=need_cases("mamba2", "model-q4_k_m.gguf"))
