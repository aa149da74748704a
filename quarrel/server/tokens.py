"""/tokenize, /detokenize and /tokenizer_info, as vLLM and llama-server have them: evaluation harnesses count by these."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import JSONResponse, Response

from quarrel.llm import Model
from quarrel.server.body import body_of, read_body
from quarrel.server.conversation import chat_request
from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.fields import Body, Text
from quarrel.server.messages import ChatMessage
from quarrel.server.reader import Reading

Json = dict[str, Any]


class TokenizeBody(Body):
    """A text in vLLM's word or llama-server's, or messages."""

    model: StrictStr | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: StrictBool | None = None
    add_special: StrictBool | None = None
    parse_special: StrictBool = True
    return_token_strs: StrictBool = False


class DetokenizeBody(Body):
    model: StrictStr | None = None
    tokens: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=1 << 20)]


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The three routes."""
    router = APIRouter()

    @router.post("/tokenize", **body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The ids of a text, with what the vocabulary puts around it where its callers expect that, or of messages."""
        body, headers = await read_body(request, TokenizeBody, dispatcher)
        given = [x for x in (body.prompt, body.content, body.messages) if x is not None]
        if len(given) != 1:
            text = f"{len(given)} of prompt, content and messages are given, wanted one"
            raise Refused(400, "invalid_request", text, param="prompt")
        special = body.add_special_tokens if body.prompt is not None else body.add_special
        # vLLM's callers get a BOS unless they say otherwise, and llama-server's only if they do.
        special = body.prompt is not None if special is None else special

        def work(llm: Model) -> list[int]:
            if body.messages is not None:
                messages = [m.plain() for m in body.messages]
                return list(chat_request(llm, dispatcher.settings.chat_template, messages, Reading()).tokens)
            return llm.tokenize(body.prompt or body.content or "", special, body.parse_special)

        async with dispatcher.models.use(body.model) as (_, llm):
            ids = await asyncio.to_thread(work, llm)
        row: Json = {"count": len(ids), "max_model_len": llm.n_ctx, "tokens": ids}
        row["token_strs"] = [llm.tokenizer.token_text(id) for id in ids] if body.return_token_strs else None
        return JSONResponse(row, headers=headers)

    @router.post("/detokenize", **body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of ids, with the names of control tokens."""
        body, headers = await read_body(request, DetokenizeBody, dispatcher)
        async with dispatcher.models.use(body.model) as (_, llm):
            text = await asyncio.to_thread(llm.detokenize, body.tokens, False)
        return JSONResponse({"prompt": text, "content": text}, headers=headers)

    @router.get("/tokenizer_info")
    async def info() -> Json:
        """What harnesses ask before they count: names of special tokens, and the chat template."""
        async with dispatcher.models.use(None) as (_, llm):
            known = llm.tokenizer
            ids = {
                "bos_token": known.bos_id,
                "eos_token": known.eos_id,
                "unk_token": known.unk_id,
                "pad_token": known.pad_id,
            }
            names = {name: None if id is None else known.token_text(id) for name, id in ids.items()}
            template = dispatcher.settings.chat_template or known.chat_template
            return {**names, "chat_template": template, "model_max_length": llm.n_ctx, "tokenizer_class": known.model}

    return router
