"""A conversation as the model's template takes it: the one way from messages to a prompt, for every protocol."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quarrel.engine import Request
from quarrel.llm import Model
from quarrel.server.formats import Call, written
from quarrel.server.reader import Reading
from quarrel.server.variants import PLAIN, chat_template

Json = dict[str, Any]
Effort = bool | str | None
"""Whether to think, or how much of it: none, minimal, low, medium, high, xhigh, max. None: as the template has it."""
_TOOLS = re.compile(r"\btools\b")
# DeepSeek's templates put the text of arguments between others; nearly all else write an object as JSON.
_TEXTS = re.compile(r"arguments['\"]?\]?\s*(\+|~|-?\}\})")
_EITHER = re.compile(r"arguments['\"]?\]?\s*(is\s+(not\s+)?(string|mapping)|\|\s*(tojson|items))|arguments\.items")
_NINE = re.compile(r"length\s*!=\s*9")
"""Mistral's want ids of nine characters."""
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_TEACHES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def chat_request(
    llm: Model,
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    reading: Reading,
    *,
    effort: Effort = None,
    template_kwargs: Mapping[str, object] | None = None,
    **options: Any,
) -> Request:
    """A request to answer messages. template: in place of the model's own. options: as `LLM.prepare` takes them."""
    chosen = chat_template(llm, template)
    text = llm.tokenizer.template_text(chosen, bool(reading.tools))
    tools = list(reading.tools or ())
    fitted = [_fitted(message, text) for message in messages]
    if tools and text != PLAIN and not _TOOLS.search(text):
        fitted, tools = _taught(fitted, tools, text), []
    kwargs = {**thinking(effort, text), **(template_kwargs or {})}
    options |= {"template": chosen, "template_kwargs": kwargs or None, "tools": tools or None, "names": reading.names}
    return llm.prepare(messages=fitted, **options)


def thinking(effort: Effort, template: str) -> dict[str, bool | str]:
    """The variables that tell templates so; of the levels, one that the template may know."""
    if effort is None:
        return {}
    thinks = effort not in (False, "none")
    made: dict[str, bool | str] = {"enable_thinking": thinks, "thinking": thinks}
    level = effort if isinstance(effort, str) else "none" if not thinks else None
    if level is not None:
        known = f"'{level}'" in template or f'"{level}"' in template
        made["reasoning_effort"] = level if known else _NEAREST.get(level, level)
    return made


def _fitted(message: Mapping[str, Any], template: str) -> Json:
    """Arguments of calls as the template wants them, an object or its JSON, and ids of the length that it wants."""
    made = dict(message)
    if made.get("reasoning_content"):
        made["thinking"] = made["reasoning_content"]  # gpt-oss' word for it
    short = _NINE.search(template) is not None
    if short and isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = _nine(made["tool_call_id"])
    if made.get("tool_calls"):
        as_text = _TEXTS.search(template) is not None and _EITHER.search(template) is None
        made["tool_calls"] = [_call(call, as_text, short) for call in made["tool_calls"]]
    return made


def _call(call: Mapping[str, Any], as_text: bool, short: bool) -> Json:
    made, function = dict(call), dict(call["function"])
    arguments = function.get("arguments")
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {})
    elif not as_text and (arguments is None or isinstance(arguments, str)):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            function["arguments"] = found
    if short and isinstance(made.get("id"), str):
        made["id"] = _nine(made["id"])
    return {**made, "function": function}


def _nine(id: str) -> str:
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _taught(messages: Sequence[Json], tools: Sequence[Mapping[str, Any]], template: str) -> list[Json]:
    """For a template that knows nothing of tools: what there is and how to call it, said to the model in Hermes' way."""
    lesson = _TEACHES.format("\n".join(json.dumps(tool) for tool in tools))
    made: list[Json] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if isinstance(content, list):  # with images
            made.append({"role": role, "content": content})
            continue
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        calls = [
            Call(f["name"], given if isinstance(given := f.get("arguments"), str) else json.dumps(given or {}))
            for call in message.get("tool_calls") or ()
            if isinstance(f := call.get("function"), dict)
        ]
        if calls:
            content = "\n".join([*([content] if content else []), written("hermes", calls)])
        if (
            made and role == "user" == made[-1]["role"] and isinstance(made[-1]["content"], str)
        ):  # templates want them in turn
            made[-1]["content"] += f"\n{content}"
        else:
            made.append({"role": role, "content": content})
    first = made[0]
    if isinstance(first["content"], list):
        first["content"] = [{"type": "text", "text": f"{lesson}\n\n"}, *first["content"]]
        return made
    if first["role"] == "system" or "system" not in template or "not supported" in template:
        first["content"] = (
            f"{first['content']}\n\n{lesson}" if first["role"] == "system" else f"{lesson}\n\n{first['content']}"
        )
        return made
    return [{"role": "system", "content": lesson}, *made]
