"""Breaks the Metal kernels of the MLX backend, one small edit at a time, and counts how many breaks the checks notice.

    python -m tools.metal_mutate [--edits 50] [--seed 0] [--only NAME] [--json FILE]

First every barrier is taken out, then random edits are made: comparisons flipped, operators, numbers and min / max
exchanged, conditions negated. A mutant is run on the cases of the contracts that reach its kernel, under the emulator's
checks and two schedules, and is caught if anything is found or a result leaves the contract's tolerance. Edits that do not
compile, or that leave the machine code as it was, are not counted and others are made instead. The last line is one JSON
document. It takes some seconds an edit.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quarrel.errors import QuarrelError, UnsupportedOp
from quarrel.gguf import GGMLType
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from quarrel.ops import ALL_OPS, EXTRA_OPS, reference
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.compare import errors, row_error
from quarrel.ops.contract import Case, Compute, Concrete, Op
from quarrel.ops.linear import LINEAR, NORM_LINEAR, LinearSpec, NormLinearSpec
from quarrel.ops.moe import ROUTE, RouteSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.sample import SAMPLE, SampleSpec
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec
from tests.mlx_backend.trials import FAR_APART, every_cut, far_apart
from tools.metal_emulator import MetalCompileError, MetalFindings, Mode, Settings, install, metal_kernel
from tools.metal_emulator.build import MetalSource
from tools.metal_emulator.kernel import Call
from tools.metal_emulator.ptx import compile_ptx
from tools.metal_emulator.session import Launch
from tools.metal_emulator.toolchain import find_toolchain
from tools.mutants import Tally, equivalent, share

CHECK = Settings(mode=Mode.CHECK, timeout_s=20)
SEEDS = (0, 1)
MOST_CASES = 24
COMPUTES: tuple[Compute, ...] = ("float16", "float32")
"""Half precision has the narrower types, float32 the narrower tolerance."""
KIN = 4
"""Other kernels of a family that an edit is tried in: so many of those with the most rows, and half as many of those with
the largest matrices."""
_FAMILY = re.compile(r"_(f32|f16|bf16|[it]?q\d\w*|mxfp4|nvfp4)(?=_|$).*")

BOTH_WAYS = ("linear", "linear_add", "norm_linear", "norm_gate_up", "expert_up", "expert_down")
"""Ops that have one kernel for rows that decode and another for the rows of prompts."""
CHOOSING = ("sample", "logprobs", "route")
"""Ops that give whole numbers: one draw of inputs reaches few of their choices."""
SEEDS_OF_CHOICES = 4


def _emptied(op: Op) -> Op:
    """A recurrent op on inputs whose last sequence brings no token."""

    def make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
        assert op.make is not None
        *given, starts, kv_len, slots, state = op.make(case, rng)
        assert isinstance(starts, np.ndarray)
        end = int(starts[-2])
        rows = [x[:end].copy() if isinstance(x, np.ndarray) and len(x) == starts[-1] else x for x in given]
        return (*rows, np.append(starts[:-1], starts[-2]), kv_len, slots, state)

    return replace(op, make=make)


_MAP = LinearSpec(GGMLType.Q4_K, 5, 2048)
FURTHER: tuple[tuple[Op, Case], ...] = (
    # Matrices whose rows several SIMD-groups share.
    (LINEAR, Case(_MAP, {"T": 2})),
    (NORM_LINEAR, Case(NormLinearSpec(NormSpec("rms", 2048, 1e-5), (_MAP, _MAP)), {"T": 2})),
    (LINEAR, Case(replace(_MAP, n=2049, k=4096), {"T": 2})),
    # Splits and tiles before a window, groups that 32 is no multiple of.
    (ATTENTION, Case(AttentionSpec(2, 1, 64, 0.125, window=300), {"S": 2, "Q": 1, "KV": 900, "block_size": 32})),
    (
        ATTENTION,
        Case(AttentionSpec(4, 2, 64, 0.125, window=300, chunked=True), {"S": 2, "Q": 1, "KV": 900, "block_size": 32}),
    ),
    (ATTENTION, Case(AttentionSpec(2, 1, 64, 0.125, window=40), {"S": 40, "Q": 3, "KV": 90, "block_size": 32})),
    (ATTENTION, Case(AttentionSpec(5, 1, 32, 0.18), {"S": 2, "Q": 40, "KV": 60, "block_size": 32})),
    # Heads and rows of a head that no threadgroup divides into.
    (ATTENTION, Case(AttentionSpec(7, 1, 64, 0.125), {"S": 3, "Q": 1, "KV": 50, "block_size": 16})),
    (SCAN2, Case(Scan2Spec(3, 20, 1, 16), {"S": 2, "Q": 3})),
    (_emptied(CONV), Case(ConvSpec(96, 4), {"S": 2, "Q": 7})),
    (_emptied(SCAN1), Case(Scan1Spec(96, 16), {"S": 2, "Q": 7})),
    (_emptied(SCAN2), Case(Scan2Spec(6, 32, 2, 16), {"S": 2, "Q": 7})),
    (replace(ATTENTION, make=far_apart), FAR_APART),
    # Every mix of cuts, and infinities among finite logits.
    (replace(SAMPLE, make=lambda case, rng: every_cut(rng)), Case(SampleSpec(100), {"R": 204})),
    # Groups of experts without a bias.
    (ROUTE, Case(RouteSpec(8, 2, "sigmoid", n_groups=8, groups_used=4), {"T": 11})),
)
"""What the contracts' cases are too small or too round for."""

