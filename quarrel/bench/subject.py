"""A model on a backend, sized for the tests that it has to run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quarrel.bench.cut import one_layer_of_each
from quarrel.bench.inputs import Layout
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.models import EncoderSpec, ModelSpec, Tensors, assemble, read_spec
from quarrel.ops.embedding import vocabulary
from quarrel.ops.program import Program
from quarrel.ops.step import Backend, ComputeChoice, Limits, Step
from quarrel.ops.traffic import Traffic

BLOCK = 32
SPARE = 2
"""Blocks more than the longest sequence fills: the checks decode a few tokens on."""
LEAST = 64
"""Tokens that there is always room for, for the checks."""


@dataclass(frozen=True)
class Source:
    """An open file and its forward pass, whole or cut down."""

    file: GGUFFile
    spec: ModelSpec | EncoderSpec
    tensors: Tensors

    @classmethod
    def of(cls, file: GGUFFile, length: int) -> Source:
        return cls(file, read_spec(file, length), Tensors(file))

    @cached_property
    def program(self) -> Program:
        return assemble(self.spec, self.tensors)

    @property
    def encodes(self) -> bool:
        return isinstance(self.spec, EncoderSpec)

    def cut(self) -> tuple[Source, list[int]]:
        """One layer of each kind, and which those are."""
        if self.tensors.file is not self.file:  # cut already: layer numbers are no longer the file's
            kept = self.spec.n_layers if isinstance(self.spec, EncoderSpec) else len(self.spec.layers)
            return self, list(range(kept))
        spec, tensors, chosen = one_layer_of_each(self.file, self.spec)
        return Source(self.file, spec, tensors), chosen


def limits_for(tests: Sequence[Test], step_tokens: int, encodes: bool) -> Limits:
    """Room for each of the tests; one cache serves them all."""
    longest = max([LEAST, *(t.length for t in tests)])
    blocks = -(-longest // BLOCK) + SPARE
    seqs = max([1, *(t.batch for t in tests)])
    n_blocks = max([blocks, *(t.batch * (-(-max(t.length, LEAST) // BLOCK) + SPARE) for t in tests)])
    tokens = max(step_tokens, longest if encodes else 0, seqs)
    return Limits(tokens, seqs, blocks, n_blocks, BLOCK)


class Subject:
    """A compiled model with what the measurements ask of it."""

    def __init__(self, source: Source, backend: Backend, limits: Limits, compute: ComputeChoice) -> None:
        began = time.perf_counter()
        self.source, self.backend, self.limits = source, backend, limits
        if hasattr(backend, "ahead"):
            backend.ahead = False  # processes that compile would stand in the way of what is timed
        self.step: Step = backend.compile(source.program, source.tensors, limits, compute)
        self.load_seconds = time.perf_counter() - began
        self.layout = Layout(limits, min(vocabulary(source.program), source.spec.n_vocab))
        self.traffic = Traffic.of(source.program, self.step.compute)

    def close(self) -> None:
        self.step.close()
