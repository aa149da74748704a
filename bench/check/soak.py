"""A server for hours: mixed load, callers that go away, models swapped; what it holds must stay flat.

    python -m bench.check.soak [--minutes 120] [--every 1.0] --out FILE.json

Two real servers run: one with three random models in processes of their own, with LoRA adapters, and one with the bundled
model and, out of `--cases`, a recurrent one and a reranker in its own process (`--no-engine-process`). All but the first
model of each are swapped now and then. Every `--every` seconds one of the kinds of request below is sent to one of them, up
to four at once. Each must end in one of its allowed ways: a whole answer, this caller's own going away, or the error that
it asked for. Every half a minute the resident memory, descriptors and threads of all processes are read, and /metrics, none
of whose counters may run backwards.

FILE is written every minute, and at SIGTERM; its `verdict` is of that time. Memory is judged by how the server's own
process grows in the second half of the time: at most `--slope` MiB an hour. The last line is JSON; the exit status is 1 if
anything is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from quarrel.gguf import GGUFFile
from tests.llm.test_adapters import ONE, TWO, write_adapter
from tests.llm.test_embed import with_keys
from tests.tiny_model import CHATML, write_tiny_model

WORDS = ["king", "queen", "castle", "forest", "river", "child", "winter", "bread", "horse", "moon", "garden", "sailor"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
PATIENCE = 60.0
"""Seconds after which a request counts as hung."""
LOOK = 30.0
CONTEXT = 2048
"""Of the random models, whose tokens are letters: what is said about a tool takes 800 of them."""
Json = dict[str, Any]


class Wrong(Exception):
    """An answer that is not one of those allowed."""


@dataclass
class Server:
    """One server process and what it offers."""

    name: str
    url: str
    process: subprocess.Popen[str]
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    swapped: tuple[str, ...]
    ranker: str
    client: httpx.AsyncClient
    last: dict[tuple[str, ...], float] = field(default_factory=dict)
    looks: list[Json] = field(default_factory=list)

    def model(self) -> str:
        return random.choice(self.models)


def prompt() -> str:
    return "once upon a time the " + " ".join(random.choices(WORDS, k=random.randint(1, 40)))


def options(server: Server, **more: Any) -> Json:
    """Fields of a completion: samplers, an adapter now and then, and what a kind of request adds."""
    body: Json = {"model": server.model(), "max_tokens": random.randint(1, 48), "ignore_eos": True, **more}
    samplers: list[Json] = [{}, {"temperature": 0}, {"seed": random.randrange(1 << 31), "top_k": 5}, {"min_p": 0.1}]
    others: list[Json] = [{}, {}, {"repetition_penalty": 1.2}, {"logit_bias": {"5": -3}}, {"stop": ["zz", "qx"]}]
    body |= random.choice(samplers) | random.choice(others)
    if server.adapters and random.random() < 0.3 and body["model"] in server.swapped:
        body["adapter"] = random.choice(server.adapters)
    return body


async def post(server: Server, path: str, body: Json, wanted: int = 200) -> Any:
    answer = await server.client.post(path, json=body)
    if answer.status_code == 503 and answer.headers.get("retry-after") and "unloaded" in answer.text:
        raise Refused
    if answer.status_code != wanted:
        raise Wrong(f"{path}: {answer.status_code} {answer.text[:300]}")
    return answer.json()


class Refused(Exception):
    """503 with Retry-After: the model was taken out meanwhile, which the swaps ask for."""


async def completion(server: Server) -> str:
    many = random.choice([1, 1, 2, 3])
    more: list[Json] = [{}, {"logprobs": 3}, {"echo": True}]
    body = options(server, prompt=prompt(), n=many, **random.choice(more))
    made = await post(server, "/v1/completions", body)
    reasons = [c["finish_reason"] for c in made["choices"]]
    if len(reasons) != many or not set(reasons) <= {"length", "stop"}:
        raise Wrong(f"completion: {made}")
    return "whole"


async def chat(server: Server) -> str:
    made = await post(server, "/v1/chat/completions", options(server, messages=[{"role": "user", "content": prompt()}]))
    if made["choices"][0]["finish_reason"] not in ("length", "stop"):
        raise Wrong(f"chat: {made}")
    return "whole"


async def structured(server: Server) -> str:
    """A JSON schema: what is whole must keep to it."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"model": server.model(), "messages": [{"role": "user", "content": prompt()}], "max_tokens": 60}
    made = await post(server, "/v1/chat/completions", {**body, "response_format": form})
    choice = made["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut off by max_tokens"
    found = json.loads(choice["message"]["content"])
    if found["name"] not in ("ann", "bob") or not 0 <= found["n"] <= 99 or len(found) != 2:
        raise Wrong(f"structured: {found}")
    return "whole"


async def tool(server: Server) -> str:
    functions = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]
    body = {"model": server.model(), "messages": [{"role": "user", "content": prompt()}], "max_tokens": 90}
    made = await post(server, "/v1/chat/completions", {**body, "tools": functions, "tool_choice": "required"})
    if made["choices"][0]["finish_reason"] not in ("length", "tool_calls"):
        raise Wrong(f"tool: {made}")
    return made["choices"][0]["finish_reason"]  # type: ignore[no-any-return]


