"""An answer that may call tools: its request, and its text with the calls taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from quarrel.engine import Chunk, Request, Stream
from quarrel.llm import LLM

if TYPE_CHECKING:
    from quarrel.server.formats import Call


class Reader:
    """Of one answer. `text` and `calls` are whole when its stream has ended."""

    def __init__(self, llm: LLM, tools: Sequence[Mapping[str, Any]]) -> None:
        from quarrel.server.reader import Reading  # only here: most conversations have no tools

        self.text, self.calls = "", list["Call"]()
        self._llm, self._reading = llm, Reading(tools, thoughts=False)
        self._tokens: Sequence[int] = ()

    def request(self, messages: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> Request:
        from quarrel.server.conversation import chat_request

        options = dict(keywords)
        template = options.pop("template", None)
        request = chat_request(cast("Any", self._llm), template, messages, self._reading, **options)
        self._tokens = request.tokens
        return request

    def read(self, stream: Stream) -> Stream:
        """The stream, with what is no call."""
        return cast("Stream", _Read(stream, self._chunks(stream)))

    def _chunks(self, stream: Stream) -> Iterator[Chunk]:
        reader = self._reading.reader(cast("Any", self._llm), self._tokens)
        for chunk in stream:
            if chunk.read:
                yield chunk
                continue
            found = reader.push(chunk.text, last=chunk.result is not None)
            self.text += found.text
            self.calls += found.calls
            yield replace(chunk, text=found.text)


class _Read:
    def __init__(self, stream: Stream, chunks: Iterator[Chunk]) -> None:
        self.prompt_tokens, self._chunks = stream.prompt_tokens, chunks

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks
