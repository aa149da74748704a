"""From a model's name and options to an `LLM`: opened, planned, compiled."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec

from quarrel.env import read_environment
from quarrel.llm.compile import compile_model
from quarrel.llm.defaults import defaults_of
from quarrel.llm.explain import Explanation
from quarrel.llm.loaded import Loaded
from quarrel.llm.model import LLM
from quarrel.llm.open import ModelName, open_model
from quarrel.llm.options import LoadOptions, described
from quarrel.llm.plan import plan_model

P = ParamSpec("P")
log = logging.getLogger("quarrel")


def _takes(options: Callable[P, LoadOptions]) -> Callable[[Callable[..., LLM]], Callable[Concatenate[ModelName, P], LLM]]:
    """Gives a function the keyword arguments of `options`, for type checkers and for `help`."""

    def decorate(function: Callable[..., LLM]) -> Callable[Concatenate[ModelName, P], LLM]:
        name = inspect.signature(function).parameters["name"]
        fields = inspect.signature(options).parameters.values()
        function.__signature__ = inspect.Signature([name, *fields], return_annotation=LLM)  # type: ignore[attr-defined]
        function.__doc__ = f"{function.__doc__}\n{described()}"
        return function

    return decorate


@_takes(LoadOptions)
def load(name: ModelName, **options: Any) -> LLM:
    """Loads a model.

    name: a GGUF file (any shard of a split one), a folder in safetensors as Hugging Face has them, a name in an Ollama
    store or the Hugging Face cache, `hf://owner/repo`, or `demo` or `demo-chat`.

    Raises ModelNotFound, GGUFError, UnsupportedModel, TokenizerError, BackendUnavailable, UnsupportedOp, OutOfMemory, and
    RequestError for an option out of range. The options:
    """
    return load_with(name, LoadOptions(**options))


def load_with(name: ModelName, options: LoadOptions) -> LLM:
    """As `load`."""
    began = time.perf_counter()
    _set_log_level()
    files = ExitStack()
    try:
        opened = open_model(name, options, files)
        planned = plan_model(opened)
        compiled = compile_model(opened, planned)
    except BaseException:
        files.close()
        raise
    explanation = Explanation.of(opened, planned, compiled)
    seconds = time.perf_counter() - began
    log.info(
        "loaded %s on %s (%s) in %.2f s, n_ctx %d",
        *(name, explanation.backend, opened.backend.device(), seconds, explanation.n_ctx),
    )
    return LLM(
        Loaded(
            options=options,
            loop=compiled.loop,
            file=opened.file,
            files=files,
            spec=planned.spec,
            tokenizer=opened.tokenizer,
            explanation=explanation,
            load_seconds=seconds,
            defaults=defaults_of(opened.found.params, opened.file.metadata),
            system=opened.found.system,
            adapters=tuple(options.adapters or ()),
            eyes=opened.eyes,
            sight=planned.sight,
        )
    )


def _set_log_level() -> None:
    level = read_environment().log
    if level is None:
        return
    log.setLevel(level.upper())
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
