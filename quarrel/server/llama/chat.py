"""/v1/chat/completions as llama-server answers it: OpenAI's form, with timings and with logprobs by id."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.engine import Chunk, Result, Service
from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher, Generation, answer_stream, bursts, cancel_on_disconnect, results
from quarrel.server.errors import Refused, llama_body
from quarrel.server.lines import DONE, SSE
from quarrel.server.lines import event as line
from quarrel.server.llama.bodies import ChatBody
from quarrel.server.llama.completion import biases_of, check_room, final, keep_of, probability, service_of
from quarrel.server.llama.lora import Lora
from quarrel.server.llama.media import with_files
from quarrel.server.llama.progress import Progress, timings
from quarrel.server.llama.slots import Slots
from quarrel.server.llama.table import Routes
from quarrel.server.openai import FINGERPRINT, _Chat, _usage
from quarrel.server.settings import Settings

Json = dict[str, Any]


def routes(dispatcher: Dispatcher, slots: Slots, lora: Lora) -> Routes:
    """Chat."""
    router = Routes()

    async def chat(request: Request) -> Response:
        """The next message of a conversation."""
        body, headers = await read_body(request, ChatBody, dispatcher)
        return await _answer(dispatcher, slots, lora, request, body, headers)

    async def count(request: Request) -> Response:
        """How many tokens a conversation's prompt has."""
        body, headers = await read_body(request, ChatBody, dispatcher)
        await asyncio.to_thread(with_files, body.messages, dispatcher.settings.media_path)
        messages, reading = [m.plain() for m in body.messages], body.reading()

        def work(llm: Model) -> int:
            more: Any = {"effort": body.reasoning_effort, "template_kwargs": variables(dispatcher.settings, body)}
            return len(chat_request(llm, dispatcher.settings.chat_template, messages, reading, **more).tokens)

        async with dispatcher.models.use(body.model) as (_, llm):
            tokens = await asyncio.to_thread(work, llm)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens}, headers=headers)

    for path in ("/v1/chat/completions", "/chat/completions"):
        router.post(path)(chat)
        router.post(f"{path}/input_tokens")(count)
    return router


def variables(settings: Settings, body: ChatBody) -> Json:
    """What llama-server tells templates, before what the request does: whether to think, the day, and the tools as JSON."""
    made: Json = {form: time.strftime(text) for form, text in (("date_string", "%d %b %Y"), ("datetime", "%b %d %Y"))}
    made["functions"] = json.dumps(body.tools, indent=2) if body.tools else ""  # Firefunction's templates have no `tools`
    effort = body.reasoning_effort
    made["enable_thinking"] = settings.thinking if effort is None else effort != "none"
    return made | body.variables()


