"""Chat templates of a file, and what a caller may put into them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from quarrel.errors import RequestError, TokenizerError
from quarrel.gguf import Metadata
from quarrel.tokenizer.special import Trust
from quarrel.tokenizer.templates import BUILTIN_TEMPLATES

if TYPE_CHECKING:
    from quarrel.tokenizer.renderer import Renderer

KEY: Final = "tokenizer.chat_template"
# Templates make tokens of roles ('<|' + role + '|>'), so a role must be one of those that models are trained on.
ROLES: Final = (
    "system",
    "developer",
    "user",
    "assistant",
    "model",
    "tool",
    "function",
    "ipython",
    "tool_call",
    "tool_response",
    "assistant_tool_call",
    "available_tools",
    "documents",
    "document",
    "observation",
)
MAX_MESSAGES: Final = 10_000
MAX_KWARGS: Final = 16
MAX_KWARG_CHARS: Final = 1024
RESERVED: Final = (
    *("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"),
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
    *("raise_exception", "strftime_now", "range", "dict", "namespace", "cycler", "joiner", "loop", "self", "super"),
)
CONTINUES: Final = "continue_final_message"
_KWARG: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


class ChatTemplates:
    """The file's template, its named variants (tokenizer.chat_template.NAME), and the built-in ones."""

    def __init__(self, metadata: Metadata, control_texts: Mapping[str, str]) -> None:
        self.default = metadata.str(KEY, None)
        self.named = {key.removeprefix(KEY + "."): metadata.str(key) for key in metadata if key.startswith(KEY + ".")}
        self._control_texts = dict(control_texts)

    @cached_property
    def _renderer(self) -> Renderer:
        from quarrel.tokenizer.renderer import Renderer  # only here: texts that are no chat need no process

        return Renderer()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[tuple[str, Trust]]:
        """The chat's text in runs, each with who wrote it; `template` is Jinja.

        With the variable `continue_final_message` the last message, which is the assistant's, begins the answer.
        """
        further, begun = _checked_kwargs(kwargs or {}), list[tuple[str, Trust]]()
        checked = _checked_messages(messages)
        if further.pop(CONTINUES, False) is True:
            checked, begun = checked[:-1], [(_beginning(checked), Trust.CONTENT)]
        variables = {
            **further,
            "messages": checked,
            "add_generation_prompt": bool(add_generation_prompt or begun),
            "tools": _checked_objects("tools", tools),
            "documents": _checked_objects("documents", documents),
        }
        return [*self._renderer.render(template, variables, self._control_texts), *begun]

    def greet(self) -> list[tuple[str, Trust]]:
        """A greeting by the file's template. Raises TokenizerError where it cannot be rendered."""
        template = self.choose(None)
        try:
            return self.render(template, [{"role": "user", "content": "Hello"}], True)
        except RequestError as error:
            raise TokenizerError(f"the chat template cannot render a greeting: {error}") from None

    def choose(self, name: str | None, with_tools: bool = False) -> str:
        """The Jinja text behind a name; without a name the file's own."""
        if name is None and with_tools and "tool_use" in self.named:
            return self.named["tool_use"]
        if name is None:
            if self.default is None:
                known = f"{', '.join(BUILTIN_TEMPLATES)}, or a Jinja text"
                raise RequestError(
                    f"the model file has no chat template: choose one by template= or --chat-template, of {known}"
                )
            return self.default
        if "{{" in name or "{%" in name:
            return name
        if name in self.named:
            return self.named[name]
        if name in BUILTIN_TEMPLATES:
            return BUILTIN_TEMPLATES[name]
        known = ", ".join([*self.named, *BUILTIN_TEMPLATES])
        raise RequestError(f"there is no chat template {name[:80]!r}, wanted {known}, or a Jinja text")


def _checked_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    checked = _checked_objects("messages", messages)
    if not checked:
        raise RequestError("there are no messages, wanted at least one")
    if len(checked) > MAX_MESSAGES:
        raise RequestError(f"there are {len(checked)} messages, wanted at most {MAX_MESSAGES}")
    for at, message in enumerate(checked):
        if message.get("role") not in ROLES:
            found = repr(message.get("role"))[:80]
            raise RequestError(f"messages[{at}] has the role {found}, wanted one of {', '.join(ROLES)}")
    return checked


def _checked_objects(what: str, values: Sequence[Mapping[str, object]] | None) -> list[dict[str, object]] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        such = """ such as [{"role": "user", "content": "Hello"}]""" if what == "messages" else ""
        raise RequestError(f"{what} is a {type(values).__name__}, wanted a list{such}")
    for at, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{what}[{at}] is a {type(value).__name__}, wanted an object")
    return [dict(value) for value in values]


def _beginning(messages: Sequence[Mapping[str, object]]) -> str:
    """The text of the last message, which an answer goes on from."""
    content, role = messages[-1].get("content"), messages[-1].get("role")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None for p in parts]
    if len(messages) < 2 or role != "assistant" or not all(isinstance(text, str) for text in texts):
        found = "the only one" if len(messages) < 2 else f"of the {role}" if role != "assistant" else "no text"
        wanted = "a text of the assistant behind others"
        raise RequestError(f"{CONTINUES} is true and the last message is {found}, wanted {wanted}", "messages")
    return "\n\n".join(str(text) for text in texts)


def _checked_kwargs(kwargs: Mapping[str, object]) -> dict[str, object]:
    if len(kwargs) > MAX_KWARGS:
        raise RequestError(f"there are {len(kwargs)} template arguments, wanted at most {MAX_KWARGS}")
    for name, value in kwargs.items():
        if not isinstance(name, str) or _KWARG.fullmatch(name) is None or name in RESERVED:
            raise RequestError(f"a template argument cannot be called {str(name)[:80]!r}")
        try:
            length = len(value) if isinstance(value, str) else len(json.dumps(value, allow_nan=False, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            message = (
                f"the template argument {name} is a {type(value).__name__} that JSON cannot hold, wanted a value of JSON"
            )
            raise RequestError(message) from None
        if length > MAX_KWARG_CHARS:
            raise RequestError(f"the template argument {name} has {length} characters, wanted at most {MAX_KWARG_CHARS}")
    return dict(kwargs)
