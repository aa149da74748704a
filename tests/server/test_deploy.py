"""What `deploy/` says of metrics, routes and options is true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def rendered(path: Path) -> list[dict[str, Any]]:
    """A template of the chart with an empty list in the place of every value: its shape, without Helm."""
    text = re.sub(r"^\{\{-.*\}\}\n", "", path.read_text(), flags=re.MULTILINE)
    return list(yaml.safe_load_all(re.sub(r"\{\{.*?\}\}", "[]", text)))


def test_the_charts_templates_are_what_they_should_be() -> None:
    values = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
    texts = {path.name: path.read_text() for path in (DEPLOY / "helm" / "templates").glob("*.yaml")}
    for used in {name for text in texts.values() for name in re.findall(r"\.Values\.([\w.]+)", text)}:
        found = values
        for part in used.split("."):
            found = found[part]  # a value that the templates read has a default
    assert [d["kind"] for d in rendered(DEPLOY / "helm" / "templates" / "server.yaml")] == ["Deployment", "Service"]
    (ray,) = rendered(DEPLOY / "helm" / "templates" / "ray.yaml")
    (application,) = yaml.safe_load(ray["spec"]["serveConfigV2"])["applications"]
    module, name = application["import_path"].split(":")
    source = (DEPLOY / f"{module}.py").read_text()
    assert f"def {name}(" in source
    assert {k for k in application["args"] if f'"{k}"' not in source} == set()
    (workers,) = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for group in (workers, ray["spec"]["rayClusterConfig"]["headGroupSpec"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"image", "resources", "volumeMounts"} < set(container)


def test_every_container_of_compose_has_limits() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    limits = [service["deploy"]["resources"]["limits"] for service in services.values()]
    assert all({"cpus", "memory", "pids"} <= set(limit) for limit in limits)


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
