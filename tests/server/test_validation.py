"""A body that breaks its schema is told in one sentence: what, found, wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quarrel.server.body import parse_body
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.ollama_bodies import OllamaChat
from quarrel.server.response_bodies import ResponsesBody
from quarrel.server.schemas import ChatBody, CompletionBody, EmbeddingsBody

SENTENCES: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionBody, {}, "prompt is missing: the request needs it"),
    (CompletionBody, {"prompt": 5}, "prompt is 5, wanted a text or a list"),
    (CompletionBody, {"prompt": []}, "prompt has 0 entries, wanted at least 1"),
    (CompletionBody, {"prompt": ["a", 1]}, "prompt.1 is 1, wanted a text or a list"),
    (CompletionBody, {"prompt": ""}, "prompt has 0 characters, wanted at least 1"),
    (CompletionBody, {"prompt": ["a", ""]}, "prompt.1 has 0 characters, wanted at least 1"),
    (CompletionBody, {"prompt": [[1], []]}, "prompt.1 has 0 entries, wanted at least 1"),
    (CompletionBody, {"prompt": [[1], [1, "a"]]}, 'prompt.1.1 is "a", wanted a whole number'),
    (EmbeddingsBody, {"input": ""}, "input has 0 characters, wanted at least 1"),
    (EmbeddingsBody, {"input": [[1], [-1]]}, "input.1.0 is -1, wanted 0 or more"),
    (CompletionBody, {"prompt": "\ud800"}, 'prompt is "\\ud800", wanted a text in UTF-8'),
    (CompletionBody, {"prompt": "a", "temperature": -1}, "temperature is -1, wanted 0 or more"),
    (CompletionBody, {"prompt": "a", "temperature": "x" * 99}, f'temperature is "{"x" * 39}…, wanted a number'),
    (CompletionBody, {"prompt": "a", "typical_p": 0}, "typical_p is 0, wanted more than 0"),
    (CompletionBody, {"prompt": "a", "seed": 2**64}, f"seed is {2**64}, wanted less than {2**64}"),
    (CompletionBody, {"prompt": "a", "mirostat": 3}, "mirostat is 3, wanted at most 2"),
    (CompletionBody, {"prompt": "a", "stream": 1}, "stream is 1, wanted true or false"),
    (CompletionBody, {"prompt": "a", "stop": 5}, "stop is 5, wanted a text or a list"),
    (CompletionBody, {"prompt": "a", "stop": [""]}, "stop.0 has 0 characters, wanted at least 1"),
    (CompletionBody, {"prompt": "a", "stop": ["b"] * 17}, "stop has 17 entries, wanted at most 16"),
    (CompletionBody, {"prompt": "a", "stop": "b" * 300}, "stop has 300 characters, wanted at most 256"),
    (
        CompletionBody,
        {"prompt": "a", "logit_bias": {"-1": 1}},
        'logit_bias has the key "-1", wanted what matches ^[0-9]{1,10}$',
    ),
    (CompletionBody, {"prompt": "a", "logit_bias": {"1": 300}}, "logit_bias.1 is 300, wanted at most 100"),
    (ChatBody, {"messages": [5]}, "messages.0 is 5, wanted an object"),
    (ChatBody, {"messages": [{"content": "a"}]}, "messages.0.role is missing: the request needs it"),
    (ChatBody, {"messages": [{"role": "user", "content": {}}]}, "messages.0.content is an object, wanted a text or a list"),
    (ResponsesBody, {"input": "a", "previous_response_id": 5}, "previous_response_id is 5, wanted a text"),
    (
        ResponsesBody,
        {"input": [{"type": "zap"}]},
        "input.0.type is \"zap\", wanted 'message', 'function_call', 'function_call_output', 'reasoning' or"
        " 'item_reference'",
    ),
    (
        ChatBody,
        {"messages": [], "tool_choice": {"type": "function", "function": {"name": 5}}},
        "messages has 0 entries, wanted at least 1",
    ),
    (
        ChatBody,
        {"messages": [{"role": "user"}], "tool_choice": {"type": "function", "function": {"name": 5}}},
        "tool_choice.function.name is 5, wanted a text",
    ),
    (OllamaChat, {"keep_alive": [1]}, "keep_alive is a list, wanted a number"),
]


@pytest.mark.parametrize(("schema", "body", "sentence"), SENTENCES, ids=[s[:40] for _, _, s in SENTENCES])
def test_what_is_wrong_is_one_sentence(schema: type[Body], body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_body(json.dumps(body), schema)
    assert str(caught.value) == sentence
    assert sentence.startswith(str(caught.value.param))
