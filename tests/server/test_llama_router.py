"""Several models behind llama-server's protocol, and one that is unloaded while nobody uses it."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import quarrel
from quarrel.errors import ConfigError
from quarrel.launch.arguments import parse
from quarrel.launch.main import hosts_of, load_options, settings_of, source_of
from quarrel.launch.router import Presets
from quarrel.llm import LLM
from quarrel.server import Settings
from quarrel.server.llama.app import build
from quarrel.server.llama.tools import ToolServers, servers_of
from tests.server.conftest import Live, running

PATIENCE = 60.0


def load(source: str) -> LLM:
    return quarrel.load("demo", backend="cpu", threads=1, n_ctx=64, max_seqs=1)


def post(live: Live, path: str, status: int = 200, **body: Any) -> Any:
    answer = live.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def state_of(live: Live, name: str) -> str:
    rows = live.client.get("/models").json()["data"]
    found: str = next(row["status"]["value"] for row in rows if row["id"] == name)
    return found


def wait_for(live: Live, name: str, state: str) -> None:
    end = time.monotonic() + PATIENCE
    while state_of(live, name) != state:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_router_loads_what_requests_name_and_unloads_the_oldest(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    settings = Settings(data_dir=tmp_path, llama=True, models=("a", "b", "c"), router=True, models_max=2)
    with running(settings, server=build(settings, None, load, lambda: names)) as live:
        props = live.client.get("/props").json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, True)
        assert [state_of(live, name) for name in "abc"] == ["unloaded"] * 3
        assert post(live, "/tokenize", model="a", content="Once")["tokens"]
        assert post(live, "/models/load", model="b") == {"success": True}
        wait_for(live, "b", "loaded")
        assert "already loaded" in post(live, "/models/load", 400, model="b")["error"]["message"]
        post(live, "/completion", model="c", prompt="Once", n_predict=1)
        assert [state_of(live, name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
        assert live.client.get("/props?model=c").json()["default_generation_settings"]["n_ctx"] == 64
        assert "d" in post(live, "/completion", 404, model="d", prompt="Once")["error"]["message"]
        post(live, "/models/unload", model="b")
        assert state_of(live, "b") == "unloaded"
        names[:] = ["c", "d"]
        assert {row["id"] for row in live.client.get("/models?reload=1").json()["data"]} == {"c", "d"}
        text = live.client.get("/metrics").text
        assert "llamacpp:tokens_predicted_total 1\n" in text
        assert "llamacpp:n_tokens_max 3\n" in text


def test_a_model_that_is_not_loaded_is_refused_where_requests_load_none(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, llama=True, models=("a",), router=True, autoload=False)
    with running(settings, server=build(settings, None, load)) as live:
        assert "not loaded" in post(live, "/completion", 400, model="a", prompt="Once")["error"]["message"]


def test_a_model_sleeps_while_nobody_uses_it_and_what_it_counted_is_kept(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, llama=True, models=("a",), keep_alive=0.05, aliases=("b", "a"), tags=("t", "s"))
    with running(settings, server=build(settings, load("a"), load)) as live:
        post(live, "/completion", prompt="Once", n_predict=3)
        end = time.monotonic() + PATIENCE
        while not live.client.get("/props").json()["is_sleeping"]:  # which does not keep it awake
            assert time.monotonic() < end
        row = live.client.get("/v1/models").json()["data"][0]
        assert (row["id"], row["aliases"], row["tags"], row["meta"]["n_vocab"]) == ("a", ["a", "b"], ["s", "t"], 4096)
        assert "llamacpp:tokens_predicted_total 3\n" in live.client.get("/metrics").text
        answer = live.client.get("/metrics")
        assert "llamacpp:predicted_tokens_seconds 0.0\n" in answer.text
        assert answer.headers["Process-Start-Time-Unix"]
        assert live.client.get("/props").json()["is_sleeping"]
        post(live, "/completion", prompt="Once", n_predict=2)  # and it wakes
        assert "llamacpp:tokens_predicted_total 5\n" in live.client.get("/metrics").text


def test_there_are_figures_only_where_they_are_wanted(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, llama=True, metrics=False)
    with running(settings, load) as live:
        assert live.client.get("/metrics").status_code == 501


def test_models_of_a_folder_and_of_a_preset_have_their_own_options(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "eyes").mkdir(parents=True)
    for name in ("one.gguf", "eyes/model.gguf", "eyes/mmproj-f16.gguf", "notes.txt"):
        (folder / name).write_bytes(b"")
    preset = tmp_path / "presets.ini"
    preset.write_text(
        "version = 1\n[*]\nctx-size = 256\n[mine:Q8]\nmodel = m.gguf\nno-mmproj = true\n[hub]\nhf-repo = a/b\n"
    )
    words = ["--models-dir", str(folder), "--models-preset", str(preset), "-np", "1", "-c", "128"]
    presets = Presets(parse(words, {}), words)
    assert presets.read() == ("eyes", "one", "mine:Q8", "hub")
    eyes, mine, hub = (presets.arguments(name) for name in ("eyes", "mine:Q8", "hub"))
    assert (source_of(eyes), load_options(eyes).mmproj) == (f"{folder}/eyes/model.gguf", f"{folder}/eyes/mmproj-f16.gguf")
    assert (load_options(eyes).n_ctx, load_options(mine).n_ctx, load_options(mine).mmproj) == (128, 256, "none")
    assert (source_of(hub), load_options(hub).mmproj) == ("hf://a/b", None)
    preset.write_text("[a]\nno value")
    with pytest.raises(ConfigError, match=r"--models-preset .*presets.ini"):
        presets.read()
    with pytest.raises(ConfigError, match="no such folder"):
        Presets(parse(["--models-dir", str(tmp_path / "none")], {}), []).read()


def test_llama_servers_arguments_say_how_it_is_reached_and_found() -> None:
    words = "--host 127.0.0.1,::1 --alias b,a --tags x -hf o/m:Q4_K_M --sleep-idle-seconds 5 -kvu -c 96 -np 3"
    args = parse(words.split(), {})
    assert (hosts_of(args), source_of(args), load_options(args).n_ctx) == (("127.0.0.1", "::1"), "hf://o/m:Q4_K_M", 96)
    assert source_of(parse(["-hf", "o/m", "--hf-file", "f.gguf"], {})) == "hf://o/m:f.gguf"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = settings_of(args, listener, None, ("a",), 3)
        assert (settings.aliases, settings.tags, settings.keep_alive) == (("b", "a"), ("x",), 5.0)
        assert settings.hosts == ()
        assert not settings.metrics
        assert settings_of(parse(["--host", "127.0.0.1,0.0.0.0"], {}), listener, None, ("a",), 1).hosts == ("*",)


def test_tools_of_mcp_servers_are_listed_and_called_and_one_that_is_none_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server")
    from tests.server.test_toolbox import toys

    begun, gate = threading.Event(), threading.Event()
    given = {"mcpServers": {"none": {"command": "no-such-program-here", "args": ["x"], "timeout_ms": 20}}}
    servers = {"toys": (toys(begun, gate), 30.0), "slow": (toys(begun, gate), 0.001)}
    servers |= servers_of(json.dumps(given), "--mcp-servers-json")
    assert (servers["none"][0].args, servers["none"][1]) == (["x"], 0.02)
    settings = Settings(data_dir=tmp_path, llama=True)
    with (
        ToolServers(servers) as tools,
        running(settings, server=build(settings, load("a"), tools=tools)) as live,
    ):
        found = {row["tool"]: row["definition"]["function"] for row in live.client.get("/tools").json()}
        assert set(found) == {f"{name}_{tool}" for name in ("toys", "slow") for tool in ("add", "fail", "wait")}
        assert found["toys_add"]["name"] == "toys_add"
        assert "a" in found["toys_add"]["parameters"]["properties"]
        assert post(live, "/tools", tool="toys_add", params={"a": 2, "b": 3}) == {"plain_text_response": "5"}
        assert "error" in post(live, "/tools", tool="toys_fail")
        assert "0.001 s" in post(live, "/tools", tool="slow_wait")["error"]
        post(live, "/tools", 404, tool="none_add")
    wrong = (
        {"args": 5},
        {"args": [1]},
        {"env": "x"},
        {"cwd": []},
        {"timeout_ms": "1"},
        {"timeout_ms": -1},
        {"timeout_ms": True},
    )
    odd = [json.dumps({"mcpServers": {"a": {"command": "b", **more}}}) for more in wrong]
    for text in ("no JSON", "[]", '{"mcpServers": {"a": {}}}', "[" * 99_999, *odd):
        with pytest.raises(ConfigError, match="--mcp-servers-json"):
            servers_of(text, "--mcp-servers-json")


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(json.dumps({k.lower(): v for k, v in self.headers.items()}).encode())

    def do_POST(self) -> None:
        self.send_response(204)
        self.end_headers()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_pages_reach_servers_elsewhere_with_the_headers_that_they_name(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        path = f"/cors-proxy?url=http://127.0.0.1:{other.server_port}/x"
        settings = Settings(data_dir=tmp_path, llama=True, proxy=True, predict_route="/predict")
        with running(settings, load) as live:
            named = {"x-llama-server-proxy-header-authorization": "Bearer theirs"}
            seen = live.client.get(path, headers={"Authorization": "Bearer ours", "Cookie": "a=b", **named}).json()
            assert seen["authorization"] == "Bearer theirs"
            assert "cookie" not in seen
            assert live.client.post(path, json={}).status_code == 204
            for url in ("", "ftp://a/", "http://a:b@c/", "http://a:99999/"):
                assert live.client.get(f"/cors-proxy?url={url}").status_code == 400
            both = [{"@requestFormat": "completion", "prompt": "Once", "n_predict": 1}, {"@requestFormat": "none"}]
            first, second = post(live, "/predict", instances=both)["predictions"]
            assert first["tokens_predicted"] == 1
            assert second["error"]["code"] == 400
        other.shutdown()
    settings = Settings(data_dir=tmp_path, llama=True)
    with running(settings, load) as live:
        assert [live.client.get(path).status_code, live.client.get("/tools").status_code] == [403, 403]
        assert live.client.post("/predict", json={"instances": []}).status_code == 404
