"""Writes `docs/coverage.md`, which test runs what on which backend: `python -m tools.coverage`.

The page is made of the very parameters that pytest gives to the tests named here. A test compares the two, and asks that no
promised cell is empty.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from quarrel.gguf import GGMLType
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Case, Op
from quarrel.ops.formats import WEIGHT_TYPES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
OPS = {**ALL_OPS, **EXTRA_OPS}
BACKENDS = ("cpu", "triton", "mlx")
HEADS = (64, 80, 96, 128, 256)
FUSED = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0)


@dataclass(frozen=True)
class Source:
    """A test function; `ops` is what it runs where its parameters name a block format alone."""

    letter: str
    backend: str
    module: str
    function: str
    ops: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.module.replace(".", "/") + ".py"


_EXPERTS = ("expert_up", "expert_down")
_LEVELS = "test_linear_is_right_and_does_not_depend_on_the_batch"
SOURCES = (
    Source("A", "cpu", "tests.cpu_backend.test_ops", "test_cases_match_the_reference"),
    Source("B", "cpu", "tests.cpu_backend.test_experts", "test_experts_of_every_format", _EXPERTS),
    Source("C", "cpu", "tests.cpu_backend.test_levels", _LEVELS, ("linear",)),
    Source("D", "cpu", "tests.cpu_backend.test_models", "test_outputs_match_the_truth_in_any_pieces"),
    Source("E", "triton", "tests.triton_backend.test_ops", "test_case_matches_the_reference"),
    Source("F", "triton", "tests.triton_backend.test_extra", "test_case_matches_the_reference"),
    Source("G", "triton", "tests.triton_backend.test_extra", "test_experts_of_every_format", _EXPERTS),
    Source("H", "triton", "tests.triton_backend.test_models", "test_outputs_match_the_truth_in_two_pieces"),
    Source("I", "mlx", "tests.mlx_backend.test_cases", "test_case_matches_the_reference_in_half_precision"),
    Source("J", "mlx", "tests.mlx_backend.test_linear", "test_case_matches_the_reference"),
    Source("K", "mlx", "tests.mlx_backend.test_experts", "test_every_format_alone_and_in_tiles", ("expert_down",)),
    Source("L", "mlx", "tests.mlx_backend.test_experts", "test_every_format_of_gate_and_up", ("expert_up",)),
    Source("M", "mlx", "tests.mlx_backend.test_attention", "test_every_head_size_alone_and_in_tiles", ("attention",)),
    Source("N", "mlx", "tests.mlx_backend.test_models", "test_outputs_match_the_truth_in_any_pieces"),
)
RECORD = "bench/results/2026-11-22-h200-models.json"
"""Whole models on the GPU itself."""


def everything() -> bool:
    """Whether the tests have more parameters than the page, which is made where there is no GPU."""
    _load_interpreter()
    interpreted = importlib.import_module("quarrel.triton_backend.runtime.launch").INTERPRETED
    return os.environ.get("QUARREL_TEST_ALL") == "1" or not interpreted


def _load_interpreter() -> None:
    """As pytest does before it loads the tests of that backend."""
    importlib.import_module("tests.triton_backend.conftest")


def parameters(function: Any) -> Iterator[dict[str, Any]]:
    """What pytest calls a parametrised test with."""
    axes = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
        # pytest.param(...) has its values and marks; else a row is a tuple, or for one name the value itself.
        rows = [row.values if hasattr(row, "marks") else row if len(names) > 1 else (row,) for row in mark.args[1]]
        axes.append([dict(zip(names, row)) for row in rows])
    for parts in product(*axes):
        yield {name: value for part in parts for name, value in part.items()}


@dataclass(frozen=True)
class Fact:
    """One thing that a test runs."""

    op: str
    format: GGMLType | None = None
    head: int = 0
    feature: str = ""


@cache
def facts() -> dict[tuple[str, Fact], str]:
    """Letters of the tests, by backend and what they run."""
    found: dict[tuple[str, Fact], str] = {}
    _load_interpreter()
    for source in SOURCES:
        function = getattr(importlib.import_module(source.module), source.function)
        for given in parameters(function):
            for fact in _facts(source, given):
                letters = found.get((source.backend, fact), "")
                if source.letter not in letters:
                    found[source.backend, fact] = letters + source.letter
    return found


def _facts(source: Source, given: dict[str, Any]) -> Iterator[Fact]:
    if isinstance(given.get("op"), Op):
        yield from _of_case(given["op"], given["case"])
    elif "name" in given:
        for case in OPS[given["name"]].cases():
            yield from _of_case(OPS[given["name"]], case)
    elif "type" in given:
        yield from (Fact(op, given["type"]) for op in source.ops)
    elif isinstance(given.get("spec"), AttentionSpec):
        for new in (1, 2):
            yield from _of_attention(given["spec"], new)
    elif "case" in given:
        yield Fact("model " + given["case"][0])


def _of_case(op: Op, case: Case) -> Iterator[Fact]:
    yield Fact(op.name)
    members = (getattr(case.spec, name, None) for name in ("linear", "gate", "up"))
    parts = (case.spec, *members, *getattr(case.spec, "linears", ()))
    for part in parts:
        if isinstance(type := getattr(part, "type", None), GGMLType):
            yield Fact(op.name, type)
    if isinstance(case.spec, AttentionSpec) and not case.dims.get("kv"):
        yield from _of_attention(case.spec, case.dims["Q"])
    if isinstance(case.spec, AttentionSpec) and case.dims.get("kv"):
        yield Fact(op.name, feature=f"cache of {case.note}")


def _of_attention(spec: AttentionSpec, new: int) -> Iterator[Fact]:
    kind = "one query" if new == 1 else "several"
    yield Fact("attention", head=spec.head_dim, feature=kind)
    for name in ("window", "sinks", "cap"):
        if getattr(spec, name):
            yield Fact("attention", feature=f"{name}, {kind}")
    if spec.n_heads > spec.n_kv:
        yield Fact("attention", feature=f"shared keys, {kind}")


def letters(fact: Fact) -> tuple[str, ...]:
    """By backend; empty where no test runs it."""
    return tuple(facts().get((backend, fact), "") for backend in BACKENDS)


WEIGHTS = {
    **{op: tuple(WEIGHT_TYPES) for op in ("linear", "embedding", "expert_up", "expert_down")},
    **dict.fromkeys(("norm_linear", "norm_gate_up"), FUSED),
}
"""The formats that are promised, by op."""


def promised() -> dict[str, Fact]:
    """Every cell that must not be empty on any backend, with a name."""
    cells = {op: Fact(op) for op in OPS}
    for op, types in WEIGHTS.items():
        cells |= {f"{op} {type.name}": Fact(op, type) for type in types}
    for kind in ("one query", "several"):
        cells |= {f"attention {head} {kind}": Fact("attention", head=head, feature=kind) for head in HEADS}
        for name in ("window", "sinks", "cap", "shared keys"):
            cells[f"attention {name} {kind}"] = Fact("attention", feature=f"{name}, {kind}")
    return cells


def missing() -> list[str]:
    """Promised cells that are empty."""
    empty = [f"{name} on {b}" for name, fact in promised().items() for b, x in zip(BACKENDS, letters(fact)) if not x]
    for folder in folders():
        cpu, triton, mlx = models(folder)
        empty += [f"{folder} on {b}" for b, x in zip(BACKENDS, (cpu, triton, mlx)) if not x]
    return empty


@cache
def folders() -> list[str]:
    """Reference models, one a folder of cases."""
    return sorted({fact.op.removeprefix("model ") for _, fact in facts() if fact.op.startswith("model ")})


@cache
def _recorded() -> frozenset[str]:
    rows = json.loads((ROOT / RECORD).read_text("utf-8"))["rows"]
    return frozenset(r["model"].partition("/")[0] for r in rows if r.get("error", math.inf) <= r["limit"])


def models(folder: str) -> tuple[str, str, str]:
    """Letters, and `gpu` for the record on a GPU."""
    cpu, triton, mlx = letters(Fact("model " + folder))
    # The files that do not always run do so with QUARREL_TEST_ALL=1.
    triton = " ".join(filter(None, [triton, "gpu" if folder in _recorded() else ""]))
    return cpu, triton or _all("triton", folder), mlx or _all("mlx", folder)


def _all(backend: str, folder: str) -> str:
    """`all` if the backend's test of whole models takes this folder's files where everything is asked for."""
    module = importlib.import_module(f"tests.{backend}_backend.test_models")
    return "all" if any(arch == folder for arch, _ in module.variants()) else ""


HEAD = """\
# Which test runs what

