"""The QUARREL_* variables are read strictly, in one place."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quarrel import env
from quarrel.env import Environment, memory_of, read_environment
from quarrel.errors import ConfigError
from tests.paths import need_cases

PACKAGE = Path(env.__file__).parent


def test_without_variables_the_defaults_hold() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"QUARREL_THREADS": "", "HOME": "/"}) == Environment()


def test_every_variable_is_read(tmp_path: Path) -> None:
    given = {
        "QUARREL_BACKEND": "cpu",
        "QUARREL_COMPUTE": "float32",
        "QUARREL_THREADS": "3",
        "QUARREL_CHECK": "1",
        "QUARREL_MODELS": str(tmp_path),
        "QUARREL_PREFILL_KEY": "secret",
        "QUARREL_LOG": "debug",
        "QUARREL_MEMORY": "80%",
        "QUARREL_KV_CACHE": "int8",
        "QUARREL_ATTENTION": "own",
        "QUARREL_TENSOR_PARALLEL": "2",
    }
    wanted = Environment(
        "cpu", "float32", 3, True, tmp_path, "debug", 0.8,
        kv_cache="int8", attention="own", tensor_parallel=2, prefill_key="secret",
    )  # fmt: skip
    assert read_environment(given) == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.0", 1.0),
        ("0.25", 0.25),
        ("100%", 1.0),
        ("2 GB", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("1.5g", 3 << 29),
        ("512m", 512 << 20),
        ("123456789", 123456789),
    ],
)
def test_memory_is_bytes_or_a_share(text: str, value: float) -> None:
    read = memory_of(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUARREL_BACKEND", "cuda"),
        ("QUARREL_BACKEND", "CPU"),
        ("QUARREL_COMPUTE", "fp16"),
        ("QUARREL_THREADS", "0"),
        ("QUARREL_TENSOR_PARALLEL", "17"),
        ("QUARREL_THREADS", "-1"),
        ("QUARREL_THREADS", "2.0"),
        ("QUARREL_THREADS", " 2"),
        ("QUARREL_THREADS", "1025"),
        ("QUARREL_THREADS", "9" * 5000),
        ("QUARREL_THREADS", "²"),
        ("QUARREL_CHECK", "true"),
        ("QUARREL_MODELS", "/nowhere/at/all"),
        ("QUARREL_LOG", "INFO"),
        ("QUARREL_MEMORY", "0"),
        ("QUARREL_MEMORY", "0.0"),
        ("QUARREL_MEMORY", "1.5"),
        ("QUARREL_MEMORY", "101%"),
        ("QUARREL_MEMORY", "-1G"),
        ("QUARREL_MEMORY", "8 gigabytes"),
        ("QUARREL_MEMORY", "9" * 5000),
    ],
)
def test_a_malformed_value_is_an_error_that_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is .*, wanted|{name} is .*no folder"):
        read_environment({name: value})


def test_the_variables_are_few_and_all_described() -> None:
    text = Path(env.__file__).read_text()
    names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and _is_name(node.value)}
    assert len(names) <= 15
    assert all(f"\n{name}  " in (env.__doc__ or "") for name in names)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.startswith("QUARREL_") and " " not in value


def test_no_other_file_reads_one() -> None:
    readers = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "env.py":
            continue
        tree = ast.parse(path.read_text("utf-8"))
        reads = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and _is_name(n.value)]
        readers += [f"{path.relative_to(PACKAGE)}:{n.lineno} {n.value}" for n in reads]
    assert readers == []


def test_the_log_goes_to_standard_error_when_asked_for() -> None:
    path = need_cases("llama32", "model-q4_0x.gguf")
    code = f"import quarrel; quarrel.load({str(path)!r}, backend='cpu', n_ctx=32).close()"
    for level, said in (("info", True), ("warning", False), ("", False)):
        variables = {**os.environ, "QUARREL_LOG": level}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables)
        assert ("on cpu" in done.stderr) is said


def test_a_relative_cache_folder_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, wanted in (("cache", ".cache"), ("", ".cache"), (str(tmp_path / "own"), "own")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert env.cache_home() == tmp_path / wanted
