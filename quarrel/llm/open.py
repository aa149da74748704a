"""The first step of loading: files are found and opened, the tokenizer and the architecture read, a backend chosen."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quarrel.convert import open_file, seeing_folder
from quarrel.env import Environment, read_environment
from quarrel.errors import BackendUnavailable, RequestError
from quarrel.gguf import GGUFFile, resolve
from quarrel.gguf.resolve import Resolved
from quarrel.llm.adapters import Adapters, read_adapters
from quarrel.llm.memory import context_of
from quarrel.llm.options import MTP, LoadOptions
from quarrel.models import EncoderSpec, ModelSpec, Tensors, read_spec
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.registry import missing_driver
from quarrel.ops.step import Backend, WeightSource
from quarrel.tokenizer import Tokenizer
from quarrel.tokenizer import load_tokenizer as read_tokenizer

if TYPE_CHECKING:
    from quarrel.llm.images import Eyes

ModelName = str | os.PathLike[str]
AUTO = ("triton", "mlx", "cpu")
"""The order in which `auto` tries backends."""


@dataclass(frozen=True)
class Opened:
    """A model's files, read as far as a plan needs them."""

    name: str
    options: LoadOptions
    """Resolved with the environment."""
    environment: Environment
    files: ExitStack
    """Closes everything that was opened."""
    file: GGUFFile
    found: Resolved
    tokenizer: Tokenizer
    spec: ModelSpec | EncoderSpec
    tensors: Tensors
    adapters: Adapters | None
    draft: GGUFFile | None
    backend: Backend
    skipped: tuple[str, ...]
    """Why the backends before it could not be used."""
    devices: int
    """How many share the model."""
    eyes: Eyes | None = None

    @property
    def weights(self) -> WeightSource:
        """The model's own and its adapters'."""
        return self.tensors if self.adapters is None else self.adapters.source(self.tensors)

    @property
    def weight_bytes(self) -> int:
        """Device memory that they take on a single device."""
        tensors = self.file.tensors.values()
        return sum(t.nbytes for t in tensors) + (0 if self.adapters is None else self.adapters.nbytes)


def open_model(name: ModelName, options: LoadOptions, files: ExitStack) -> Opened:
    """Opens a model, its adapters and its draft model; `files` closes them. Raises what `load` does."""
    environment = read_environment()
    devices = options.devices(environment)
    found = _find(name, environment)
    resolved = options.resolved(environment)
    if options.gpu_layers == 0 and resolved.backend == "auto":
        resolved = replace(resolved, backend="cpu", gpu_layers=None)
    backend, skipped = choose_backend(resolved.backend, resolved.threads)
    if resolved.attention == "cudnn" and backend.name != "triton":
        message = f"attention is 'cudnn', which the {backend.name} backend has not: use auto, or backend triton"
        raise RequestError(message, "attention")

    if resolved.compute == "fp8" and (options.deterministic or options.decoded_weights == "never"):
        other = "deterministic" if options.deterministic else "decoded_weights"
        message = f"compute is 'fp8', whose weights are kept in E4M3 for whole prompts: leave out {other}, or use float16"
        raise RequestError(message, "compute", other)

    def opened(name: ModelName, mmproj: bool = False) -> GGUFFile:
        return files.enter_context(open_file(_find(name, environment).paths, mmproj=mmproj))

    file = files.enter_context(open_file(found.paths, options.quantize))
    tensors, spec = Tensors(file), read_spec(file, scaling=options.scaling, asked=options.n_ctx)
    tokenizer = read_tokenizer(file.metadata)  # later, as what is no model of text has no vocabulary either
    if isinstance(spec, EncoderSpec):
        _check_encoder(options, devices)
        devices = 1
    if devices > 1:
        _check_shared(options, environment)
    eyes = _eyes(resolved, found, file, spec, devices, lambda name: opened(name, mmproj=True))
    if eyes is not None:
        files.callback(eyes.decoder.close)
        spec = eyes.seeing(spec, file.metadata)
    adapters = {adapter: opened(path) for adapter, path in (options.adapters or {}).items()}
    return Opened(
        name=str(name),
        options=resolved,
        environment=environment,
        files=files,
        file=file,
        found=found,
        tokenizer=tokenizer,
        spec=spec,
        tensors=tensors,
        adapters=read_adapters(adapters, file, tensors) if adapters else None,
        draft=None if options.draft in (None, MTP) or isinstance(spec, EncoderSpec) else opened(options.draft),
        backend=backend,
        skipped=skipped,
        devices=devices,
        eyes=eyes,
    )


