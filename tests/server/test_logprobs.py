"""Log probabilities over HTTP: tokens as they stand in the text, and a prompt's own where it is echoed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quarrel.engine import TokenLogprob
from quarrel.llm import LLM
from quarrel.server.logprobs import LEAST, LogprobLists, chat_logprob
from tests.server.conftest import Live

PROMPT = "Once upon a time there was a king, na\u00efve \U0001f600"


def model(live: Live) -> LLM:
    live.client.post("/api/models/demo")
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    assert isinstance(loaded.llm, LLM)
    return loaded.llm


def complete(live: Live, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3, **more}
    answer = live.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_stand_where_their_offsets_say(live: Live, echo: bool) -> None:
    choice = complete(live, echo=echo)
    lists, text = choice["logprobs"], choice["text"]
    assert len({len(column) for column in lists.values()}) == 1
    first = 2 if echo else 0  # BOS, and a token with the space that stands before a whole text
    for token, at in list(zip(lists["tokens"], lists["text_offset"], strict=True))[first:]:
        assert token.startswith("bytes:") or text[at : at + len(token)] == token
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert any(t.startswith(" ") for t in lists["tokens"][-12:])
    assert (
        "".join(t for t in lists["tokens"][-12:] if not t.startswith("bytes:"))
        == text[-sum(map(len, lists["tokens"][-12:])) :]
    )


def test_a_chats_tokens_add_up_to_its_text(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "logprobs": True, "top_logprobs": 5}
    choice = live.client.post("/v1/chat/completions", json={**body, "temperature": 0}).json()["choices"][0]
    rows = choice["logprobs"]["content"]
    assert bytes(b for row in rows for b in row["bytes"]).decode() == choice["message"]["content"]
    assert any(row["token"].startswith(" ") for row in rows)
    for row in rows:
        assert len({top["token"] for top in row["top_logprobs"]}) == 5  # " a" is not "a"


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_an_echoed_prompt_has_its_own_logprobs(live: Live, max_tokens: int) -> None:
    llm = model(live)
    ids = llm.tokenize(PROMPT)
    known = llm.logprobs(ids, top=3)
    for prompt in (PROMPT, ids, [ids]):
        lists = complete(live, prompt=prompt, echo=True, max_tokens=max_tokens)["logprobs"]
        assert len(lists["tokens"]) == len(ids) + max_tokens
        assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
        assert lists["token_logprobs"][1 : len(ids)] == pytest.approx([e.logprob for e in known])
        for made, entry in zip(lists["top_logprobs"][1:], known, strict=False):
            assert max(made.values()) == pytest.approx(entry.top[0][1])
            assert any(value == pytest.approx(entry.logprob) for value in made.values())  # the token itself is there


def test_an_evaluation_harness_reads_a_continuation(live: Live) -> None:
    """As lm-evaluation-harness asks and reads: the prompt's tokens, the last one that was drawn left out."""
    llm = model(live)
    context, whole = "Once upon a", llm.tokenize("Once upon a time there was a king")
    start = len(llm.tokenize(context))
    asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}
    by_ids = complete(live, prompt=whole, **asked)["logprobs"]
    values, tops = by_ids["token_logprobs"][start:-1], by_ids["top_logprobs"][start:-1]
    wanted = llm.logprobs(whole, top=1)[start - 1 :]
    assert sum(values) == pytest.approx(sum(e.logprob for e in wanted))
    greedy = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
    assert greedy == [e.token_id == e.top[0][0] for e in wanted]
    by_text = complete(live, prompt=context + " time there was a king", **asked)["logprobs"]
    at = next(i for i, offset in enumerate(by_text["text_offset"]) if offset >= len(context))
    assert sum(by_text["token_logprobs"][at:-1]) == pytest.approx(sum(values))


def test_a_stream_has_the_same_lists(live: Live) -> None:
    for more in ({"n": 2, "seed": 5, "temperature": 1.0}, {"prompt": ["A king", PROMPT]}, {"max_tokens": 0}):
        body = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 2, "echo": True, "temperature": 0, **more}
        whole = live.client.post("/v1/completions", json=body).json()["choices"]
        lines = live.client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        rows = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        for choice in whole:
            mine = [r for r in rows if r["index"] == choice["index"]]
            assert "".join(r["text"] for r in mine) == choice["text"]
            for name, column in choice["logprobs"].items():
                assert [v for r in mine if r["logprobs"] for v in r["logprobs"][name]] == column


def test_what_json_cannot_hold_is_the_least_number(live: Live) -> None:
    llm = model(live)
    entry = TokenLogprob(5, float("-inf"), ((6, -0.1), (llm.tokenizer.n_vocab, float("-inf"))))
    assert chat_logprob(entry, llm)["logprob"] == LEAST
    lists = LogprobLists(llm).answer([entry])
    assert json.dumps(lists, allow_nan=False)
    assert LEAST in lists["top_logprobs"][0].values()
