"""Prompts that are read for another process (`prefill.py`): what a cache then holds of them, in pieces."""

from __future__ import annotations

import json
from typing import Any

from quarrel.engine import Service
from quarrel.errors import RequestError
from quarrel.llm.model import LLM


class Pieces(list[Any]):
    """What was written to it, in order, not copied."""

    write = list.append


def read_prompt(llm: LLM, question: bytes) -> Pieces:
    """Runs the prompt of a question, and returns what is known of it then, in pieces. Raises QuarrelError."""
    try:
        fields = json.loads(question)
        tokens, salt, adapter = fields["tokens"], fields["salt"], fields["adapter"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestError("the question is no prompt: both sides want the same version of Quarrel") from None
    service = Service(cache_salt=salt)
    if llm.prefixes.known(tokens, salt=salt, adapter=adapter) < len(tokens):
        llm.generate(tokens, max_tokens=1, temperature=0.0, ignore_eos=True, service=service, adapter=adapter)
    saved, identity = llm.prefixes.take(tokens, salt=salt, adapter=adapter)
    made = Pieces()
    saved.write(made, identity, check=False)
    return made
