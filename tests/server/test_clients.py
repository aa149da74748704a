"""Clients that others wrote, where they are installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from tests.server.conftest import Live


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
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
        assert '"text"' in answer or '"token"' in answer or '"content"' in answer or '"embedding"' in answer
        assert "error" not in answer
