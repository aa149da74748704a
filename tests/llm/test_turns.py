"""A second turn runs its own tokens only, on models with recurrent layers too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quarrel
from quarrel.errors import QueueFull, RequestError
from quarrel.tokenizer import TokenizerWarning
from tests.paths import need_cases
from tests.tiny_model import write_tiny_model

GREEDY = quarrel.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
NEW = [7, 8, 9, 10]


@pytest.mark.parametrize(
    "model", ["llama32", "granitehybrid", "mamba2", "qwen35", "lfm2moe", "deepseek2", "gemma4_e", "gemma3n"]
)
def test_the_second_turn_of_a_chat_prefills_only_what_is_new(model: str) -> None:
    path = need_cases(model, "model-q4_0x.gguf")
    prompt = [(7 * i + i * i) % 256 for i in range(77)]
    with quarrel.load(path, backend="cpu", n_ctx=256) as llm:
        first = llm.generate(prompt, GREEDY)
        second = llm.generate([*prompt, *first.token_ids, *NEW], GREEDY)
        # The last token drawn in a turn has not run.
        assert second.timings.prefill_tokens == len(NEW) + 1
        assert second.usage.cached_tokens == 77 + 9 - 1
        again = llm.generate([*prompt, *first.token_ids, *NEW], GREEDY)
        assert again.token_ids == second.token_ids
    with quarrel.load(path, backend="cpu", n_ctx=256, prefix_cache=False) as llm:
        assert llm.generate([*prompt, *first.token_ids, *NEW], GREEDY).token_ids == second.token_ids


def test_a_list_may_be_longer_than_the_queue() -> None:
    with quarrel.load(need_cases("llama32", "model-q4_0x.gguf"), backend="cpu", n_ctx=64, max_seqs=2, max_waiting=1) as llm:
        results = llm.generate([[i] for i in range(1, 20)], GREEDY, max_tokens=2)
        assert len(results) == 19
        with pytest.raises(QueueFull):
            llm.generate([1], GREEDY, n=4)
        with pytest.raises(RequestError, match="service is a str"):
            llm.generate([1], GREEDY, service="fast")  # type: ignore[call-overload]


def test_log_probabilities_of_a_text_are_those_of_its_logits() -> None:
    with quarrel.load(need_cases("llama32", "model-q4_0x.gguf"), backend="cpu", n_ctx=1024) as llm:
        ids = [(7 * i + i * i) % 256 for i in range(700)]  # more than one step
        found = llm.logprobs(ids, top=2)
        logits = llm.logits(ids).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert [p.token_id for p in found] == ids[1:]
        assert [p.logprob for p in found] == pytest.approx([row[id] for row, id in zip(logits, ids[1:])], abs=1e-9)
        assert [p.top[0][0] for p in found] == list(logits[:-1].argmax(axis=1))
        assert llm.logprobs([5]) == []
        with pytest.raises(RequestError, match="top is 21"):
            llm.logprobs(ids, top=21)


def test_a_template_that_hides_its_control_tokens_is_told_of_at_the_first_chat(tmp_path: Path) -> None:
    template = "{{ '<|im_{}|>'.format('start') }}{{ messages[0].content }}"
    with quarrel.load(write_tiny_model(tmp_path / "m.gguf", template=template), backend="cpu") as llm:
        asked = [{"role": "user", "content": "hello"}]
        with pytest.warns(TokenizerWarning, match="computes control tokens instead of writing them"):
            llm.chat(asked, max_tokens=1)
        llm.chat(asked, max_tokens=1)  # and not again: a warning would be an error here
