"""The process as a launcher starts it: it listens at once, says what it takes, hands over, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import quarrel
from quarrel.launch.devices import visible
from quarrel.launch.early import Early
from quarrel.launch.main import main
from quarrel.launch.report import lines
from quarrel.server.listening import bound
from tests.ports import reserved_port

DEMO = Path(quarrel.__file__).parent / "demo" / "quarrel-demo-11M-Q8_0.gguf"
PATIENCE = 120.0


@contextmanager
def launched(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process whose standard error is a pipe, as a launcher has it, and its port."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "quarrel", "llama-server", "--port", str(port), *words]
        own = {**os.environ, **environment}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=own)
        try:
            yield process, port
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def wait_for(port: int) -> list[int]:
    """The statuses of /health, until it is 200."""
    found: list[int] = []
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and found[-1:] != [200]:
        try:
            found.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code)
        except httpx.TransportError:
            time.sleep(0.01)
    return found


def test_it_loads_serves_and_dies_with_all_that_it_started() -> None:
    with launched("--model", str(DEMO), "-c", "512", "-np", "2", "-ngl", "0", "--what", "is this", "--temp", "0") as (
        process,
        port,
    ):
        statuses = wait_for(port)
        assert statuses[-1] == 200
        assert set(statuses[:-1]) <= {503}
        # The first request may come before the server has taken over.
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            body = {"prompt": "Once upon a time", "n_predict": 4}
            first, again = (client.post("/completion", json=body).json() for _ in range(2))
            assert first["content"] == again["content"]  # by the temperature of the command line
            # By ChatML, as the model has no template.
            chat = {"messages": [{"role": "user", "content": "hi"}], "n_predict": 2}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
            assert client.get("/props", headers={"Host": "page.example"}).status_code == 421
            assert client.get("/v1/models").json()["data"][0]["id"] == "quarrel-demo-11M-Q8_0"
            assert client.get("/props").json()["default_generation_settings"]["n_ctx"] == 256
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        started = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().decode() if process.stdout else ""  # its end means that nobody holds the pipe
        process.wait()
    assert "heeds --port" in said.splitlines()[0]
    assert "passes over --what is this" in said.splitlines()[0]
    sizes = re.findall(r"\w+: +(\S+) (model|KV|compute) buffer size = +([\d.]+) MiB", said)
    assert {kind for _, kind, _ in sizes} == {"model", "KV", "compute"}
    assert sum(float(size) for name, kind, size in sizes if kind == "model") == pytest.approx(11.0, abs=0.2)
    end = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_context_longer_than_the_models_is_the_models() -> None:
    with launched("--model", str(DEMO), "-c", "9000", "-np", "1", "-ngl", "0", "--chat-template", "chatml") as (_, port):
        assert wait_for(port)[-1] == 200
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            assert client.get("/slots").json()[0]["n_ctx"] == 512
            # By ChatML, as the model has no template.
            chat = {"messages": [{"role": "user", "content": "hi"}], "n_predict": 2}
            assert client.post("/v1/chat/completions", json=chat).status_code == 200


OLD = """#!/bin/sh
echo "old engine: $@ ($LD_LIBRARY_PATH)"
"""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--model", "BROKEN"), "not a GGUF file"),
        (("--model", str(DEMO), "--mmproj", "no-such.gguf"), "no-such.gguf"),
        (("--model", str(DEMO), "--lora", "a,b"), "2 adapters at once"),
        (("--list-devices",), ""),
        (("--no-webui", "--verbose"), ""),
    ],
)
def test_what_is_not_for_us_goes_to_the_old_engine_with_the_same_words(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    (broken := tmp_path / "broken.gguf").write_bytes(b"no GGUF at all")
    (old := tmp_path / "llama-server.ollama").write_text(OLD)
    old.chmod(0o755)
    given = [str(broken) if word == "BROKEN" else word for word in words]
    ours = ["--old-engine", str(old), "--old-library-path", "/lib/of/theirs"]
    command = [sys.executable, "-m", "quarrel", "llama-server", *ours, *given, "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 0
    assert found.stdout == f"old engine: {' '.join(given)} --port 0 (/lib/of/theirs)\n"
    assert why in found.stderr
    assert not why or "takes this model" in found.stderr


def test_an_old_engine_that_cannot_be_started_is_one_sentence(tmp_path: Path) -> None:
    (old := tmp_path / "llama-server.ollama").write_text("#!/nowhere/sh\n")
    old.chmod(0o755)
    command = [sys.executable, "-m", "quarrel", "llama-server", "--old-engine", str(old), "--list-devices"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (found.returncode, len(found.stderr.splitlines())) == (1, 1)
    assert found.stderr.startswith(f"error loading model: {old}: No such file")


def test_whatever_goes_wrong_the_old_engine_takes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("blk.0")

    class Handed(Exception):
        pass

    def hand_over(*_: object) -> None:
        raise Handed

    (old := tmp_path / "old").write_text(OLD)
    old.chmod(0o755)
    monkeypatch.setattr("quarrel.launch.main._load", fails)
    monkeypatch.setattr("quarrel.launch.main.hand_over", hand_over)
    with pytest.raises(Handed):
        main(["--model", str(DEMO), "--port", "0", "--old-engine", str(old)])
    assert f"it failed (KeyError: 'blk.0'): {old} takes this model" in capsys.readouterr().err


def test_without_an_old_engine_the_devices_are_our_own(tmp_path: Path) -> None:
    """A stand-in for nvidia-smi, as this machine may have none."""
    (program := tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-aa11, NVIDIA H200, 143771, 143000, 9.0'\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "quarrel", "llama-server"]
    listed = subprocess.run([*command, "--list-devices"], capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert (listed.returncode, listed.stdout) == (
        0,
        "Available devices:\n  CUDA0: NVIDIA H200 (143771 MiB, 143000 MiB free)\n",
    )
    probed = subprocess.run([*command, "--verbose"], capture_output=True, text=True, env=environment, timeout=PATIENCE)
    assert "  Device 0: NVIDIA H200, compute capability 9.0, VMM: no, VRAM: 143771 MiB" in probed.stderr
    assert re.search(r"^system_info: .*CUDA : ARCHS = 900 ", probed.stderr, re.MULTILINE)


def test_hidden_devices_are_not_listed() -> None:
    table = "0, GPU-aa11, A, 10, 9, 8.0\n1, GPU-bb22, B, 20, 19, 9.0\n2, GPU-cc33, C, [N/A], 1, 9.0\n"
    assert [g.name for g in visible(table, None)] == ["A", "B"]
    assert [g.name for g in visible(table, "1,0")] == ["B", "A"]
    assert [g.name for g in visible(table, "GPU-bb22")] == ["B"]
    assert visible(table, "") == []
    assert visible(table, "7") == []
    assert visible("nvidia-smi has failed", None) == []


def get(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as made:
        made.sendall(request)
        found = b""
        while piece := made.recv(65536):
            found += piece
        return found


def test_early_answers_say_how_far_it_is_and_the_rest_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.launch.early.DRAIN_SECONDS", 60.0)  # a busy machine may take longer to send 900 kB
    early = Early(bound("127.0.0.1", 0))
    early.start()
    port = early.listener.getsockname()[1]
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    for request in (
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nContent-Length: 900000\r\n\r\n" + b"x" * 900_000,
    ):
        answer = get(port, request)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == loading
    early.loaded()
    slow = socket.create_connection(("127.0.0.1", port))
    slow.sendall(b"GET /hea")
    asking = socket.create_connection(("127.0.0.1", port))
    asking.sendall(b"POST /completion HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    assert get(port, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert get(port, b"GET /v1/health HTTP/1.1\r\n\r\n").endswith(b'{"status":"ok"}')
    late = socket.create_connection(("127.0.0.1", port))  # may still lie in the listener's queue
    taken = early.hand_over()
    names = {one.getpeername() for one in taken}
    assert {slow.getsockname(), asking.getsockname()} <= names
    one = next(s for s in taken if s.getpeername() == asking.getsockname())
    assert one.recv(100) == b"POST /completion HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    assert not early._thread.is_alive()
    for each in (slow, asking, late, early.listener, *taken):
        each.close()


def test_a_gpu_has_its_buffers_by_name_and_all_layers() -> None:
    with quarrel.load(str(DEMO), backend="cpu", n_ctx=64) as llm:
        from dataclasses import replace

        e = llm.explain()
        gpu = replace(
            e, backend="triton", device="NVIDIA H200", plan=replace(e.plan, free=3 << 30, host=5 << 20, host_layers=2)
        )
    said = list(lines(gpu, 8))
    assert re.fullmatch(r"\w+: using device CUDA0 \(NVIDIA H200\) \(unknown id\) - 3072 MiB free", said[0])
    assert said[1] == "load_tensors: offloaded 7/9 layers to GPU"
    assert "load_tensors:          CPU model buffer size =     5.00 MiB" in said
    found = re.findall(r": +CUDA0 (model|KV|compute) buffer size = +([\d.]+) MiB", "\n".join(said))
    assert [kind for kind, _ in found] == ["model", "KV", "compute"]
    assert float(found[0][1]) == pytest.approx(e.memory.weights / 2**20, abs=0.01)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has Metal")
def test_without_a_mac_nobody_looks_for_metal() -> None:
    code = "import sys; from quarrel.llm.open import choose_backend; found, why = choose_backend('auto', 1)\n"
    code += "print(any(name.startswith(('mlx', 'quarrel.mlx')) for name in sys.modules), *why, sep='\\n')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    shown = found.stdout.splitlines()
    assert shown[0] == "False", found.stderr
    if any("triton" in line for line in shown):
        assert shown[-1] == "backend mlx cannot run on this machine: Metal is there on Apple silicon Macs only"


def test_the_command_goes_straight_to_it() -> None:
    code = "import runpy, sys; sys.argv = ['quarrel', 'llama-server', '--version']\n"
    code += "try: runpy.run_module('quarrel', run_name='__main__')\n"
    code += "except SystemExit as end: print(end.code, 'quarrel.cli' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert found.stdout == "0 False\n", found.stderr


def test_what_takes_long_to_import_is_not_wanted_before_a_model_answers() -> None:
    """Ollama starts an engine for every model."""
    code = (
        "import sys; from quarrel.llm.loading import load_with; from quarrel.llm.options import LoadOptions\n"
        "load_with('demo', LoadOptions(backend='cpu', n_ctx=64))\n"
        "late = ('asyncio', 'gguf', 'tokenizers', 'fastapi', 'pydantic', 'starlette', 'torch', 'jinja2', 'llguidance')\n"
        "late += ('http.client', 'ssl', 'quarrel.llm.images', 'quarrel.parallel', 'quarrel.cli.parser')\n"
        "print([name for name in late if name in sys.modules])\n"
        "import quarrel.server.llama.app, quarrel.server.run\n"
        "print('fastapi' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert found.stdout.split("\n")[:2] == ["[]", "False"], found.stderr
