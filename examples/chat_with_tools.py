"""A conversation in which the model calls a function of ours and then answers with what came back."""

from __future__ import annotations

import json
import sys

from serving import serving

try:
    import openai
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
except ImportError:
    sys.exit("needs OpenAI's client: pip install openai")

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Bergen", "Oslo"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def weather(town: str) -> str:
    return {"Bergen": "rain", "Oslo": "snow"}[town]


with (
    serving(sys.argv[1] if len(sys.argv) > 1 else "demo") as url,
    openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
):
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Bergen?"}]
    asked = client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=100, seed=1
    )
    (call, *_) = asked.choices[0].message.tool_calls or ()
    assert call.type == "function"
    found = weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) = {found}")
    messages.append({"role": "assistant", "tool_calls": [call.to_dict()]})  # type: ignore[misc, list-item]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=24, seed=1)
    print(answer.choices[0].message.content)
