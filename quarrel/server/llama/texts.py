"""/apply-template and /embedding: what messages become, and vectors of texts."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.llama import chat
from quarrel.server.llama.bodies import ChatBody, EmbeddingBody, Words
from quarrel.server.llama.completion import prompt_ids
from quarrel.server.llama.table import Routes

MOST = 2048
"""Texts of one request."""


def routes(dispatcher: Dispatcher) -> Routes:
    """Both."""
    router = Routes()

    @router.post("/apply-template")
    async def apply_template(request: Request) -> Response:
        """The prompt that messages become."""
        body, headers = await read_body(request, ChatBody, dispatcher)
        messages, tools = [m.plain() for m in body.messages], None if body.tool_choice == "none" else body.tools

        def work(llm: Model) -> str:
            return llm.tokenizer.render_chat(
                messages,
                add_generation_prompt=body.add_generation_prompt is not False,
                tools=tools,
                template=dispatcher.settings.chat_template,
                kwargs=chat.variables(dispatcher.settings, body),
            )

        async with dispatcher.models.use(body.model) as (_, llm):
            prompt = await asyncio.to_thread(work, llm)
        return JSONResponse({"prompt": prompt}, headers=headers)

    async def embedding(request: Request) -> Response:
        """Vectors of texts, each in a list, as llama-server has them for models of one vector a text."""
        body, headers = await read_body(request, EmbeddingBody, dispatcher)
        given = body.content if body.content is not None else body.input
        if given is None:
            raise Refused(400, "invalid_request", '"input" or "content" must be provided')
        async with dispatcher.models.use(body.model) as (_, llm):
            made = await cancel_on_disconnect(request, embed(dispatcher, request, llm, given, body))
        rows = [{"index": i, "embedding": [[float(x) for x in v]]} for i, v in enumerate(made.vectors)]
        return JSONResponse(rows, headers=headers)

    for path in ("/embedding", "/embeddings"):
        router.post(path)(embedding)

    return router


def _several(given: Any) -> list[Any]:
    if isinstance(given, Words):
        return [given.text()]
    given = given if isinstance(given, str) else [g.text() if isinstance(g, Words) else g for g in given]
    if isinstance(given, str) or all(isinstance(x, int) for x in given):
        return [given]
    if any(isinstance(x, int) for x in given):
        return [given]
    if len(given) > MOST:
        raise Refused(400, "invalid_request", f"the input has {len(given)} entries, wanted up to {MOST}", param="input")
    return list(given)


async def embed(dispatcher: Dispatcher, request: Request, llm: Model, given: Any, body: EmbeddingBody) -> Any:
    """Vectors of what the body has."""
    texts = [t if isinstance(t, str) else prompt_ids(llm, t) for t in _several(given)]
    plain = body.embd_normalize is not None and body.embd_normalize < 0
    pooling: Any = dispatcher.settings.pooling or None
    if pooling == "none":
        text = "a vector for each token (--pooling none) is not made here: start the server with mean, cls or last"
        raise Refused(400, "unsupported", text, param="input")
    return await dispatcher.embed(request.state.caller, llm, texts, body.dimensions, pooling, normalize=not plain)