BARRIER = re.compile(r"(threadgroup_barrier|simdgroup_barrier)\([^;]*\);")
EDITS: tuple[tuple[str, str, str], ...] = (
    # What is found, what comes in its place, and what to call it.
    (r"(?<=[\w)\]] )<(?= [\w(-])", "<=", "< to <="),
    (r"(?<=[\w)\]] )>=(?= [\w(-])", ">", ">= to >"),
    (r"(?<=[\w)\]] )>(?= [\w(-])", ">=", "> to >="),
    (r"(?<=[\w)\]] )==(?= [\w(-])", "!=", "== to !="),
    (r" && ", " || ", "&& to ||"),
    (r" \|\| ", " && ", "|| to &&"),
    (r"(?<=[\w)\]]) \+ (?=[\w(])", " - ", "+ to -"),
    (r"(?<=[\w)\]]) - (?=[\w(])", " + ", "- to +"),
    (r"(?<=[\w)\]]) \* (?=[\w(])", " + ", "* to +"),
    (r"(?<=[\w)\]]) / (?=[\w(])", " * ", "/ to *"),
    (r"(?<=[\w)\]]) % (?=[\w(])", " / ", "% to /"),
    (r"metal::min\(", "metal::max(", "min to max"),
    (r"metal::max\(", "metal::min(", "max to min"),
    (r"(?<== )0(?=;)", "1", "a count from 1"),
    (r"simd_sum\(", "(", "no sum over lanes"),
    (r"(?<= \? )([^:;?]+) : ([^;,()]+)(?=;)", r"\2 : \1", "branches exchanged"),
)

