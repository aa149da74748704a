"""Texts that go on past their context: the older half of what may go is left out, and the rest is read again.

llama.cpp turns the cache's keys to their new places instead, which is quicker and a little different from reading them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import cast

from quarrel.engine import AsyncStream, Chunk, Request, Result, Usage
from quarrel.server.dispatch import Generation, bursts
from quarrel.server.settings import Settings

SPARE = 4
"""Tokens of the context that are never kept."""


def followed(
    generation: Generation, which: int, settings: Settings, keep: int | None, *, stream: bool
) -> AsyncIterator[list[Chunk]]:
    """As `bursts`; with context shift, where the context is full before the request is, the text goes on.

    keep: tokens of the prompt that stay, its BOS not counted; below 0 all of it. stream: as the stream was submitted. What
    keeps to a grammar, or has alternatives or images, ends with the context.
    """
    request = generation.requests[which]
    if not settings.context_shift or request.guide is not None or request.params.n > 1 or request.sight is not None:
        return bursts(generation, which, settings.timeout)
    return _going_on(generation, which, settings.timeout, settings.keep if keep is None else keep, stream)


async def results_of(generation: Generation, settings: Settings, keep: int | None) -> list[Result]:
    """Every stream's result."""
    found = []
    for which in range(len(generation.streams)):
        async for burst in followed(generation, which, settings, keep, stream=False):
            found += [chunk.result for chunk in burst if chunk.result is not None][:1]
    return found


async def _going_on(
    generation: Generation, which: int, limit: float, keep: int, stream: bool
) -> AsyncIterator[list[Chunk]]:
    first = generation.requests[which]
    request, before = first, list[Result]()
    while True:
        async for burst in bursts(generation, which, limit):
            *others, last = burst
            result = last.result
            if result is None:
                yield burst
                continue
            further = _shifted(first, request, result, before, keep)
            if further is None:
                yield [*others, replace(last, result=_whole(first, [*before, result]))]
                return
            yield [*others, replace(last, result=None)]
            before.append(result)
            request = further
            streams = cast("list[AsyncStream]", generation.streams)  # the dispatcher's, which ends all of them
            streams[which] = generation.llm.submit(request, stream=stream)
            break
        else:
            return


def _shifted(first: Request, request: Request, result: Result, before: list[Result], keep: int) -> Request | None:
    """What is to be run next; None where the text has ended."""
    tokens = [*request.tokens, *result.token_ids]
    made = sum(len(r.token_ids) for r in (*before, result))
    most = first.params.max_tokens
    if result.finish_reason != "length" or len(tokens) < request.n_ctx or (most is not None and made >= most):
        return None
    kept = len(first.tokens) if keep < 0 else keep + 1
    kept = min(kept, len(first.tokens), max(0, request.n_ctx - SPARE))
    dropped = max(1, (len(tokens) - kept) // 2)
    params = replace(request.params, max_tokens=None if most is None else most - made)
    # Another seed, as random numbers belong to places, which come again.
    return replace(request, tokens=(*tokens[:kept], *tokens[kept + dropped :]), params=params, seed=request.seed + 1)


def _whole(first: Request, results: list[Result]) -> Result:
    """One result of all of them, with the first one's prompt."""
    last = results[-1]
    if len(results) == 1:
        return last
    logprobs = tuple(entry for r in results for entry in r.logprobs or ())
    return replace(
        last,
        text="".join(r.text for r in results),
        token_ids=tuple(id for r in results for id in r.token_ids),
        usage=Usage(len(first.tokens), sum(r.usage.completion_tokens for r in results), results[0].usage.cached_tokens),
        timings=replace(
            results[0].timings,
            decode=sum(r.timings.decode for r in results) + sum(r.timings.prefill for r in results[1:]),
            decode_tokens=sum(r.timings.decode_tokens + 1 for r in results) - 1,
        ),
        seed=first.seed,
        logprobs=logprobs if last.logprobs is not None else None,
    )
