"""Every line knows its room: what each room may import and what it must never name, checked over the syntax trees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from quarrel.models import ARCHITECTURES
from tools.rooms import PACKAGE, ROOMS, TEST_ONLY, Room

ROOT = Path(__file__).resolve().parents[1]


FORBIDDEN_IMPORTS = frozenset({"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "imp"})
FORBIDDEN_CALLS = frozenset({"eval", "exec", "__import__"})
FORBIDDEN_ATTRIBUTES = frozenset({"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"})

MECHANISMS = frozenset({"mamba", "mamba2"})
"""Architectures that are called by the mechanism they are made of, which has no other name."""

ARCHITECTURE = re.compile(rf"\b({'|'.join(sorted(set(ARCHITECTURES) - MECHANISMS))})\b(?!\.cpp)", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    """One source file and its room."""

    path: str
    room: str
    tree: ast.Module = field(repr=False)


def module(path: Path, text: str) -> Module:
    relative = path.relative_to(PACKAGE)
    room = relative.parts[0].removesuffix(".py")
    return Module(str(path.relative_to(ROOT)), room, ast.parse(text, str(path)))


@cache
def modules() -> list[Module]:
    """Those of the package: many trees, and most processes of a run of all tests need none."""
    return [module(p, p.read_text("utf-8")) for p in sorted(PACKAGE.rglob("*.py"))]


@dataclass(frozen=True)
class Import:
    """A dotted name that some line brings in; `nested` when a function does it."""

    name: str
    line: int
    nested: bool


def imports(m: Module) -> Iterator[Import]:
    """All of them, whether at the top, in a function, under TYPE_CHECKING or by a constant `import_module`."""

    def walk(node: ast.AST, nested: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, nested) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{m.path}:{child.lineno} imports relatively"
                if child.module == "quarrel":
                    yield from (Import(f"quarrel.{alias.name}", child.lineno, nested) for alias in child.names)
                else:
                    yield Import(child.module or "", child.lineno, nested)
            elif isinstance(child, ast.Call) and _called(child).endswith("import_module"):
                yield from (Import(str(a.value), child.lineno, nested) for a in child.args if isinstance(a, ast.Constant))
            inside = nested or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, inside)

    return walk(m.tree, False)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func)


def import_faults(m: Module) -> list[str]:
    room = ROOMS.get(m.room)
    if room is None:
        return [f"{m.path}: no room is called {m.room!r}; give it one in tools/rooms.py"]
    faults = []
    for found in imports(m):
        top = found.name.split(".")[0]
        where = f"{m.path}:{found.line}"
        if top in FORBIDDEN_IMPORTS:
            faults.append(f"{where} imports {top}, which no file here may")
        elif top == "quarrel":
            if not _own(m.room, room, found.name):
                faults.append(f"{where}: {m.room}/ may not import {found.name}")
        elif top not in sys.stdlib_module_names and top not in room.outside:
            if TEST_ONLY.get(m.room) != top:
                faults.append(f"{where}: {m.room}/ may not import {top}")
            elif not found.nested:
                faults.append(f"{where}: {m.room}/ may import {top} inside a function only")
    return faults


def _own(name: str, room: Room, imported: str) -> bool:
    inner = imported.removeprefix("quarrel").removeprefix(".")
    if inner and not (PACKAGE / inner.split(".")[0]).exists() and not (PACKAGE / f"{inner.split('.')[0]}.py").exists():
        inner = ""  # `from quarrel import load`: a public name, not a module
    allowed = (name, *room.own)
    return any(inner == a or (a != "" and inner.startswith(f"{a}.")) for a in allowed)


def danger_faults(m: Module) -> list[str]:
    """Calls that run what a file says, wherever they stand."""
    faults = []
    for node in ast.walk(m.tree):
        where = f"{m.path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in FORBIDDEN_CALLS or name in FORBIDDEN_ATTRIBUTES:
                faults.append(f"{where} calls {name}")
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if on and keyword.arg in ("allow_pickle", "shell"):
                    faults.append(f"{where} passes {keyword.arg}=True")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            faults.append(f"{where} names {ast.unparse(node)}")
    return faults


def noun_faults(m: Module) -> list[str]:
    """Architectures named in code or texts (docstrings may cite them) where the room does not speak of them."""
    room = ROOMS.get(m.room, Room("", ""))
    if room.nouns:
        return []
    docstrings = {
        id(node.value)
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    faults = []
    for node in ast.walk(m.tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
        elif isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            text = node.name
        elif isinstance(node, ast.arg):
            text = node.arg
        if named := ARCHITECTURE.search(text.replace("_", " ")):
            faults.append(f"{m.path}:{getattr(node, 'lineno', 0)}: {m.room}/ names the architecture {named[0]!r}")
    return faults


def test_every_file_imports_only_what_its_room_may() -> None:
    assert [fault for m in modules() for fault in import_faults(m)] == []


def test_nothing_runs_code_from_a_file() -> None:
    assert [fault for m in modules() for fault in danger_faults(m)] == []


def test_only_models_and_tokenizers_name_an_architecture() -> None:
    quiet = ("ops", "cpu_backend", "triton_backend", "mlx_backend", "engine", "gguf")
    assert [fault for m in modules() if m.room in quiet for fault in noun_faults(m)] == []


@pytest.mark.parametrize(
    ("room", "line", "said"),
    [
        ("ops/bad.py", "import torch", "ops/ may not import torch"),
        ("ops/bad.py", "def f():\n    from triton import jit", "ops/ may not import triton"),
        ("ops/bad.py", "from quarrel import models", "ops/ may not import quarrel.models"),
        ("ops/bad.py", "from hypothesis import strategies", "inside a function only"),
        ("engine/bad.py", "from quarrel.ops.linear import linear", "engine/ may not import quarrel.ops.linear"),
        ("engine/bad.py", "from quarrel.gguf import GGUFFile", "engine/ may not import quarrel.gguf"),
        ("cpu_backend/bad.py", "import importlib\nimportlib.import_module('torch')", "may not import torch"),
        ("cli/bad.py", "import numpy", "cli/ may not import numpy"),
        ("attic/bad.py", "x = 1", "no room is called 'attic'"),
        ("gguf/bad.py", "import pickle", "imports pickle"),
    ],
)
def test_a_breach_of_the_table_is_found(room: str, line: str, said: str) -> None:
    faults = import_faults(module(PACKAGE / room, line))
    assert any(said in fault for fault in faults), faults


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "f = yaml.load",
        "os.system('ls')",
    ],
)
def test_a_dangerous_call_is_found(line: str) -> None:
    assert danger_faults(module(PACKAGE / "gguf" / "bad.py", line))


def test_an_architecture_named_in_a_kernel_is_found_and_a_docstring_is_not() -> None:
    assert noun_faults(module(PACKAGE / "ops" / "bad.py", "kind = 'gemma2'"))
    assert noun_faults(module(PACKAGE / "ops" / "bad.py", "def llama_rope(): pass"))
    assert not noun_faults(module(PACKAGE / "ops" / "good.py", '"""As in gemma2."""\nx = "made by llama.cpp"'))


Graph = Mapping[str, frozenset[str]]


def graph(trees: Mapping[str, ast.Module]) -> Graph:
    """Which modules each module names when it is loaded or type-checked: imports inside functions are left out."""

    def named(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                full = {alias.name: f"{child.module}.{alias.name}" for alias in child.names}
                yield from (name if name in trees else child.module or "" for name in full.values())
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from named(child)

    return {name: frozenset(named(tree)) & trees.keys() - {name} for name, tree in trees.items()}


def circles(edges: Graph) -> list[set[str]]:
    """Modules that reach themselves, by the circle they are in."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += edges[name]
        return seen

    reached = {name: reach(name) for name in edges}
    found: list[set[str]] = []
    for name in edges:
        if name in reached[name] and not any(name in circle for circle in found):
            found.append({other for other in reached[name] if name in reached[other]})
    return found


def test_no_modules_import_each_other() -> None:
    names = {m.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): m.tree for m in modules()}
    assert circles(graph(names)) == []


def test_a_circle_of_imports_is_found() -> None:
    texts = {
        "quarrel.a": "from quarrel import b",
        "quarrel.b": "if TYPE_CHECKING:\n    from quarrel.c import C",
        "quarrel.c": "import quarrel.a",
        "quarrel.d": "from quarrel.a import x\ndef f():\n    from quarrel import e",
        "quarrel.e": "from quarrel.d import y",
    }
    assert circles(graph({name: ast.parse(text) for name, text in texts.items()})) == [
        {"quarrel.a", "quarrel.b", "quarrel.c"}
    ]


def test_the_table_names_only_rooms_that_are_there() -> None:
    here = {p.stem for p in PACKAGE.iterdir()}
    assert ROOMS.keys() - here == set()


def test_importing_the_package_brings_in_no_backend() -> None:
    code = "import sys, quarrel.cli; print(*sorted({'torch', 'triton', 'mlx', 'llvmlite'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