async def _streamed(server: Server, path: str, body: Json, last: Callable[[str], bool], leave: bool) -> str:
    """Reads a stream to its end, or leaves it after some lines."""
    left, final = random.randint(0, 20) if leave else 1 << 30, ""
    async with server.client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode("utf-8", "replace")
            if answer.status_code == 503 and "unloaded" in text:
                raise Refused
            raise Wrong(f"{path}: {answer.status_code} {text[:300]}")
        async for line in answer.aiter_lines():
            final = line or final
            left -= 1
            if left < 0:
                return "left"
    if not last(final):
        raise Wrong(f"{path}: the stream ended with {final[:300]!r}")
    return "whole"


def _done(line: str) -> bool:
    return line == "data: [DONE]"


def _complete(line: str) -> bool:
    return bool(json.loads(line.removeprefix("data: ")).get("complete"))


def _ollama_done(line: str) -> bool:
    return bool(json.loads(line).get("done"))


async def stream(server: Server) -> str:
    leave = random.random() < 0.4
    if random.random() < 0.5:
        return await _streamed(server, "/v1/completions", options(server, prompt=prompt(), stream=True), _done, leave)
    body = options(server, messages=[{"role": "user", "content": prompt()}], stream=True)
    return await _streamed(server, "/v1/chat/completions", body, _done, leave)


async def api_stream(server: Server) -> str:
    body = {"model": server.model(), "prompt": prompt(), "max_tokens": random.randint(1, 40)}
    return await _streamed(server, "/api/stream", body, _complete, random.random() < 0.3)


async def vanish(server: Server) -> str:
    """Asks for a whole answer and goes away at a random moment."""
    body = options(server, prompt=prompt())
    try:
        await asyncio.wait_for(post(server, "/v1/completions", body | {"max_tokens": 200}), random.random() * 0.2)
        return "whole"
    except TimeoutError:
        return "left"


async def responses(server: Server) -> str:
    made = await post(server, "/v1/responses", {"model": server.model(), "input": prompt(), "max_output_tokens": 20})
    if made["status"] not in ("completed", "incomplete"):
        raise Wrong(f"responses: {made}")
    return "whole"


async def embeddings(server: Server) -> str:
    body = {"model": server.model(), "input": [prompt(), prompt()], "encoding_format": random.choice(["float", "base64"])}
    for row in (await post(server, "/v1/embeddings", body))["data"]:
        given = row["embedding"]
        vector = np.frombuffer(base64.b64decode(given), np.float32) if isinstance(given, str) else np.array(given)
        if not 0.99 < float(vector @ vector) < 1.01:
            raise Wrong("an embedding is not of length 1")
    return "whole"


async def rerank(server: Server) -> str:
    """Where no model is made for it, that is what the answer must say."""
    body = {"model": server.ranker or server.model(), "query": "a king", "documents": ["a queen", "rain", prompt()[:60]]}
    found = await post(server, "/v1/rerank", body, 200 if server.ranker else 400)
    if server.ranker:
        if sorted(r["index"] for r in found["results"]) != [0, 1, 2]:
            raise Wrong(f"rerank: {found}")
        return "whole"
    if found["error"]["code"] != "unsupported_by_model":
        raise Wrong(f"rerank: {found}")
    return "refused as it must be"


async def tokens(server: Server) -> str:
    text, model = prompt(), server.model()
    ids = (await post(server, "/api/tokenize", {"model": model, "text": text, "add_special": False}))["tokens"]
    back = (await post(server, "/api/detokenize", {"model": model, "tokens": ids}))["text"]
    if back.strip() != text:
        raise Wrong(f"tokens: {text!r} came back as {back!r}")
    return "whole"


