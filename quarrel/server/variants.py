"""Further names of models, and what is said to a model by such a name: what Ollama's Modelfile has beside FROM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from quarrel.engine import Request, Sampling, SamplingParams, merged
from quarrel.llm import Model
from quarrel.llm.requests import Message, Prompt

PLAIN = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""The chat template of a model that has none: texts that it goes on with."""
GO_PLAIN = "{{ .Prompt }}"
"""The same in the language of Ollama's templates."""
_GO = re.compile(r"\{\{-?\s*[.$]|\{\{-?\s*(if|range|with|else|end|block|define)\b")


def is_go_template(text: str) -> bool:
    """Whether a chat template is of the kind that Ollama writes, and not Jinja."""
    return _GO.search(text) is not None


@dataclass(frozen=True)
class Prompting:
    """What goes before and with every request of a name."""

    system: str | None = None
    template: str | None = None
    """A chat template in place of the file's."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The beginning of every conversation."""
    adapter: str | None = None
    """Of requests that name none."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """In Ollama's words, as they were given."""
    sampling: Sampling = field(default_factory=lambda: Sampling())
    """Those that requests understand."""
    license: str = ""

    def of(self, llm: Model) -> Model:
        """The model as requests of the name see it."""
        return cast("Model", _Prompted(llm, self)) if self != Prompting(license=self.license) else llm


class _Prompted:
    """A model whose requests begin with what a name says; whatever a request says itself comes first."""

    def __init__(self, llm: Model, prompting: Prompting) -> None:
        self._llm, self.prompting = llm, prompting
        self.defaults = merged(llm.defaults, prompting.sampling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def prepare(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        **keywords: Any,
    ) -> Request:
        own = self.prompting
        if messages is not None and isinstance(messages, list):
            messages = [*own.messages, *messages]
            if own.system and not any(m.get("role") == "system" for m in messages):
                messages = [{"role": "system", "content": own.system}, *messages]
        if keywords.get("adapter") is None and own.adapter is not None:
            keywords["adapter"] = own.adapter
        if keywords.get("max_tokens", 0) is None and "max_tokens" in own.sampling:
            del keywords["max_tokens"]  # which a request that names no limit says
        return self._llm.prepare(prompt, messages=messages, params=params or self.defaults, **keywords)


def chat_template(llm: Model, wanted: str | None) -> str | None:
    """In place of the file's own template: the server's, the name's, or a plain one where there is none at all."""
    if wanted is None and isinstance(llm, _Prompted):
        wanted = llm.prompting.template
    return wanted or (None if llm.tokenizer.chat_template is not None else PLAIN)
