"""A server under load: streams side by side, ten times too many requests, idle hostile connections, callers that vanish.

    python -m bench.serve.server_load load     [--url URL] [--streams 100] [--seconds 20] [--tokens 64] [--plot load.svg]
    python -m bench.serve.server_load overload [--url URL] [--streams 16] [--factor 10] [--seconds 60] [--calm 60]
    python -m bench.serve.server_load idle     [--url URL] [--connections 10000] [--half 1.0] [--seconds 30]
    python -m bench.serve.server_load look     --url URL [--seconds 30]
    python -m bench.serve.server_load probe    --url URL [--seconds 30]
    python -m bench.serve.server_load vanish   [--url URL] [--count 1000] [--streams 32]
    python -m bench.serve.server_load kill     [--times 5] [--streams 16]   kill -9 of the model's process
    python -m bench.serve.server_load term     [--times 5] [--streams 16]   SIGTERM
    python -m bench.serve.server_load crash    [--times 5] [--streams 16]   kill -9 of the server

Without --url a server with the bundled model, or --model, is started on a free port; what stands behind `--` goes to it,
as in `-- --parallel 32`. Signals come at a random moment; half of the requests that they hit are no streams. The client is
plain sockets in this one process, so that it costs little of the machine that both run on; --cores 0-3,4-7 gives the server
the first ones and the client the others. Times are from the first byte sent; that between tokens is between two events of
one stream. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HEAD_SECONDS = 10
"""The server closes a connection that has not sent a whole head by then; they are opened over as long, or `--ramp`."""
PER_ADDRESS = 2000
"""Hostile connections from each source address: the server allows 2048, and 10,000 are wanted; requests are of one."""
WORDS = ["king", "queen", "castle", "forest", "river", "child", "winter", "bread", "horse", "moon", "garden", "sailor"]


@dataclass
class Answer:
    """One request's way."""

    status: int = 0
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    ended: bool = False
    """Whether a last event came: [DONE], or a whole JSON body."""
    failed: str = ""
    retry_after: bool = False


