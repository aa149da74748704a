"""Sampling settings that come with a model from an Ollama store, as defaults."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
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


def defaults_of(params: str | None) -> SamplingParams:
    """The defaults, with the values of a model's params layer; wrong ones are left out with a warning."""
    result = SamplingParams()
    for name, value in _document(params).items():
        if name not in NAMES or (name == "num_predict" and isinstance(value, int) and value < 0):
            continue
        try:
            result = merged(result, _one(NAMES[name], value))
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
