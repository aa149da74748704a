"""/ws: generation over a WebSocket, in the web page's messages.

In: `inference`, `resume`, `stop`, `status`, `ping`. Out: `inference` (a token, or the end), `resume`, `status`, `error`,
`metrics`. Requests on one connection run side by side and carry the `request_id` that they came with; `stop` ends one of
them, or all. One with `keep` outlasts its connection for a while, and `resume` finds it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, WebSocket
from pydantic import Field, StrictBool
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocketDisconnect, WebSocketState

from quarrel.engine import Request, Service
from quarrel.errors import QuarrelError
from quarrel.llm import Model, Structure
from quarrel.server.answers import Answer, Answers
from quarrel.server.body import IGNORED, LARGE, MAX_VALUES, ignored_fields, parse_body
from quarrel.server.connections import MAX_MESSAGE
from quarrel.server.dispatch import Dispatcher, Generation, chunks
from quarrel.server.errors import Refused, plain_body, refused, word
from quarrel.server.fields import Text
from quarrel.server.metrics import Metrics
from quarrel.server.overflow import summed_up
from quarrel.server.reader import Reading
from quarrel.server.rest import activity_of, prepare_of, priority_of, token_message
from quarrel.server.schemas import GenerateBody, ResponseFormat

MAX_CONNECTIONS = 1024
OUT_QUEUE = 256
"""Messages that may wait for a slow reader; one more and it is cut off."""
MAX_RUNNING = 16
METRICS_EVERY = 5.0
PROTOCOL = "quarrel"

Json = dict[str, Any]
log = logging.getLogger("quarrel.server")


class SocketBody(GenerateBody):
    """What the page asks for beyond /api/generate. keep: the answer outlasts this connection."""

    prompt: Text = ""
    """Empty where the last of `messages` says all, such as the result of a tool or one with images."""
    keep: StrictBool = False
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Json], Field(max_length=128)] | None = None
    overflow: Literal["stop", "shift", "summary"] | None = None  # type: ignore[assignment]

    def turns(self) -> list[dict[str, object]] | None:
        if self.prompt:
            if self.tools is not None:
                self.chat = True
            return super().turns()
        if not self.messages:
            raise Refused(400, "invalid_request", "prompt is missing", param="prompt")
        before: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, *(m.plain() for m in self.messages)]

    def structure(self) -> Structure | None:
        """The grammar that every token of the answer keeps to."""
        return None if self.response_format is None else self.response_format.structure()


def routes(dispatcher: Dispatcher, metrics: Metrics) -> APIRouter:
    """The one WebSocket route, and the answer to a plain request for it."""
    router = APIRouter()
    open_now: set[Connection] = set()
    users: Counter[str] = Counter()
    answers = Answers()

    @router.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        room = len(open_now) < MAX_CONNECTIONS
        metrics.sockets.labels("accepted" if room else "refused").inc()
        if not room:
            text = f"{MAX_CONNECTIONS} WebSockets are open already: try again later"
            refusal = Refused(503, "too_many_connections", text, retry_after=5.0)
            metrics.errors.labels(refusal.code).inc()
            await socket.send_denial_response(JSONResponse(plain_body(refusal), 503, refusal.headers()))
            return
        offered = socket.scope.get("subprotocols", [])
        await socket.accept(PROTOCOL if PROTOCOL in offered else None)
        connection = Connection(socket, dispatcher, metrics, users, answers)
        open_now.add(connection)
        metrics.connections.inc()
        try:
            await connection.run()
        finally:
            open_now.discard(connection)
            metrics.connections.dec()

    @router.get("/ws", include_in_schema=False)
    async def plain() -> Response:
        text = "/ws is a WebSocket: connect with the headers Connection: Upgrade and Upgrade: websocket"
        refusal = Refused(426, "upgrade_required", text)
        metrics.errors.labels(refusal.code).inc()
        return JSONResponse(plain_body(refusal), refusal.status, {"Connection": "Upgrade", "Upgrade": "websocket"})

    return router


class Connection:
    """One browser tab. What it runs and does not ask to keep ends with it. users: how many of them have requests in flight,
    by model."""

    def __init__(
        self, socket: WebSocket, dispatcher: Dispatcher, metrics: Metrics, users: Counter[str], answers: Answers
    ) -> None:
        self._socket, self._dispatcher, self._metrics = socket, dispatcher, metrics
        self._caller: str = socket.scope["state"]["caller"]
        self._out: asyncio.Queue[Json] = asyncio.Queue(OUT_QUEUE)
        self._following: dict[str, Answer] = {}
        self._answers, self._users, self._running = answers, users, Counter[str]()

    async def run(self) -> None:
        """Until either side goes."""
        self._say("status", {"connected": True, "models": [e.name for e in self._dispatcher.models.entries()]})
        writer, ticker = asyncio.create_task(self._write()), asyncio.create_task(self._tick())
        reader = asyncio.create_task(self._read())
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending = [writer, ticker, reader]
            for task in ending:
                task.cancel()
            ending += self._leave()
            await asyncio.gather(*ending, return_exceptions=True)
            if self._socket.application_state is WebSocketState.CONNECTED:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the other side was faster
                    await self._socket.close(1001 if self._dispatcher.closing else 1000)

    async def _read(self) -> None:
        while True:
            try:
                message = await self._socket.receive()
            except (WebSocketDisconnect, RuntimeError):
                return
            if message["type"] == "websocket.disconnect":
                return
            self._metrics.messages.labels("in").inc()
            try:
                await self._take(message.get("text"))
            except QuarrelError as error:
                self._fail(refused(error))

    async def _take(self, text: str | None) -> None:
        if text is None:
            raise Refused(400, "invalid_request", "the message is binary, wanted JSON as text")
        if len(text) > MAX_MESSAGE:
            raise Refused(400, "invalid_request", f"a message of {len(text)} characters, wanted at most {MAX_MESSAGE}")
        if len(text) <= LARGE:
            kind, payload, body = _parsed(text)
        else:
            async with self._dispatcher.reading:  # one after the other, beside what the server answers meanwhile
                kind, payload, body = await asyncio.to_thread(_parsed, text)
        # What an inference brings about has a span of its own, which ends with its answer.
        if isinstance(body, QuarrelError):
            self._fail(refused(body), _printable(payload.get("request_id")))
        elif body is not None:
            self._start(body)
        else:
            with self._dispatcher.traces.message(_known(kind)):
                self._do(kind, payload)

    def _do(self, kind: object, payload: Json) -> None:
        if kind == "resume":
            self._resume(payload.get("request_id"))
        elif kind == "stop":
            self._stop(payload.get("request_id"))
        elif kind == "status":
            models = [activity_of(e) for e in self._dispatcher.models.entries()]
            self._say("status", {"connected": True, "models": [m["name"] for m in models], "details": models})
        elif kind == "ping":
            self._say("pong", {})
        else:
            raise Refused(
                400, "unknown_type", f"a message of type {str(kind)[:40]!r}: wanted inference, resume, stop, status or ping"
            )

    def _start(self, body: SocketBody) -> None:
        try:
            ignored = ignored_fields(body, self._dispatcher, "/ws")
        except QuarrelError as error:
            self._fail(refused(error), _printable(body.request_id))
            return
        self._check_room()
        id = body.request_id or "ws-" + secrets.token_hex(6)
        if id in self._following:
            raise Refused(400, "invalid_request", f"the request {id!r} runs already")
        answer = Answer(id, self._caller, kept=body.keep)
        if body.keep:
            self._answers.keep(answer)
        self._follow(answer)
        answer.task = asyncio.create_task(self._generate(answer, body, ignored))

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # perhaps before its first line ran, so that it could not say so itself
                answer.say("inference", {"token": "", "complete": True, "finish_reason": "cancelled", "request_id": id})
            for follower in answer.followers:
                follower.ended(answer)
            self._answers.ended(answer)

        answer.task.add_done_callback(ended)

    def _resume(self, id: object) -> None:
        try:
            answer = self._answers.find(self._caller, id)
        except Refused as error:
            self._fail(error, _printable(id))
            return
        self._say("resume", {"request_id": answer.id, "text": answer.text})
        if answer.end is not None:
            kind, payload = answer.end
            self._say(kind, {**payload, "token": ""} if kind == "inference" else payload)
        elif answer.id not in self._following:
            self._check_room()
            self._follow(answer)

    def _check_room(self) -> None:
        if len(self._following) >= MAX_RUNNING:
            raise Refused(429, "queue_full", f"{MAX_RUNNING} requests run on this connection already")

    def _follow(self, answer: Answer) -> None:
        answer.follow(self)
        self._following[answer.id] = answer

    def _leave(self) -> list[asyncio.Task[None]]:
        """Follows nothing any more; returns what ends with that."""
        left = list(self._following.values())
        self._following.clear()
        for answer in left:
            answer.leave(self)
        return [a.task for a in left if a.task is not None and not a.kept]

    def hear(self, kind: str, payload: Json) -> None:
        """Of an answer that this connection follows."""
        self._say(kind, payload)

    def ended(self, answer: Answer) -> None:
        """Called when an answer that it follows is over."""
        self._following.pop(answer.id, None)

    def _stop(self, id: object) -> None:
        for answer in list(self._following.values()):
            if (id is None or answer.id == id) and answer.task is not None:
                answer.task.cancel()

    @contextlib.contextmanager
    def _using(self, model: str) -> Iterator[None]:
        """Counts this connection among those that use a model, while a request of it runs."""
        most = self._dispatcher.settings.sockets_per_model
        if not self._running[model]:
            if self._users[model] >= most:
                text = f"{most} WebSockets have requests of {model} in flight already: try again later"
                raise Refused(503, "queue_full", text, retry_after=1.0)
            self._users[model] += 1
        self._running[model] += 1
        try:
            yield
        finally:
            self._running[model] -= 1
            self._users[model] -= not self._running[model]

    async def _generate(self, answer: Answer, body: SocketBody, ignored: Mapping[str, str]) -> None:
        id = answer.id
        try:
            entry = self._dispatcher.models.entry(body.model)
            state = {"state": "generating" if entry.loaded else "loading", "request_id": id}
            answer.say("status", {**state, **({"ignored": ignored[IGNORED]} if ignored else {})})
            template = self._dispatcher.settings.chat_template
            dropped = 0
            turns: Sequence[Mapping[str, Any]] | None = body.turns()
            options: Any = {"structure": body.structure(), "tools": body.tools}
            made = prepare_of(body, template, turns, **options)
            if body.overflow == "summary" and turns is not None:
                answer.say("status", {**state, "state": "summarising"})
                turns, dropped = await summed_up(self._dispatcher, self._caller, body.model, "/ws", turns, made)
                made = prepare_of(body, template, turns, **options)
                answer.say("status", state)

            def prepare(llm: Model, service: Service) -> Sequence[Request]:
                return made(llm, replace(service, progress=True))

            admission = self._dispatcher.admit(self._caller, body.model, prepare, "/ws", priority_of(body))
            with self._dispatcher.traces.message("inference", id), self._using(entry.name):
                async with admission as generation:
                    await self._send(answer, body, generation, dropped)
        except QuarrelError as error:
            self._metrics.errors.labels(refused(error).code).inc()
            answer.say("error", _error(refused(error), id))
        except Exception:
            log.exception("a request on a WebSocket failed")
            failure = Refused(500, "internal", "the server failed at this request: its log says why")
            self._metrics.errors.labels(failure.code).inc()
            answer.say("error", _error(failure, id))

    async def _send(self, answer: Answer, body: SocketBody, generation: Generation, dropped: int) -> None:
        """dropped: messages that a summary stands for."""
        made = 0
        async for chunk in chunks(generation, 0, self._dispatcher.settings.timeout):
            if chunk.read:
                if chunk.read < generation.prompt_tokens:
                    prompt = {"read": chunk.read, "of": generation.prompt_tokens}
                    answer.say("status", {"state": "reading", "request_id": answer.id, **prompt})
                continue
            made += chunk.token_id is not None
            row = {**token_message(chunk, generation, made), "request_id": answer.id}
            if dropped and chunk.result is not None:
                row["dropped"] = dropped + chunk.result.dropped
            if chunk.result is not None and body.tools:
                reader = Reading(body.tools).reader(generation.llm, generation.requests[0].tokens)
                found = reader.push(chunk.result.text, last=True)
                if found.calls:  # the page folds thoughts away by their tags
                    text = f"<think>{found.thought}</think>\n\n{found.text}" if found.thought else found.text
                    row |= {"text": text, "tool_calls": [call.body(i) for i, call in enumerate(found.calls)]}
            if body.stream is False:
                if chunk.result is None:
                    continue
                row["token"], row["stream"] = chunk.result.text, False
            if self._out.full():
                await asyncio.sleep(0)  # many at once, behind a pause of this process, are no slow reader
            answer.say("inference", row)

    def _say(self, kind: str, payload: Json) -> None:
        try:
            self._out.put_nowait({"type": kind, "payload": payload})
        except asyncio.QueueFull:
            # A reader that does not read: the connection ends, and with it what it runs.
            self._leave()
            self._out = asyncio.Queue()
            self._out.put_nowait({"type": "close", "payload": {}})

    def _fail(self, error: Refused, id: str | None = None) -> None:
        self._metrics.errors.labels(error.code).inc()
        self._say("error", _error(error, id))

    async def _write(self) -> None:
        while True:
            message = await self._out.get()
            if message["type"] == "close":
                return
            began = time.perf_counter()
            try:
                await self._socket.send_text(json.dumps(message, ensure_ascii=False))
            except (WebSocketDisconnect, RuntimeError):
                return
            self._metrics.messages.labels("out").inc()
            self._metrics.message_seconds.labels(message["type"]).observe(time.perf_counter() - began)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(METRICS_EVERY)
            models = [activity_of(e) for e in self._dispatcher.models.entries()]
            self._metrics.broadcasts.inc()
            self._say("metrics", {"active": self._dispatcher.active, "models": models})


def _parsed(text: str) -> tuple[object, Json, SocketBody | QuarrelError | None]:
    """A message's type and payload; of an inference its body, or what is wrong with that."""
    if text.count(",") > MAX_VALUES:
        raise Refused(413, "too_large", f"the JSON has more than {MAX_VALUES} commas: send less at once")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_request", "the message is not JSON") from error
    kind = message.get("type") if isinstance(message, dict) else None
    payload = message.get("payload") or {} if isinstance(message, dict) else {}
    if not isinstance(payload, dict):
        raise Refused(400, "invalid_request", "payload is no object")
    if kind != "inference":
        return kind, payload, None
    try:
        return kind, payload, parse_body(json.dumps(payload), SocketBody)
    except QuarrelError as error:
        return kind, payload, error


def _error(error: Refused, id: str | None) -> Json:
    return {"code": word(error), "message": str(error), **({} if id is None else {"request_id": id})}


def _printable(id: object) -> str | None:
    return id if isinstance(id, str) and id.isprintable() else None


def _known(kind: object) -> str:
    """A name for a span, which a caller cannot invent."""
    return str(kind) if kind in ("stop", "status", "ping") else "unknown"
