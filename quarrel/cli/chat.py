"""`quarrel chat`: a conversation, by the model's chat template."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from quarrel.cli.flags import in_flags
from quarrel.cli.interrupt import CtrlC
from quarrel.cli.models import document, opened, speeds
from quarrel.cli.prompt import as_unicode, model_of
from quarrel.cli.request import request_keywords, template_of
from quarrel.cli.terminal import line, note, visible, write, write_json
from quarrel.engine import Result
from quarrel.errors import ContextOverflow, QuarrelError, RequestError
from quarrel.llm import LLM
from quarrel.llm.requests import ChatKeywords

INTERRUPTED = 130
PROMPT, MORE = ">>> ", "... "
FENCE = '"""'

HELP = """\
/system TEXT   a new system message; /system alone takes it away
/reset         forget the conversation, keep the system message
/save FILE     write the conversation: Markdown for a name in .md, else JSON
/help          this list
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. Text of several lines stands between two \""" marks."""


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, keywords: ChatKeywords, system: str | None, *, json: bool) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []
        self._llm, self._keywords, self._json = llm, keywords, json

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def ask(self, text: str) -> tuple[Result, bool]:
        """Prints the answer as it comes. Returns it, and whether Ctrl-C stopped it; what it had said by then stays."""
        question = {"role": "user", "content": text}
        messages = [*self.messages, question]
        with CtrlC() as interrupt, interrupt.follow(self._llm.chat(messages, stream=True, **self._keywords)) as stream:
            for chunk in stream:
                if not self._json:
                    write(visible(chunk.text) if sys.stdout.isatty() else chunk.text)
        result = stream.result
        assert result is not None
        if self._json:
            write_json({"role": "assistant", "content": result.text, **document(self._llm, result)})
        else:
            line()
        if result.finish_reason == "error":
            raise result.failure or QuarrelError(result.error)
        if result.text or not interrupt.pressed:
            self.turns += [question, {"role": "assistant", "content": result.text}]
        return result, interrupt.pressed

    def save(self, path: Path) -> None:
        """Writes all messages, the system message too."""
        if path.suffix == ".md":
            text = "".join(f"**{m['role']}**\n\n{m['content']}\n\n" for m in self.messages)
        else:
            text = json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, "utf-8")


def run(args: argparse.Namespace) -> int:
    model = model_of(args)
    keywords = cast("ChatKeywords", {**request_keywords(args), "template": template_of(args)})
    with opened(args, model) as llm:
        if keywords["template"] is None and llm.tokenizer.chat_template is None:
            raise RequestError(
                f"{model} has no chat template: it was made to continue texts, as `quarrel generate` does;"
                " --chat-template chatml, for instance, talks with it all the same"
            )
        system = None if args.system is None else as_unicode(args.system)
        conversation = Conversation(llm, keywords, system, json=args.json)
        if args.prompt is not None:
            result, interrupted = conversation.ask(as_unicode(args.prompt))
            if not args.quiet and not args.json:
                note(speeds(llm, result))
            return INTERRUPTED if interrupted else 0
        if sys.stdin is not None and sys.stdin.isatty():
            _talk(conversation, llm, args)
            return 0
        return _read_lines(conversation)


def _read_lines(conversation: Conversation) -> int:
    """Each line of standard input is a message; the first error ends it."""
    for text in sys.stdin or ():
        if text.strip():
            _, interrupted = conversation.ask(as_unicode(text.rstrip("\n")))
            if interrupted:
                return INTERRUPTED
    return 0


def _talk(conversation: Conversation, llm: LLM, args: argparse.Namespace) -> None:
    if not args.quiet:
        explained = llm.explain()
        note(f"{explained.model} on {explained.device}, {llm.n_ctx} tokens of context. /help lists commands, Ctrl-D ends.")
    with _line_editing():
        while True:
            try:
                text = _read_message()
                if text.startswith("/"):
                    if not _obey(conversation, text):
                        return
                elif text:
                    _answer(conversation, llm, text, args)
            except EOFError:
                note("")
                return
            except KeyboardInterrupt:
                note("\n(Ctrl-D or /exit ends the conversation)")


def _answer(conversation: Conversation, llm: LLM, text: str, args: argparse.Namespace) -> None:
    try:
        result, _ = conversation.ask(text)
    except ContextOverflow as error:
        note(f"quarrel: {in_flags(error, args.flags)}; /reset forgets the conversation")
    except QuarrelError as error:
        note(f"quarrel: {in_flags(error, args.flags)}")
    else:
        if not args.quiet:
            note(speeds(llm, result))


def _obey(conversation: Conversation, text: str) -> bool:
    """Carries out a command; False for the one that ends the conversation."""
    command, _, rest = text.partition(" ")
    rest = rest.strip()
    if command in ("/exit", "/quit", "/bye"):
        return False
    if command in ("/reset", "/clear"):
        conversation.turns.clear()
        note("(forgotten)")
    elif command == "/system":
        conversation.system = rest or None
        note("(the system message is set)" if rest else "(there is no system message now)")
    elif command == "/save" and rest:
        try:
            conversation.save(Path(rest).expanduser())
            note(f"(saved in {rest})")
        except OSError as error:
            note(f"quarrel: {rest}: {error.strerror or error}")
    elif command == "/help":
        note(HELP)
    else:
        note(f"quarrel: {text!r} is no command here, or lacks its argument\n{HELP}")
    return True


def _read_message() -> str:
    """One message: a line, or several between two fences."""
    text = _ask_line(PROMPT)
    if not text.startswith(FENCE):
        return as_unicode(text.strip())
    lines = [text.removeprefix(FENCE)]
    while not lines[-1].endswith(FENCE):
        lines.append(_ask_line(MORE))
    lines[-1] = lines[-1].removesuffix(FENCE)
    return as_unicode("\n".join(lines).strip())


def _ask_line(prompt: str) -> str:
    # input() writes its prompt to standard output, which may be a file that answers go to.
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


@contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys and a history that lasts, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = _history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        _keep_history(readline, path)


def _history_file() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return base / "quarrel" / "chat_history"


def _keep_history(readline: ModuleType, path: Path) -> None:
    # Only the user may read it; a history that cannot be written is no error.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        readline.set_history_length(1000)
        readline.write_history_file(path)
        path.chmod(0o600)