async def ollama(server: Server) -> str:
    model, number = server.model(), {"num_predict": random.randint(1, 30)}
    match random.randrange(4):
        case 0:
            body = {"model": model, "prompt": prompt(), "options": number}
            return await _streamed(server, "/api/generate", body, _ollama_done, random.random() < 0.3)
        case 1:
            body = {"model": model, "messages": [{"role": "user", "content": prompt()}], "options": number}
            return await _streamed(server, "/api/chat", body, _ollama_done, False)
        case 2:
            made = await post(server, "/api/embed", {"model": model, "input": prompt()})
            return "whole" if made["embeddings"] else "nothing"
    for path in ("/api/tags", "/api/ps", "/api/version"):
        (await server.client.get(path)).raise_for_status()
    return "whole"


async def bad(server: Server) -> str:
    """What must be refused, by a 4xx that names it."""
    path, body = random.choice(
        [
            ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
            ("/v1/completions", {"model": "no such", "prompt": "x"}),
            ("/v1/completions", {"prompt": "long " * 3000}),
            ("/v1/chat/completions", {"messages": []}),
            ("/v1/completions", {"prompt": "x", "adapter": "none such"}),
            ("/api/tokenize", {"text": 7}),
        ]
    )
    answer = await server.client.post(path, json=body)
    if not 400 <= answer.status_code < 500 or not answer.json()["error"]:
        raise Wrong(f"bad: {answer.status_code} {answer.text[:200]}")
    return "refused as it must be"


async def socket(server: Server) -> str:
    """A page's visit: some requests side by side on one WebSocket, one stopped, the tab perhaps closed meanwhile."""
    leave = random.random() < 0.3
    async with connect(server.url.replace("http", "ws") + "/ws") as ws:
        ids = [f"r{i}" for i in range(random.randint(1, 4))]
        for id in ids:
            body = {"prompt": prompt(), "model": server.model(), "max_tokens": random.randint(1, 60), "request_id": id}
            await ws.send(json.dumps({"type": "inference", "payload": body}))
        if random.random() < 0.5:
            await ws.send(json.dumps({"type": "stop", "payload": {"request_id": ids[0]}}))
        await ws.send(json.dumps({"type": "ping"}))
        open_now, seen = set(ids), 0
        async for raw in ws:
            message = json.loads(raw)
            payload, seen = message["payload"], seen + 1
            if message["type"] == "error" and "unloaded" not in payload["message"]:
                raise Wrong(f"ws: {payload}")
            if message["type"] == "error" or payload.get("complete"):
                open_now.discard(payload["request_id"])
            if leave and seen > 8:
                return "left"
            if not open_now:
                return "whole"
    raise Wrong(f"ws: closed with {open_now} open")


async def swap(server: Server) -> str:
    """A fresh copy in a model's place, or it goes and comes back with the next request."""
    name = random.choice(server.swapped)
    if random.random() < 0.5:
        answer = await server.client.post(f"/api/models/{name}", params={"reload": "true"})
    else:
        answer = await server.client.delete(f"/api/models/{name}")
    if answer.status_code != 200:
        raise Wrong(f"swap: {answer.status_code} {answer.text[:200]}")
    return "whole"


async def page(server: Server) -> str:
    for path in ("/", "/v1/models", "/api/models", "/api/metrics", "/healthz", "/readyz", "/openapi.json"):
        answer = await server.client.get(path)
        if answer.status_code != 200:
            raise Wrong(f"{path}: {answer.status_code}")
    return "whole"


KINDS: dict[Callable[[Server], Awaitable[str]], int] = {
    completion: 4,
    chat: 4,
    structured: 2,
    tool: 1,
    stream: 5,
    api_stream: 2,
    vanish: 3,
    responses: 1,
    embeddings: 2,
    rerank: 1,
    tokens: 2,
    ollama: 3,
    bad: 2,
    socket: 3,
    swap: 1,
    page: 1,
}
"""How often each comes."""


