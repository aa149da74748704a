"""The same in the form that a caller wants: metrics as text, the document as YAML."""

from __future__ import annotations

import pytest
import yaml

from quarrel.server.openapi import as_yaml
from tests.server.conftest import Live


@pytest.mark.parametrize(
    ("accept", "query", "text"),
    [
        ("*/*", "", False),
        ("application/json", "", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "", False),
        ("text/plain", "", True),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", "", True),
        ("application/json, text/plain;q=0.5", "", False),
        ("application/json;q=0.1, text/plain", "", True),
        ("text/plain;q=zap, ;;;,,", "", False),
        ("application/json", "?format=prometheus", True),
        ("text/plain", "?format=json", False),
    ],
)
def test_metrics_come_as_accept_or_the_query_says(live: Live, accept: str, query: str, text: bool) -> None:
    answer = live.client.get(f"/api/metrics{query}", headers={"Accept": accept})
    assert answer.status_code == 200
    if text:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "# TYPE quarrel_webui_requests_total counter" in answer.text
    else:
        assert {"uptime", "active", "models"} == answer.json().keys()


def test_another_format_is_refused(live: Live) -> None:
    assert live.client.get("/api/metrics?format=xml").status_code == 400


def test_the_document_comes_as_yaml(live: Live) -> None:
    answer = live.client.get("/openapi.yaml")
    assert answer.headers["content-type"].startswith("application/yaml")
    assert yaml.safe_load(answer.text) == live.client.get("/openapi.json").json()


def test_odd_values_come_back_from_yaml() -> None:
    odd = {
        "a: b": [[], {}, [1, [2, {"x": None}]], "yes", "- a", "\n", "\u00e9", 1e-9, True],
        "": {"b": {"c": "#"}},
        "no": "1",
    }
    assert yaml.safe_load(as_yaml(odd)) == odd