async def _answer(
    dispatcher: Dispatcher, slots: Slots, lora: Lora, request: Request, body: ChatBody, headers: dict[str, str]
) -> Response:
    await asyncio.to_thread(with_files, body.messages, dispatcher.settings.media_path)
    messages = [m.plain() for m in body.messages]
    reading = body.reading()
    options: Any = {"max_tokens": None, **(dispatcher.settings.sampling or {}), **body.sampling()}
    structure, adapter = body.structure(), body.adapter or lora.chosen(body.lora)
    if structure is not None:
        options.pop("ignore_eos", None)

    def prepare(llm: Model, service: Service) -> Sequence[Any]:
        biased: Any = {**options, "logit_bias": biases_of(llm, body.logit_bias)} if body.logit_bias else options
        made = chat_request(
            llm,
            dispatcher.settings.chat_template,
            messages,
            reading,
            effort=body.reasoning_effort,
            template_kwargs=variables(dispatcher.settings, body),
            service=service_of(service, body),
            structure=structure,
            adapter=adapter,
            keep=keep_of(dispatcher.settings, body.n_keep),
            thinking_budget=body.thinking_budget,
            **biased,
        )
        check_room(len(made.tokens), made.n_ctx)
        return [made]

    form, stream, n = _Chat(reading), bool(body.stream), body.n or 1
    admission = dispatcher.admit(request.state.caller, body.model, prepare, request.url.path, stream=stream)
    head: Json = {"created": int(time.time()), "id": "chatcmpl-" + secrets.token_hex(16)}

    def named(generation: Generation) -> Json:
        return {**head, "model": generation.model, "system_fingerprint": FINGERPRINT}

    if not stream:

        def whole(generation: Generation, found: list[Result]) -> Json:
            listed = [r for first in found for r in (first, *first.alternatives)]
            choices = [form.choice(r, i, generation) for i, r in enumerate(listed)]
            for choice, result in zip(choices, listed, strict=True):
                if result.logprobs is not None:
                    choice["logprobs"] = {"content": [probability(e, generation.llm) for e in result.logprobs]}
            more = {"object": "chat.completion", "usage": _usage(listed, n), "timings": timings(listed[0])}
            if dispatcher.settings.verbose if body.verbose is None else body.verbose:
                more["__verbose"] = final(listed[0], 0, generation, -1)
            return {"choices": choices, **named(generation), **more}

        async def work() -> Json:
            async with admission as generation:
                with slots.taken(generation, body.id_slot):
                    found = await results(generation, dispatcher.settings.timeout)
                return whole(generation, found)

        return JSONResponse(await cancel_on_disconnect(request, work()), headers=headers)

    with_usage = body.stream_options is not None and body.stream_options.include_usage

    async def events(generation: Generation) -> AsyncIterator[str]:
        def event(index: int, delta: Json, **more: Any) -> str:
            choice = {"finish_reason": more.pop("finish_reason", None), "index": index, "delta": delta}
            if "logprobs" in more:
                choice["logprobs"] = more.pop("logprobs")
            return line({"choices": [choice], **named(generation), "object": "chat.completion.chunk", **more})

        begun: set[int] = set()
        progress = Progress(generation, 0, timed=bool(body.timings_per_token))
        ended: list[Result] = []
        with slots.taken(generation, body.id_slot):
            async for burst in bursts(generation, 0, dispatcher.settings.timeout):
                rows = []
                for chunk in burst:
                    if chunk.read:
                        begun.add(chunk.index)
                        for report in progress.reports(chunk):
                            rows.append(event(chunk.index, {"role": "assistant", "content": None}, **report))
                        continue
                    more = {**_logprobs(chunk, generation), **progress.with_token(chunk)}
                    deltas: list[Json] = []
                    if chunk.index not in begun:
                        begun.add(chunk.index)
                        deltas.append({"role": "assistant", "content": None})
                    made = form.delta(chunk, chunk.index, generation)
                    delta = {k: v for k, v in made["delta"].items() if k != "role" and v != ""}
                    if thought := delta.pop("reasoning_content", None):
                        deltas.append({"reasoning_content": thought})
                    if delta or (more and not deltas):
                        deltas.append(delta)
                    for delta in deltas:
                        rows.append(event(chunk.index, delta, **(more if delta is deltas[-1] else {})))
                    if chunk.result is not None:
                        ended.append(chunk.result)
                        last = {"finish_reason": made["finish_reason"], "timings": timings(chunk.result)}
                        rows.append(event(chunk.index, {}, **last))
                yield "".join(rows)
        if with_usage:
            more = {"usage": _usage(ended, n), "timings": timings(min(ended, key=lambda r: r.usage.cached_tokens))}
            yield line({"choices": [], **named(generation), "object": "chat.completion.chunk", **more})
        yield DONE

    def failure(error: Refused) -> str:
        return line(llama_body(error))

    return await answer_stream(admission, events, failure, "text/event-stream", {**SSE, **headers})


def _logprobs(chunk: Chunk, generation: Generation) -> Json:
    if chunk.logprob is None:
        return {}
    return {"logprobs": {"content": [probability(chunk.logprob, generation.llm)]}}
