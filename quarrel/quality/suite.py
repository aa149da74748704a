"""One model through the suite: logits, perplexity, coherence, speed, expert selections, memory. Plain numbers, for JSON."""

from __future__ import annotations

import base64
import contextlib
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel import __version__
from quarrel.errors import RequestError
from quarrel.llm import LLM, find
from quarrel.ops.step import Backend, ComputeChoice
from quarrel.quality.coherence import faults
from quarrel.quality.evaluate import evaluate, pieces_of
from quarrel.quality.selections import agreement, selections

LOGITS = ("The quick brown fox", "Hello, my name is", "In a hole in the ground there lived a hobbit.")
"""Prompts whose last logits are stored and compared."""

COHERENCE = (("The capital of France is", 5), ("Once upon a time", 10), ("What is 2+2?", 3), ("Once upon a time", 64))
"""Prompts to continue greedily, and by how many tokens."""

PASSAGE = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she
had peeped into the book her sister was reading, but it had no pictures or conversations in it, and what is the use of a
book, thought Alice, without pictures or conversations? So she was considering in her own mind, as well as she could, for
the hot day made her feel very sleepy and stupid, whether the pleasure of making a daisy-chain would be worth the trouble
of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing so
very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, Oh dear! Oh
dear! I shall be late! But when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and then
hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit with either
a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after it, and
fortunately was just in time to see it pop down a large rabbit-hole under the hedge.
"""
"""Lewis Carroll, Alice's Adventures in Wonderland, 1865: what perplexity is measured on where no text is given."""

N_CTX = 128
"""Tokens of a chunk of the passage: short, so that it has several in any vocabulary."""
LEAST = 32
Entry = dict[str, Any]


@dataclass(frozen=True)
class Allowed:
    """How far a run may be from its baseline."""

    distance: float = 1e-5
    """Mean squared difference of logits, over their mean square."""
    perplexity: float = 0.05
    """Relative change, either way."""
    experts: float = 0.9
    """Share of the baseline's expert choices that must be the same."""
    speed: float | None = None
    """Least share of the baseline's tokens a second; None: reported, not judged."""
    memory: int | None = None
    """Bytes of the process at its peak; None: reported, not judged."""


def run(llm: LLM, name: str, backend: Backend, compute: ComputeChoice, text: str | None, chunks: int | None) -> Entry:
    """Everything about one model."""
    prompts: list[Entry] = []
    for prompt in LOGITS:
        ids = llm.tokenize(prompt)
        prompts.append({"prompt": prompt, "tokens": ids, "logits": _packed(llm.logits(ids)[-1])})
    continuations, speeds = [], []
    for prompt, count in COHERENCE:
        result = llm.generate(prompt, temperature=0.0, max_tokens=count, ignore_eos=True)
        found = faults(result.text)
        continuations.append({"prompt": prompt, "max_tokens": count, "text": result.text, "faults": found})
        speeds.append(result.timings.decode_rate)
    length = _chunk(llm, PASSAGE if text is None else text)
    pieces = pieces_of(llm, PASSAGE if text is None else text, length, chunks)
    scored = evaluate(llm, pieces, None, None, lambda done, all, perplexity: None)
    e = llm.explain()
    return {
        "model": Path(name).name,
        "architecture": e.architecture,
        "backend": e.backend,
        "device": e.device,
        "compute": e.compute,
        "quarrel": __version__,
        "prompts": prompts,
        "continuations": continuations,
        "perplexity": {"value": scored.perplexity.value, "tokens": scored.tokens, "n_ctx": length},
        "tokens_per_second": max(speeds),
        "expert_selections": selections(find(name).paths[0], backend, compute, prompts[0]["tokens"]),
        "memory": {**asdict(e.memory), "process_peak": peak_bytes()},
    }


def compare(now: Entry, then: Entry, allowed: Allowed) -> tuple[dict[str, float], list[str]]:
    """Measures against the baseline, and what is outside of what is allowed, in words."""
    wrong = [f"{c['prompt']!r} is continued with {c['text']!r}: {f}" for c in now["continuations"] for f in c["faults"]]
    measures: dict[str, float] = {}
    try:
        distances = [_distance(a, b) for a, b in zip(now["prompts"], then["prompts"], strict=True)]
        measures["logits distance"] = max(distances)
        for entry, distance in zip(now["prompts"], distances, strict=True):
            if not distance <= allowed.distance:
                wrong.append(f"logits of {entry['prompt']!r} are {distance:.3g} away, allowed {allowed.distance:.3g}")
        ratio = now["perplexity"]["value"] / then["perplexity"]["value"]
        measures["perplexity ratio"] = ratio
        if not abs(ratio - 1) <= allowed.perplexity:
            wrong.append(f"perplexity is {ratio:.4f} times the baseline's, allowed 1 ± {allowed.perplexity:g}")
        measures["same texts"] = _share(a["text"] == b["text"] for a, b in zip(now["continuations"], then["continuations"]))
        if then["expert_selections"] or now["expert_selections"]:
            same = agreement(now["expert_selections"], then["expert_selections"])
            measures["same experts"] = same
            if same < allowed.experts:
                wrong.append(f"{100 * same:.1f} % of the experts are chosen again, wanted {100 * allowed.experts:g} %")
        measures["speed ratio"] = now["tokens_per_second"] / max(then["tokens_per_second"], 1e-9)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"the baseline of {now['model']} is damaged or of another suite ({error}): make it again"
        ) from None
    if allowed.speed is not None and measures["speed ratio"] < allowed.speed:
        wrong.append(f"{measures['speed ratio']:.2f} of the baseline's tokens a second, wanted {allowed.speed:g}")
    peak = now["memory"]["process_peak"]
    if allowed.memory is not None and peak > allowed.memory:
        wrong.append(f"the process took {peak} bytes at its peak, allowed {allowed.memory}")
    return measures, wrong


def reset_peak() -> None:
    """Where the system can: forgets the process's peak, so that each model has its own."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Of the process, resident, since `reset_peak`."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _chunk(llm: LLM, text: str) -> int:
    """N_CTX, or less for a short text or context."""
    length = min(N_CTX, llm.n_ctx, len(llm.tokenize(text)))
    if length < LEAST:
        raise RequestError(f"the text has {length} tokens, wanted {LEAST} or more to measure perplexity on")
    return length


def _share(found: Any) -> float:
    values = list(found)
    return sum(values) / len(values) if values else 1.0


def _packed(row: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()


def _distance(now: Mapping[str, Any], then: Mapping[str, Any]) -> float:
    if now["tokens"] != then["tokens"]:
        return float("inf")
    a, b = (np.frombuffer(base64.b64decode(e["logits"]), "<f4").astype(np.float64) for e in (now, then))
    if a.shape != b.shape or not np.isfinite(a).all():
        return float("inf")
    return float(((a - b) ** 2).mean() / max((b**2).mean(), 1e-30))


def judge(
    entries: Sequence[Entry], baseline: Sequence[Entry], allowed: Allowed
) -> list[tuple[Entry, dict[str, float], list[str]]]:
    """Each entry with its measures and faults; a model that the baseline lacks has no measures, and a fault."""
    known = {entry.get("model"): entry for entry in baseline}
    judged = []
    for entry in entries:
        if entry["model"] in known:
            judged.append((entry, *compare(entry, known[entry["model"]], allowed)))
        else:
            judged.append((entry, {}, [f"the baseline has no model {entry['model']}: it has {', '.join(map(str, known))}"]))
    return judged
