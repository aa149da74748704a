"""Ollama's routes about models: what there is, what runs, further names, and what is to be had."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response, StreamingResponse

from quarrel import __version__
from quarrel.errors import QuarrelError
from quarrel.gguf.resolve import pull as download
from quarrel.llm import find
from quarrel.server.body import body_of, read_body
from quarrel.server.dispatch import Dispatcher
from quarrel.server.errors import Refused
from quarrel.server.lines import line
from quarrel.server.names import Name, checked, now
from quarrel.server.ollama_bodies import NamedBody, OllamaCopy, OllamaCreate, OllamaPull, OllamaShow
from quarrel.server.ollama_facts import Describer, Json, Named, sampling_of, tagged
from quarrel.server.validation import first_fault
from quarrel.server.variants import GO_PLAIN, PLAIN, Prompting, is_go_template

PROTOCOL = "0.33.0"
"""The Ollama whose protocol this is: clients compare it with what they need."""
TELL_EVERY = 0.3
"""Seconds between two lines about something that takes its time."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/|hf://")


def known(dispatcher: Dispatcher, name: str, sentence: str) -> Named:
    """The model of that name. Raises `Refused` with this sentence where there is none."""
    try:
        return dispatcher.models.named(name)
    except Refused as error:
        raise Refused(404, error.code, sentence) from None


def routes(dispatcher: Dispatcher, describer: Describer) -> APIRouter:
    """Those about models."""
    router, models, folder = APIRouter(), dispatcher.models, dispatcher.settings.data_dir / "models"
    working: set[asyncio.Task[None]] = set()

    @router.get("/api/tags")
    async def tags() -> Json:
        """The models."""
        return {"models": await describer.listed(models.listed())}

    @router.get("/api/ps")
    async def running() -> Json:
        """The models in memory."""
        loaded = [(name, entry) for name, entry in models.listed() if entry.loaded is not None]
        return {"models": await describer.listed(loaded, running=True)}

    @router.get("/api/version")
    async def version() -> Json:
        """Of the protocol, and of this server."""
        return {"version": PROTOCOL, "quarrel": __version__}

    @router.post("/api/show", **body_of(OllamaShow))
    async def show(request: Request) -> Response:
        """One model."""
        body, headers = await read_body(request, OllamaShow, dispatcher)
        name, entry = known(dispatcher, body.named(), f"model '{tagged(body.named())}' not found")
        made = await asyncio.to_thread(describer.shown, name, entry, verbose=body.verbose)
        return JSONResponse(made, headers=headers)

    @router.post("/api/copy", **body_of(OllamaCopy))
    async def copy(request: Request) -> Response:
        """Another name for a model."""
        body, headers = await read_body(request, OllamaCopy, dispatcher)
        name, entry = known(dispatcher, body.source, f'model "{body.source}" not found')
        models.made.add(Name(checked(body.destination), entry.source, name.prompting, name.adapters, now()))
        return Response(headers=headers)

    @router.delete("/api/delete", **body_of(NamedBody))
    async def delete(request: Request) -> Response:
        """Takes a name away; a file goes with its last name only where it came by a request."""
        body, headers = await read_body(request, NamedBody, dispatcher)
        known(dispatcher, body.named(), f"model '{body.named()}' not found")
        source = await models.forget(body.named())
        if source is not None and Path(source).parent == folder:
            Path(source).unlink(missing_ok=True)
        return Response(headers=headers)

    @router.post("/api/create", **body_of(OllamaCreate))
    async def create(request: Request) -> Response:
        """A name for a model with what a Modelfile says of it."""
        body, headers = await read_body(request, OllamaCreate, dispatcher)
        made = await _created(body)
        models.made.add(made)
        return await _states(body.stream, headers, "creating new layers", "writing manifest", "success")

    async def _created(body: OllamaCreate) -> Name:
        name = checked(body.named())
        if body.quantize:
            raise Refused(
                400, "unsupported", "a model is quantised with `quarrel quantize`, not by a request", param="quantize"
            )
        if len(body.files) > 1:
            raise Refused(400, "unsupported", f"files holds {len(body.files)} files, wanted one of GGUF", param="files")
        if body.from_:
            base, entry = known(dispatcher, body.from_, f"model '{body.from_}' not found: name one of /api/tags in from")
            source, prompting, adapters = entry.source, base.prompting, dict(base.adapters)
        elif body.files:
            source, prompting, adapters = await _blob(next(iter(body.files.values()))), Prompting(), {}
        else:
            raise Refused(400, "invalid_request", "neither 'from' or 'files' was specified", param="from")
        adapters |= {file: await _blob(digest) for file, digest in body.adapters.items()}
        licenses = [body.license] if isinstance(body.license, str) else body.license
        try:
            parameters = {**prompting.parameters, **body.parameters}
            sampling, _ = sampling_of(parameters)
        except ValidationError as error:
            field, sentence = first_fault(error)
            raise Refused(400, "invalid_request", f"parameters: {sentence}", param=field) from error
        made = Prompting(
            system=prompting.system if body.system is None else body.system,
            template=prompting.template if body.template is None else _template(body.template),
            messages=tuple(m.plain() for m in body.messages) or prompting.messages,
            adapter=next(iter(adapters), None),
            parameters=parameters,
            sampling=sampling,
            license="\n".join(filter(None, licenses)) or prompting.license,
        )
        return Name(name, source, made, adapters, now())

    async def _blob(digest: str) -> str:
        """The file with this digest."""
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise Refused(400, "invalid_request", f"invalid digest {digest[:80]!r}, wanted sha256: and 64 digits")
        path = folder / f"sha256-{found[1]}"
        if path.is_file():
            return str(path)
        entries = [entry for _, entry in models.listed()]
        for entry, known_digest in zip(entries, await describer.digest(entries), strict=True):
            if known_digest == found[1]:
                return entry.source
        raise Refused(404, "not_found", f"there is no file with the digest {digest}: send it to /api/blobs/{digest} first")

    @router.get("/api/blobs/{digest}", include_in_schema=False)
    async def has_blob(digest: str) -> Response:
        """Whether a file with this digest is here."""
        await _blob(digest)
        return Response()

    @router.post("/api/blobs/{digest}", status_code=201)
    async def put_blob(request: Request, digest: str) -> Response:
        """Takes a file, for a model to be created of it."""
        with contextlib.suppress(Refused):
            await _blob(digest)
            return Response(status_code=200)
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise Refused(400, "invalid_request", f"invalid digest {digest[:80]!r}, wanted sha256: and 64 digits")
        await _store(request, folder / f"sha256-{found[1]}", found[1])
        return Response(status_code=201)

    @router.post("/api/pull", **body_of(OllamaPull))
    async def pull(request: Request) -> Response:
        """Has a model that is here already, or gets one from the Hugging Face hub."""
        body, headers = await read_body(request, OllamaPull, dispatcher)
        name = body.named()
        if not models.has(name):
            source = _HUB.sub("hf://", name, count=1) if _HUB.match(name) else await asyncio.to_thread(_in_store, name)
            if source is None:
                raise Refused(
                    400,
                    "not_found",
                    f"pull model manifest: {tagged(name)!r} is not to be had: Ollama's registry is not read here. Pull it"
                    " with ollama, or name one of the Hugging Face hub, such as hf.co/owner/repo:Q4_K_M",
                )
            if source.startswith("hf://"):
                reached: Json = {}
                work = asyncio.create_task(_fetched(name, source, reached))
                working.add(work)  # it goes on if the caller goes
                work.add_done_callback(working.discard)
                return await _states(body.stream, headers, "pulling manifest", "success", work=work, reached=reached)
            models.made.add(Name(name.removesuffix(":latest"), source, created=now()))
        return await _states(body.stream, headers, "pulling manifest", "success")

    async def _fetched(name: str, source: str, reached: Json) -> None:
        def report(file: str, done: int, size: int) -> None:
            reached.update(status=f"pulling {file}", digest=file, total=size, completed=done)

        await asyncio.to_thread(download, source, progress=report)
        models.made.add(Name(name.removesuffix(":latest"), source, created=now()))

    @router.post("/api/push", **body_of(OllamaPull))
    async def push(request: Request) -> Response:
        """Nothing is sent anywhere."""
        body, _ = await read_body(request, OllamaPull, dispatcher)
        known(dispatcher, body.named(), f"model '{body.named()}' not found")
        raise Refused(400, "unsupported", "models are not pushed from here: no registry is written to")

    return router


