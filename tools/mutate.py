"""Breaks the Python code that guards requests' data, one small edit at a time, and counts how many breaks its tests notice.

    python -m tools.mutate [--only scheduler] [--sample N] [--seed 0] [--jobs 2] [--seconds S] [--json FILE]

Edits of the syntax tree: comparisons, operators, conditions, numbers and truth values changed, statements left out. Each
mutant is a fork of this process, which imports the changed module in place of the file and runs that module's tests, the
quickest first, up to the first failure. What hangs is noticed, too. Assertions, messages, annotations and constants of
modules are left alone. Edits come in a random order, so that a part of them, where the time runs out, is a fair sample.
The last line is JSON; the exit status is 1 below 85 %.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tools.mutants import Tally, equivalent, share

ROOT = Path(__file__).resolve().parent.parent
ENOUGH = 0.85
PATIENT = 4.0
_SIMULATED = "tests/engine/test_simulation.py::test_{}[range({}, {})]"
SIMULATION = (
    _SIMULATED.format("any_order_of_events_gives_everyone_his_own", 10, 20),
    _SIMULATED.format("faults_lose_those_in_the_step_and_nobody_else", 110, 120),
)
"""A part: what it does not notice, the rest of it seldom does."""
_BLOCKS = (
    "tests/engine/test_blocks.py",
    "tests/engine/test_starts.py",
    "tests/engine/test_reuse.py",
    "tests/engine/test_family.py",
    "tests/engine/test_eviction.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_turns.py",
    "tests/engine/test_windows.py",
)
TARGETS: dict[str, tuple[str, ...]] = {
    "quarrel/engine/pools.py": (*_BLOCKS, *SIMULATION),
    "quarrel/engine/prefix.py": (*_BLOCKS, *SIMULATION),
    "quarrel/engine/cache.py": (*_BLOCKS, *SIMULATION),
    "quarrel/engine/queue.py": (
        "tests/engine/test_scheduler.py",
        "tests/engine/test_reuse.py",
        "tests/engine/test_service.py",
    ),
    "quarrel/engine/scheduler.py": (*_BLOCKS[5:], "tests/engine/test_draft.py", *SIMULATION),
    "quarrel/engine/loop.py": ("tests/engine/test_async.py", "tests/engine/test_engine.py", "tests/engine/test_service.py"),
    "quarrel/server/keys.py": ("tests/server/test_keys.py",),
    "quarrel/server/limits.py": ("tests/server/test_limits.py",),
}
"""A module, and its tests in the order in which they run."""
SLOW = "not two_thousand and not long_load and not nobody_starves"
EQUIVALENT: dict[str, tuple[tuple[str, str, str], ...]] = {
    "quarrel/engine/pools.py": (
        ("1 to 2", "self.added += 1", "only whether it changes is looked at"),
        ("Add to Sub", "self.added += 1", "likewise"),
        ("0 to 1", "self.added = 0", "likewise"),
    ),
    "quarrel/engine/loop.py": (("0 to 1", "self.places = Places(0)", "serving sets it before anybody can come"),),
    "quarrel/engine/prefix.py": (
        ("32 to 33", "token_bytes(32)", "a secret of any length will do"),
        ("16 to 17", "digest_size=16", "and a key"),
        ("0 to 1", "self._clock = 0", "only the order counts"),
        ("LtE to Lt", "while at + stride <= limit and", "speed only: what remains is walked"),
        ("0 to 1", "self.window_changes = 0", "only whether it changes is looked at"),
        ("Add to Sub", "self.window_changes += 1", "likewise"),
        ("1 to 2", "self.window_changes += 1", "likewise"),
        ("Add to Sub", "parent.changes += 1", "likewise"),
        ("1 to 2", "parent.changes += 1", "likewise"),
        ("1 to 2", "self._key(None, (), salt)", "a root's block is any number below 0"),
        ("1 to 2", "self._clock += 1", "only the order counts"),
        (
            "to Or",
            "if node.alive and node.block >= 0 and not node.children",
            "who is offered is looked at again when he goes",
        ),
        ("64 to 65", "4 * len(self._by_block) + 64", "a bound that was chosen"),
        ("Mult to Add", "4 * len(self._by_block) + 64", "likewise"),
        ("Add to Sub", "4 * len(self._by_block) + 64", "likewise"),
        ("Gt to GtE", "4 * len(self._by_block) + 64", "likewise"),
        ("256 to 257", "stride: int = 256", "speed only"),
        ("Add to Sub", "while at + stride <= limit and", "speed only: what remains is walked"),
    ),
    "quarrel/engine/cache.py": (
        ("1 to 2", "s.cache.indexed = len(whole)", "any number below 0 says the same"),
        ("LtE to Lt", "if tokens <= len(state.blocks) * size", "what is enough is found to be so below, too"),
        ("Gt to GtE", "if ahead > 0 and", "none is taken then"),
        ("Gt to GtE", "if len(blocks) > at:", "nothing is written then"),
        ("1 to 2", "at + 1 - self.rules.window >=", "a first look, which is repeated exactly"),
        ("Add to Sub", "at + 1 - self.rules.window >=", "likewise: of freed + 1"),
        ("Sub to Add", "at + 1 - self.rules.window >=", "likewise"),
        ("Mult to Add", "node, start = s.cache.node", "start is set again before it is read"),
    ),
    "quarrel/engine/queue.py": (
        ("2 to 3", "sorted(self._heap", "no two have the same order"),
        ("Add to Sub", "if len(self._heap) > 2 *", "a bound that was chosen"),
        ("2 to 3", "if len(self._heap) > 2 *", "likewise"),
        ("64 to 65", "if len(self._heap) > 2 *", "likewise"),
        ("Mult to Add", "if len(self._heap) > 2 *", "likewise"),
        ("Gt to GtE", "if len(self._heap) > 2 *", "likewise"),
    ),
    "quarrel/engine/scheduler.py": (
        ("Lt to LtE", "last.place < sequence.place", "no two have the same place"),
        ("0 to 1", "self._count = 0", "only the order counts"),
        ("Gt to GtE", "if sequence.siblings > 1 else []", "nobody who runs is of the family of one that is alone"),
        ("1 to 2", "self._count += 1", "only the order counts"),
    ),
    "quarrel/server/keys.py": (
        ("1 to 2", "indent=1", "how the file looks"),
        ("left out", "file.flush()", "shows only where the machine loses its power"),
        ("True to False", "missing_ok=True", "the file is there unless what failed was its renaming"),
        ("left out", "self._stamp = None", "the new file has another inode, unless that is given out again"),
        ("0.0 to 1.0", "times =", "any number stands for no time"),
    ),
}
"""By file: edits that were looked at and change nothing that anybody can see."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One edit of one file."""

    file: str
    line: int
    what: str
    text: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}: {self.text}"


