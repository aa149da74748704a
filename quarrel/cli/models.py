"""A model as the command line loads and reports it."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from quarrel.cli.flags import load_options
from quarrel.cli.terminal import progress, some
from quarrel.engine import Result
from quarrel.llm import LLM, load_with


@contextmanager
def opened(args: argparse.Namespace, model: str) -> Iterator[LLM]:
    """The model, loaded as the command line says, with a bar while its weights are packed."""
    with progress(f"loading {model}") as bar:
        gc.disable()  # what is made until then stays
        try:
            llm = load_with(model, replace(load_options(args), progress=bar))
        finally:
            gc.enable()
    with llm:
        yield llm


def document(llm: LLM, result: Result) -> dict[str, Any]:
    """A result as JSON, with the model and backend."""
    e = llm.explain()
    head = {"model": e.model, "backend": e.backend, "device": e.device, "compute": e.compute}
    return {**head, **_plain(result)}


def _plain(result: Result) -> dict[str, Any]:
    rates = {"prefill_rate": result.timings.prefill_rate, "decode_rate": result.timings.decode_rate}
    plain: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stopped_by": result.stopped_by,
        "seed": result.seed,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "timings": {**asdict(result.timings), **rates},
    }
    if result.error is not None:
        plain["error"] = result.error
    if result.logprobs is not None:
        plain["logprobs"] = [asdict(entry) for entry in result.logprobs]
    plain |= {name: count for name in ("dropped", "shifted") if (count := getattr(result, name))}
    if result.alternatives:
        plain["alternatives"] = [_plain(other) for other in result.alternatives]
    return plain


def speeds(llm: LLM, result: Result) -> str:
    """What a person wants to know of a run, on one line."""
    usage, timings = result.usage, result.timings
    e = llm.explain()
    tokens = sum(r.usage.completion_tokens for r in (result, *result.alternatives))
    prompt = f"prompt {some(usage.prompt_tokens, 'token')}"
    if usage.cached_tokens:
        prompt += f" ({usage.cached_tokens} cached)"
    if timings.prefill_rate:
        prompt += f" at {timings.prefill_rate:.1f}/s"
    answer = some(tokens, "token")
    if timings.decode_rate:
        answer += f" at {timings.decode_rate:.1f}/s"
    if timings.guessed_tokens:
        answer += f", {timings.right_tokens} of {some(timings.guessed_tokens, 'drafted token')} right"
    ends = {"length": "at the limit", "stop": "at its end", "cancelled": "cancelled", "error": "failed"}
    return f"[{e.model}, {e.backend}] {prompt}; {answer}, {ends[result.finish_reason]}; seed {result.seed}"