EQUIVALENT: tuple[tuple[str, str, str], ...] = (
    ("> to >=", "if (d > -INFINITY)", "exp(-inf) adds nothing"),
    ("> to >=", "if (!(t > 0.0f)", "what is weighed at temperature 0 is not read"),
    ("> to >=", "above[d - 1] > 0", "what is wanted is never 0, so neither is what holds it"),
    (">= to >", "first > 0 && first >= count", "a chunk of no tokens does nothing"),
    ("a count from 1", "uint found = 0", "ranks are 32 bits of a float; the cut moves by one of its last places"),
    ("/ to *", "lost) / t)", "what rounding lost is too little to show in half precision"),
    ("> to >=", "gate > 7.0f ? 7.0f : gate", "7 either way"),
    (">= to >", "if (row >= N) return", "rows past the last are computed as the last and not written"),
    (">= to >", "(tile_row >= n_new * GROUP) return", "rows past the last are computed and not written"),
    (">= to >", "tile_row >= rows) return", "rows past the last are not written, nor is a split of no keys read"),
    ("< to <=", "group < groups", "rows past the last are computed as the last and not written"),
    ("< to <=", "if (i * 32 + lane < D) acc[i] +=", "what is read past a head is not written"),
    ("- to +", "(v[i * VEC + j] - mean) * (v[i * VEC + j] - mean)", "the mean of (v + m)(v - m) is the variance too"),
    ("* to +", "best = metal::max(best, top_sum", "any number about as large serves for the largest"),
    ("> to >=", "const float by = sum > 0.0f", "a sequence's only query has a key"),
    ("> to >=", "most > 1e-30f", "a head whose largest value is 1e-30 to the bit"),
    ("a count from 1", "ulong next = 0", "every entry is larger"),
    ("< to <=", "if (b < D)", "pairs end at D, which is even"),
    ("> to >=", "if (WINDOW > 0) seen = seen", "every key is past the first one of no window; encoders' cases notice it"),
    ("< to <=", "for (int i = 0; i < EACH; i++)", "the loop leaves at n >= N before"),
    ("/ to *", "score[KEYS / 8]", "an array longer than it need be"),
    ("> to >=", "if (x > MOST) x = MOST", "the largest either way"),
    ("< to <=", "const uint code = size < NORMAL", "the least normal number has one code by both formulas"),
    ("|| to &&", "- begin != 1 || first >= last", "a split of several queries or of no keys is read by nobody"),
    (">= to >", "- begin != 1 || first >= last", "a split of no keys is read by nobody"),
    ("< to <=", "firsts[g] < firsts[0]", "no two of them are the same token"),
    ("&& to ||", "if (lane < R && out < N) total +=", "lanes that write nothing"),
    ("< to <=", "in_next[r] = row + r < P", "a row past a head's last is not written"),
    ("< to <=", "for (int i = 0; i < pairs; i += 32)", "a round without pairs adds none"),
    ("< to <=", "start < last; start += KEYS", "a tile without keys adds nothing"),
    ("< to <=", "for (int i = 0; i < COUNT; i++)", "a sum more, which no lane that writes takes"),
    ("|| to &&", "goal < before || goal >= before", "a run without the goal finds it nowhere"),
    ("|| to &&", "if (!(t > 0.0f) || metal::abs(top) == INFINITY)", "what is weighed then is not read"),
    ("a count from 1", "ulong best = 0", "an id that is missing is below 0 then too"),
)
"""Edits that were looked at and change no result: the edit, a part of the line, and why."""


@dataclass(frozen=True)
class Trial:
    """One call of an op: what runs it, and what it should give."""

    op: Op
    case: Case
    compute: Compute
    single: bool | None
    seed: int = 0

    def run(self) -> tuple[tuple[Concrete, ...], float]:
        """The results, and their error over the tolerance."""
        assert self.op.make is not None
        inputs = self.op.make(self.case, np.random.default_rng(self.seed))
        batch = None
        if self.single is not None:
            rows = Rows(np.full(self.case.dims["T"], self.single))
            batch = Batch(rows, rows)
        got = run_op(REGISTRY, self.op, self.case.spec, inputs, self.compute, batch)
        with np.errstate(all="ignore"):
            want = reference.run_op(self.op, self.case.spec, inputs)
        found = errors(self.op, self.case.spec, got, want, self.case)
        worst = max(*found.values(), row_error(self.op, self.case.spec, got, want))
        return got, worst / self.op.tolerance[self.compute]


@dataclass
class Target:
    """A kernel's text, the trials that launch it, and one of its launches."""

    name: str
    header: str
    source: str
    trials: list[Trial] = field(default_factory=list)
    launches: list[tuple[metal_kernel, Call]] = field(default_factory=list)

    @property
    def family(self) -> str:
        return _FAMILY.sub("", self.name[: -len("_01234567")])

    def text(self, part: str) -> str:
        return self.header if part == "header" else self.source


@dataclass(frozen=True)
class Mutant:
    """One edit of one kernel."""

    target: Target
    part: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        before = self.target.text(self.part).splitlines()[self.line].strip()
        return f"{self.target.name}.{self.part}:{self.line + 1}: {self.what}: {before}"


def trials() -> Iterator[Trial]:
    """The contracts' cases, small ones first within an op."""
    for seed in range(SEEDS_OF_CHOICES):
        for op in {**ALL_OPS, **EXTRA_OPS}.values():
            if seed and op.name not in CHOOSING:
                continue
            for case in sorted(op.cases(), key=_work):
                if _work(case) > 3e6:
                    continue
                for single in (True, False) if op.name in BOTH_WAYS else (None,):
                    for compute in COMPUTES:
                        yield Trial(op, case, compute, single, seed)
    for op, case in FURTHER:
        yield Trial(op, case, "float16", True if op.name in BOTH_WAYS else None)


