"""A model as the command line loads and reports it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quarrel.cli.asked import adapters_of
from quarrel.cli.samplers import sampling_of
from quarrel.cli.terminal import progress, some
from quarrel.engine import Result, Sampling, SamplingParams, merged
from quarrel.errors import RequestError
from quarrel.llm import LLM, load

MAX_TEMPLATE = 4 << 20


@contextmanager
def opened(args: argparse.Namespace, model: str) -> Iterator[LLM]:
    """The model, loaded by the options under "loading", with a bar while its weights are packed."""
    with progress(f"loading {model}") as bar:
        llm = load(model, **load_options(args), progress=bar)
    with llm:
        yield llm


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options under "loading", and those under "beside the model" where a command has them, as `load` takes them."""
    beside = {"draft": args.draft, "adapters": adapters_of(args)} if hasattr(args, "draft") else {}
    return {
        "backend": args.backend,
        "compute": args.compute,
        "n_ctx": args.ctx,
        "memory": args.memory,
        "threads": args.threads,
        "kv_cache": args.kv_cache,
        "prefix_cache_bytes": args.prefix_cache_bytes,
        "attention": args.attention,
        "deterministic": args.deterministic,
        "tensor_parallel": args.tensor_parallel,
        "experts_on_cpu": args.experts_on_cpu,
        "rope_scaling": args.rope_scaling,
        "rope_scale": args.rope_scale,
        "yarn_orig_ctx": args.yarn_orig_ctx,
        **beside,
    }


def checked_sampling(args: argparse.Namespace) -> Sampling:
    """The sampling options, refused before a model is loaded for nothing."""
    sampling = sampling_of(args)
    merged(SamplingParams(), sampling)
    return sampling


def template_of(args: argparse.Namespace) -> str | None:
    """The chat template asked for: the text of a file, or a name."""
    given: str | None = args.chat_template
    if given is None or not Path(given).is_file():
        return given
    with Path(given).open("rb") as file:
        data = file.read(MAX_TEMPLATE + 1)
    if len(data) > MAX_TEMPLATE:
        raise RequestError(f"the chat template {given} is larger than {MAX_TEMPLATE >> 20} MiB; choose another file")
    return data.decode("utf-8", "replace")


def document(llm: LLM, result: Result) -> dict[str, Any]:
    """A result as JSON, with what made it."""
    made = llm.explain()
    head = {"model": made.model, "backend": made.backend, "device": made.device, "compute": made.compute}
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
    if result.alternatives:
        plain["alternatives"] = [_plain(other) for other in result.alternatives]
    return plain


def speeds(llm: LLM, result: Result) -> str:
    """What a person wants to know of a run, on one line."""
    usage, timings = result.usage, result.timings
    made = llm.explain()
    tokens = sum(r.usage.completion_tokens for r in (result, *result.alternatives))
    prompt = f"prompt {some(usage.prompt_tokens, 'token')}"
    if usage.cached_tokens:
        prompt += f" ({usage.cached_tokens} known)"
    if timings.prefill_rate:
        prompt += f" at {timings.prefill_rate:.1f}/s"
    answer = some(tokens, "token")
    if timings.decode_rate:
        answer += f" at {timings.decode_rate:.1f}/s"
    ends = {"length": "at the limit", "stop": "at its end", "cancelled": "cancelled", "error": "failed"}
    return f"[{made.model}, {made.backend}] {prompt}; {answer}, {ends[result.finish_reason]}; seed {result.seed}"