@contextlib.contextmanager
def served(name: str, models: tuple[str, ...], swapped: tuple[str, ...], ranker: str, *words: str) -> Iterator[Server]:
    """A server on a free port, its log beside it."""
    command = [sys.executable, "-m", "quarrel", "serve", "--port", "0", "--backend", "cpu", "--threads", "1", "--rate", "0"]
    command += ["--chat-template", "chatml", "--ollama-compat", "--parallel", "8", *words]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log, text=True) as process:
        try:
            for _ in range(1200):
                log.seek(0)
                if found := re.search(r"listening on (http://\S+)", log.read()):
                    break
                time.sleep(0.1)
            else:
                raise SystemExit("the server did not start")
            adapters = ("one", "two") if "--lora" in words else ()
            client = httpx.AsyncClient(base_url=found[1], timeout=PATIENCE)
            yield Server(name, found[1], process, models, adapters, swapped, ranker, client)
        finally:
            process.terminate()
            process.wait(60)
            log.seek(0)
            if traces := re.findall(r"Traceback[\s\S]{0,2000}", log.read()):
                print(*traces[:3], sep="\n", file=sys.stderr)


def tree(pid: int) -> dict[int, Json]:
    """Resident MiB, descriptors and threads of a process and all that it started."""
    found: dict[int, Json] = {}
    parents: dict[int, int] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(each.parent.name)] = int(each.read_text("ascii", "replace").rpartition(")")[2].split()[1])
    todo = [pid]
    while todo:
        at = todo.pop()
        todo += [child for child, parent in parents.items() if parent == at]
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{at}/status").read_text("utf-8", "replace")
            rss, threads = (int(re.search(rf"{word}:\s+(\d+)", status)[1]) for word in ("VmRSS", "Threads"))  # type: ignore[index]
            found[at] = {"mib": rss / 1024, "fds": len(os.listdir(f"/proc/{at}/fd")), "threads": threads}
    return found


