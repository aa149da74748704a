"""Folders of models that see, as Hugging Face's transformers saves them: what they make of a prompt with a picture."""

from __future__ import annotations

import numpy as np
import pytest

import quarrel
from quarrel.cpu_backend.backend import create
from quarrel.errors import ModelError, RequestError
from quarrel.models import Tensors
from quarrel.ops.contract import rel_error
from tests.sight import WHOLE, WHOLES, whole_logits


@pytest.mark.parametrize("kind", WHOLES)
def test_a_folder_sees_a_picture_as_transformers_does(kind: str) -> None:
    want = np.load(WHOLE / kind / "logits.npy")
    assert rel_error(whole_logits(kind, create()), want) < 1e-5


@pytest.mark.parametrize("kind", WHOLES)
def test_a_message_with_a_picture_becomes_the_tokens_of_its_family(kind: str) -> None:
    wanted = np.load(WHOLE / kind / "ids.npy")
    parts = [{"type": "image", "image": np.load(WHOLE / kind / "image.npy")}, {"type": "text", "text": "What is it?"}]
    with quarrel.load(WHOLE / kind, backend="cpu", n_ctx=512) as llm:
        request = llm.prepare(messages=[{"role": "user", "content": parts}], template="{{ messages[0].content }}")
        eyes = llm._parts.eyes
        assert eyes is not None
        assert request.sight is not None
        (image,), pad = request.sight.images, llm.tokenizer.token_id(eyes.layout.pad)
    first, *_, last = np.flatnonzero(wanted < 0)
    if not kind.startswith("gemma4"):  # which makes every image as large as it may be
        assert image.tokens == last + 1 - first
    around = [*wanted[5:first], *[pad] * image.tokens, *wanted[last + 1 : -6]]
    first = int(request.tokens[0] == 2)  # gemma4's text begins with <bos>
    assert list(request.tokens[first : first + len(around)]) == around


def test_an_image_that_is_longer_than_the_table_of_positions_is_refused_before_it_is_encoded() -> None:
    parts = [{"type": "image", "image": np.zeros((24, 96, 3), np.uint8)}]
    with quarrel.load(WHOLE / "gemma4", backend="cpu", n_ctx=512) as llm:
        with pytest.raises(
            RequestError, match="is 99 patches long, and the model has places for 72: send one that is nearer"
        ):
            llm.prepare(messages=[{"role": "user", "content": parts}], template="{{ messages[0].content }}")


def test_bounds_around_maps_count_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    want, number = np.load(WHOLE / "gemma4_e" / "logits.npy"), Tensors.number

    def changed(bounds: dict[str, float]) -> None:
        read = lambda self, name: bounds.get(name.rpartition(".")[2], number(self, name))  # noqa: E731
        monkeypatch.setattr(Tensors, "number", read)

    changed({"output_min": 5.0})
    with pytest.raises(ModelError, match=r"bounds of blk.0.attn_q.weight are -1.5 to 1.875 and 5.0 to 1.25: the file is"):
        whole_logits("gemma4_e", create())
    changed({"output_min": -1e31, "output_max": 1e31})
    assert rel_error(whole_logits("gemma4_e", create()), want) > 1e-3
