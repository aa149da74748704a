"""Prompts that are read for another process (`prefill.py`): what a cache then holds of them, in its memory or in pieces."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from quarrel.engine import Service
from quarrel.engine.saved import Array
from quarrel.errors import RequestError
from quarrel.llm.model import LLM

if TYPE_CHECKING:
    from quarrel.flight.segments import Borrower


class Pieces(list[Any]):
    """What was written to it, in order, not copied."""

    write = list.append


def read_prompt(llm: LLM, question: bytes, borrower: Borrower | None = None) -> Pieces:
    """Runs the prompt of a question, and returns what is known of it then, in pieces: none where it lies in the memory that
    the question names. Raises QuarrelError."""
    try:
        fields = json.loads(question)
        tokens, salt, adapter = fields["tokens"], fields["salt"], fields["adapter"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestError("the question is no prompt: both sides want the same version of Quarrel") from None
    with nullcontext() if borrower is None else borrower.borrow(fields.get("memory")) as memory:
        return _read(llm, tokens, salt, adapter, memory)


def _read(llm: LLM, tokens: list[int], salt: Any, adapter: Any, memory: Array | None) -> Pieces:
    service = Service(cache_salt=salt)
    if llm.prefixes.known(tokens, salt=salt, adapter=adapter) < len(tokens):
        llm.generate(tokens, max_tokens=1, temperature=0.0, ignore_eos=True, service=service, adapter=adapter)
    saved, identity = llm.prefixes.take(tokens, salt=salt, adapter=adapter, memory=memory)
    made = Pieces()
    if memory is None or not any(np.may_share_memory(memory, array) for array in (*saved.blocks, *saved.states)):
        saved.write(made, identity, check=False)
    return made