async def look(server: Server, began: float) -> list[str]:
    """One record of a server, and the counters that fell since the last one."""
    text = (await server.client.get("/metrics")).text
    counts = {
        (s.name, *s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if family.type in ("counter", "histogram") or s.name == "quarrel_moe_expert_selection"
        if not s.name.endswith("_created")
    }
    fell = [f"{k} {server.last[k]} to {v}" for k, v in counts.items() if v < server.last.get(k, 0)]
    server.last |= counts
    each = tree(server.process.pid)
    row: Json = {"minutes": round((time.monotonic() - began) / 60, 2), "processes": len(each)}
    row |= {what: round(sum(p[what] for p in each.values()), 2) for what in ("mib", "fds", "threads")}
    row |= {"server": each[server.process.pid], "eldest": each[min(each.keys() - {server.process.pid}, default=min(each))]}
    server.looks.append(row)
    return fell


def slope(looks: list[Json], value: Callable[[Json], float]) -> float:
    """How much a figure grows in an hour, by the line that fits it best."""
    if len(looks) < 3:
        return 0.0
    return round(float(np.polyfit([r["minutes"] / 60 for r in looks], [value(r) for r in looks], 1)[0]), 3)


def verdict(server: Server, limit: float) -> Json:
    """What the records of the second half say: caches fill in the first. The eldest model's process lives as long as its
    server."""
    looks = [r for r in server.looks if r["minutes"] >= server.looks[-1]["minutes"] / 2]
    slopes = {
        "mib_per_hour": slope(looks, lambda r: r["mib"]),
        "server_mib_per_hour": slope(looks, lambda r: r["server"]["mib"]),
        "eldest_model_mib_per_hour": slope(looks, lambda r: r["eldest"]["mib"]),
        "server_fds_per_hour": slope(looks, lambda r: r["server"]["fds"]),
        "server_threads_per_hour": slope(looks, lambda r: r["server"]["threads"]),
    }
    ends = {what: [round(r[what], 1) for r in (looks[0], looks[-1])] for what in ("mib", "fds", "threads", "processes")}
    flat = slopes["server_mib_per_hour"] <= limit and slopes["server_fds_per_hour"] <= 1 and ends["fds"][1] < 200
    return {**slopes, "from_to": ends, "flat": flat}


async def soak(servers: list[Server], args: argparse.Namespace) -> bool:
    ends: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    fell: list[str] = []
    began = time.monotonic()
    gate = asyncio.Semaphore(4)

    async def one(kind: Callable[[Server], Awaitable[str]], server: Server) -> None:
        tally = ends.setdefault(f"{server.name} {kind.__name__}", Counter())
        async with gate:
            try:
                tally[await asyncio.wait_for(kind(server), PATIENCE)] += 1
            except Refused:
                tally["refused: unloaded meanwhile"] += 1
            except TimeoutError:
                tally["HUNG"] += 1
                wrong.append(f"{kind.__name__} on {server.name} did not end in {PATIENCE:g} s")
            except Exception as error:
                tally["WRONG"] += 1
                wrong.append(f"{kind.__name__} on {server.name}: {type(error).__name__}: {error}"[:500])

    def write(last: bool) -> bool:
        judged = {s.name: verdict(s, args.slope) for s in servers}
        good = not wrong and not fell and all(v["flat"] for v in judged.values())
        done = {
            "command": " ".join(["python -m bench.check.soak", *sys.argv[1:]]),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "ended": last,
            "requests": sum(sum(c.values()) for c in ends.values()),
            "ends": {k: dict(c) for k, c in sorted(ends.items())},
            "wrong": wrong[:50],
            "metrics_that_fell": fell[:50],
            "verdict": {**judged, "good": good},
        }
        looks = {s.name: s.looks for s in servers}
        Path(args.out).write_text(json.dumps({**done, "looks": looks}, indent=1), "utf-8")
        if last:
            print(json.dumps({k: v for k, v in done.items() if k != "ends"}))
        return good

    tasks: set[asyncio.Task[None]] = set()
    looked = written = 0.0
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    while not stopped.is_set() and (now := time.monotonic() - began) < args.minutes * 60:
        if now >= looked:
            looked = now + LOOK
            for server in servers:
                fell += await look(server, began)
        if now >= written:
            written = now + 60
            write(False)
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        task = asyncio.create_task(one(kind, random.choice(servers)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(random.random() * 2 * args.every)
    await asyncio.gather(*tasks)
    for server in servers:
        fell += await look(server, began)
        models = (await server.client.get("/api/metrics")).json()["models"]
        idle = [m for m in models if m["state"] == "loaded"]
        wrong += [f"{m['name']} still runs {m['running']}" for m in idle if m["running"] or m["waiting"]]
        lost = [m["kv_blocks"] - m["kv_blocks_free"] - m["kv_blocks_kept"] for m in idle]
        wrong += [f"{server.name}: {n} blocks are lost" for n in lost if n]
        await server.client.aclose()
    return write(True)


def reranker(source: Path, to: Path) -> None:
    """An encoder with a head that ranks by no knowledge at all."""
    with GGUFFile.open([source]) as file:
        width = int(file.metadata["bert.embedding_length"])  # type: ignore[arg-type]
    head = {
        "cls.output.weight": np.linspace(-1, 1, width, dtype=np.float32)[None],
        "cls.output.bias": np.zeros(1, np.float32),
    }
    with_keys(source, to, {"bert.pooling_type": 4}, head)


def random_model(path: Path, seed: int) -> Path:
    return write_tiny_model(path, template=CHATML, seed=seed, n_ctx=CONTEXT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two requests, on average")
    parser.add_argument("--slope", type=float, default=1.0, help="MiB an hour that a server may grow")
    parser.add_argument("--cases", type=Path, help="the folder of reference models, for a recurrent one and a reranker")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "models").mkdir()
        (folder / "second").mkdir()
        tiny = [random_model(folder / f"models/{n}.gguf", i) for i, n in enumerate(("a", "b", "c"))]
        loras = [f"one={write_adapter(folder / 'one.gguf', ONE)}", f"two={write_adapter(folder / 'two.gguf', TWO)}"]
        first = [str(tiny[0]), "--models-dir", str(folder / "models"), "--data-dir", str(folder / "data")]
        first += ["--lora", loras[0], "--lora", loras[1]]
        second = [
            "demo",
            "--models-dir",
            str(folder / "second"),
            "--no-engine-process",
            "--data-dir",
            str(folder / "data2"),
        ]
        random_model(folder / "second/d.gguf", 3)
        generating, swapped, ranker = ("demo", "d"), ("d",), ""
        if args.cases:
            (folder / "second/recurrent.gguf").symlink_to((args.cases / "mamba2/model-q4_0x.gguf").resolve())
            reranker(args.cases / "bert/model-q4_0x.gguf", folder / "second/rank.gguf")
            generating, swapped, ranker = ("demo", "d", "recurrent"), ("d", "recurrent", "rank"), "rank"
        servers = [
            stack.enter_context(served("processes", ("a", "b", "c"), ("b", "c"), "", *first)),
            stack.enter_context(served("threads", generating, swapped, ranker, *second)),
        ]
        return int(not asyncio.run(soak(servers, args)))


if __name__ == "__main__":
    sys.exit(main())