@dataclass(frozen=True)
class Target:
    """Where requests go, and what they ask for."""

    host: str
    port: int
    tokens: int = 64
    key: str = ""

    def request(self, *, stream: bool = True) -> bytes:
        prompt = "Once upon a time the " + " ".join(random.choices(WORDS, k=6))
        body = json.dumps({"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": stream}).encode()
        lines = [f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Length: {len(body)}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join(lines).encode() + b"\r\nConnection: close\r\n\r\n" + body


class _Call(asyncio.Protocol):
    """One request's connection. Plain callbacks: a caller that costs much would be measured with the server."""

    def __init__(
        self, request: bytes, answer: Answer, over: asyncio.Future[None], tally: Counter[int] | None, stream: bool
    ) -> None:
        self._request, self._answer, self._over, self._tally, self._stream = request, answer, over, tally, stream
        self._began = time.perf_counter()
        self._last = 0.0
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, answer = time.perf_counter(), self._answer
        data = self._rest + data
        if not answer.status:
            head, end, rest = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = data
                return
            answer.status = int(head.split(b" ", 2)[1])
            answer.retry_after = b"retry-after:" in head.lower()
            data = rest
        if answer.status != 200 or not self._stream:
            self._rest = data
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                answer.ended = True
            elif line.startswith(b'data: {"error"'):
                answer.failed = json.loads(line[6:])["error"]["code"]
            elif line.startswith(b"data: "):
                self._token(now)

    def _token(self, now: float) -> None:
        if not self._answer.first:
            self._answer.first = now - self._began
        else:
            self._answer.gaps.append(now - self._last)
        self._answer.tokens += 1
        self._last = now
        if self._tally is not None:
            self._tally[int(now)] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._answer
        if exc is not None or not answer.status:
            answer.failed = answer.failed or type(exc or ConnectionError()).__name__
        if answer.status != 200 or not self._stream:  # an answer in one piece
            body = b""
            with contextlib.suppress(ValueError):
                body = json.loads(self._rest)
            answer.ended = bool(body)
            if isinstance(body, dict) and "error" in body:
                answer.failed = answer.failed or body["error"]["code"]
        answer.seconds = time.perf_counter() - self._began
        if not self._over.done():
            self._over.set_result(None)


async def ask(target: Target, tally: Counter[int] | None = None, *, stream: bool = True) -> Answer:
    """One completion, read to its end. tally: counts the tokens of each second."""
    answer, events = Answer(), asyncio.get_running_loop()
    over: asyncio.Future[None] = events.create_future()
    call = _Call(target.request(stream=stream), answer, over, tally, stream)
    try:
        await events.create_connection(lambda: call, target.host, target.port)
    except OSError as error:
        answer.failed = type(error).__name__
        return answer
    await over
    return answer


async def health(target: Target, path: str = "/healthz") -> tuple[int, float]:
    """Status and seconds of one look, on a connection of its own."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return int(head.split(b" ", 2)[1]), time.perf_counter() - began


async def crowd(
    target: Target, count: int, seconds: float, tally: Counter[int] | None = None, *, mixed: bool = False
) -> tuple[list[Answer], float]:
    """`count` callers, each asking again as soon as it is answered; a refused one comes back after a tenth of a second.

    mixed: every second request is no stream.
    """
    answers: list[Answer] = []
    began = time.perf_counter()

    async def caller() -> None:
        while time.perf_counter() - began < seconds:
            answer = await ask(target, tally, stream=not mixed or len(answers) % 2 == 0)
            answers.append(answer)
            if answer.status != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(caller() for _ in range(count)))
    return answers, time.perf_counter() - began


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    if not values:
        return {}
    found = np.percentile(np.array(values), (50, 95, 99, 100)) * 1000
    return {name: round(float(v), 1) for name, v in zip(("p50", "p95", "p99", "max"), found, strict=True)}


def ways(answers: Sequence[Answer]) -> dict[str, int]:
    """How requests ended, each in one way; a cut one had no last event, or no answer at all."""

    def way(a: Answer) -> str:
        if a.status == 0:
            return "not connected" if a.failed == "ConnectionRefusedError" else "closed without an answer"
        if not a.ended:
            return "cut"
        return a.failed or ("whole" if a.status == 200 else str(a.status))

    return dict(Counter(map(way, answers)))


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    good = [a for a in answers if a.status == 200 and a.ended and not a.failed]
    refused = [a for a in answers if a.status in (429, 503)]
    return {
        "seconds": round(seconds, 1),
        "requests": len(answers),
        "whole": len(good),
        "statuses": dict(Counter(str(a.status) for a in answers)),
        "without_end": sum(not a.ended for a in answers),
        "failures": dict(Counter(a.failed for a in answers if a.failed)),
        "tokens_per_second": round(sum(a.tokens for a in good) / seconds, 1),
        "first_token_ms": quantiles([a.first for a in good]),
        "between_tokens_ms": quantiles([g for a in good for g in a.gaps]),
        "refused_ms": quantiles([a.seconds for a in refused]),
        "refused_without_retry_after": sum(not a.retry_after for a in refused),
    }


async def load(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """`--streams` at once."""
    await ask(target)
    answers, seconds = await crowd(target, args.streams, args.seconds)
    if args.plot:
        good = [a for a in answers if a.ended and a.status == 200]
        curves = {"first token": [a.first for a in good], "between tokens": [g for a in good for g in a.gaps]}
        Path(args.plot).write_text(svg(curves, f"{args.streams} streams"), "utf-8")
    return {"streams": args.streams, **summary(answers, seconds)}


async def overload(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """`--streams` at once for what the server can do; then requests come `--factor` times as fast as it can end them.

    Goodput is kept second by second, by the median, while requests come. A process of its own asks one request after the
    other meanwhile: how long its refusals take is free of this one's work.
    """
    await ask(target)
    calm: Counter[int] = Counter()
    alone = summary(*await crowd(target, args.streams, min(args.seconds, args.calm), calm))
    rate = args.factor * alone["whole"] / alone["seconds"]
    memory = [_resident(args.pid)]
    tasks: list[asyncio.Task[Answer]] = []
    storm: Counter[int] = Counter()
    command = [sys.executable, __file__, "probe", "--url", f"http://{target.host}:{target.port}", "--tokens", "1"]
    prober = await asyncio.create_subprocess_exec(
        *command, "--seconds", str(args.seconds - 2), stdout=asyncio.subprocess.PIPE
    )
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < args.seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.create_task(ask(target, storm)))
        await asyncio.sleep(0.002)
    until = int(time.perf_counter())
    answers = await asyncio.gather(*tasks)
    over = summary(answers, time.perf_counter() - began)
    probed = json.loads((await prober.communicate())[0])
    memory.append(_resident(args.pid))
    calm_rate, storm_rate = (
        float(np.median([n for second, n in sorted(t.items())[1:-1] if second < until] or [0])) for t in (calm, storm)
    )
    rates = {"calm": calm_rate, "storm": storm_rate}
    figures = {
        "asked_per_second": round(rate, 1),
        "goodput": rates,
        "goodput_share": round(storm_rate / max(calm_rate, 1), 3),
        "resident_mib": memory,
    }
    return {**figures, "peak": alone, "overload": over, "probe": probed}


async def idle(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Connections that nobody needs; one that is closed is opened again. A share of `--half` send a piece of a head now and
    then, which the server ends after 10 seconds; the others ask once and then are silent, which it ends after 60.

    A process of its own looks at the server's health meanwhile, so that this one's work is not in the times.
    """
    opened, closed, held = 0, 0, 0
    end = time.perf_counter() + args.seconds + 2 * args.ramp

    async def hold(which: int) -> None:
        nonlocal opened, closed, held
        source = f"127.1.{which // PER_ADDRESS // 200}.{1 + which // PER_ADDRESS % 200}"
        await asyncio.sleep(random.random() * args.ramp)
        while time.perf_counter() < end:
            try:
                reader, writer = await asyncio.open_connection(target.host, target.port, local_addr=(source, 0))
            except OSError:
                await asyncio.sleep(0.5)
                continue
            opened, held = opened + 1, held + 1
            half = which < args.half * args.connections
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + (b"X-Slow: " if half else b"\r\n"))
            with contextlib.suppress(OSError, TimeoutError):
                while await asyncio.wait_for(reader.read(1), 3 + 4 * random.random()):
                    pass
            with contextlib.suppress(OSError, TimeoutError):
                if not reader.at_eof():
                    writer.write(b"a" * half)
                    await asyncio.wait_for(reader.read(), max(0.1, end - time.perf_counter()))
            held, closed = held - 1, closed + 1
            writer.close()

    tasks = [asyncio.create_task(hold(i)) for i in range(args.connections)]
    await asyncio.sleep(2 * args.ramp)
    counts: list[int] = []
    command = [sys.executable, __file__, "look", "--url", f"http://{target.host}:{target.port}"]
    looker = await asyncio.create_subprocess_exec(*command, "--seconds", str(args.seconds), stdout=asyncio.subprocess.PIPE)
    seen = asyncio.create_task(looker.communicate())
    while not seen.done():
        counts.append(held)
        await asyncio.sleep(0.1)
    looks = json.loads(seen.result()[0])
    answer = await ask(target)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    looks.pop("mode")
    return {
        "connections": args.connections,
        "half_heads": args.half,
        "held": {"least": min(counts), "most": max(counts)},
        "opened": opened,
        "closed_by_server": closed,
        "seconds": args.seconds,
        **looks,
        "a_completion_meanwhile": {
            "status": answer.status,
            "whole": answer.ended,
            "first_ms": round(answer.first * 1000, 1),
        },
    }


