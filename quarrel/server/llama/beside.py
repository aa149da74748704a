"""llama-server's own routes beside the other protocols of `quarrel serve`: those whose paths no other protocol has."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.server.body import body_of
from quarrel.server.dispatch import Dispatcher
from quarrel.server.fields import Body
from quarrel.server.llama import completion, lora, slots, texts
from quarrel.server.llama.bodies import ChatBody, CompletionBody, EmbeddingBody, InfillBody
from quarrel.server.llama.figures import Figures
from quarrel.server.llama.models import props_of
from quarrel.server.llama.table import Routes

BODIES: dict[str, type[Body]] = {
    "/completion": CompletionBody,
    "/infill": InfillBody,
    "/apply-template": ChatBody,
    "/embedding": EmbeddingBody,
    "/slots/{id_slot}": slots.FileBody,
}


def routes(dispatcher: Dispatcher) -> APIRouter:
    """With the server's own names of models, any of which may be asked for."""
    made, own, adapter = Routes(), slots.Slots(Figures()), lora.Lora(dispatcher.settings)
    made.include(completion.routes(dispatcher, own, adapter))
    made.include(slots.routes(dispatcher, own, adapter))
    made.include(texts.routes(dispatcher))
    router, known = APIRouter(), dict[str, dict[str, object]]()
    for route in made.routes:
        methods = sorted((route.methods or set()) - {"HEAD"})
        if route.path in (*BODIES, "/slots"):
            body = body_of(BODIES[route.path]) if route.path in BODIES else {}
            router.add_api_route(route.path, route.endpoint, methods=methods, **body)

    @router.get("/props")
    async def props(request: Request) -> Response:
        """The model, its template, and what a request is answered with that says nothing."""

        entry = dispatcher.models.entry(request.query_params.get("model"))
        if entry.loaded is None and entry.name in known:  # who looks wakes none
            return JSONResponse(known[entry.name] | {"is_sleeping": True})
        async with dispatcher.models.use(entry.name) as (_, llm):
            found = await asyncio.to_thread(props_of, dispatcher.settings, entry.name, llm)
        known[entry.name] = {field: value for field, value in found.items() if field != "meta"}
        return JSONResponse(known[entry.name])

    return router