def mutants(file: str) -> Iterator[Mutant]:
    """Every edit of a file."""
    source = (ROOT / file).read_text("utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    for place, (node, count) in enumerate(_places(tree)):
        for choice in range(count):
            changed = copy.deepcopy(tree)
            what = _edit(_places(changed), place, choice)
            code = compile(ast.fix_missing_locations(changed), file, "exec")
            yield Mutant(file, node.lineno, what, lines[node.lineno - 1].strip(), code)


Place = tuple[ast.expr | ast.stmt, int]


def _places(tree: ast.AST) -> list[Place]:
    """Nodes that can be edited, in how many ways; the same for a copy."""
    found: list[Place] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                visit(default, True)
            for statement in node.body:
                visit(statement, True)
            return
        if inside and isinstance(node, ast.expr | ast.stmt) and (count := _ways(node)):
            found.append((node, count))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inside)

    visit(tree, False)
    return found


def _ways(node: ast.expr | ast.stmt) -> int:
    match node:
        case ast.Compare():
            return sum(type(op) in _COMPARISONS for op in node.ops)
        case ast.BoolOp() | ast.UnaryOp(ast.Not()) | ast.Continue() | ast.Break():
            return 1
        case ast.BinOp(left, op, right):
            return int(type(op) in _OPERATORS and not any(isinstance(x, ast.JoinedStr) or _text(x) for x in (left, right)))
        case ast.Constant(bool() | int() | float()):
            return 1
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            return int(not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant))
        case ast.Call(ast.Name(name)):
            return int(name in _CALLS)
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("log")))):
            return 0
        case ast.Expr(ast.Call()) | ast.Delete():
            return 1
        case ast.AugAssign(_, op):
            return 1 + (type(op) in _OPERATORS)
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            return 1
    return 0


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _edit(places: list[Place], place: int, choice: int) -> str:
    """Makes the edit in the tree that the places are of, and says what it is."""
    node = places[place][0]
    match node:
        case ast.Compare(ops=ops):
            at = [i for i, op in enumerate(ops) if type(op) in _COMPARISONS][choice]
            before, ops[at] = ops[at], _COMPARISONS[type(ops[at])]()
            return f"{type(before).__name__} to {type(ops[at]).__name__}"
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return f"to {type(node.op).__name__}"
        case ast.UnaryOp():
            node.op = ast.UAdd()
            _become(node, ast.Call(ast.Name("bool", ast.Load()), [node.operand], []))
            return "no not"
        case ast.BinOp():
            before, node.op = node.op, _OPERATORS[type(node.op)]()
            return f"{type(before).__name__} to {type(node.op).__name__}"
        case ast.Constant(value):
            assert isinstance(value, bool | int | float)
            node.value = not value if isinstance(value, bool) else value + 1
            return f"{value} to {node.value}"
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return "condition negated"
        case ast.Call(ast.Name() as name):
            before_name, name.id = name.id, _CALLS[name.id]
            return f"{before_name} to {name.id}"
        case ast.AugAssign() if choice:
            before, node.op = node.op, _OPERATORS[type(node.op)]()
            return f"{type(before).__name__} to {type(node.op).__name__}"
        case ast.Continue() | ast.Break():
            other = ast.Break if isinstance(node, ast.Continue) else ast.Continue
            _become(node, other())
            return f"to {other.__name__.lower()}"
    _become(node, ast.Pass())
    return "left out"