async def look(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """One look at the health after the other."""
    looks: list[float] = []
    statuses: Counter[int] = Counter()
    began = time.perf_counter()
    while time.perf_counter() - began < args.seconds:
        status, seconds = await health(target)
        statuses[status] += 1
        looks.append(seconds)
        await asyncio.sleep(0.02)
    return {"looks": len(looks), "statuses": dict(statuses), "health_ms": quantiles(looks)}


async def probe(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """One request after the other, twenty a second at most."""
    answers: list[Answer] = []
    began = time.perf_counter()
    while time.perf_counter() - began < args.seconds:
        answers.append(await ask(target))
        await asyncio.sleep(0.05)
    return summary(answers, time.perf_counter() - began)


async def vanish(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Callers that go away at a random moment, streaming or not, while others are served."""
    left, gone = args.count, 0

    async def caller() -> None:
        nonlocal left, gone
        while left > 0:
            left -= 1
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(target.host, target.port)
                writer.write(target.request(stream=random.random() < 0.5))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), random.random() * 0.3)
                gone += not reader.at_eof()
                writer.transport.abort()

    await ask(target)
    staying = asyncio.create_task(crowd(target, 4, 3600.0))
    await asyncio.gather(*(caller() for _ in range(args.streams)))
    began = time.perf_counter()
    staying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await staying
    figures = await _figures(target)
    while figures["running"] or figures["waiting"]:
        await asyncio.sleep(0.01)
        figures = await _figures(target)
        if time.perf_counter() - began > 30:
            break
    lost = figures["kv_blocks"] - figures["kv_blocks_free"] - figures.get("kv_blocks_kept", 0)
    seconds = time.perf_counter() - began
    return {
        "callers": args.count,
        "gone_before_the_end": gone,
        "blocks_lost": lost,
        "idle_after_ms": round(seconds * 1000, 1),
    }


async def kill(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """kill -9 of the model's process while streams run."""
    back: list[float] = []
    answers: list[Answer] = []
    for _ in range(args.times):
        await ask(target)
        work = asyncio.create_task(crowd(target, args.streams, 3.0, mixed=True))
        await asyncio.sleep(2 * random.random())
        for child in _children(args.pid):
            os.kill(child, signal.SIGKILL)
        began = time.perf_counter()
        status = 0
        while (await health(target, "/readyz"))[0] == 200 and time.perf_counter() - began < 2:
            await asyncio.sleep(0.005)
        while status != 200:
            status, _ = await health(target, "/readyz")
            await health(target)
            await asyncio.sleep(0.02)
        back.append(time.perf_counter() - began)
        answers += (await asyncio.wait_for(work, 60))[0]
    return {"times": args.times, "ready_again_ms": quantiles(back), "ways": ways(answers)} | summary(
        answers, args.times * 3.0
    )


async def term(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """SIGTERM to a server of its own each time, while requests run."""
    return await _ending(args, signal.SIGTERM)


async def crash(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """kill -9 of a server of its own each time: no caller may be left waiting, and its model's process must go, too."""
    return await _ending(args, signal.SIGKILL)


async def _ending(args: argparse.Namespace, number: signal.Signals) -> dict[str, Any]:
    ends: list[float] = []
    statuses: Counter[str] = Counter()
    answers: list[Answer] = []
    for _ in range(args.times):
        with served(args) as (url, process):
            here = target_of(url, args)
            await ask(here)
            work = asyncio.create_task(crowd(here, args.streams, 2.0, mixed=True))
            await asyncio.sleep(1.5 * random.random())
            everything = [process.pid, *_children(process.pid)]
            process.send_signal(number)
            began = time.perf_counter()
            while any(map(_runs, everything)):
                await asyncio.sleep(0.01)
            ends.append(time.perf_counter() - began)
            statuses[str(process.wait())] += 1
            answers += (await asyncio.wait_for(work, 60))[0]
    taken = [a for a in answers if a.status == 200]
    lost = sum(not a.ended for a in taken)
    figures = {"exit_ms": quantiles(ends), "exit_statuses": dict(statuses), "ways": ways(answers)}
    return {"times": args.times, **figures, "taken": len(taken), "taken_without_end": lost} | summary(
        answers, args.times * 1.0
    )


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def _figures(target: Target) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(b"GET /api/metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    writer.close()
    found: dict[str, Any] = json.loads(body)["models"][0]
    return found


def _resident(pid: int | None) -> float:
    """MiB of a process and those that it started; 0 where it cannot be read."""
    if pid is None or not Path("/proc").is_dir():
        return 0.0
    pages = sum(int(Path(f"/proc/{p}/statm").read_text("ascii").split()[1]) for p in (pid, *_children(pid)))
    return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def _children(pid: int) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = each.read_text("ascii", "replace").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(each.parent.name))
    return found


def svg(curves: dict[str, list[float]], title: str) -> str:
    """Cumulative shares over a logarithmic axis of milliseconds."""
    width, height, left, top = 720, 400, 60, 40
    low, high = 0.1, 100_000.0

    def x(ms: float) -> float:
        return left + (np.log10(min(max(ms, low), high)) + 1) / 6 * (width - left - 20)

    def y(share: float) -> float:
        return top + (1 - share) * (height - top - 50)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    ]
    out.append(
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="24" font-size="16">{title}</text>'
    )
    for power in range(-1, 6):
        at = x(10.0**power)
        out.append(f'<path d="M{at:.1f} {top}V{y(0)}" stroke="#ddd"/>')
        out.append(f'<text x="{at:.1f}" y="{y(0) + 18}" text-anchor="middle">{10.0**power:g}</text>')
    for share in (0, 0.5, 0.95, 1):
        out.append(f'<path d="M{left} {y(share):.1f}H{width - 20}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for (name, values), color in zip(curves.items(), ("#2563eb", "#c2410c"), strict=False):
        if values:
            shares = np.linspace(0, 1, 200)
            points = zip(np.quantile(np.array(values) * 1000, shares), shares, strict=True)
            path = "L".join(f"{x(ms):.1f} {y(share):.1f}" for ms, share in points)
            out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            row = top + 18 + 18 * list(curves).index(name)
            out.append(f'<text x="{left + 12}" y="{row}" fill="{color}">{name}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">milliseconds</text></svg>')
    return "\n".join(out)


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of our own: its address and process."""
    command = [sys.executable, "-m", "quarrel", "serve", args.model, "--port", "0", "--rate", "0", *args.options]
    theirs, ours = cores(args.cores)
    _run_on(theirs)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        _run_on(ours)
        log = None
        try:
            for line in process.stderr:
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                raise SystemExit("the server did not start")
            log = subprocess.Popen([sys.executable, "-c", "import sys\nfor _ in sys.stdin: pass"], stdin=process.stderr)
            yield found[1], process
        finally:
            process.terminate()
            process.wait(60)
            if log is not None:
                log.wait(10)


def cores(given: str) -> tuple[list[int], list[int]]:
    """ "0-3,4-7" is the server's and the client's; nothing is no matter which."""
    if not given:
        return [], []
    first, second = ([int(n) for n in part.split("-")] for part in given.split(","))
    return list(range(first[0], first[-1] + 1)), list(range(second[0], second[-1] + 1))


def _run_on(some: list[int]) -> None:
    if some:
        os.sched_setaffinity(0, some)


MODES = {
    "load": load,
    "overload": overload,
    "idle": idle,
    "look": look,
    "probe": probe,
    "vanish": vanish,
    "kill": kill,
    "term": term,
    "crash": crash,
}


def target_of(url: str, args: argparse.Namespace) -> Target:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    return Target(host, int(port or 80), args.tokens, args.key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--url")
    parser.add_argument("--key", default="")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--factor", type=int, default=10)
    parser.add_argument("--calm", type=float, default=60, help="seconds of that before an overload")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--half", type=float, default=1.0, help="share of idle connections that send half a head")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--plot")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pid", type=int, help="of the server at --url, to read its memory and to kill its model")
    parser.add_argument("--cores", default="", help="the server's and the client's, as 0-3,4-7")
    parser.add_argument("--ramp", type=float, default=HEAD_SECONDS, help="seconds over which idle connections are opened")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:cut])
    with contextlib.ExitStack() as stack:
        args.options = given[cut + 1 :]
        url = args.url
        if args.mode in ("term", "crash"):
            url = "http://127.0.0.1:0"
        elif not url:
            url, process = stack.enter_context(served(args))
            args.pid = process.pid
        else:
            _run_on(cores(args.cores)[1])
        target = target_of(url, args)
        with contextlib.suppress(ImportError, ValueError):
            import resource

            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        gc.disable()  # a pause of this process would come back as a burst of connections
        print(json.dumps({"mode": args.mode, **asyncio.run(MODES[args.mode](target, args))}))


if __name__ == "__main__":
    main()
