"""The pages of `docs/tutorials/` do what they say: their files are written and imported, the rest is run."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quarrel.models import ARCHITECTURES
from quarrel.ops.registry import backend

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"


def put(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[str]]:
    """The modules of a page's files, imported under their own names, and what remains of its code."""
    modules, rest = {}, []
    for code in re.findall(r"^```python\n(.*?)^```$", (TUTORIALS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL):
        named = re.match(r"# (quarrel/\S+)\.py\n", code)
        if named is None:
            rest.append(code)
            continue
        name = named[1].replace("/", ".")
        path = folder / f"{name}.py"
        path.write_text(code, "utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, modules[name])
        spec.loader.exec_module(modules[name])
    return modules, rest


@contextmanager
def metal() -> Iterator[Any]:
    from tests.mlx_backend.cases import running

    with running() as made:
        yield made


@contextmanager
def triton() -> Iterator[Any]:
    from quarrel.triton_backend.backend import create

    yield create()


@contextmanager
def cpu() -> Iterator[Any]:
    yield backend("cpu")


def test_an_op_in_three_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for framework in ("mlx.core", "triton"):
        pytest.importorskip(framework, reason=f"needs {framework}")
    modules, (check,) = put("op.md", tmp_path, monkeypatch)
    homes = {"cpu_backend.registry": cpu, "triton_backend.backend": triton, "mlx_backend.registry": metal}
    for home, running in homes.items():
        registry = importlib.import_module(f"quarrel.{home}").REGISTRY
        (mine,) = (m for name, m in modules.items() if name.split(".")[1] == home.split(".")[0])
        with running() as made:
            monkeypatch.setitem(registry._by_op, "softsign", list(mine.IMPLEMENTATIONS))
            exec(check, {"backend": made})


def test_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    _, rest = put("architecture.md", tmp_path, monkeypatch)
    monkeypatch.setitem(ARCHITECTURES, "tinker", "tinker")  # type: ignore[arg-type]
    exec("\n".join(rest), {})
    assert "relative error " in capsys.readouterr().out
