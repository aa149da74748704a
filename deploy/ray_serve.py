"""Replicas of `quarrel serve` on the machines of a Ray cluster, with the same routes and keys.

pip install '.[cuda,server,ray]' in the clone
serve run ray_serve:app model=/models/mistral-7b-Q4_K_M.gguf replicas=4 gpus=1 hosts=llm.example.org
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount

import quarrel
from quarrel.server import Settings, build
from quarrel.server.affinity import prefix_of, routed

PROBE_SECONDS = 2.0
"""How long the router waits for a replica's queue length before it tries the next one. A replica that computes a prompt or
compiles kernels answers late; one that has died fails at once."""
DRAIN_SECONDS = 600.0
"""For which a replica that is to go may end the answers that it has begun; it gets no new ones."""
PAUSES = (0.05, 0.5, 2.0)
"""Behind which a request whose replica has died goes to another one."""
LOST = "the replica of the request has died: try again in a moment"
AGAIN = 1012
"""Of a WebSocket: connect once more."""
_HOP = (b"connection", b"transfer-encoding")
_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
    "subprotocols",
)
_TO = "@"
"""In the place of a prefix: the name of the one replica that a message of a WebSocket goes to."""


def app(args: dict[str, str]) -> serve.Application:
    """model: a path on every machine. replicas: how many, or at least, where max_replicas says how many at most: one more
    for each `queue` requests that wait or run. gpus: of each, which share the model. hosts: public names. limits: a Redis
    in which replicas count together what a key uses."""
    gpus, hosts = int(args.get("gpus", "1")), tuple(filter(None, args.get("hosts", "").split(",")))
    least = int(args.get("replicas", "1"))
    most, queue = int(args.get("max_replicas", least)), float(args.get("queue", "16"))
    # Behind a public name there must be API keys: `quarrel keys create`, in the data directory of every machine.
    settings = Settings(
        (args["model"],), host="0.0.0.0" if hosts else "127.0.0.1", hosts=hosts, shared_limits=args.get("limits", "")
    )
    # Of the same version, a deployment is scaled, and its replicas stay.
    version = repr([quarrel.__version__, args["model"], gpus, hosts, settings.shared_limits])
    scale: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scale = {
            "autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=queue)
        }
    replicas = serve.deployment(
        Replica,
        version=version,
        ray_actor_options={"num_gpus": gpus} if gpus else {"num_cpus": 1},
        max_ongoing_requests=settings.max_seqs + settings.queue + settings.sockets_per_model,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=ByPrefix, request_router_kwargs={"room": settings.max_seqs}
        ),
        **scale,
    )
    ahead = serve.deployment(
        serve.ingress(_passing)(Front),
        version=version,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )
    return ahead.bind(replicas.bind(settings, max(1, gpus)), settings.body_limit)


class ByPrefix(FIFOMixin, MultiplexMixin, RequestRouter):
    """A request goes to the replica that has its prompt's beginning, unless that has more than its share of the work."""

    queue_len_response_deadline_s = PROBE_SECONDS

    def initialize_state(self, room: int) -> None:
        self._room = room

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:  # other tasks look for places for all that wait, of which the first gets this one
            waiting = (request for request in self._pending_requests_to_fulfill if not request.future.done())
            pending_request = next(waiting, None)
        if pending_request is None:
            await asyncio.sleep(0.001)  # Ray's loop asks again at once, and would let nothing else run
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.multiplexed_model_id
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if wanted.startswith(_TO):  # where it has gone, any other will say so
            named = known.get(wanted.removeprefix(_TO))
            return [[named]] if named is not None else [candidate_replicas]
        prefix = bytes.fromhex(wanted)
        loads = {name: self.replica_queue_len_cache.get(r.replica_id) or 0 for name, r in known.items()}
        order = routed(prefix, loads, self._room) if prefix else sorted(loads, key=lambda name: loads[name])
        return [[known[name]] for name in order]


