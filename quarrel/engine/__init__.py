"""Requests, blocks and time: what stands between a prompt and the steps of a backend."""

from quarrel.engine.engine import Activity, Engine
from quarrel.engine.generation import Request
from quarrel.engine.loop import Loop
from quarrel.engine.params import Sampling, SamplingParams, merged, token_id
from quarrel.engine.results import Chunk, FinishReason, Result, Timings, TokenLogprob, Usage
from quarrel.engine.sequence import Deliver, Scoring
from quarrel.engine.stream import AsyncStream, Stream, start, start_async
from quarrel.engine.text import Detokenizer, Texts

__all__ = [
    "Activity",
    "AsyncStream",
    "Chunk",
    "Deliver",
    "Detokenizer",
    "Engine",
    "FinishReason",
    "Loop",
    "Request",
    "Result",
    "Sampling",
    "SamplingParams",
    "Scoring",
    "Stream",
    "Texts",
    "Timings",
    "TokenLogprob",
    "Usage",
    "merged",
    "start",
    "start_async",
    "token_id",
]
