"""`quarrel explain`: the memory plan, and which implementation took which op."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from quarrel.bench.bandwidth import host_bandwidth
from quarrel.cli.models import opened
from quarrel.cli.prompt import model_of
from quarrel.cli.terminal import amount, line, table, tidy, visible, write_json
from quarrel.llm import Explanation, HostFacts

_ENUM = re.compile(r"<\w+\.(\w+): \d+>")
_STORED = {"auto": "", "float16": "float16", "bfloat16": "bfloat16"} | {
    name: f"{name}, a scale for each token and head" for name in ("int8", "fp8", "fp8_e5m2")
}
_BLOCK = re.compile(r"blk\.(\d+)\.")


def run(args: argparse.Namespace) -> int:
    with opened(args, model_of(args)) as llm:
        explanation = llm.explain()
    speed = host_bandwidth(args.threads) if explanation.host_layers else 0.0
    if args.json:
        document = asdict(explanation)
        if facts := explanation.host_layers:
            document["host_layers"] |= {"bytes_per_second": speed, "most_tokens_per_second": speed / facts.read}
        write_json(document)
        return 0
    host = _host(explanation.host_layers, speed) if explanation.host_layers else ()
    for text in (*_summary(explanation), "", *_memory(explanation), *host, "", *_choices(explanation, args.all)):
        line(visible(text))
    return 0


def _summary(e: Explanation) -> Iterator[str]:
    shared = f"up to {e.max_seqs} sequences at once share {e.cache_tokens} tokens of cache"
    if not e.plan.cache + e.plan.states and e.host_layers is None:  # an encoder's step begins and ends with its texts
        shared = f"a step takes texts of up to {e.plan.limits.max_tokens} together"
    rows = [
        ["model", f"{e.model}, {e.architecture}"],
        ["backend", f"{e.backend} on {e.device}"],
        ["arithmetic", e.compute + (", the same bits in every batch" if e.plan.limits.deterministic else "")],
        ["context", f"{e.n_ctx} tokens; {shared}"],
        *(["not used", reason] for reason in e.skipped),
        *([["draft", f"{e.draft.model}, {e.draft.architecture}, {amount(e.draft.plan.total)}"]] if e.draft else []),
    ]
    return table(rows, indent="")


def _memory(e: Explanation) -> Iterator[str]:
    plan, memory = e.plan, e.memory
    in_place = f"{amount(memory.weights_in_place)} of them in the file's own pages" if memory.weights_in_place else ""
    lazily = "rows of results for scoring, allocated when used" if memory.activations > plan.scratch else ""
    recurrent = [
        ["recurrent states", amount(plan.states), "", "in the cache's"] if plan.states else [],
        ["their snapshots", amount(plan.snapshots), "", "in the cache's"] if plan.snapshots else [],
    ]
    rows = [
        ["", "planned", "allocated", ""],
        ["weights", amount(plan.weights), amount(memory.weights), in_place],
        *([["weights in 16 bits, for prompts", amount(plan.decoded), amount(memory.decoded), ""]] if plan.decoded else []),
        ["key and value cache", amount(plan.cache), amount(memory.cache), _STORED[plan.limits.kv_cache]],
        *(row for row in recurrent if row),
        ["scratch of a step", amount(plan.scratch), amount(memory.activations), lazily],
        *([["graphs", amount(plan.graphs), "", ""]] if plan.graphs else []),
        ["all", amount(plan.total), amount(memory.total), ""],
        ["budget", amount(plan.budget), "", f"of {amount(plan.free)} free"],
    ]
    yield "memory"
    yield from table(rows, right=(1, 2))
    if plan.host:
        yield f"  in host memory: the experts of {plan.host_layers} layers, {amount(plan.host)}, in the file's own pages"
    if plan.resident:
        yield f"  on the device too: those of them used most, {amount(plan.resident)} of the weights"
    yield f"  the longest context that fits is {plan.longest} tokens, for one sequence"


def _host(facts: HostFacts, speed: float) -> Iterator[str]:
    """speed: bytes a second that the host reads."""
    memory = facts.memory
    yield ""
    yield f"host: {facts.layers} of {facts.of} layers, computed by {facts.device}"
    yield f"  weights {amount(memory.weights)}, {amount(memory.weights_in_place)} of them in the file's own pages"
    yield f"  key and value cache {amount(memory.cache)}, scratch {amount(memory.activations)}"
    yield f"  {amount(facts.plan.total)} planned of {amount(facts.plan.free)} free"
    yield (
        f"  a token reads {amount(facts.read)} there: at most {speed / facts.read:.1f} tokens/s for one sequence, as that"
        f" memory is read at {speed / 1e9:.0f} GB/s (just measured)"
    )


def _choices(e: Explanation, all: bool) -> Iterator[str]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for n, c in enumerate(e.choices):
        groups.setdefault((c.op, c.spec, c.implementation, c.declined, n if all else 0), []).append(c.path)
    yield f"{len(e.choices)} calls a step" + ("" if all else f", {len(groups)} kinds")
    rows, reasons = [], []
    for (op, spec, implementation, declined, _), paths in groups.items():
        rows.append([str(len(paths)), str(op), str(implementation), where(paths), _short(str(spec), all)])
        reasons.append(declined)
    lines = table([["calls", "op", "taken by", "where", "spec"], *rows], right=(0,))
    yield next(lines)
    for text, declined in zip(lines, reasons, strict=True):
        yield text
        assert isinstance(declined, tuple)
        yield from (f"           not by {reason}" for reason in declined)


def _short(spec: str, all: bool) -> str:
    spec = _ENUM.sub(r"\1", spec)
    return spec if all else tidy(spec, 100)


def where(paths: Iterable[str]) -> str:
    """Paths in short: `blk.0-3,5.attn` for those of several blocks."""
    blocks: dict[str, list[int]] = {}
    for path in paths:
        found = _BLOCK.search(path)
        numbers = blocks.setdefault(_BLOCK.sub("blk.*.", path), [])
        if found:
            numbers.append(int(found[1]))
    return " ".join(p.replace("*", _ranges(sorted(set(n)))) if n else p for p, n in blocks.items())


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
