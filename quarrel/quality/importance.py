"""An importance matrix of a model: what a text puts into each map of its layers, as `llama-imatrix` adds it up.

The model's program runs op by op on the backend, as QUARREL_CHECK runs it, with composites taken apart: so the input of
every map is seen, and a step that nobody watches is none the slower. Several chunks run at once, each a sequence apart.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from quarrel.errors import ModelError, RequestError
from quarrel.gguf import Entry, ImportanceMatrix, read_importance
from quarrel.llm import LoadOptions
from quarrel.llm.memory import context_of
from quarrel.llm.open import Opened, open_model
from quarrel.models import EncoderSpec, assemble
from quarrel.ops.check import CheckedStep
from quarrel.ops.contract import Array, Concrete, WeightRef
from quarrel.ops.heads import HeadLinearSpec
from quarrel.ops.null import expand
from quarrel.ops.program import Node, Program
from quarrel.ops.step import Limits, StepInputs, StepOutputs, Want
from quarrel.quality.chunks import chunks
from quarrel.quality.files import check_folder, read_text

CHUNK = 512
STEP = 2048
"""Tokens of a step: weights are laid out for each op anew, so that a step wants many."""
BLOCK = 32
SAVED = 8
"""Steps between which what was added up is written down."""
_RANGE = re.compile(r"(.*?)\[:, (\d+):(\d+)\]")


class Collector(CheckedStep):
    """Compares nothing; adds up the squares of what the maps of layers read, by the names of the file's tensors."""

    def __init__(self, opened: Opened, program: Program, limits: Limits) -> None:
        super().__init__(opened.backend, program, opened.tensors, limits, opened.options.compute)
        self._file, self._seen = opened.file, set[str]()
        self.entries: dict[str, Entry] = {}

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        self._seen.clear()
        for state in self._states:
            state[:] = 0
        return super().__call__(inputs, want)

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        """Adds up what came into the maps of a node."""
        refs = [r for r in node.inputs if isinstance(r, WeightRef) and r.name.startswith("blk.") and ".weight" in r.name]
        x = inputs[0]
        if not refs or not isinstance(x, np.ndarray):
            return
        name = node.op.name
        if name == "linear":
            self._add(refs[0], _squares(x)[None], np.full(1, len(x)))
        elif name == "head_linear":
            spec = node.spec
            assert isinstance(spec, HeadLinearSpec)
            heads = x.reshape(len(x), spec.n_heads, -1)[..., : spec.k]
            self._add(refs[0], _squares(heads), np.full(1, len(x)))
        elif name in ("expert_up", "expert_down"):
            ids = inputs[1]
            assert isinstance(ids, np.ndarray)
            sums, counts = _by_expert(x, ids, node.spec.n_experts)
            for ref in refs:
                self._add(ref, sums, counts)

    def _add(self, ref: WeightRef, sums: Array, counts: Array) -> None:
        """sums [maps, k]; counts [maps], or [1] for all. Parts of a tensor that read the same count once."""
        if ref.name in self._seen:
            return
        columns = _RANGE.fullmatch(ref.name)
        name = columns[1] if columns else ref.name.partition("[")[0]
        if columns is None and name in self._seen:
            return
        if not np.isfinite(sums).all():
            raise ModelError(f"what comes into {name} is not finite: the model or its file is damaged")
        info = self._file.tensors[name]
        if name not in self.entries:
            self.entries[name] = Entry(np.zeros((len(sums), info.dims[0])), np.zeros(len(counts)))
        entry = self.entries[name]
        start = int(columns[2]) if columns else 0
        entry.sums[:, start : start + sums.shape[1]] += sums
        if name not in self._seen:
            entry.counts[:] += counts
        self._seen.update((name, ref.name))


def _squares(x: Array) -> Array:
    sums: Array = np.square(x, dtype=np.float64).sum(0)
    return sums


def _by_expert(x: Array, ids: Array, n: int) -> tuple[Array, Array]:
    """Sums [n, k] and counts [n] of rows x [T, k] or [T, used, k] that go to experts ids [T, used]."""
    sums, counts = np.zeros((n, x.shape[-1])), np.bincount(ids.reshape(-1), minlength=n)
    for e in np.flatnonzero(counts):
        chosen = ids == e
        sums[e] = _squares(x[chosen] if x.ndim == 3 else x[chosen.any(-1)])
    return sums, counts


