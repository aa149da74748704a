"""`quarrel generate`: continues a text, as it comes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from quarrel.cli.display import with_progress
from quarrel.cli.flags import UsageError
from quarrel.cli.interrupt import CtrlC
from quarrel.cli.models import document, opened, speeds
from quarrel.cli.prompt import as_unicode, model_and_text
from quarrel.cli.request import request_keywords, template_of
from quarrel.cli.terminal import line, note, visible, write, write_json
from quarrel.engine import Chunk, Result, Stream
from quarrel.errors import QuarrelError
from quarrel.llm import LLM
from quarrel.llm.requests import Message

INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    """Status 130 after Ctrl-C, with what was generated until then printed."""
    model, prompt = model_and_text(args)
    keywords = request_keywords(args)
    images = [{"type": "image", "image": path} for path in args.image or ()]
    chat = args.chat or args.system is not None or args.chat_template is not None or bool(images)
    if args.echo and chat:
        raise UsageError("--echo shows a text that is continued, and --chat asks for an answer; leave one of them out")
    if keywords.get("logprobs") is not None and not args.json:
        raise UsageError("--logprobs are printed as JSON: give --json too, or leave them out")
    template = template_of(args)
    with opened(args, model) as llm:
        with CtrlC() as interrupt:
            if chat:
                system: list[Message] = (
                    [{"role": "system", "content": as_unicode(args.system)}] if args.system is not None else []
                )
                content = [*images, {"type": "text", "text": prompt}] if images else prompt
                messages = [*system, {"role": "user", "content": content}]
                stream = interrupt.follow(llm.chat(messages, stream=True, template=template, **keywords))
            else:
                if not args.quiet and llm.tokenizer.chat_template is not None and sys.stderr.isatty():
                    note("(this model has a chat template; --chat puts the text to it as a message)")
                stream = interrupt.follow(llm.stream(prompt, **keywords))
            _show(args, llm, stream, prompt if args.echo else "")
        result = stream.result
        assert result is not None
        if not args.quiet and not args.json:
            note(speeds(llm, result))
    for one in (result, *result.alternatives):
        if one.finish_reason == "error":
            raise one.failure or QuarrelError(one.error)
    return INTERRUPTED if interrupt.pressed else 0


def _show(args: argparse.Namespace, llm: LLM, stream: Stream, echo: str) -> None:
    """Prints everything."""
    streaming = not args.json if args.stream is None else args.stream
    if not args.json and getattr(args, "n", 1) > 1:
        streaming = False  # tokens of several continuations alternate: only whole ones can be read
    if streaming and not args.json:
        write(_for_terminal(echo))
    ended = True
    with stream:
        for chunk in with_progress(stream):
            if streaming and args.json:
                write_json(_line(chunk))
            elif streaming and chunk.text:
                write(_for_terminal(chunk.text))
                ended = chunk.text.endswith("\n")
    result = stream.result
    assert result is not None
    if args.json:
        write_json({"result": document(llm, result)} if streaming else {**document(llm, result), **_echoed(echo)})
    elif not streaming:
        _print_whole(result, echo)
    elif not ended or echo:
        line()


def _print_whole(result: Result, echo: str) -> None:
    for i, one in enumerate((result, *result.alternatives)):
        if i:
            line("---")
        line(_for_terminal(echo + one.text))


def _line(chunk: Chunk) -> dict[str, Any]:
    """One line of a JSON stream; its end is in the `result` that follows."""
    line = {"index": chunk.index, "text": chunk.text, "token_id": chunk.token_id}
    return line if chunk.logprob is None else {**line, "logprob": asdict(chunk.logprob)}


def _echoed(echo: str) -> dict[str, str]:
    return {"prompt": echo} if echo else {}


def _for_terminal(text: str) -> str:
    """A file or a pipe gets the model's text as it is; a terminal is not driven by it."""
    return visible(text) if sys.stdout.isatty() else text
