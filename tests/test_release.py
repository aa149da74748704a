"""What is published: the files of the wheel, and the facts that are written in more than one place."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

import quarrel
from quarrel.gguf.resolve import BUNDLED

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_wheel_has_the_packages_files_and_no_others() -> None:
    done = subprocess.run(["git", "ls-files", "quarrel"], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    brought = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    tracked = {name for name in done.stdout.splitlines() if (ROOT / name).exists()}
    assert tracked - brought == set()
    assert {name for name in brought - tracked if ".gguf" in name or not name.endswith(".py")} == set()
    assert {"quarrel/server/static/app.js", "quarrel/py.typed"} <= brought
    assert {f"quarrel/demo/{file}" for file in BUNDLED.values()} <= brought


def test_the_version_is_the_same_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "Chart.yaml").read_text("utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {quarrel.__version__, chart["appVersion"], citation["version"]} == {PROJECT["version"]}
    assert citation["license"] == PROJECT["license"]


def test_the_wheel_is_tried_on_every_python_that_it_names() -> None:
    check = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text("utf-8"))
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert check["jobs"]["install"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_cannot_change_under_them(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", ())]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_forms_of_issues_can_be_read(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    assert path.name == "config.yml" or all(field["attributes"]["label"] for field in form["body"])
