"""Clients that others wrote, where they are installed."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from quarrel.server import Rates, Settings
from tests.server.conftest import Live, running


def test_langchains_chat_model(live: Live) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = langchain.ChatOpenAI(
        model="demo", base_url=f"{live.url}/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0
    )
    whole = model.invoke("Tell me of a king.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] <= 24
    parts = list(model.stream("Tell me of a king."))
    assert "".join(p.content for p in parts) == whole.content
    assert len(parts) > 3
    schema = {"title": "Pick", "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    longer = langchain.ChatOpenAI(model="demo", base_url=f"{live.url}/v1", api_key="none", max_tokens=200, seed=1)
    loaded = longer.with_structured_output({**schema, "additionalProperties": False}, method="json_schema")
    assert loaded.invoke("Pick one.")["a"] in ("x", "y")


CURL = """
curl -sS URL/v1/chat/completions -H 'Content-Type: application/json' \
  -d '{"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}'
curl -sSN URL/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 8, "stream": true}'
curl -sSN URL/api/stream -d '{"prompt": "Once", "max_tokens": 8}'
curl -sS URL/v1/embeddings -d '{"input": "a king"}'
"""


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_as_the_documentation_has_it(live: Live) -> None:
    for line in CURL.replace("\\\n", " ").strip().splitlines():
        words = [w.replace("URL", live.url) for w in shlex.split(line)]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        assert '"text"' in answer or '"token"' in answer or '"content"' in answer or '"embedding"' in answer
        assert "error" not in answer


@pytest.fixture(scope="module", name="open_door")
def _open_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("o"), rates=Rates(requests=0), chat_template="chatml")
    with running(settings) as made:
        yield made


HI = '"messages":[{"role":"user","content":"Hi"}]'
CALL = (
    '"tools":[{"type":"function","name":"pick","description":"d","parameters":{"$schema":'
    '"http://json-schema.org/draft-07/schema#","type":"object","properties":{"city":{"type":"string","enum":["Rome","Oslo"]}},'
    '"required":["city"],"additionalProperties":false}}],"tool_choice":"required"'
)
# What each wrote on the wire, but for the model's name and the length of the answer: (request line, headers, body, what its
# reader needs of the answer).
WRITTEN = {
    "java.net.http, which offers HTTP/2": (
        "/api/chat",
        "Connection: Upgrade, HTTP2-Settings|HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA|Upgrade: h2c"
        "|User-Agent: Java-http-client/17.0.15|Content-Type: application/json",
        '{"model":"demo",' + HI + ',"stream":false,"options":{"num_predict":3,"temperature":0}}',
        ['"done":true', '"done_reason":"length"'],
    ),
    "java.net.HttpURLConnection": (
        "/api/chat",
        "Content-Type: application/json|User-Agent: Java/17.0.15|Accept: text/html, image/gif, image/jpeg, */*; q=0.2"
        "|Connection: keep-alive|Transfer-Encoding: chunked",
        '{"model":"demo",' + HI + ',"stream":false,"options":{"num_predict":3,"temperature":0}}',
        ['"done":true'],
    ),
    "Ollama's own client in Go": (
        "/api/chat",
        "User-Agent: ollama/0.33.0 (amd64 linux) Go/go1.27|Accept: application/x-ndjson|Content-Type: application/json"
        "|Accept-Encoding: gzip",
        '{"model":"demo","messages":null,"options":null}',
        ['"done_reason":"load"', '"message":{"role":"assistant","content":""}'],
    ),
    "ollama-js": (
        "/api/chat",
        "connection: keep-alive|Content-Type: application/json|Accept: application/json"
        "|User-Agent: ollama-js/0.6.4 (x64 linux Node.js/v20.20.2)|accept-language: *|sec-fetch-mode: cors"
        "|accept-encoding: gzip, deflate",
        '{"model":"demo",' + HI + ',"stream":true,"options":{"num_predict":3,"temperature":0}}',
        ['"done": true'],
    ),
    "openai-js": (
        "/v1/chat/completions",
        "connection: keep-alive|accept: application/json|user-agent: OpenAI/JS 6.49.0|x-stainless-retry-count: 0"
        "|x-stainless-lang: js|x-stainless-runtime: node|authorization: Bearer k|content-type: application/json"
        "|accept-language: *|sec-fetch-mode: cors|accept-encoding: gzip, deflate",
        '{"model":"demo",' + HI + ',"max_tokens":3,"temperature":0,"stream_options":{"include_usage":true},"stream":true}',
        ['"finish_reason": "length"', '"choices": [], "usage": {"prompt_tokens":', "data: [DONE]"],
    ),
    "@langchain/openai by responses": (
        "/v1/responses",
        "accept: application/json|user-agent: langchainjs-openai/1.0.0|x-stainless-lang: js|content-type: application/json",
        '{"input":[{"type":"message","role":"user","content":"Hi"}],"model":"demo","stream":false,"text":{},'
        '"max_output_tokens":16}',
        ['"text":{"format":{"type":"text"}}', '"input_tokens_details":{"cached_tokens":'],
    ),
    "@langchain/ollama for vectors": (
        "/api/embed",
        "Content-Type: application/json|Accept: application/json",
        '{"model":"demo","input":["a","b"],"truncate":false}',
        ['"embeddings":[[', '"total_duration":'],
    ),
    "@ai-sdk/openai with a tool": (
        "/v1/responses",
        "authorization: Bearer k|content-type: application/json|accept: */*"
        "|user-agent: ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2",
        '{"model":"demo","input":[{"role":"user","content":[{"type":"input_text","text":"Hi"}]}],"max_output_tokens":256,'
        + CALL
        + "}",
        ['"type":"function_call"', '"name":"pick"', '"status":"completed"'],
    ),
}


@pytest.mark.parametrize("client", WRITTEN)
def test_what_clients_in_other_languages_write(open_door: Live, client: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path, headers, body, wanted = WRITTEN[client]
    data = body.encode()
    chunked = "Transfer-Encoding" in headers
    if chunked:
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    head = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{open_door.port}", *headers.split("|")]
    head += [] if chunked else [f"Content-Length: {len(data)}"]
    last = b"GET /api/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = open_door.raw("\r\n".join([*head, "", ""]).encode() + data + last, 30).decode()
    assert answer.count("HTTP/1.1 200") == 2, answer
    assert [part for part in wanted if part not in answer] == []
    assert json.loads(answer.splitlines()[-1])["version"], "the connection goes on"
    assert "upgrade" not in caplog.text.lower()


def test_top_k_minus_1_is_no_cut_as_clients_of_vllm_send_it(live: Live) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "seed": 5}
    texts = [
        live.client.post("/v1/completions", json={**body, "top_k": k}).json()["choices"][0]["text"] for k in (-1, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
