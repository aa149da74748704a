"""Google Vertex AI's way in: several requests in one body, each of which names the route that it is for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher
from quarrel.server.fields import Body
from quarrel.server.llama.table import Routes

Json = dict[str, Any]
_ROUTES = {
    "chatCompletions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "completion": "/completion",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "infill": "/infill",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "applyTemplate": "/apply-template",
}
FORMAT = "@requestFormat"


class PredictBody(Body):
    instances: list[Json] = Field(max_length=128)


def routes(dispatcher: Dispatcher) -> Routes:
    """The one route, where the settings say; none else."""
    router = Routes()
    if not dispatcher.settings.predict_route:
        return router

    @router.post(dispatcher.settings.predict_route)
    async def predict(request: Request) -> Response:
        """The answers to all instances, each as its route gives it."""
        body, headers = await read_body(request, PredictBody, dispatcher)
        found = await asyncio.gather(*(_answer(request, instance) for instance in body.instances))
        return JSONResponse({"predictions": found}, headers=headers)

    return router


async def _answer(request: Request, instance: Json) -> Any:
    name = instance.get(FORMAT)
    path = _ROUTES.get(name, name if name in _ROUTES.values() else None) if isinstance(name, str) else None
    if path is None:
        text = f"an instance has no {FORMAT} that is one of {', '.join(_ROUTES)}"
        return {"error": {"code": 400, "message": text, "type": "invalid_request_error"}}
    sent = json.dumps({**{k: v for k, v in instance.items() if k != FORMAT}, "stream": False}).encode()
    pieces: list[bytes] = []
    taken = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if taken.is_set():
            await asyncio.Event().wait()  # it never goes before its answer is here
        taken.set()
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        pieces.append(message.get("body", b""))

    kept = [(k, v) for k, v in request.scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
    headers = [*kept, (b"content-length", str(len(sent)).encode())]
    await request.app({**request.scope, "path": path, "raw_path": path.encode(), "headers": headers}, receive, send)
    return json.loads(b"".join(pieces) or b"null")
