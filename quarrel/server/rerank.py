"""/v1/rerank: how well documents answer a query, by a model that was made to judge pairs. Others refuse."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StrictBool, StrictInt, StrictStr
from starlette.responses import JSONResponse, Response

from quarrel.server.body import body_of, read_body
from quarrel.server.dispatch import Dispatcher, cancel_on_disconnect
from quarrel.server.errors import Refused
from quarrel.server.fields import Body, Text

Json = dict[str, Any]


class Document(Body):
    text: Text


Documents = Annotated[list[Text | Document], Field(min_length=1, max_length=2048)]


class RerankBody(Body):
    """Of Jina's and Cohere's clients, or with `texts` of those of Hugging Face's text-embeddings-inference."""

    model: StrictStr | None = None
    query: Text
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: Annotated[StrictInt, Field(ge=1)] | None = None
    return_documents: StrictBool = False
    return_text: StrictBool = False

    def plain(self) -> list[str]:
        """The documents' texts."""
        if (self.documents is None) == (self.texts is None):
            said = (
                "is missing: the request needs it" if self.texts is None else "and texts are both given, wanted one of them"
            )
            raise Refused(400, "invalid_request", f"documents {said}", param="documents")
        return [d if isinstance(d, str) else d.text for d in self.documents or self.texts or ()]


def routes(dispatcher: Dispatcher) -> APIRouter:
    """The one route."""
    router = APIRouter(prefix="/v1")

    @router.post("/rerank", **body_of(RerankBody))
    async def rerank(request: Request) -> Response:
        """The documents, best first, with the model's own scores."""
        body, headers = await read_body(request, RerankBody, dispatcher)
        texts = body.plain()
        async with dispatcher.models.use(body.model) as (name, llm):
            pairs = await asyncio.to_thread(lambda: [llm.tokenizer.encode_pair(body.query, text) for text in texts])
            made = await cancel_on_disconnect(
                request, dispatcher.embed(request.state.caller, llm, pairs, None, pooling="rank")
            )
        scores = [float(v[0]) for v in made.vectors]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        if body.texts is not None:
            more = [{"text": texts[i]} if body.return_text else {} for i in best]
            return JSONResponse([{"index": i, "score": scores[i], **m} for i, m in zip(best, more)], headers=headers)
        rows: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if body.return_documents:
            rows = [{**row, "document": {"text": texts[row["index"]]}} for row in rows]
        usage = {"prompt_tokens": made.total_tokens, "total_tokens": made.total_tokens}
        return JSONResponse({"object": "list", "model": name, "results": rows, "usage": usage}, headers=headers)

    return router
