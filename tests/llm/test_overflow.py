"""Conversations that are longer than the context: the oldest turns go, or a summary takes their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import quarrel
from quarrel.errors import ContextOverflow, RequestError
from quarrel.llm import LLM
from quarrel.llm.overflow import SINKS, asking, limit, shift_ids, shift_messages, summarised
from tests.tiny_model import CHATML, write_tiny_model

Message = dict[str, object]


def talk(turns: int, system: bool = True) -> list[Message]:
    """Turns of two messages, each one token long for `encode`."""
    made: list[Message] = [{"role": "system", "content": "s"}] if system else []
    for i in range(turns):
        made += [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]
    return [*made, {"role": "user", "content": "last"}]


def encode(messages: Sequence[Any]) -> list[str]:
    return [str(m["content"]) for m in messages]


@pytest.mark.parametrize(
    ("turns", "most", "kept", "dropped"),
    [
        (3, 8, ["s", "q0", "a0", "q1", "a1", "q2", "a2", "last"], 0),
        (3, 7, ["s", "q1", "a1", "q2", "a2", "last"], 2),
        (3, 3, ["s", "last"], 6),
        (3, 1, ["s", "last"], 6),
        (9, 19, ["s", *(f"{w}{i}" for i in range(4, 9) for w in "qa"), "last"], 8),
    ],
)
def test_the_system_message_and_the_newest_turns_stay(turns: int, most: int, kept: list[str], dropped: int) -> None:
    """Of nine turns, four go at once: what the next request leaves out is the same, and the cache has the rest."""
    assert shift_messages(talk(turns), encode, most) == (kept, dropped)


def test_a_call_goes_with_its_answer() -> None:
    turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "c"}, {"role": "tool", "content": "t"}]
    assert shift_messages([*turn, {"role": "assistant", "content": "a"}, *turn], encode, 4) == (["u", "c", "t"], 4)
    assert shift_messages(turn, encode, 1) == (["u", "c", "t"], 0), "a single turn stays as it is"


def test_of_a_text_the_first_tokens_and_the_newest_stay() -> None:
    ids, dropped = shift_ids(range(100), 10)
    assert list(ids) == [0, 1, 2, 3, 94, 95, 96, 97, 98, 99]
    assert (dropped, SINKS) == (90, 4)
    assert shift_ids(range(10), 10) == (range(10), 0)
    assert shift_ids(range(10), 3) == (range(10), 0), "too short a context for anything"


def test_room_is_left_for_the_answer() -> None:
    assert [limit(100, n) for n in (None, 10, 90, 0)] == [75, 90, 75, 99]


def test_a_summary_stands_before_the_first_question_that_stays() -> None:
    messages = talk(2)
    wanted, tokens = asking(messages, 2, 4096)
    assert encode(wanted)[:3] == ["s", "q0", "a0"]
    assert (wanted[-1]["role"], tokens) == ("user", 512)
    made = summarised(messages, 2, " short\n")
    assert encode(made) == ["s", "(A summary of our conversation before this: short)\n\nq1", "a1", "last"]
    parts = [{"type": "text", "text": "look"}]
    (first, _) = summarised([*talk(1, system=False)[:2], {"role": "user", "content": parts}, messages[-1]], 2, "x")
    assert isinstance(first["content"], list)
    assert first["content"][1:] == parts


@pytest.fixture(name="llm", scope="module")
def _llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "chatty.gguf", template=CHATML)
    with quarrel.load(str(path), backend="cpu", n_ctx=256) as llm:
        yield llm


LONG: list[Any] = [
    {"role": "system", "content": "brief"},
    *({"role": role, "content": "x" * 60} for _ in range(4) for role in ("user", "assistant")),
    {"role": "user", "content": "end"},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


def test_stop_is_the_default_and_shift_says_what_it_left_out(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match="the context holds 256"):
        llm.chat(LONG, **GREEDY)
    found = llm.chat(LONG, overflow="shift", **GREEDY)
    assert found.dropped > 0
    assert found.dropped % 2 == 0
    shorter = llm.chat([LONG[0], *LONG[1 + found.dropped :]], **GREEDY)
    assert (shorter.text, shorter.usage.prompt_tokens) == (found.text, found.usage.prompt_tokens)
    assert shorter.dropped == 0
    assert llm.chat(LONG[-1:], overflow="shift", **GREEDY).dropped == 0
    with pytest.raises(ContextOverflow):
        llm.chat([{"role": "user", "content": "x" * 400}], overflow="shift", **GREEDY)


def test_a_text_is_shortened_too(llm: LLM) -> None:
    found = llm.generate("x" * 400, overflow="shift", **GREEDY)
    assert found.usage.prompt_tokens == 248
    assert found.dropped == len(llm.tokenize("x" * 400)) - 248


def test_an_answer_goes_on_past_the_context(llm: LLM) -> None:
    messages: list[Any] = [{"role": "system", "content": "brief"}, {"role": "user", "content": "x" * 60}]
    shifts: dict[str, Any] = {"overflow": "shift", "temperature": 0.0}
    prompt = llm.prepare(messages=messages)
    made = llm.chat(messages, **shifts, max_tokens=400)
    assert (made.usage.completion_tokens, made.finish_reason, made.dropped) == (400, "length", 0)
    assert made.shifted > 400 + len(prompt.tokens) - 256 - 100
    # What stays are the system message and the head of what follows it.
    kept = llm.prepare(messages=messages, **shifts).keep
    assert llm.detokenize(prompt.tokens[:kept], False).endswith("brief<|im_end|> \n<|im_start|> user\n")
    tokens = [*prompt.tokens, *made.token_ids][:256]
    again = [*tokens[:kept], *tokens[kept + (256 - kept) // 2 :]]
    at = 256 - len(prompt.tokens)
    assert llm.generate(again, temperature=0.0, max_tokens=20).token_ids == made.token_ids[at : at + 20]
    # Without a limit of its own it has the context's.
    assert llm.generate("x", **shifts, max_tokens=None).usage.completion_tokens == 256
    assert llm.chat(messages, temperature=0.0).shifted == llm.generate("x" * 99, temperature=0.0).shifted == 0
    with pytest.raises(RequestError, match="keep is -2, wanted a count of tokens"):
        llm.generate("x", keep=-2)


def test_a_summary_is_the_models_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = LLM.prepare

    def prepare(self: LLM, *args: Any, **keywords: Any) -> Any:
        seen.append([str(m["content"]) for m in keywords["messages"]])
        return real(self, *args, **keywords)

    monkeypatch.setattr(LLM, "prepare", prepare)
    found = llm.chat(LONG, overflow="summary", **GREEDY)
    whole, asked, summed = seen
    assert len(whole) == 10
    assert asked[-1].startswith("Summarise our conversation so far")
    assert summed[0] == "brief"
    assert summed[1].startswith("(A summary of our conversation before this: ")
    assert found.dropped >= len(asked) - 2 > 0


def test_a_wrong_word_is_one_sentence(llm: LLM) -> None:
    with pytest.raises(RequestError, match="overflow is 'drop', wanted one of stop, shift, summary"):
        llm.chat(LONG, overflow="drop", **GREEDY)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="sums up messages"):
        llm.generate("x", overflow="summary", **GREEDY)
