"""Thoughts end where they are as long as a request allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import quarrel
from quarrel.errors import RequestError
from quarrel.llm import LLM, Structure
from quarrel.llm.thinking import HARMONY, thinking_guide

OPEN = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"
TURNS = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(name="llm", scope="module")
def _llm() -> Iterator[LLM]:
    with quarrel.load("demo", backend="cpu", threads=2, n_ctx=128) as llm:
        yield llm


def fed(llm: LLM, budget: int, text: str, prompt: str = "Say it.") -> tuple[int, str]:
    """How many of a text's tokens were free to draw, and what is forced behind them."""
    guide = thinking_guide(llm.tokenizer, llm.tokenizer.n_vocab, llm.tokenize(prompt), budget)()
    free = 0
    for id in llm.tokenize(text, False):
        if not guide.allowed().all():
            break
        assert guide.take(id) is False
        free += 1
    forced = []
    while not guide.allowed().all():
        (id,) = guide.allowed().nonzero()[0]
        forced.append(int(id))
        guide.take(int(id))
    return free, llm.detokenize(forced, False).strip()


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_that_the_prompt_began_has_so_many_tokens(llm: LLM, budget: int) -> None:
    assert fed(llm, budget, "the fox ran home to the lamp", "Say it.<think>\n") == (budget, "</think>")


def test_a_thought_that_the_answer_begins_is_counted_behind_its_tag(llm: LLM) -> None:
    tag, words = "<think>", " the fox ran home to the lamp"
    free, forced = fed(llm, 3, tag + words)
    assert free == len(llm.tokenize(tag, False)) + 3
    assert forced == "</think>"
    free, forced = fed(llm, 2, HARMONY[0] + words)
    assert forced.replace(" ", "") == "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("text", ["the fox ran home to the lamp and slept", "<think>a b</think> the fox ran home to it"])
def test_what_is_no_thought_or_ends_in_time_is_left_alone(llm: LLM, text: str) -> None:
    assert fed(llm, 6, text) == (len(llm.tokenize(text, False)), "")


def test_a_closing_tag_that_has_begun_is_waited_for(llm: LLM) -> None:
    ids = llm.tokenize("</think>", False)
    assert len(ids) > 2
    text = "a</think> the fox"
    budget = 2  # within the tag
    assert fed(llm, budget, text, "Say it.<think>") == (len(llm.tokenize(text, False)), "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_comes_behind_the_thought(llm: LLM, temperature: float) -> None:
    options: Any = {"temperature": temperature, "seed": 3, "max_tokens": 40, "ignore_eos": True}
    free = llm.chat(TURNS, template=OPEN, **options)
    assert "</think>" not in free.text
    made = llm.chat(TURNS, template=OPEN, thinking_budget=6, **options)
    thought, tag, rest = made.text.partition("</think>")
    assert tag
    assert rest.strip()
    assert made.token_ids[:6] == free.token_ids[:6]
    assert thought.strip() == llm.detokenize(free.token_ids[:6]).strip()


def test_drafts_and_structures_beside_it(llm: LLM) -> None:
    options: Any = {"template": OPEN, "thinking_budget": 6, "temperature": 0, "max_tokens": 40}
    assert llm.chat(TURNS, **options, service=quarrel.Service(speculate=4)).text == llm.chat(TURNS, **options).text
    shaped = llm.chat(TURNS, template=SAY, thinking_budget=0, structure=Structure.regex("[a-z]{4}"), max_tokens=9)
    assert len(shaped.text) == 4


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_a_wrong_budget_is_a_sentence(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="thinking_budget is"):
        llm.chat(TURNS, template=SAY, thinking_budget=wrong)
