"""What can be typed in a conversation beside messages: `/help`, `/set`, `/model` and others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from quarrel.cli.conversation import Conversation
from quarrel.cli.samplers import SAMPLERS, Sampler
from quarrel.cli.terminal import note, visible
from quarrel.engine import Sampling, SamplingParams, merged
from quarrel.errors import RequestError

HELP = """\
/regen         another answer to the last question
/edit [TEXT]   ask the last question again, changed
/system [TEXT] a new system message; /system alone takes it away
/set [NAME [VALUE]]  a sampling option, such as /set temperature 0.2; without a value it is as at first
/model NAME    another model goes on with the conversation
/image PATH    a picture for the next question
/reset         forget the conversation, keep the system message
/tools         what the model may call (--mcp)
/save FILE     write the conversation: Markdown for a name in .md, else JSON
/load FILE     go on with a conversation that was saved as JSON
/help          this list
/exit          end, as Ctrl-D does
Ctrl-C stops an answer. Alt-Enter begins another line, or text of several lines stands between two \""" marks."""

COMMANDS = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))
ALIASES = {"/quit": "/exit", "/bye": "/exit", "/clear": "/reset", "/retry": "/regen", "/?": "/help"}


class Slash:
    """The commands of one conversation."""

    def __init__(
        self, conversation: Conversation, answer: Callable[[Callable[[], Any]], None], switch: Callable[[str], None]
    ) -> None:
        """answer: runs a question and reports on it. switch: gives the conversation the model of that name."""
        self._conversation, self._answer, self._switch = conversation, answer, switch
        self._first = dict(conversation.keywords)
        self.draft = ""
        """What stands in the next prompt already."""

    def obey(self, text: str) -> bool:
        """Carries out a command; False for the one that ends the conversation. Raises QuarrelError and OSError."""
        command, _, rest = text.partition(" ")
        command = ALIASES.get(command, command)
        if command == "/exit":
            return False
        if command not in COMMANDS:
            raise RequestError(f"{visible(text)!r} is no command here: /help lists them")
        getattr(self, f"_{command[1:]}")(rest.strip())
        return True

    def _help(self, rest: str) -> None:
        note(HELP)

    def _reset(self, rest: str) -> None:
        self._conversation.turns.clear()
        self._conversation.images.clear()
        note("(forgotten)")

    def _system(self, rest: str) -> None:
        self._conversation.system = rest or None
        note("(the system message is set)" if rest else "(there is no system message now)")

    def _tools(self, rest: str) -> None:
        box = self._conversation.toolbox
        functions = [tool["function"] for tool in box.tools] if box is not None else []
        note("\n".join(visible(f"{f['name']}: {f['description']}") for f in functions) or "(none: --mcp gives some)")

    def _regen(self, rest: str) -> None:
        self._answer(self._conversation.again)

    def _edit(self, rest: str) -> None:
        talk = self._conversation
        turns, images = list(talk.turns), talk.images
        before = talk.take_back()
        if not rest:
            self.draft = before
            return
        left = len(talk.turns)
        try:
            self._answer(lambda: talk.ask(rest))
        finally:
            if len(talk.turns) == left:  # there is no other answer
                talk.turns, talk.images = turns, images

    def _image(self, rest: str) -> None:
        if not self._conversation.llm.sees:
            raise RequestError("this model has no eyes: it reads text only; one with its mmproj-*.gguf beside it has")
        path = _path(rest, "/image")
        self._conversation.add_image(path)
        note(f"({path.name} goes with the next question)")

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        self._conversation.save(path)
        note(f"(saved in {path})")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        self._conversation.load(path)
        note(f"({len(self._conversation.turns)} messages of {path})")

    def _model(self, rest: str) -> None:
        if not rest:
            raise RequestError("/model wants the name of a model, such as /model mistral:7b")
        self._switch(rest)

    def _set(self, rest: str) -> None:
        keywords: dict[str, Any] = self._conversation.keywords  # type: ignore[assignment]
        name, _, value = rest.partition(" ")
        if not name:
            given = {s.field: keywords[s.field] for s in SAMPLERS if s.field in keywords}
            note("\n".join(f"{field} = {value!r}" for field, value in given.items()) or "(all as the model has them)")
            return
        sampler = _sampler(name)
        if value.strip():
            new: Any = _value(sampler, value.strip())
            if sampler.many:
                new = [*keywords.get(sampler.field, ()), new]
            if sampler.field == "logit_bias":
                new = dict(keywords.get("logit_bias", {})) | dict(new[-1:])
            merged(SamplingParams(), cast("Sampling", {sampler.field: new}))
            keywords[sampler.field] = new
        elif sampler.field in self._first:
            keywords[sampler.field] = self._first[sampler.field]
        else:
            keywords.pop(sampler.field, None)
        note(
            f"({sampler.field} is {keywords[sampler.field]!r})"
            if sampler.field in keywords
            else f"({sampler.field} is unset)"
        )


def _sampler(name: str) -> Sampler:
    wanted = name.lstrip("-").replace("-", "_")
    for sampler in SAMPLERS:
        flags = {flag.lstrip("-").replace("-", "_") for flag in f"{sampler.flags} {sampler.hidden}".split()}
        if wanted in {sampler.field, *flags} and sampler.field not in ("n", "logprobs"):
            return sampler
    known = ", ".join(s.field for s in SAMPLERS if s.field not in ("n", "logprobs"))
    raise RequestError(f"there is no option {visible(name)!r}, wanted one of {known}")


def _value(sampler: Sampler, text: str) -> Any:
    if sampler.type is None:
        if text not in ("on", "off"):
            raise RequestError(f"{sampler.field} is {visible(text)!r}, wanted on or off")
        return text == "on"
    try:
        return sampler.type(text)
    except (ValueError, argparse.ArgumentTypeError):
        kind = {int: "a whole number", float: "a number"}.get(sampler.type, "as in --help")  # type: ignore[call-overload]
        raise RequestError(f"{sampler.field} is {visible(text)!r}, wanted {kind}") from None


def _path(text: str, command: str) -> Path:
    if not text:
        raise RequestError(f"{command} wants a file")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(str(error)) from None