def _become(node: ast.AST, other: ast.AST) -> None:
    """Makes a node another one, wherever it hangs; its line stays."""
    for name in node._fields:
        delattr(node, name)
    node.__class__ = other.__class__
    for name, value in ast.iter_fields(other):
        setattr(node, name, value)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module the code of a mutant."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.file.removesuffix(".py").replace("/", ".")
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self._mutant.file, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._mutant.code, vars(module))


def run(tests: Sequence[str], mutant: Mutant | None, report: int) -> int:
    """In a fork: pytest's exit status. Without a mutant, writes which modules came from elsewhere to `report`."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(mutant))
        sys.modules.pop(mutant.file.removesuffix(".py").replace("/", "."), None)  # as it was before the edit
    words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout", "-o", "addopts="]
    status = int(pytest.main([*words, "-W", "ignore", "-k", SLOW, *tests]))
    if mutant is None:
        ours = ("quarrel", "tests", "tools", "__main__", "_pytest", "pytest")
        names = [n for n, m in sys.modules.items() if n.split(".")[0] not in ours and getattr(m, "__spec__", None)]
        os.write(report, json.dumps(names).encode())
    return status


def fork(tests: Sequence[str], mutant: Mutant | None, report: int = -1, seconds: float = math.inf) -> int:
    """The process id of a child that runs the tests, for so many seconds of a processor's time at most."""
    gc.freeze()  # so that the child's collector leaves shared pages alone
    pid = os.fork()
    if not pid:
        try:
            if seconds < math.inf:
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), resource.RLIM_INFINITY))
            status = run(tests, mutant, report)
        except BaseException:
            status = 99
        os._exit(status)
    return pid


def baseline(files: Sequence[str]) -> dict[str, float]:
    """Seconds of a processor's time that each file's tests take as they are. Imports here what they import from elsewhere,
    for all forks."""
    taken, wanted = dict[str, float](), set[str]()
    for file in files:
        ours, theirs = os.pipe()
        pid = fork(TARGETS[file], None, theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as end:
            found = end.read()
        _, status, used = os.wait4(pid, 0)
        if code := os.waitstatus_to_exitcode(status):
            raise SystemExit(f"the tests of {file} fail as they are (status {code}): {' '.join(TARGETS[file])}")
        taken[file] = used.ru_utime + used.ru_stime
        wanted.update(json.loads(found))
    for name in sorted(wanted):
        try:
            importlib.import_module(name)
        except Exception:  # a part that wants to be imported by another one
            continue
    return taken


def judge(todo: list[Mutant], limits: dict[str, float], jobs: int, end: float) -> Iterator[tuple[Mutant, str]]:
    """Mutants and what noticed them, as it is known. limits: seconds of a processor's time after which the tests of a file
    hang, so that a busy machine is no hang; those that wait for ever are given PATIENT times as long by the clock."""
    running: dict[int, tuple[Mutant, float]] = {}
    while todo or running:
        while todo and len(running) < jobs and time.monotonic() < end:
            mutant = todo.pop()
            seconds = limits[mutant.file]
            pid = fork(TARGETS[mutant.file], mutant, seconds=seconds)
            running[pid] = mutant, time.monotonic() + PATIENT * seconds
        if not running:
            return
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            mutant, _ = running.pop(pid)
            _kill(pid)  # what it has started
            code = os.waitstatus_to_exitcode(status)
            yield mutant, {0: "", 1: "a test", -signal.SIGXCPU: "a hang"}.get(code, "a crash" if code < 0 else "an import")
        elif not pid:
            for late, (mutant, when) in list(running.items()):
                if time.monotonic() > when:
                    del running[late]
                    _kill(late)
                    os.waitpid(late, 0)
                    yield mutant, "a hang"
            time.sleep(0.02)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--sample", type=int, default=1 << 30, help="so many edits of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    files = [file for file in TARGETS if args.only in file]
    chance, todo = random.Random(args.seed), list[Mutant]()
    limits = {file: 10 + 3 * seconds for file, seconds in baseline(files).items()}
    for file in files:
        every = list(mutants(file))
        todo += chance.sample(every, min(args.sample, len(every)))
    chance.shuffle(todo)
    tallies = {file: Tally(file) for file in files}
    wanted = len(todo)

    def report() -> dict[str, object]:
        score = share(list(tallies.values()))
        of = {"seed": args.seed, "wanted": wanted, "share_caught": score, "shares": {}}
        of["shares"] = {file: share([tally]) for file, tally in tallies.items()}
        return of | {file: tally.report() for file, tally in tallies.items()}

    for mutant, noticed in judge(todo, limits, args.jobs, end):
        reason = equivalent(mutant.what, mutant.text, EQUIVALENT.get(mutant.file, ()))
        tallies[mutant.file].add(str(mutant), noticed, reason)
        if args.json:
            args.json.write_text(json.dumps(report(), indent=1) + "\n")
    print(json.dumps(report()))
    return int(share(list(tallies.values())) < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