def _work(case: Case) -> float:
    sizes = [int(n) for n in re.findall(r"\d+", str(case.spec)) if int(n) < 1 << 20]
    return float(np.prod(sorted(sizes)[-2:], dtype=np.float64)) * max(case.dims.values(), default=1)


def targets(only: str) -> list[Target]:
    """Every kernel that the cases launch."""
    found: dict[tuple[str, str, str], Target] = {}

    class Recorder(metal_kernel):
        trial: Trial

        def launch(self, call: Call, settings: Settings) -> Launch:
            key = (self.name, self.header, self.source)
            target = found.setdefault(key, Target(*key))
            if Recorder.trial not in target.trials:
                target.trials.append(Recorder.trial)
                target.launches.append((self, call))
            return super().launch(call, settings)

    with install(Settings(mode=Mode.FAST)):
        mx.fast.metal_kernel = Recorder
        for trial in trials():
            Recorder.trial = trial
            try:
                _, error = trial.run()
            except UnsupportedOp:  # caches of codes, which the backend declines
                continue
            assert error <= 1, (trial, error)
    return [t for t in found.values() if only in t.name]


def barriers(all_targets: list[Target]) -> list[list[Mutant]]:
    """Every barrier of every family once, in each kernel that holds it: not every instance needs it."""
    made: dict[tuple[str, str, str], list[Mutant]] = {}
    for target in all_targets:
        for part in ("source", "header"):
            lines = target.text(part).splitlines()
            for i, line in enumerate(lines):
                if BARRIER.search(line):
                    text = "\n".join([*lines[:i], BARRIER.sub(";", line), *lines[i + 1 :]])
                    # Which barrier of the text it is, so that two alike lines are two barriers.
                    place = f"{line}@{sum(BARRIER.search(x) is not None for x in lines[:i])}"
                    made.setdefault((target.family, part, place), []).append(Mutant(target, part, i, "no barrier", text))
    return list(made.values())


def edits(all_targets: list[Target], rng: random.Random) -> Iterator[list[Mutant]]:
    """Random edits without end; every family is as likely as any other."""
    families: dict[str, list[Target]] = {}
    for target in all_targets:
        families.setdefault(target.family, []).append(target)
    tried: set[tuple[str, str]] = set()
    while True:
        target = rng.choice(families[rng.choice(sorted(families))])
        part = rng.choice(["source", "source", "header"])
        text = target.text(part)
        pattern, replacement, what = rng.choice(EDITS)
        places = [m for m in re.finditer(pattern, text) if not _idle(text, m.start())]
        if not places:
            continue
        match = rng.choice(places)
        changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
        if (target.family, changed) in tried:
            continue
        tried.add((target.family, changed))
        mutant = Mutant(target, part, text[: match.start()].count("\n"), what, changed)
        kin = [t for t in families[target.family] if t is not target]
        most_rows = sorted(kin, key=lambda t: -max(max(trial.case.dims.values(), default=0) for trial in t.trials))
        largest = sorted(kin, key=lambda t: -max(_work(trial.case) for trial in t.trials))
        chosen = {id(t): t for t in (*most_rows[:KIN], *largest[: KIN // 2])}.values()
        yield [mutant, *filter(None, (_same_edit(mutant, t, match, replacement) for t in chosen))]


def _same_edit(mutant: Mutant, kin: Target, match: re.Match[str], replacement: str) -> Mutant | None:
    """The edit in another kernel of the family, if that has the same line."""
    text, other = mutant.target.text(mutant.part), kin.text(mutant.part)
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end()) % (len(text) + 1)
    at = other.find(text[begin:end])
    if at < 0 or other.count(text[begin:end]) != text.count(text[begin:end]):
        return None
    for _ in range(text[:begin].count(text[begin:end])):
        at = other.find(text[begin:end], at + 1)
    start, stop = at + match.start() - begin, at + match.end() - begin
    changed = other[:start] + match.expand(replacement) + other[stop:]
    return Mutant(kin, mutant.part, other[:start].count("\n"), mutant.what, changed)


def _idle(text: str, at: int) -> bool:
    """Comments, and lines that only the compiler reads."""
    line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at) % (len(text) + 1)]
    return "//" in line[: at - text.rfind("\n", 0, at)] or line.lstrip().startswith(("#", "template", "constexpr"))