class Replica:
    """A model with its server, which is spoken to without a socket."""

    def __init__(self, settings: Settings, gpus: int) -> None:
        llm = quarrel.load(settings.models[0], max_seqs=settings.max_seqs, tensor_parallel=gpus)
        self._app = build(settings, lambda source: llm).app
        self._heard: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def relay(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """What the server sends for a request, in order. It learns of a caller who goes."""
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        heard.put_nowait({"type": "http.request", "body": body, "more_body": False})
        async for message in self._answers(scope, heard, {"type": "http.disconnect"}):
            yield message

    async def socket(self, scope: dict[str, Any], name: str) -> AsyncIterator[dict[str, Any]]:
        """First the name of this replica, then what the server sends on a WebSocket; what it gets comes by `hear`."""
        heard = self._heard[name] = asyncio.Queue()
        try:
            yield {"replica": serve.get_replica_context().replica_id.unique_id}
            async for message in self._answers(scope, heard, {"type": "websocket.disconnect", "code": 1006}):
                yield message
        finally:
            del self._heard[name]

    async def hear(self, name: str, message: dict[str, Any]) -> bool:
        """A message of a caller's for a WebSocket; False: it is not open here."""
        heard = self._heard.get(name)
        if heard is not None:
            heard.put_nowait(message)
        return heard is not None

    async def _answers(
        self, scope: dict[str, Any], heard: asyncio.Queue[dict[str, Any]], end: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        made: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        task = asyncio.create_task(self._app({**scope, "state": {}}, heard.get, made.put))
        task.add_done_callback(lambda _: made.put_nowait(None))
        try:
            while (message := await made.get()) is not None:
                yield message
            await task
        finally:
            heard.put_nowait(end)


def _passing() -> Starlette:
    """What Ray's proxies speak to, in the process of a Front: an application whose class Ray knows."""

    async def passed(scope: Any, receive: Any, send: Any) -> None:
        await serve.get_replica_context().servable_object.answer(scope, receive, send)

    return Starlette(routes=[Mount("/", app=passed)])


class Front:
    """Reads a request, which says where it is to go, and passes the answer on while it is made."""

    def __init__(self, replicas: DeploymentHandle, body_limit: int) -> None:
        self._replicas, self._limit = replicas, body_limit

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """As an ASGI application."""
        named = {name: scope[name] for name in _SCOPE if name in scope} | {"root_path": ""}
        if scope["type"] == "websocket":
            await self._socket(named, receive, send)
        else:
            await (await self._response(named, Request(scope, receive)))(scope, receive, send)

    async def _response(self, scope: dict[str, Any], request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._limit:
                return PlainTextResponse(f"the body has more than {self._limit} bytes", 413)
        # What Ray calls a multiplexed model is here a prefix: a place that is found for one goes to a request that has it.
        to = self._replicas.options(method_name="relay", stream=True, multiplexed_model_id=(prefix_of(body) or b"").hex())
        messages, start = await self._begun(lambda: to.remote(scope, body))
        if start is None:
            return PlainTextResponse(LOST, 503, {"retry-after": "5"})

        async def rest() -> AsyncIterator[bytes]:
            ended = False
            try:
                async for message in messages:
                    yield message.get("body", b"")
                ended = True
            finally:
                if not ended:  # the caller has gone
                    messages.cancel()

        answer = StreamingResponse(rest(), start["status"])
        answer.raw_headers = [(name, value) for name, value in start["headers"] if name.lower() not in _HOP]
        return answer

    async def _begun(self, ask: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None]:
        """An answer and its first message, for which other replicas are asked where one dies before it: nothing has been
        sent then."""
        messages = None
        for pause in PAUSES:
            messages = ask()
            try:
                return messages, await anext(messages)
            except RayActorError:
                await asyncio.sleep(pause)
        return messages, None

    async def _socket(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """A WebSocket stays with one replica: what it sends is one answer, what it gets goes there one by one."""
        name = secrets.token_hex(16)
        to = self._replicas.options(method_name="socket", stream=True)
        messages, start = await self._begun(lambda: to.remote(scope, name))
        if start is None:
            await send({"type": "websocket.close", "code": AGAIN, "reason": LOST})
            return
        there = self._replicas.options(method_name="hear", multiplexed_model_id=_TO + start["replica"])

        async def listen() -> None:
            heard = True
            while heard:
                message = await receive()
                heard = await there.remote(name, message) and message["type"] != "websocket.disconnect"

        listening, ended = asyncio.create_task(listen()), False
        try:
            async for message in messages:
                await send(message)
            ended = True
        except RayActorError:
            ended = True
            await send({"type": "websocket.close", "code": AGAIN, "reason": LOST})
        finally:
            listening.cancel()
            if not ended:  # the caller has gone
                messages.cancel()
