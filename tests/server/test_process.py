"""The command: signals, refusals at the start, and the keys' command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quarrel.cli import main
from quarrel.errors import ConfigError
from quarrel.server import Settings
from quarrel.server.listening import bound
from tests.ports import reserved_port


@contextmanager
def served(*options: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [
        sys.executable,
        "-m",
        "quarrel",
        "serve",
        "demo",
        "--port",
        "0",
        "--data-dir",
        str(folder),
        "--backend",
        "cpu",
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    url = None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            url = found[1]
            break
    assert url, lines
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    try:
        yield process, url
    finally:
        process.kill()
        process.wait()
        drain.join()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_takes_no_new_ones(tmp_path: Path, number: signal.Signals) -> None:
    with served("--grace", "120", folder=tmp_path) as (process, url):
        body = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True, "stream": True}
        httpx.post(f"{url}/api/generate", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            text = "".join(lines)
        assert text.endswith("data: [DONE]")
        assert '"finish_reason": "length"' in text
        began = time.monotonic()
        assert process.wait(100) == 0
        assert time.monotonic() - began < 60, "what is idle is not waited for, which would take the 120 seconds of --grace"


def test_while_a_model_is_loaded_a_signal_ends_it_at_once(tmp_path: Path) -> None:
    with served("--grace", "60", folder=tmp_path) as (process, url):
        waiting: list[httpx.Response] = []
        ask = {"prompt": "a", "max_tokens": 1}

        def call() -> None:
            with contextlib.suppress(httpx.TransportError):  # the signal was faster than the connection
                waiting.append(httpx.post(f"{url}/v1/completions", json=ask, timeout=60))

        caller = threading.Thread(target=call)
        caller.start()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(100) == 0
        assert time.monotonic() - began < 50
        caller.join(60)
        assert [a.status_code for a in waiting] in ([200], [503], [])


def test_an_option_that_no_model_can_have_ends_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "demo", "--port", "0", "--data-dir", str(tmp_path), "--backend", "cpu", "--no-engine-process"]
    assert main([*words, "--ctx", "513"]) == 1
    assert capsys.readouterr().err.startswith("quarrel: --ctx is 513, wanted 1 to 512")
    assert main([*words, "--ctx", "600", "--rope-scaling", "yarn", "--rope-scale", "1.1"]) == 1
    assert "quarrel: --ctx is 600, wanted 1 to 563" in capsys.readouterr().err
    assert main([*words, "--kv-cache", "fp8", "--attention", "cudnn"]) == 1  # told by loading alone
    assert capsys.readouterr().err.splitlines()[-1].startswith("quarrel: --attention is 'cudnn'")


def test_what_is_not_done_in_time_gets_a_last_event(tmp_path: Path) -> None:
    with served("--grace", "0.3", folder=tmp_path) as (process, url):
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}
        httpx.post(f"{url}/api/generate", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert text.endswith("data: [DONE]")
        assert "server_shutdown" in text or text.count('"finish_reason": "length"') == 8
        assert process.wait(60) == 0


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc")
def test_a_models_process_ends_with_a_server_that_is_killed_and_stands_a_signal_to_all(tmp_path: Path) -> None:
    def parent(pid: int) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[1])
        except OSError:
            return 0

    with served(folder=tmp_path) as (process, url):
        httpx.post(f"{url}/api/generate", json={"prompt": "a", "max_tokens": 1}, timeout=60)
        (model,) = [int(p) for p in os.listdir("/proc") if p.isdigit() and parent(int(p)) == process.pid]
        os.kill(model, signal.SIGTERM)
        os.kill(model, signal.SIGINT)
        assert httpx.post(f"{url}/api/generate", json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200
        assert parent(model) == process.pid
        process.kill()
        end = time.monotonic() + 60
        while parent(model) and time.monotonic() < end:
            time.sleep(0.02)
        assert not parent(model)


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "demo", "--port", port, "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    why = "another program has this port; end it, or choose another --port"
    assert said == f"quarrel: 127.0.0.1:{port} cannot be listened on: {why}"


def test_an_address_that_is_not_here_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        bound("192.0.2.1", 0)
    assert str(caught.value) == "192.0.2.1:0 cannot be listened on: this machine has no such address; choose another --host"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--port", "99999"], "the port is 99999"),
        (["--origin", "example"], "is no origin"),
        (["--models-dir", "/no/such"], "is no folder"),
        (["-m", "no/such.gguf"], "no model 'no/such.gguf' was found"),
        (["--queue", "0"], "--queue is 0"),
        (["--timeout", "nan"], "--timeout is nan"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    assert main(["serve", "demo", "--data-dir", str(tmp_path), *options]) in (1, 2)
    assert word in capsys.readouterr().err


def test_variables_are_read_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quarrel.server.settings import cache_variables, from_environment

    variables = {
        "WEBUI_PORT": "81",
        "WEBUI_HOST": "::1",
        "WEBUI_ALLOWED_ORIGINS": "https://a.b, https://c.d",
        "MODEL_PATH": "m",
        "WEBUI_API_KEY": "short",
    }
    assert from_environment(variables) == {
        "port": 81,
        "host": "::1",
        "origins": ("https://a.b", "https://c.d"),
        "models": ("m",),
        "api_keys": ("short",),
    }
    assert cache_variables(variables) == {}
    assert cache_variables({"WEBUI_CACHE_DIR": str(tmp_path)}) == {
        "XDG_CACHE_HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    assert cache_variables({"WEBUI_CACHE_DIR": "/c", "TRITON_CACHE_DIR": "/t"})["TRITON_CACHE_DIR"] == "/t"
    with pytest.raises(ConfigError, match="has 5 characters, wanted 16"):
        Settings(api_keys=("short",)).check(False)
    monkeypatch.setenv("WEBUI_PORT", "many")
    assert main(["serve", "demo", "--data-dir", str(tmp_path)]) == 1
    assert "WEBUI_PORT is 'many'" in capsys.readouterr().err


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> object:
        assert main(["keys", *words, "--data-dir", str(tmp_path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    made = run("create", "page", "--days", "2")
    assert isinstance(made, dict)
    assert made["key"].startswith("qk-")
    fresh = run("rotate", made["id"])
    assert isinstance(fresh, dict)
    run("revoke", fresh["id"])
    rows = run("list")
    assert isinstance(rows, list)
    assert [r["state"] for r in rows] == ["revoked", "revoked"]
    assert main(["keys", "revoke", "zzz", "--data-dir", str(tmp_path)]) == 1
    assert main(["keys", "create", "--data-dir", str(tmp_path)]) == 2
    assert main(["keys", "list", "--data-dir", str(tmp_path)]) == 0
    assert "revoked" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["keys.json", "keys.made"]


def test_without_the_extra_keys_are_made_and_serving_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['fastapi'] = None; from quarrel.cli import main; sys.exit(main(sys.argv[1:]))"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    assert run("keys", "create", "laptop", "--data-dir", str(tmp_path)).returncode == 0
    done = run("serve", "demo", "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "quarrel: the server needs fastapi: pip install 'longbow-quarrel[server]'\n"


def test_a_first_model_that_cannot_be_loaded_is_in_the_log(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "quarrel", "serve", str(broken), "--port", "0", "--data-dir", str(tmp_path)]
    with subprocess.Popen([*command, "--no-engine-process"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "could not be loaded" in line), "")
        process.terminate()
    assert "broken could not be loaded: " in said


def test_a_server_starts_where_nobody_can_read_what_it_says(tmp_path: Path) -> None:
    with reserved_port() as port:
        starts_unread(port, tmp_path)


def starts_unread(port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quarrel", "serve", "--port", str(port), "--data-dir", str(tmp_path)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen([*command, "--no-engine-process", "--backend", "cpu"], stdout=full, stderr=full)
    try:
        end, found = time.monotonic() + 60, 0
        while found != 200:
            assert process.poll() is None
            assert time.monotonic() < end
            with contextlib.suppress(httpx.TransportError):
                found = httpx.get(f"http://127.0.0.1:{port}/healthz").status_code
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
