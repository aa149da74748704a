"""Which models there are, and what each is: /models, /models/load, /models/unload and /props.

What was found out of a model when it was loaded is also the answer while it is not, and nothing here keeps one awake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quarrel.llm import Model
from quarrel.server.body import read_body
from quarrel.server.dispatch import Dispatcher
from quarrel.server.entries import Entry
from quarrel.server.errors import Refused
from quarrel.server.fields import Body
from quarrel.server.llama.completion import settings_of
from quarrel.server.llama.table import Routes
from quarrel.server.models import name_of
from quarrel.server.openai import FINGERPRINT
from quarrel.server.settings import Settings

Json = dict[str, Any]
_DETAILS = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}


class ModelBody(Body):
    model: StrictStr


class Facts:
    """By the name of each model that was loaded. `keep` is called wherever that happens, on any thread."""

    def __init__(self, settings: Settings) -> None:
        self.found: dict[str, Json] = {}
        self._settings = settings

    def keep(self, source: str, llm: Model) -> None:
        """What is to be known of it."""
        name = name_of(source)
        self.found[name] = props_of(self._settings, name, llm)


def routes(dispatcher: Dispatcher, facts: Facts, names: Callable[[], Iterable[str]] | None) -> Routes:
    """All of them. names: as `app.build` has it."""
    router, settings, models, found = Routes(), dispatcher.settings, dispatcher.models, facts.found

    async def known_of(entry: Entry) -> Json:
        if entry.loaded is None and not entry.rested:
            async with models.use(entry.name):
                return found[entry.name]
        return found[entry.name] | {"is_sleeping": entry.loaded is None}

    def row(entry: Entry) -> Json:
        made: Json = {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "quarrel"}
        made |= {"aliases": sorted(settings.aliases or {entry.name}), "tags": sorted(settings.tags)}
        if (known := found.get(entry.name)) is not None:
            made["meta"] = known["meta"]
        if settings.router:
            made["status"] = {"value": "unloaded" if entry.state == "failed" else entry.state}
            made["status"] |= {"failed": True} if entry.state == "failed" else {}
        return made

    @router.get("/v1/models")
    async def listed(request: Request) -> Response:
        """Every model on offer, loaded or not; with `reload`, read anew."""
        if names is not None and request.query_params.get("reload"):
            await models.renew(await asyncio.to_thread(names))
        entries = models.entries()
        data = [row(entry) for entry in entries]
        more = [_as_ollama(e.name, found[e.name]) for e in entries if e.name in found]
        return JSONResponse({"models": more, "object": "list", "data": data})

    @router.get("/props")
    async def props(request: Request) -> Response:
        """The model, its template, and what a request is answered with that says nothing."""
        name = request.query_params.get("model")
        if settings.router and name is None:
            limits = {"max_instances": settings.models_max, "models_autoload": settings.autoload}
            return JSONResponse({"role": "router", **limits, "build_info": FINGERPRINT, "is_sleeping": False})
        made = await known_of(models.entry(name))
        return JSONResponse({k: v for k, v in made.items() if k != "meta"})

    @router.post("/v1/models/load")
    async def load(request: Request) -> Response:
        """Begins to load a model; /models says when it is there."""
        entry = models.entry((await read_body(request, ModelBody, dispatcher))[0].model)
        if entry.loaded is not None:
            raise Refused(400, "invalid_request", "model is already loaded")
        entry.state = "loading"
        task = asyncio.create_task(_quietly(dispatcher, entry))
        begun.add(task)
        task.add_done_callback(begun.discard)
        return JSONResponse({"success": True})

    @router.post("/v1/models/unload")
    async def unload(request: Request) -> Response:
        """Takes a model out of memory, once its requests have ended."""
        entry = models.entry((await read_body(request, ModelBody, dispatcher))[0].model)
        if entry.loaded is None:
            raise Refused(400, "invalid_request", "model is not loaded")
        await models.unload(entry.name)
        return JSONResponse({"success": True})

    begun: set[asyncio.Task[None]] = set()
    return router


async def _quietly(dispatcher: Dispatcher, entry: Entry) -> None:
    try:
        await dispatcher.models.load(entry.name)
    except Refused:
        return  # the list and the log say why


def _as_ollama(name: str, known: Json) -> Json:
    sees = ["multimodal"] if known["modalities"]["vision"] else []
    row: Json = {"name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model"}
    more = {"parameter_size": "", "quantization_level": ""}
    return {**row, "description": "", "tags": [""], "capabilities": ["completion", *sees], "details": {**_DETAILS, **more}}


def props_of(settings: Settings, name: str, llm: Model) -> Json:
    """Of a model that is loaded."""
    tokenizer, explanation = llm.tokenizer, llm.explain()
    seed = (settings.sampling or {}).get("seed")
    params: Any = settings_of(llm.defaults, -1 if seed is None else seed)
    params |= {"stream": False, "n_predict": -1, "max_tokens": -1}
    meta = {"n_vocab": tokenizer.n_vocab, "n_ctx": llm.n_ctx, "n_params": explanation.parameters}
    return {
        "default_generation_settings": {"params": params, "n_ctx": llm.n_ctx, "id": 0, "is_processing": False},
        "total_slots": explanation.max_seqs,
        "model_alias": name,
        "model_path": explanation.model,
        "modalities": {"vision": bool(explanation.projector), "video": False, "audio": False},
        "media_marker": settings.media_marker,
        "endpoint_slots": settings.slots,
        "endpoint_metrics": settings.metrics,
        "chat_template": settings.chat_template or tokenizer.chat_template or "",
        "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
        "build_info": FINGERPRINT,
        "is_sleeping": False,
        "cors_proxy_enabled": settings.proxy,
        "meta": {**meta, "ftype": explanation.quantization},
    }
