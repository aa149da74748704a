"""Requests, blocks and time: what stands between a prompt and the steps of a backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarrel.engine.cache import CacheRules
    from quarrel.engine.engine import Activity, Engine
    from quarrel.engine.generation import Request
    from quarrel.engine.loop import Loop
    from quarrel.engine.output import OutputBuffer
    from quarrel.engine.packed import Packed
    from quarrel.engine.params import Sampling, SamplingParams, merged, token_id
    from quarrel.engine.results import Chunk, FinishReason, Result, Timings, TokenLogprob, Usage
    from quarrel.engine.sequence import Deliver, Scoring
    from quarrel.engine.service import Priority, Service
    from quarrel.engine.stats import Histogram, Stats
    from quarrel.engine.stream import AsyncStream, Delivery, Stream, deliver, start, start_async
    from quarrel.engine.text import Detokenizer, Guide, MakeGuide, Texts

__all__ = [
    "Activity",
    "AsyncStream",
    "CacheRules",
    "Chunk",
    "Deliver",
    "Delivery",
    "Detokenizer",
    "Engine",
    "FinishReason",
    "Guide",
    "Histogram",
    "Loop",
    "MakeGuide",
    "OutputBuffer",
    "Packed",
    "Priority",
    "Request",
    "Result",
    "Sampling",
    "SamplingParams",
    "Scoring",
    "Service",
    "Stats",
    "Stream",
    "Texts",
    "Timings",
    "TokenLogprob",
    "Usage",
    "deliver",
    "merged",
    "start",
    "start_async",
    "token_id",
]

_MODULES = {
    "cache": "CacheRules",
    "engine": "Activity Engine",
    "generation": "Request",
    "loop": "Loop",
    "output": "OutputBuffer",
    "packed": "Packed",
    "params": "Sampling SamplingParams merged token_id",
    "results": "Chunk FinishReason Result Timings TokenLogprob Usage",
    "sequence": "Deliver Scoring",
    "service": "Priority Service",
    "stats": "Histogram Stats",
    "stream": "AsyncStream Delivery Stream deliver start start_async",
    "text": "Detokenizer Guide MakeGuide Texts",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    # Imported when first asked for: the command line reads `params` to print its help, and needs no NumPy for that.
    if name not in _HOMES:
        raise AttributeError(f"module 'quarrel.engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"quarrel.engine.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
