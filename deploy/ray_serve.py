"""Replicas of `quarrel serve` on the machines of a Ray cluster, with the same routes and keys.

pip install '.[cuda,server,ray]' in the clone
serve run ray_serve:app model=/models/mistral-7b-Q4_K_M.gguf replicas=4 gpus=1 hosts=llm.example.org
"""

from __future__ import annotations

from ray import serve
from starlette.applications import Starlette
from starlette.routing import Mount

import quarrel
from quarrel.server import Settings, build


def app(args: dict[str, str]) -> serve.Application:
    """model: a path on every machine. replicas: how many. gpus: of each, which share the model. hosts: public names."""
    gpus, hosts = int(args.get("gpus", "1")), tuple(filter(None, args.get("hosts", "").split(",")))
    # Behind a public name there must be API keys: `quarrel keys create`, in the data directory of every machine.
    settings = Settings((args["model"],), host="0.0.0.0" if hosts else "127.0.0.1", hosts=hosts)

    def replica() -> Starlette:
        llm = quarrel.load(args["model"], max_seqs=settings.max_seqs, tensor_parallel=max(1, gpus))
        server = build(settings, lambda source: llm)
        life = server.api.router.lifespan_context
        return Starlette(routes=[Mount("/", server.app)], lifespan=lambda _: life(server.api))

    options = {"num_gpus": gpus} if gpus else {"num_cpus": 1}
    deployment = serve.deployment(
        num_replicas=int(args.get("replicas", "1")), ray_actor_options=options, max_ongoing_requests=256
    )
    return deployment(serve.ingress(replica)(type("Replica", (), {}))).bind()