def factory(mutant: Mutant) -> Callable[..., metal_kernel]:
    """Makes kernels as the emulator does, but this one with its edit."""

    class Mutated(metal_kernel):
        def __init__(
            self, name: str, input_names: Any, output_names: Any, source: str, header: str = "", **rest: Any
        ) -> None:
            target = mutant.target
            if (name, header, source) == (target.name, target.header, target.source):
                source, header = (mutant.text, header) if mutant.part == "source" else (source, mutant.text)
            super().__init__(name, input_names, output_names, source, header)

    return Mutated


def changes_code(mutant: Mutant) -> bool:
    """Whether a launch's machine code is another: what is edited may be dead in every instance that is launched."""
    for kernel, call in mutant.target.launches[:MOST_CASES]:
        parts = {"header": kernel.header, "source": kernel.source}
        versions = []
        for changed in ({}, {mutant.part: mutant.text}):
            made = parts | changed
            other = metal_kernel(kernel.name, kernel.input_names, kernel.output_names, made["source"], made["header"])
            text = other.text(call)
            try:
                ptx = compile_ptx(MetalSource(other.name, text.text, text.entry), "sm_90", find_toolchain())
            except MetalCompileError:
                return False
            versions.append(re.sub(r"//.*", "", ptx))
        if versions[0] != versions[1]:
            return True
    return False


def caught(mutant: Mutant) -> str:
    """What noticed it, or an empty string."""
    tried = mutant.target.trials
    for trial in [*tried[:MOST_CASES], *(t for t in tried[MOST_CASES:] if (t.op, t.case) in FURTHER)]:
        first: tuple[Concrete, ...] | None = None
        for seed in SEEDS:
            with install(replace(CHECK, seed=seed)):
                mx.fast.metal_kernel = factory(mutant)
                try:
                    got, error = trial.run()
                except MetalFindings as found:
                    return found.findings[0].kind.name.lower()
                except QuarrelError as refused:
                    if isinstance(refused, MetalCompileError):
                        raise
                    return "refused"
            if not error <= 1:
                return "wrong result"
            if first is not None and any(_bytes(a) != _bytes(b) for a, b in zip(first, got)):
                return "order"
            first = got
    return ""


def first_noticed(alike: list[Mutant]) -> tuple[Mutant, str]:
    """The first of these that something notices, and what does; else the last one."""
    for mutant in alike:
        try:
            if noticed := caught(mutant):
                return mutant, noticed
        except MetalCompileError:
            return mutant, ""
    return mutant, ""


def _bytes(result: Concrete) -> bytes:
    arrays = [result] if isinstance(result, np.ndarray) else [getattr(result, "k"), getattr(result, "v")]  # noqa: B009
    return b"".join(a.tobytes() for a in arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    all_targets = targets(given.only)
    print(f"{len(all_targets)} kernels in {len({t.family for t in all_targets})} families", flush=True)
    rng = random.Random(given.seed)
    groups: dict[str, tuple[Iterator[list[Mutant]], int]] = {
        "barriers": (iter(barriers(all_targets)), 1 << 30),
        "edits": (edits(all_targets, rng), given.edits),
    }
    report: dict[str, Any] = {"kernels": len(all_targets), "seed": given.seed}
    tallies = [Tally(kind) for kind in groups]
    for tally, (mutants, most) in zip(tallies, groups.values()):
        without_effect = 0
        while tally.made < most and (alike := next(mutants, None)) is not None:
            mutant, noticed = first_noticed(alike)
            if not noticed and not any(map(changes_code, alike)):
                without_effect += 1
                print(f"without effect: {mutant}", flush=True)
                continue
            line = mutant.target.text(mutant.part).splitlines()[mutant.line]
            tally.add(str(mutant), noticed, equivalent(mutant.what, line, EQUIVALENT))
        report[tally.kind] = {**tally.report(), "without_effect": without_effect}
    report["share_caught"] = share(tallies)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(0 if report["share_caught"] >= 0.98 else 1)


if __name__ == "__main__":
    main()
