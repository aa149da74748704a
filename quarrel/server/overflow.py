"""Conversations that are longer than the context, where a request says `overflow: summary`: the model sums up first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quarrel.engine import Request, Sampling, Service
from quarrel.llm import Model
from quarrel.llm.overflow import asking, summarised
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher, Prepare, results
from quarrel.server.reader import Reader, Reading

Message = Mapping[str, Any]


async def summed_up(
    dispatcher: Dispatcher, caller: str, model: str | None, where: str, messages: Sequence[Message], prepare: Prepare
) -> tuple[Sequence[Message], int]:
    """The messages with a summary in the place of those that do not fit, and how many these are.

    prepare: makes the request of `messages` as they are, which says how many it leaves out. where: the route. The summary
    is a generation of the caller's, with its place in the queue and its cost.
    """
    async with dispatcher.models.use(model) as (_, llm):
        dropped = (await asyncio.to_thread(prepare, llm, Service()))[0].dropped
        if not dropped:
            return messages, 0
        wanted, tokens = asking(messages, dropped, llm.n_ctx)

    def ask(llm: Model, service: Service) -> Sequence[Request]:
        template, options = dispatcher.settings.chat_template, Sampling(max_tokens=tokens, temperature=0.0)
        made = chat_request(llm, template, wanted, Reading(), service=service, overflow="shift", **options)
        readers.append(Reading().reader(llm, made.tokens))
        return [made]

    readers: list[Reader] = []
    async with dispatcher.admit(caller, model, ask, where, stream=False) as generation:
        (result,) = await results(generation, dispatcher.settings.timeout)
    return summarised(messages, dropped, readers[-1].push(result.text, last=True).text), dropped