def watched(program: Program) -> Program:
    """The program up to its last map in a layer, of primitives alone."""
    nodes: list[Node] = list(program.nodes)
    next_id = 1 + max(v.id for v in [*(v for n in nodes for v in n.outputs), *program.inputs.values()])
    flat: list[Node] = []
    while nodes:
        node = nodes.pop(0)
        if node.op.expand is None:
            flat.append(node)
            continue
        body, next_id = expand(node, next_id)
        nodes[:0] = body
    last = max(
        i for i, n in enumerate(flat) if any(isinstance(r, WeightRef) and r.name.startswith("blk.") for r in n.inputs)
    )
    kept = tuple(flat[: last + 1])
    return Program(kept, program.inputs, {"hidden": kept[-1].outputs[0]}, program.caches, program.states)


def collect(
    name: str,
    text: Path,
    target: Path,
    options: LoadOptions,
    *,
    size: int = CHUNK,
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportanceMatrix:
    """Puts `text` through a model in chunks of `size` tokens, at most `most` of them, and writes `target`.

    What is done stands in a file with `.part` behind its name; another call with the same arguments goes on with it.
    progress: chunks done, and in all.

    Raises what `load` does, and RequestError for a target that is there, a text without a whole chunk, and an encoder.
    """
    if target.exists():
        raise RequestError(f"{target} is there already: move it away, or choose another name", "target")
    check_folder(target)
    words = read_text(text)
    with ExitStack() as files:
        opened = open_model(name, options, files)
        if isinstance(opened.spec, EncoderSpec):
            raise RequestError(f"{name} is an encoder: importance matrices are for models that write")
        context_of(opened.spec, size)
        vocab = opened.tokenizer
        bos = vocab.bos_id if vocab.add_bos else None
        pieces = list(chunks(vocab.encode(words.removesuffix("\n")), size, bos, most))
        note = _note(opened, words, size)
        part = target.with_name(f"{target.name}.part")
        step, done = _step(opened, size, len(pieces)), 0
        if (begun := _begun(part, note)) is not None:
            kept = {name: Entry(entry.sums.astype(np.float64), entry.counts) for name, entry in begun.entries.items()}
            step.entries, done = kept, min(begun.chunks, len(pieces))
        for turn in range(-(-(len(pieces) - done) // step.limits.max_seqs)):
            if progress is not None:
                progress(done, len(pieces))
            batch = pieces[done : done + step.limits.max_seqs]
            step(_inputs(batch, step.limits), "hidden")
            done += len(batch)
            if turn % SAVED == SAVED - 1:
                ImportanceMatrix(step.entries, done, size, (text.name,), note).write(part)
        made = ImportanceMatrix(step.entries, done, size, (text.name,))
        made.write(target)
        part.unlink(missing_ok=True)
        if progress is not None:
            progress(done, len(pieces))
    return made


def _step(opened: Opened, size: int, count: int) -> Collector:
    assert not isinstance(opened.spec, EncoderSpec)
    seqs, blocks = min(max(1, STEP // size), count), -(-size // BLOCK)
    limits = Limits(seqs * size, seqs, blocks, seqs * blocks, BLOCK)
    return Collector(opened, watched(assemble(opened.spec, opened.tensors)), limits)


def _inputs(pieces: Sequence[Sequence[int]], limits: Limits) -> StepInputs:
    """A step of whole sequences of one length, each with cache blocks of its own."""
    n, size, blocks = len(pieces), len(pieces[0]), limits.max_blocks_per_seq
    positions = np.tile(np.arange(size, dtype=np.int32), n)
    first = np.repeat(np.arange(n, dtype=np.int32) * (blocks * BLOCK), size)
    ends = np.arange(n + 1, dtype=np.int32) * size
    table = np.arange(n * blocks, dtype=np.int32).reshape(n, blocks)
    seqs = np.arange(n, dtype=np.int32)
    ids = np.array(pieces, np.int32).reshape(-1)
    return StepInputs(ids, positions, first + positions, ends, np.full(n, size, np.int32), table, ends[1:] - 1, None, seqs)


def _note(opened: Opened, text: str, size: int) -> str:
    """What an interrupted file must have been made of, to go on with it."""
    states = [path.stat() for path in opened.file.files]
    source = [[str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in zip(opened.file.files, states)]
    return json.dumps([source, zlib.crc32(text.encode()), size, opened.options.compute, opened.backend.name])


def _begun(part: Path, note: str) -> ImportanceMatrix | None:
    try:
        found = read_importance(part)
    except (RequestError, ModelError):
        return None
    return found if found.note == note else None
