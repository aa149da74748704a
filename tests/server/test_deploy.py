"""What `deploy/` says of metrics, routes and options is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from quarrel.cli.parser import make_parser
from tests.server.conftest import Live

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NAME = re.compile(r"\bquarrel_[a-z_]+\b")


def exposed(live: Live) -> set[str]:
    live.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1})
    live.client.post("/v1/completions", content=b"{")
    return {re.split(r"[{ ]", row)[0] for row in live.client.get("/metrics").text.splitlines() if not row.startswith("#")}


def test_every_query_of_dashboard_and_alerts_names_a_metric_that_there_is(live: Live) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [t["expr"] for p in dashboard["panels"] for t in p["targets"]]
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    wanted = {name for query in queries for name in NAME.findall(query)}
    assert len(wanted) >= 8
    assert wanted <= exposed(live)


def test_the_files_parse_and_their_options_exist() -> None:
    for path in [*DEPLOY.glob("*.yaml"), *DEPLOY.glob("grafana/provisioning/*/*.yaml"), DEPLOY / "helm" / "values.yaml"]:
        assert yaml.safe_load(path.read_text()), path
    parser = make_parser()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert "3000" not in str(compose["services"]["grafana"]["ports"][0].rsplit(":", 1)[0])
    unit = re.search(r"^ExecStart=\S+ (.*)$", (DEPLOY / "quarrel.service").read_text(), re.MULTILINE)
    assert unit is not None
    for words in (compose["services"]["quarrel"]["command"], unit[1].split()):
        _, unknown = parser.parse_known_args(words)
        assert not unknown
