"""Embeddings of a loaded model: what its file says about pooling, heads and prefixes, and the calls that use it."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine import token_id
from quarrel.errors import ModelError, RequestError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.llm.embeddings import POOLINGS, Chunking, Embeddings, EmbedOptions, Pooling, Progress, finished
from quarrel.llm.loaded import Loaded
from quarrel.llm.pooling import PackedRun, Piece, Run, pieces_of
from quarrel.models import EncoderSpec, ModelSpec
from quarrel.ops.activation import activate

Array = npt.NDArray[Any]
Text = str | Sequence[int]

KINDS = (None, *POOLINGS)
"""`<architecture>.pooling_type` counts from none."""


@dataclass(frozen=True)
class Head:
    """A reranker's classifier on the pooled row: scores = output(norm(f(dense x))), each of which a file may leave out.

    f is tanh, or GELU in ModernBERT, whose rows are means; the norm has gains and this eps. Qwen 3, read at its last
    token, has the logits of "yes" and "no" and makes shares of them.
    """

    dense: tuple[Array, Array] | None
    output: tuple[Array, Array] | None
    norm: Array | None = None
    eps: float = 0.0
    pooling: Pooling = "cls"
    gelu: bool = False
    shares: bool = False

    @property
    def width(self) -> int | None:
        last = self.output or self.dense
        return None if last is None else len(last[0])

    def __call__(self, rows: Array) -> Array:
        if self.dense is not None:
            rows = rows @ self.dense[0].T + self.dense[1]
            rows = activate("gelu_erf", rows) if self.gelu else np.tanh(rows)
            if self.norm is not None:
                rows = rows - rows.mean(1, keepdims=True)
                rows = rows / np.sqrt((rows * rows).mean(1, keepdims=True) + self.eps) * self.norm
        if self.output is not None:
            rows = rows @ self.output[0].T + self.output[1]
        if self.shares:
            rows = np.exp(rows - rows.max(1, keepdims=True))
            rows = rows / rows.sum(1, keepdims=True)
        return rows.astype(np.float32)


@dataclass(frozen=True)
class Maps:
    """What EmbeddingGemma has behind the pooling, two linear maps, as one: rows x -> map x + bias.

    In float64, so that a row does not depend on how many there are beside it.
    """

    map: Array
    bias: Array

    @property
    def width(self) -> int:
        return len(self.map)

    def __call__(self, rows: Array) -> Array:
        return (rows.astype(np.float64) @ self.map.T + self.bias).astype(np.float32)


class Embedder:
    """What `LLM` embeds with."""

    def __init__(self, model: Loaded) -> None:
        self._loop, self._spec, self._tokenizer = model.loop, model.spec, model.tokenizer
        self._n_ctx, self._step_tokens = model.explanation.n_ctx, model.explanation.plan.limits.max_tokens
        self.pooling = _pooling(model.file, model.spec)
        self._head = _head(model.file, model.spec) if self.pooling == "rank" else None
        self._maps = _maps(model.file, model.spec.n_embd)

    @property
    def dim(self) -> int:
        """Length of a row."""
        behind = self._head or self._maps
        return (behind and behind.width) or self._spec.n_embd

    def embed(self, texts: Text | Sequence[Text], options: EmbedOptions, progress: bool | Progress = False) -> Embeddings:
        job = self._job(texts, options)
        with _progress(progress) as report:
            return job.embeddings(job.run.result(report))

    async def aembed(self, texts: Text | Sequence[Text], options: EmbedOptions) -> Embeddings:
        job = await asyncio.to_thread(self._job, texts, options)
        try:
            return job.embeddings(await asyncio.to_thread(job.run.result))
        except asyncio.CancelledError:
            job.run.cancel()
            raise

    def _job(self, texts: Text | Sequence[Text], options: EmbedOptions) -> _Job:
        """Checks the options. A decoder's texts are tokenized before anything runs, an encoder's meanwhile."""
        pooling = self._pooling_of(options.pooling)
        read = self._head.pooling if self._head is not None and pooling == "rank" else pooling
        head = self._head if pooling == "rank" else self._maps
        width = (head and head.width) or self._spec.n_embd
        _check_dimensions(options.dimensions, width)
        self._check_chunk(options.chunk)
        prefix = self.prefixed(options.prefix)
        listed = _listed(texts)
        # A text's ids are dropped when its step has run: those of a million texts would fill gigabytes.
        owners, lengths = array("i"), array("i")

        def tokenized() -> Iterator[tuple[Piece, int]]:
            for i, text in enumerate(listed):
                ids = self._encode(i, text, prefix)
                for piece in pieces_of(i, ids, self._tokenizer, options.chunk, self._n_ctx):
                    owners.append(i)
                    lengths.append(len(piece.ids))
                    yield piece, len(listed) - i

        centred = isinstance(self._spec, EncoderSpec) and self._spec.centred_truncation
        finish = _Finish(head, bool(options.normalize) and pooling != "rank", options.dimensions, centred)
        run: Run | PackedRun
        if isinstance(self._spec, EncoderSpec):
            run = PackedRun(self._loop, tokenized(), self._spec.n_embd, read, finish, self._step_tokens)
        else:
            run = Run(self._loop, [piece for piece, _ in tokenized()], self._spec.n_embd, read, finish)
        return _Job(run, owners, lengths, pooling, finish.normalize, prefix, width)

    def prefixed(self, prefix: str | None) -> str:
        """What is put before a text: a task that the model knows by its name, anything else as it stands."""
        if prefix is None:
            return ""
        if not isinstance(prefix, str):
            raise RequestError(f"prefix is a {type(prefix).__name__}, wanted a text", "prefix")
        tasks = self._spec.tasks if isinstance(self._spec, EncoderSpec) else ()
        return f"{prefix}: " if prefix in tasks else prefix

    def _pooling_of(self, wanted: Pooling | None) -> Pooling:
        if wanted is None:
            if self.pooling is None:
                raise UnsupportedModel(
                    f"this {self._spec.architecture} model says that its rows are not pooled: choose one of pooling="
                    f"{', '.join(map(repr, POOLINGS[:3]))}, or use `token_embeddings`",
                    "pooling",
                )
            return self.pooling
        if wanted not in POOLINGS:
            raise RequestError(f"pooling is {wanted!r}, wanted one of {', '.join(POOLINGS)}", "pooling")
        if wanted == "rank" and self._head is None:
            raise UnsupportedModel(f"this {self._spec.architecture} model is no reranker: pool by mean, cls or last")
        return wanted

    def _check_chunk(self, chunk: Chunking | None) -> None:
        if chunk is not None and not 1 <= chunk.size <= self._n_ctx:
            message = f"chunks are {chunk.size} tokens long, wanted 1 to {self._n_ctx}, what the context holds"
            raise RequestError(message, "chunk")

    def _encode(self, index: int, text: object, prefix: str) -> list[int]:
        if isinstance(text, str):
            return self._tokenizer.encode(prefix + text)
        if prefix:
            raise RequestError(f"text {index} is given as token ids, which take no prefix: give it as a text")
        if not isinstance(text, Sequence | np.ndarray) or isinstance(text, bytes | bytearray):
            raise RequestError(f"text {index} is a {type(text).__name__}, wanted a text or a list of token ids")
        plain = isinstance(text, list) and {*map(type, text)} <= {int} and min(text, default=0) >= 0
        ids = list(text) if plain else [token_id(f"text {index}", id) for id in text]
        if ids and max(ids) >= self._spec.n_vocab:
            raise RequestError(f"text {index} holds the token id {max(ids)}, wanted ids from 0 to {self._spec.n_vocab - 1}")
        return ids


@dataclass(frozen=True)
class _Finish:
    """What becomes of pooled rows."""

    head: Head | Maps | None
    normalize: bool
    dimensions: int | None
    centred: bool

    def __call__(self, rows: Array, first: int) -> Array:
        rows = rows if self.head is None else self.head(rows)
        return finished(rows, normalize=self.normalize, dimensions=self.dimensions, centred=self.centred, first=first)


@dataclass(frozen=True)
class _Job:
    """A run, and the text and number of tokens of each of its rows, which grow while it runs."""

    run: Run | PackedRun
    owners: array[int]
    lengths: array[int]
    pooling: Pooling
    normalize: bool
    prefix: str
    width: int

    def embeddings(self, rows: Array) -> Embeddings:
        owners, lengths = np.array(self.owners, np.int32), np.array(self.lengths, np.int32)
        return Embeddings(rows, owners, lengths, self.pooling, self.normalize, self.width, self.prefix)


def _pooling(file: GGUFFile, spec: ModelSpec | EncoderSpec) -> Pooling | None:
    """From the file; a decoder without one is read at its last token, which has seen all others."""
    if isinstance(spec, EncoderSpec):
        return None if spec.pooling == "none" else spec.pooling
    kind: int = file.metadata.int(f"{spec.architecture}.pooling_type", KINDS.index("last"), lo=0, hi=len(KINDS) - 1)
    return KINDS[kind]


def _layer(file: GGUFFile, name: str) -> tuple[Array, Array] | None:
    """Weight and bias of a linear map, if the file has it."""
    if f"{name}.weight" not in file.tensors:
        return None
    weight = np.asarray(file.array(f"{name}.weight"), np.float32)
    bias = f"{name}.bias"
    return weight, np.asarray(file.array(bias), np.float32) if bias in file.tensors else np.zeros(len(weight), np.float32)


def _maps(file: GGUFFile, width: int) -> Maps | None:
    found = None
    for name in ("dense_2", "dense_3"):
        layer = _layer(file, name)
        if layer is None:
            continue
        weight, bias = (part.astype(np.float64) for part in layer)
        _check_map(name, weight, bias, width)
        found = Maps(weight, bias) if found is None else Maps(weight @ found.map, weight @ found.bias + bias)
        width = len(weight)
    return found


def _check_map(name: str, weight: Array, bias: Array, width: int) -> None:
    if weight.ndim != 2 or weight.shape[1] != width or bias.shape != (len(weight),):
        raise ModelError(f"the tensor {name}.weight is {list(weight.shape)}, wanted rows of {width}: inconsistent file")


def _head(file: GGUFFile, spec: ModelSpec | EncoderSpec) -> Head:
    modern = spec.architecture == "modern-bert"
    norm = np.asarray(file.array("cls.norm.weight"), np.float32) if "cls.norm.weight" in file.tensors else None
    head = Head(
        _layer(file, "cls"),
        _layer(file, "cls.output"),
        norm,
        spec.norm_eps,
        pooling="mean" if modern else "cls" if isinstance(spec, EncoderSpec) else "last",
        gelu=modern,
        shares=spec.architecture in ("qwen3", "qwen3vl"),
    )
    width = spec.n_embd
    for name, part in (("cls", head.dense), ("cls.output", head.output)):
        if part is not None:
            _check_map(name, *part, width)
            width = len(part[0])
            if name == "cls" and norm is not None and norm.shape != (width,):
                raise ModelError(f"the tensor cls.norm.weight is {list(norm.shape)}, wanted [{width}]: inconsistent file")
    if head.width is None:
        raise ModelError(
            "the file asks for rank pooling and has neither cls.weight nor cls.output.weight: convert it again"
        )
    return head


def _listed(texts: object) -> Sequence[object]:
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Sequence) or isinstance(texts, bytes | bytearray):
        raise RequestError(f"the texts are a {type(texts).__name__}, wanted a text or a list of texts")
    if len(texts) and isinstance(texts[0], int):
        return [texts]
    return texts


def _check_dimensions(dimensions: object, width: int) -> None:
    if dimensions is None:
        return
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= width:
        raise RequestError(f"dimensions is {dimensions!r}, wanted a whole number from 1 to {width}", "dimensions")


@contextmanager
def _progress(wanted: bool | Progress) -> Iterator[Progress | None]:
    """A bar on standard error for True; a function of pieces done and in all as it is."""
    if not isinstance(wanted, bool):
        yield wanted
        return
    if not wanted:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc="embedding", unit="text", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
