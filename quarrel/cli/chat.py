"""`quarrel chat`: a conversation, by the model's chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from quarrel.cli.conversation import Conversation
from quarrel.cli.display import display_of
from quarrel.cli.editor import Editor, editor, read_message
from quarrel.cli.flags import in_flags
from quarrel.cli.models import opened, speeds
from quarrel.cli.prompt import as_unicode, model_of
from quarrel.cli.request import request_keywords, template_of
from quarrel.cli.slash import COMMANDS, Slash
from quarrel.cli.terminal import note, visible
from quarrel.engine import Result
from quarrel.errors import ContextOverflow, QuarrelError, RequestError
from quarrel.llm import LLM, find
from quarrel.llm.requests import ChatKeywords
from quarrel.toolbox import Toolbox, server_of

INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    model = model_of(args)
    keywords = cast("ChatKeywords", {**request_keywords(args), "template": template_of(args)})
    with ExitStack() as tools, ExitStack() as models:
        llm = _opened(args, model, models)
        display = None if args.json else display_of(args.plain)
        servers = {words: server_of(words) for words in args.mcp or ()}
        toolbox = tools.enter_context(Toolbox(servers)) if servers else None
        system = None if args.system is None else as_unicode(args.system)
        conversation = Conversation(llm, keywords, system, display, toolbox)
        for path in args.image or ():
            conversation.add_image(Path(path))
        if args.prompt is not None:
            result, interrupted = conversation.ask(as_unicode(args.prompt))
            if not args.quiet and not args.json:
                note(speeds(llm, result))
            return INTERRUPTED if interrupted else 0
        if sys.stdin is not None and sys.stdin.isatty():
            _talk(conversation, args, models)
            return 0
        return _read_lines(conversation)


def _opened(args: argparse.Namespace, model: str, models: ExitStack) -> LLM:
    """The model, in `models`. Raises RequestError for one that cannot talk."""
    llm = models.enter_context(opened(args, model))
    if args.chat_template is None and llm.tokenizer.chat_template is None:
        raise RequestError(
            f"{model} has no chat template: it was made to continue texts, as `quarrel generate` does;"
            " --chat-template chatml, for instance, talks with it all the same"
        )
    return llm


def _read_lines(conversation: Conversation) -> int:
    """Each line of standard input is a message; the first error ends it."""
    for text in sys.stdin or ():
        if text.strip():
            _, interrupted = conversation.ask(as_unicode(text.rstrip("\n")))
            if interrupted:
                return INTERRUPTED
    return 0


def _talk(conversation: Conversation, args: argparse.Namespace, models: ExitStack) -> None:
    name = model_of(args)

    def answer(ask: Callable[[], tuple[Result, bool]]) -> None:
        result, _ = ask()
        if result.dropped:
            done = "summed up" if args.overflow == "summary" else "left out"
            note(f"(the context is full: the oldest {result.dropped} messages were {done}; /reset begins anew)")
        if result.shifted:
            note(f"(the context was full: {result.shifted} tokens were left out in the middle of the answer)")
        if not args.quiet:
            note(speeds(conversation.llm, result))

    def switch(wanted: str) -> None:
        nonlocal name
        find(wanted)  # before the old one is given up: two at once may be more than fits
        models.close()
        try:
            conversation.llm, name = _opened(args, wanted, models), wanted
        except BaseException:
            models.close()
            conversation.llm = _opened(args, name, models)
            raise
        _greet(conversation.llm, args)

    _greet(conversation.llm, args)
    slash = Slash(conversation, answer, switch)
    with editor(args.plain, COMMANDS) as keyboard:
        conversation.allow = Consent(keyboard)
        while True:
            try:
                draft, slash.draft = slash.draft, ""
                text = read_message(keyboard, draft)
                if text.startswith("/"):
                    if not slash.obey(text):
                        return
                elif text:
                    answer(lambda: conversation.ask(text))  # noqa: B023
            except EOFError:
                note("")
                return
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /exit ends the conversation)")
            except ContextOverflow as error:
                note(f"quarrel: {in_flags(error, args.flags)}; /reset forgets the conversation")
            except QuarrelError as error:
                note(f"quarrel: {in_flags(error, args.flags)}")
            except OSError as error:
                note(f"quarrel: {error.filename or ''}: {error.strerror or error}".replace(" : ", " "))


class Consent:
    """Asks a person before each call of a tool; "always" is good for a tool until the conversation ends."""

    def __init__(self, keyboard: Editor) -> None:
        self._keyboard, self._always = keyboard, set[str]()

    def __call__(self, name: str, arguments: str) -> bool:
        note(f"the model calls {visible(name)} with {visible(arguments)}")
        if name in self._always:
            return True
        while True:
            said = self._keyboard.read("call it? yes, no or always: ").strip().casefold()
            if said in ("a", "always"):
                self._always.add(name)
            if said in ("y", "yes", "a", "always", "n", "no", ""):
                return said not in ("n", "no", "")


def _greet(llm: LLM, args: argparse.Namespace) -> None:
    if not args.quiet:
        explained = llm.explain()
        note(f"{explained.model} on {explained.device}, {llm.n_ctx} tokens of context. /help lists commands, Ctrl-D ends.")
