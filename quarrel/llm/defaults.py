"""Sampling settings that come with a model, in its file or from an Ollama store, as defaults."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quarrel.engine import Sampling, SamplingParams, merged
from quarrel.errors import RequestError
from quarrel.llm.memory import caller_stacklevel

NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "stop": "stop",
    "num_predict": "max_tokens",
}
"""Ollama's name -> ours. Its other parameters (num_ctx, num_gpu, ...) are about its own server."""
KEYS: Mapping[str, str] = {
    f"general.sampling.{key}": name
    for key, name in {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_last_n": "penalty_last_n",
        "penalty_repeat": "repetition_penalty",
        "mirostat": "mirostat",
        "mirostat_tau": "mirostat_tau",
        "mirostat_eta": "mirostat_eta",
    }.items()
}
"""A GGUF file's key -> ours. The order of samplers (sequence) is not read."""


def defaults_of(params: str | None, metadata: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
    """The defaults, with the values of a file's keys and, before these, of a params layer of an Ollama store.

    Wrong ones are left out with a warning.
    """
    result = SamplingParams()
    for key in KEYS.keys() & metadata.keys():
        result = _with(result, KEYS[key], metadata[key])
    for name, value in _document(params).items():
        if name in NAMES and not (name == "num_predict" and isinstance(value, int) and value < 0):
            result = _with(result, NAMES[name], value)
    return result


def _with(result: SamplingParams, name: str, value: Any) -> SamplingParams:
    try:
        return merged(result, _one(name, value))
    except RequestError as error:
        warnings.warn(f"a default of this model is left out: {error}", stacklevel=caller_stacklevel())
        return result


def _document(params: str | None) -> dict[str, Any]:
    if params is None:
        return {}
    try:
        document = json.loads(params)
    except ValueError as error:
        warnings.warn(f"the params of this model are no JSON ({error}) and are left out", stacklevel=caller_stacklevel())
        return {}
    return document if isinstance(document, dict) else {}


def _one(name: str, value: Any) -> Sampling:
    options: Sampling = {name: value}  # type: ignore[misc]
    return options