def _template(text: str) -> str | None:
    if text.strip() in ("", GO_PLAIN):
        return PLAIN if text.strip() else None
    if is_go_template(text):
        message = (
            "template is one of Go, which is not understood here: leave it out for the file's own, or give one of Jinja"
        )
        raise Refused(400, "unsupported", message, param="template")
    return text


def _in_store(name: str) -> str | None:
    """A model that Ollama has pulled on this machine, or that was downloaded."""
    try:
        return name if find(name).source in ("ollama", "hub") else None
    except QuarrelError:
        return None


async def _states(
    stream: bool,
    headers: dict[str, str],
    *words: str,
    work: asyncio.Task[None] | None = None,
    reached: Mapping[str, object] | None = None,
) -> Response:
    """States of something that takes its time, a line each; the last one, which comes behind `work`, alone where no stream
    is wanted. reached: how far `work` is, as it says itself."""
    if not stream:
        if work is not None:
            await asyncio.shield(work)
        return JSONResponse({"status": words[-1]}, headers=headers)

    async def lines() -> AsyncIterator[str]:
        for word in words[:-1]:
            yield line({"status": word})
        try:
            if work is not None:
                while not work.done():
                    await asyncio.wait({work}, timeout=TELL_EVERY)
                    if reached:
                        yield line(dict(reached))
                work.result()
            yield line({"status": words[-1]})
        except QuarrelError as error:
            yield line({"error": str(error)})

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


async def _store(request: Request, path: Path, digest: str) -> None:
    """A body as a file, once it is whole and has this digest."""
    partial, made = path.with_suffix(f".{id(request)}"), hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            async for piece in request.stream():
                made.update(piece)
                await asyncio.to_thread(file.write, piece)
        if made.hexdigest() != digest:
            raise Refused(400, "invalid_request", f"digest mismatch: the body's is sha256:{made.hexdigest()}")
        partial.replace(path)
    except OSError as error:
        raise Refused(507, "no_space", f"the file cannot be stored: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
