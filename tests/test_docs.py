"""What the pages say is so: options, paths, commands, versions and examples."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quarrel
from quarrel import doctor, env
from quarrel.cli.parser import make_parser
from quarrel.errors import UnsupportedOp
from quarrel.gguf import GGUFFile
from quarrel.models import ARCHITECTURES, Tensors, assemble, read_spec
from quarrel.ops.registry import lower
from tests.models.test_reference_logits import architecture
from tests.paths import CASE_SETS, need_cases
from tools import site
from tools.docs import PAGE, page, structure

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


RECORD = re.compile(r"results/([\w.-]+\.jsonl?)")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def package(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement)[0].lower().replace("-", "_")


def test_the_page_of_options_is_the_parsers() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tools.docs"


def test_the_table_of_rooms_is_the_one_that_is_checked() -> None:
    assert structure(STRUCTURE) == STRUCTURE, "run python -m tools.docs"


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "examples/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TOPS = {"bench", "deploy", "docs", "examples", "fuzz", "quarrel", "tests", "tools"}
ROOM_NAMES = {p.stem for p in (ROOT / "quarrel").iterdir()}


def named_paths(text: str) -> set[str]:
    """Files and folders that a page names in backquotes: of the repository, or, by their room, of the package.

    Left out are the files of a plan: those in the section of structure.md on a kind of layer that is to be added.
    """
    text = text.partition("### A new kind of layer: adding")[0]
    found = set(re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|json|jsonl|toml))?|[a-z_]+\.py)(?:: ?\w+)?`", text))
    return {path for path in found if path.split("/")[0].removesuffix(".py") in TOPS | ROOM_NAMES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_files_that_a_page_names_are_there(path: Path) -> None:
    bases = (ROOT, ROOT / "quarrel", path.parent)
    assert [n for n in sorted(named_paths(path.read_text("utf-8"))) if not any((b / n).exists() for b in bases)] == []


def test_a_path_that_is_not_there_is_noticed() -> None:
    text = "`engine/chain.py`, `ops/registry.py: lower`, `bench/old.py`, `docs/`, `a/b`, `errors.py`, `{}`, `model.gguf`"
    assert named_paths(text) == {"engine/chain.py", "ops/registry.py", "bench/old.py", "docs/", "errors.py"}


def test_links_between_pages_lead_somewhere() -> None:
    for path in (*PAGES, ROOT / "bench" / "results" / "README.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text("utf-8")):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_page_is_on_the_site() -> None:
    assert {path.relative_to(ROOT).as_posix() for path in PAGES} - set(site.pages()) == set()
    assert [page for page in site.pages() if page != site.REFERENCE and not (ROOT / page).is_file()] == []
    assert "::: quarrel.llm.load\n" in site.reference()


EVIDENCE = (ROOT / "docs" / "evidence.md").read_text("utf-8")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`python -m ([^`]+)`", EVIDENCE))))
def test_a_command_of_the_evidence_can_be_run(command: str) -> None:
    module, *words = shlex.split(command)
    assert importlib.util.find_spec(module) is not None
    folder = ROOT / module.split(".")[0]
    options = [word for word in words if word.startswith("-")]
    source = "".join(path.read_text("utf-8") for path in folder.rglob("*.py")) if options else ""
    assert [word for word in options if f'"{word}"' not in source] == []
    assert [word for word in words if word.startswith("tests") and not (ROOT / word).exists()] == []


def test_every_record_behind_a_figure_is_in_the_evidence() -> None:
    cited = {
        link for name in ("README.md", "docs/performance.md") for link in RECORD.findall((ROOT / name).read_text("utf-8"))
    }
    assert len(cited) > 5
    assert cited - set(RECORD.findall(EVIDENCE)) == set()


def test_the_readmes_commands_are_commands() -> None:
    lines = [line.partition("  #")[0] for block in blocks(README, "sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("quarrel ")]
    assert len(commands) >= 6
    for words in commands:
        make_parser().parse_args(words)


def test_every_command_is_in_the_readme() -> None:
    commands = re.findall(r"^## ([\w-]+)$", page(), re.MULTILINE)
    assert [c for c in commands if f"quarrel {c}" not in README and c != "tokenize"] == []


EXAMPLES = {
    "README.md": "completion_tokens=40",
    "docs/python.md": "temperature is -1",
    "docs/engine.md": 'quarrel_inference_tokens_total{model="demo",type="generated"}',
}


@pytest.mark.parametrize(("name", "said"), EXAMPLES.items())
def test_the_examples_run_as_they_stand(name: str, said: str, tmp_path: Path) -> None:
    code = "\n".join(blocks((ROOT / name).read_text("utf-8"), "python"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "QUARREL_BACKEND": "cpu"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_the_first_example_is_short() -> None:
    (example,) = blocks(README, "python")
    assert len(example.splitlines()) <= 12


def test_every_variable_is_described() -> None:
    described = set(re.findall(r"^\| `(QUARREL_\w+)`", (ROOT / "docs" / "python.md").read_text("utf-8"), re.MULTILINE))
    assert described == set(re.findall(r"^(QUARREL_[A-Z_]+)  ", env.__doc__ or "", re.MULTILINE)) == set(env.NAMES)
    assert 0 < len(described) <= 15


def claims() -> dict[str, dict[str, bool]]:
    """What the README says of an architecture (`llama+experts` is Mixtral): does it run on cpu, on triton."""
    table = README.partition("## Which models")[2].partition("\n\nAn op that")[0]
    said: dict[str, dict[str, bool]] = {}
    for line in table.splitlines():
        if line.startswith("| `") and "general" not in line:
            names, _, cpu, cuda, metal = (cell.strip() for cell in line.strip("|").split("|"))
            assert {cpu, cuda, metal} <= {"yes", "not yet"}
            for name in re.findall(r"`([\w-]+)`", names):
                key = f"{name}+experts" if "with experts" in names else name
                said[key] = {"cpu": cpu == "yes", "triton": cuda == "yes", "mlx": metal == "yes"}
    return said


def test_the_readme_lists_the_architectures() -> None:
    assert sorted({*claims()} - {"llama+experts"}) == sorted(ARCHITECTURES)


@pytest.mark.parametrize(
    ("backend", "module"),
    [("cpu", "cpu_backend.registry"), ("triton", "triton_backend.backend"), ("mlx", "mlx_backend.registry")],
)
def test_an_architecture_has_kernels_where_the_readme_says_so(backend: str, module: str) -> None:
    registry = pytest.importorskip(f"quarrel.{module}").REGISTRY
    said, seen = claims(), set()
    need_cases()
    for folder in sorted(folder for cases in CASE_SETS for folder in cases.glob("*")):
        for path in sorted(folder.glob("model-*.gguf"))[:1]:
            if architecture(path) not in ARCHITECTURES:
                continue
            with GGUFFile.open(path) as file:
                spec = read_spec(file)
                program = assemble(spec, Tensors(file))
            key = "llama+experts" if folder.name == "mixtral" else spec.architecture
            try:
                lower(program, registry)
            except UnsupportedOp as error:
                assert not said[key][backend], error
            else:
                assert said[key][backend], f"{key} runs on {backend}: say so in the README's table"
            seen.add(key)
    # The text of qwen3moe by another name: tests/models/test_kinds.py; that of qwen2 by another name.
    assert seen == set(said) - {"qwen3vlmoe", "qwen2vl"}


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (newest, *_) = re.findall(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest == quarrel.__version__ == PROJECT["version"]


def test_ci_finds_the_readmes_two_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    pattern = re.search(r"grep '([^']+)' README.md", script)
    assert pattern
    lines = re.findall(pattern[1] + ".*", README, re.MULTILINE)
    assert len(lines) == 2
    assert "-c constraints.txt . &&" in lines[0]
    assert lines[0].endswith('-m quarrel generate "Once upon a time"')
    assert "-c constraints.txt -e '.[test]' &&" in lines[1]
    assert lines[1].endswith("-m pytest")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_constraints_pin_what_the_package_asks_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if line and line[0] != "#"]
    pinned = {package(line) for line in lines}
    assert [line for line in lines if "==" not in line and not line.startswith("triton>=")] == []
    asked = [r for name in ("hub", "cuda", "test", "dev") for r in PROJECT["optional-dependencies"][name]]
    assert [r for r in (*PROJECT["dependencies"], *asked) if package(r) not in pinned] == []


@pytest.mark.parametrize("extra", doctor.EXTRAS)
def test_doctor_knows_what_an_extra_brings(extra: str) -> None:
    brought = {package(r) for r in PROJECT["optional-dependencies"][extra]}
    assert set(doctor.EXTRAS[extra][1]) == brought


def test_no_file_names_somebodys_home() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("not a git checkout")
    for name in done.stdout.decode().split("\0"):
        path = ROOT / name
        if name.endswith((".md", ".txt", ".toml", ".py", ".json", ".jsonl")) and path.is_file():
            found = re.search(r"/(home|Users|root)/[a-z.]+", path.read_text("utf-8"))
            assert found is None, f"{name} names {found[0]}"