Written by `python -m tools.coverage` from the parameters of the tests themselves; a test fails where this page is out of
date, or where a cell is empty that this project promises. A letter is a test; each compares with the NumPy reference of the
op, or a whole model with reference logits. Where there is no GPU, Triton's kernels run in its interpreter and Metal's on
the emulator of [docs/metal.md](metal.md). Random shapes and values come on top: `python -m fuzz`,
on an H200 too (23,970 cases of 29 ops, right after two bugs it had found; [record](../bench/results/2026-11-21-fuzz.json)).
"""
BLOCKS = """
## Block formats

CPU, CUDA, Metal in each cell. Other formats of ggml are converted when a model is loaded.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield "| | backend | test |\n|---|---|---|"
    for s in SOURCES:
        yield f"| {s.letter} | {s.backend} | `{s.path}::{s.function}` |"
    yield f"| gpu | triton | on an H200: [record](../{RECORD}) |"
    yield "| all | triton, mlx | H or N with `QUARREL_TEST_ALL=1`: some files run always, the others then |"
    yield "\n## Ops\n\n| op | CPU | CUDA | Metal |\n|---|---|---|---|"
    for op in OPS:
        yield _row(f"`{op}`", letters(Fact(op)))
    yield BLOCKS
    yield "| | " + " | ".join(f"`{op}`" for op in WEIGHTS) + " |"
    yield "|---" * (len(WEIGHTS) + 1) + "|"
    for type in WEIGHT_TYPES:
        yield _row(type.name, [_three(letters(Fact(op, type)), type in WEIGHTS[op]) for op in WEIGHTS])
    yield "\nFusions are promised for Q4_K, Q6_K and Q8_0; for other formats they are taken apart or use the same kernels."
    yield "\n## Attention\n\n| head size, or what else | one query | several |\n|---|---|---|"
    for head in HEADS:
        cells = [Fact("attention", head=head, feature=kind) for kind in ("one query", "several")]
        yield _row(str(head), [_three(letters(c), True) for c in cells])
    for name in ("window", "sinks", "cap", "shared keys"):
        cells = [Fact("attention", feature=f"{name}, {kind}") for kind in ("one query", "several")]
        yield _row(name, [_three(letters(c), True) for c in cells])
    yield "\n## Whole models\n\nFolders of the reference cases; each holds one or more files of an architecture.\n"
    yield "| | CPU | CUDA | Metal |\n|---|---|---|---|"
    for folder in folders():
        yield _row(folder, models(folder))


def _row(head: str, cells: Iterable[str]) -> str:
    return f"| {head} | " + " | ".join(cells) + " |"


def _three(found: tuple[str, ...], wanted: bool) -> str:
    return ", ".join(x or "-" for x in found) if any(found) or wanted else ""


def main() -> None:
    PAGE.write_text(page(), "utf-8")
    for cell in missing():
        print(f"no test: {cell}")


if __name__ == "__main__":
    main()
