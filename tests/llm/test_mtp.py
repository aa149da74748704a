"""A model's own block that predicts further tokens changes how many steps a text takes, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.errors import ModelError, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models import Tensors
from tests.llm.test_embed import with_keys
from tests.models.predictor import write_knowing
from tests.paths import need_cases

OPTIONS: tuple[dict[str, float | int], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 4, "top_k": 0, "top_p": 1, "min_p": 0},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 0.1},
)
SAID = [0, 0]
"""What the last answers said of their drafts."""
PROMPTS = [[(7 * i + i * i) % 256 for i in range(n)] for n in (70, 3, 1)]


def texts(llm: quarrel.LLM) -> list[tuple[int, ...]]:
    made = [llm.generate(PROMPTS, max_tokens=24, ignore_eos=True, **o) for o in OPTIONS]  # type: ignore[call-overload]
    flat = [result for results in made for result in results]
    SAID[:] = (sum(r.timings.guessed_tokens for r in flat), sum(r.timings.right_tokens for r in flat))
    return [result.token_ids for result in flat]


@pytest.mark.parametrize("knowing", [False, True])
@pytest.mark.parametrize("arch", ["glm4moe", "qwen35"])
def test_the_text_is_the_one_without_it(arch: str, knowing: bool, tmp_path: Path) -> None:
    """Of a block that knows nothing, and, where the model looks at the last token only, of one that knows what comes."""
    path = write_knowing(tmp_path / "m.gguf", arch) if knowing else need_cases(arch, "model-q4_0x.gguf")
    with quarrel.load(path, n_ctx=128, backend="cpu", max_seqs=3) as plain:
        wanted, steps = texts(plain), plain.stats().steps
        assert SAID == [0, 0]
    with quarrel.load(path, n_ctx=128, backend="cpu", max_seqs=3, draft="mtp") as llm:
        assert texts(llm) == wanted
        stats = llm.stats()
        assert [stats.drafted_tokens, stats.drafted_right] == SAID
        assert texts(llm) == wanted  # behind prefixes that are in the cache
        stats, made = llm.stats(), llm.explain()
        assert stats.drafted_tokens > 20
        assert stats.drafted_right > 0.6 * stats.drafted_tokens if knowing else True
        assert stats.steps < steps if knowing else True
        assert made.draft is not None
        assert (made.draft.model, made.draft.architecture) == ("mtp", arch)
        assert made.plan.total + made.draft.plan.total <= made.plan.free


def test_a_model_without_one_is_refused_and_so_are_several_devices() -> None:
    with pytest.raises(UnsupportedModel, match=r"no block that predicts further tokens \(nextn, MTP\): take a file"):
        quarrel.load("demo", n_ctx=64, backend="cpu", draft="mtp")
    with pytest.raises(RequestError, match="draft, adapters, .* want one device"):
        quarrel.load(need_cases("glm4moe", "model-q4_0x.gguf"), backend="cpu", draft="mtp", tensor_parallel=2)


def with_block(case: str, to: Path, joined: tuple[int, int] | None = None) -> Path:
    """The case's model, its last layer made a block that predicts: four more tensors, and a key."""
    source = need_cases(case, "model-q4_0x.gguf")
    with GGUFFile.open(source) as file:
        arch = file.metadata.str("general.architecture")
        last, n = file.metadata.int(f"{arch}.block_count") - 1, file.metadata.int(f"{arch}.embedding_length")
    draw = np.random.default_rng(1).standard_normal
    more = {name: np.ones(n, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    more["eh_proj"] = draw(joined or (n, 2 * n)).astype(np.float32) / 16
    tensors = {f"blk.{last}.nextn.{name}.weight": values for name, values in more.items()}
    return with_keys(source, to, {f"{arch}.nextn_predict_layers": 1}, tensors)


def test_blocks_with_latent_attention_draft_too(tmp_path: Path) -> None:
    path = with_block("glm47flash", tmp_path / "m.gguf")
    asked = {"max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    with quarrel.load(path, n_ctx=128, backend="cpu") as plain:
        wanted = plain.generate(PROMPTS[0], **asked).token_ids  # type: ignore[call-overload]
    with quarrel.load(path, n_ctx=128, backend="cpu", draft="mtp") as llm:
        made = llm.generate(PROMPTS[0], **asked)  # type: ignore[call-overload]
        assert made.token_ids == wanted
        assert made.timings.guessed_tokens


def test_a_block_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    path = with_block("glm47flash", tmp_path / "m.gguf", joined=(64, 64))
    with pytest.raises(ModelError, match=r"nextn.eh_proj.weight is \[64, 64\], but .* ask for"):
        quarrel.load(path, n_ctx=64, backend="cpu", draft="mtp")
    with GGUFFile.open(need_cases("glm4moe", "model-q4_0x.gguf")) as file:
        with pytest.raises(UnsupportedModel, match=r"is Q4_0, blocks of 32 columns; .* to part it at 200: convert"):
            Tensors(file).column_range("blk.3.nextn.eh_proj.weight", 192, 384, 0, 200)