def _eyes(
    options: LoadOptions,
    found: Resolved,
    model: GGUFFile,
    spec: ModelSpec | EncoderSpec,
    devices: int,
    opened: Callable[[ModelName], GGUFFile],
) -> Eyes | None:
    """The projector that was asked for, or lies beside the model or in its folder; "none" is none."""
    if options.mmproj == "none":
        return None
    alone = devices == 1 and options.draft != MTP
    if options.mmproj is not None and not alone:
        message = "mmproj wants one device and no draft of the model's own: leave it, or tensor_parallel and draft, out"
        raise RequestError(message, "mmproj", "tensor_parallel", "draft")
    beside = found.projector or seeing_folder(found.paths) if alone and isinstance(spec, ModelSpec) else None
    path = beside if options.mmproj is None else options.mmproj
    if path is None:
        return None
    from quarrel.llm.images import opened_eyes

    return opened_eyes(path, opened, model, spec, found=options.mmproj is None, urls=options.allow_image_urls)


def find(name: ModelName) -> Resolved:
    """The files of a model, by the names that `load` takes. Raises ModelNotFound."""
    return _find(name, read_environment())


def load_tokenizer(name: ModelName) -> Tokenizer:
    """The tokenizer of a model, by the names that `load` takes; a file that holds a vocabulary alone will do."""
    with open_file(find(name).paths) as file:
        return read_tokenizer(file.metadata)


def check_context(name: ModelName, options: LoadOptions) -> None:
    """Raises RequestError where the model has no such context, whatever memory there is, before anything is loaded."""
    with open_file(find(name).paths) as file:
        spec = read_spec(file, scaling=options.scaling, asked=options.n_ctx)
    context_of(spec, options.n_ctx)


def choose_backend(wanted: str | Backend, threads: int | None) -> tuple[Backend, tuple[str, ...]]:
    """The backend, and why those before it could not be used."""
    if not isinstance(wanted, str):
        if not isinstance(wanted, Backend):
            raise RequestError(f"backend is a {type(wanted).__name__}, wanted a name or a Backend", "backend")
        return _usable(wanted), ()
    if wanted != "auto":
        return _usable(backend_named(wanted, threads)), ()
    skipped: list[str] = []
    for candidate in AUTO:
        try:
            if reason := missing_driver(candidate):
                raise BackendUnavailable(reason)
            return _usable(backend_named(candidate, threads)), tuple(skipped)
        except BackendUnavailable as error:
            skipped.append(str(error))
    raise BackendUnavailable(f"no backend can run on this machine: {'; '.join(skipped)}")


def _usable(backend: Backend) -> Backend:
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {backend.name} cannot run on this machine: {reason}")
    return backend


def _find(name: ModelName, environment: Environment) -> Resolved:
    text = os.fspath(name)
    if not isinstance(text, str) or not text:
        raise RequestError(f"the model's name is {text!r}, wanted a path or a name")
    if environment.models is not None and not Path(text).is_absolute():
        for candidate in (environment.models / text, environment.models / f"{text}.gguf"):
            if candidate.is_file():
                return resolve(str(candidate))
    return resolve(text)


def _check_encoder(options: LoadOptions, devices: int) -> None:
    if options.tensor_parallel is not None and devices > 1:
        raise RequestError("an encoder runs on one device: leave tensor_parallel out", "tensor_parallel")
    if options.pipeline_parallel is not None and devices > 1:
        raise RequestError("an encoder runs on one device: leave pipeline_parallel out", "pipeline_parallel")
    if options.adapters:
        raise RequestError("an encoder takes no adapters: leave them out", "adapters")


def _check_shared(options: LoadOptions, environment: Environment) -> None:
    """What a model on several devices cannot have."""
    option = "pipeline_parallel" if (options.pipeline_parallel or 1) > 1 else "tensor_parallel"
    if options.draft is not None or options.adapters or options.scaling or options.quantize:
        message = f"draft, adapters, rope_scaling and quantize want one device: leave them or {option} out"
        raise RequestError(message, option, "draft", "adapters", "rope_scaling", "quantize")
    if environment.check:
        raise RequestError(f"QUARREL_CHECK looks at one process: unset it, or leave {option} out", option)
