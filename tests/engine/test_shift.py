"""Texts that go on past the end of their context: with their first tokens and the newer half of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quarrel.engine import Chunk, Result, SamplingParams, Service, Stream, merged, start
from tests.engine.toys import BlockStep, HistoryStep, Toy, extend, letter, limits, request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
N_CTX = 24


def begin(toy: Toy, keep: int | None, *, service: Service = Service(), **options: Any) -> Stream:  # noqa: B008
    made = request(PROMPT, merged(GREEDY, options), n_ctx=N_CTX, service=service, drafts=toy.drafts)  # type: ignore[arg-type]
    return start(toy.loop, replace(made, keep=keep), stream=True)


def expected(toy: Toy, kept: int, count: int) -> tuple[list[int], int]:
    """What a model says that always takes the best token, and how many tokens it leaves out."""
    tokens, said, out = list(PROMPT), list[int](), 0
    while len(said) < count:
        if len(tokens) == N_CTX:
            gone = (N_CTX - kept) // 2
            del tokens[kept : kept + gone]
            out += gone
        history = 0
        for token in tokens:
            history = extend(history, token)
        said.append(int(toy.step.logits(history, tokens[-1]).argmax()))
        tokens.append(said[-1])
    return said, out


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"late": True},
    "recurrent": {"recurrent": True, "shape": limits(n_states=12)},
    "nothing-kept": {"reuse": False},
    "draft": {"draft": lambda: HistoryStep(limits())},
    "block": {"draft": lambda: BlockStep(limits())},
    "short-of-blocks": {"shape": limits(n_blocks=8, max_seqs=2)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keep", [0, 4, 99])
def test_the_rest_is_read_again(way: str, keep: int) -> None:
    """Twice at once, with guesses from the text itself in the second."""
    with Toy(**WAYS[way]) as toy:
        both = [begin(toy, keep), begin(toy, keep, service=Service(speculate=4))]
        for stream in both:
            said, out = expected(toy, min(keep, len(PROMPT)), 100)
            chunks: list[Chunk] = list(stream)
            result = chunks[-1].result
            assert result is not None
            assert (list(result.token_ids), result.shifted) == (said, out)
            assert result.text == "".join(map(letter, said)) == "".join(c.text for c in chunks)
            assert [c.token_id for c in chunks] == said
            assert (result.finish_reason, result.usage.prompt_tokens, result.usage.completion_tokens) == ("length", 8, 100)
            assert result.timings.prefill_tokens <= len(PROMPT)
        toy.assert_all_returned()


def test_without_it_a_text_ends_with_its_context() -> None:
    with Toy() as toy:
        result = begin(toy, None).wait()
        assert (result.usage.total_tokens, result.finish_reason, result.shifted) == (N_CTX, "length", 0)
        assert begin(toy, 4, max_tokens=N_CTX - 8).wait().shifted == 0  # it ends where the context does


SAMPLED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2, "penalty_last_n": 12},
    {"mirostat": 2},
    {"dry_multiplier": 1.0},
    {"logprobs": 2, "min_tokens": 40},
    {"n": 3},
]


@pytest.mark.parametrize("options", SAMPLED, ids=lambda o: "-".join(o) or "sampled")
def test_what_is_drawn_does_not_depend_on_drafts_or_haste(options: dict[str, Any]) -> None:
    """And is not drawn with the numbers of before, which would make it say the same again."""
    found: list[Result] = []
    for way in ({}, {"late": True}, {"reuse": False}):
        with Toy(**way) as toy:
            made = {"temperature": 1.0, "seed": 5, "max_tokens": 60, **options}
            found.append(begin(toy, 4, service=Service(speculate=3 * bool(way)), **made).wait())
            toy.assert_all_returned()
    first, *others = found
    for result in (first, *first.alternatives):
        assert (len(result.token_ids), result.seed, result.shifted) == (60, result.seed, 50)
        assert result.logprobs is None or len(result.logprobs) == 60
    for other in others:
        assert [r.token_ids for r in (other, *other.alternatives)] == [r.token_ids for r in (first, *first.alternatives)]
    assert first.seed == 5
    assert first.token_ids[20:30] != first.token_ids[30:40] != first.token_ids[40:50]


def test_it_is_cancelled_and_fails_as_others_do() -> None:
    with Toy(late=True) as toy:
        stream = begin(toy, 4, max_tokens=None)
        for _ in range(70):
            next(stream)
        stream.cancel()
        result = stream.wait()
        assert result.finish_reason == "cancelled"
        assert len(result.token_ids) >= 70
        broken = begin(toy, 4, max_tokens=None)
        for _ in range(50):
            next(broken)
        toy.step.fail = RuntimeError("device")
        assert broken.wait().finish_reason == "error"
        toy.step.fail = None
        toy.assert_all_returned()
