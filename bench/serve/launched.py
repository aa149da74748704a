"""How soon a llama-server is there, and how many tokens a second it gives 1, 4 and 16 callers: any program that takes its
arguments and speaks its protocol, so that two can be compared.

    python -m bench.serve.launched --out FILE.jsonl --model MODEL.gguf [--starts 8] [--callers 1,4,16] [--tokens 64]
        [--prompt-tokens 256] [--ctx 512] [-- COMMAND ...]

COMMAND is `quarrel llama-server` by default; `--model`, `--port`, `-c` and `-np` are put behind it. One line of JSON is for
the starts (seconds from the start of the process until it listens, until /health is 200, until a first completion; and what
the process had computed when /health was 200, which depends less on what else the machine does), and one
for each number of callers: tokens a second of all together, prompts included, the median time to the first token, memory.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.shared import Notes, command_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OURS = [sys.executable, "-m", "quarrel.launch"]
LIMIT = 300.0


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--callers", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("command", nargs="*", default=OURS)
    args = parser.parse_args()
    notes, name = Notes(args.out), " ".join(Path(word).name for word in args.command)
    times = [started(args.command, args.model, args.ctx) for _ in range(args.starts)]
    found = {key: [t[key] for t in times] for key in times[0]} if times else {}
    best = {key: {"least": round(min(v), 3), "median": round(median(v), 3)} for key, v in found.items()}
    notes.say(
        command=name, model=Path(args.model).name, cores=len(os.sched_getaffinity(0)), starts=len(times), seconds=best
    )
    for count in map(int, args.callers.split(",")):
        with running(args.command, args.model, args.ctx * count, count) as (process, port):
            wait(port)
            called(port, 1, args.prompt_tokens, 8)  # what is done once
            row = called(port, count, args.prompt_tokens, args.tokens)
            notes.say(command=name, callers=count, **row, memory_mib=memory(process.pid))
    return 0


@contextmanager
def running(
    command: list[str], model: str, ctx: int, parallel: int, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
    words = [*command, "--model", model, "--port", str(port), "-c", str(ctx), "-np", str(parallel)]
    environment = {k: v for k, v in environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait()


def wait(port: int) -> tuple[float, float]:
    """When something listened, and when /health was 200, by the clock."""
    listened, end = 0.0, time.perf_counter() + LIMIT
    while time.perf_counter() < end:
        try:
            status, _ = asked(port, "GET", "/health")
            listened = listened or time.perf_counter()
            if status == 200:
                return listened, time.perf_counter()
        except OSError:
            pass
        time.sleep(0.003)
    raise SystemExit("it was not ready in time")


def started(command: list[str], model: str, ctx: int) -> dict[str, float]:
    began = time.perf_counter()
    with running(command, model, ctx, 1) as (process, port):
        listened, ready = wait(port)
        computed = computing(process.pid)
        asked(port, "POST", "/completion", {"prompt": "Once", "n_predict": 1})
        first = time.perf_counter()
    return {"listens": listened - began, "ready": ready - began, "computed": computed, "first": first - began}


def asked(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def called(port: int, count: int, prompt_tokens: int, tokens: int) -> dict[str, float]:
    """So many callers at once, each with a prompt of its own."""
    firsts: list[float] = []
    begin = threading.Barrier(count + 1)

    def call(which: int) -> None:
        prompt = [100 + (which * 977 + i * 31) % 3000 for i in range(prompt_tokens)]
        body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
        begin.wait()
        began = time.perf_counter()
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        firsts.append(time.perf_counter() - began)
        last = [line for line in answer.read().split(b"\n") if line.startswith(b"data: ")][-1]
        assert json.loads(last[6:])["tokens_predicted"] == tokens
        connection.close()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {"tokens_per_s": round(count * tokens / seconds, 1), "first_token_s": round(median(firsts), 4)}


def computing(pid: int) -> float:
    """Seconds of a core that a process has used; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Resident MiB; 0 where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)


if __name__ == "__main__":
    sys.exit(main())
