"""The messages of a conversation, and the model that answers them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarrel.cli.display import Display
from quarrel.cli.interrupt import CtrlC
from quarrel.cli.models import document
from quarrel.cli.reader import Reader
from quarrel.cli.terminal import write_json
from quarrel.engine import Result, Stream
from quarrel.errors import QuarrelError, RequestError
from quarrel.llm import LLM
from quarrel.llm.requests import ChatKeywords
from quarrel.toolbox import Toolbox

MAX_ROUNDS = 8
"""Times that the model may call tools before it has to answer."""
ROLES = ("system", "user", "assistant", "tool")
MAX_FILE = 64 << 20
PICTURES = {
    "image/png": rb"\x89PNG",
    "image/jpeg": rb"\xff\xd8",
    "image/webp": rb"RIFF....WEBP",
    "image/gif": rb"GIF8",
    "image/bmp": rb"BM",
}
"""How files of each kind begin. Not every system knows the names of all."""
Message = dict[str, Any]


class Conversation:
    """What was said so far. Questions and answers are added by `ask`; `images` go with the next question."""

    def __init__(
        self,
        llm: LLM,
        keywords: ChatKeywords,
        system: str | None,
        display: Display | None,
        toolbox: Toolbox | None = None,
    ) -> None:
        """display: None prints answers as JSON. toolbox: what the model may call."""
        self.llm, self.keywords, self.system = llm, keywords, system
        self.turns: list[Message] = []
        self.images: list[Message] = []
        self.allow: Callable[[str, str], bool] = lambda name, arguments: False
        """Whether a person lets a tool of that name be called with these arguments."""
        self.toolbox, self._display = toolbox, display

    @property
    def messages(self) -> list[Message]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self.turns]

    def ask(self, text: str) -> tuple[Result, bool]:
        """Prints the answer as it comes. Returns it, and whether Ctrl-C stopped it; what it had said by then stays.
        Pictures that cannot be decoded do not go with the next question."""
        content = [{"type": "text", "text": text}, *self.images] if self.images else text
        question = {"role": "user", "content": content}
        try:
            result, stopped, said = self._answer([*self.messages, question])
        except RequestError as error:
            if error.fields == ("image",):
                self.images = []
            raise
        if said or not stopped:
            self.turns += [question, *said]
            self.images = []
        return result, stopped

    def again(self) -> tuple[Result, bool]:
        """Another answer to the last question, in the place of the first; drawn with a seed of its own."""
        question, turns = self.last_question(), self.turns
        keywords, images = self.keywords, self.images
        at = max(i for i, turn in enumerate(turns) if turn is question)
        try:
            self.turns, self.images = turns[:at], []
            self.keywords = ChatKeywords(**{k: v for k, v in keywords.items() if k != "seed"})  # type: ignore[typeddict-item]
            result, stopped, said = self._answer([*self.messages, question])
            if said or not stopped:
                turns = [*self.turns, question, *said]
            return result, stopped
        finally:
            self.turns, self.keywords, self.images = turns, keywords, images

    def last_question(self) -> Message:
        """Raises RequestError where nothing has been said yet."""
        for turn in reversed(self.turns):
            if turn["role"] == "user":
                return turn
        raise RequestError("there is no question yet: say something first")

    def take_back(self) -> str:
        """Forgets the last question and what came behind it. Returns its text; its images go with the next one."""
        question = self.last_question()
        content = question["content"]
        while self.turns.pop() is not question:
            pass
        if isinstance(content, str):
            return content
        self.images = [part for part in content if part["type"] != "text"]
        return "".join(part["text"] for part in content if part["type"] == "text")

    def add_image(self, path: Path) -> None:
        """Puts a picture beside the next question, as OpenAI's protocol has it. Raises RequestError and OSError."""
        found = _read(path)
        kind = next((kind for kind, begins in PICTURES.items() if re.match(begins, found, re.DOTALL)), None)
        if kind is None:
            raise RequestError(f"{path} is no picture by its first bytes: wanted PNG, JPEG, WebP, GIF or BMP")
        data = base64.b64encode(found).decode()
        self.images.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})

    def _answer(self, messages: list[Message]) -> tuple[Result, bool, list[Message]]:
        """The last result, whether Ctrl-C stopped it, and what was said: calls of tools and their results, and a text."""
        said: list[Message] = []
        for last in [False] * MAX_ROUNDS + [True]:
            reader = None if last or self.toolbox is None else Reader(self.llm, self.toolbox.tools)
            result, stopped = self._one([*messages, *said], reader)
            calls = [] if reader is None or stopped else reader.calls
            if not calls:
                if result.text or not stopped:
                    said.append({"role": "assistant", "content": result.text})
                break
            assert self.toolbox is not None
            assert reader is not None
            rows = [{k: v for k, v in call.body(i).items() if k != "index"} for i, call in enumerate(calls)]
            said.append({"role": "assistant", "content": reader.text, "tool_calls": rows})
            for call, row in zip(calls, rows, strict=True):
                allowed = self.allow(call.name, call.arguments)
                found = self.toolbox.call(call.name, call.parsed).text if allowed else "The user did not allow this call."
                said.append({"role": "tool", "name": call.name, "tool_call_id": row["id"], "content": found})
        return result, stopped, said

    def _one(self, messages: list[Message], reader: Reader | None) -> tuple[Result, bool]:
        with CtrlC() as interrupt, interrupt.follow(self._stream(messages, reader)) as stream:
            if self._display is None:
                for _ in stream:
                    pass
            else:
                self._display.show(stream if reader is None else reader.read(stream))
        result = stream.result
        assert result is not None
        if self._display is None:
            write_json({"role": "assistant", "content": result.text, **document(self.llm, result)})
        if result.finish_reason == "error":
            raise result.failure or QuarrelError(result.error)
        return result, interrupt.pressed

    def _stream(self, messages: list[Message], reader: Reader | None) -> Stream:
        if reader is None:
            return self.llm.chat(messages, stream=True, **self.keywords)
        return self.llm.start(reader.request(messages, self.keywords))

    def save(self, path: Path) -> None:
        """Writes all messages, the system message too."""
        if path.suffix == ".md":
            text = "".join(f"**{m['role']}**\n\n{_text(m['content'])}\n\n" for m in self.messages)
        else:
            text = json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, "utf-8", "replace")

    def load(self, path: Path) -> None:
        """Takes the messages of a file that `save` wrote as JSON, in place of what was said. Raises RequestError."""
        try:
            messages = json.loads(_read(path))
        except (ValueError, RecursionError):
            raise RequestError(f"{path} is no JSON: give a file that /save wrote under a name in .json") from None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RequestError(f"{path} holds no messages, wanted a list of objects with role and content, as /save writes")
        system = [m["content"] for m in messages if m["role"] == "system"]
        if len(system) > 1 or (system and messages[0]["role"] != "system"):
            raise RequestError(f"{path} has system messages behind its beginning, which this conversation cannot hold")
        self.system = system[0] if system else None
        self.turns, self.images = messages[len(system) :], []


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    content = value.get("content")
    if isinstance(content, list) and value["role"] == "user":
        return all(isinstance(p, dict) and _is_part(p) for p in content)
    return isinstance(content, str)


def _is_part(value: dict[str, Any]) -> bool:
    return isinstance(value.get("type"), str) and (value["type"] != "text" or isinstance(value.get("text"), str))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else "(a picture)" for part in content)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise RequestError(f"{path} is larger than {MAX_FILE >> 20} MiB; choose another file")
    return data
