"""Messages of a conversation, as chat templates take them. Texts and images are understood: all else is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import StrictInt, StrictStr

from quarrel.server.errors import Refused
from quarrel.server.fields import Body


class ImageURL(Body):
    url: StrictStr
    detail: StrictStr | None = None
    """Taken and not used: a tower says itself how many pixels it wants."""


class Part(Body):
    """A part of a message. Answers that come back as input carry the last two, and where there was none a refusal."""

    type: StrictStr | None = None
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: list[Any] | None = None
    image_url: StrictStr | ImageURL | None = None
    logprobs: list[Any] | None = None


class CalledFunction(Body):
    name: StrictStr
    arguments: StrictStr | dict[str, Any] | None = None


class ToolCall(Body):
    """A call that the model made, in OpenAI's form or Ollama's."""

    id: StrictStr | None = None
    type: StrictStr | None = None
    index: StrictInt | None = None
    function: CalledFunction


class ChatMessage(Body):
    role: StrictStr
    content: StrictStr | list[Part] | None = None
    refusal: StrictStr | None = None
    """What the model said in the place of an answer."""
    reasoning_content: StrictStr | None = None
    thinking: StrictStr | None = None
    """What it thought before, in OpenAI's form and in Ollama's."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None
    images: list[Any] | None = None
    """Ollama's: each in base64."""

    def plain(self) -> dict[str, object]:
        """For `LLM.chat`: parts of text are joined, images stay beside them, any other part is refused, and so is what says
        nothing."""
        if self.content is None and not self.tool_calls and not self.images and self.role != "assistant":
            found = f"a message of role {self.role[:40]!r} has no content"
            raise Refused(400, "invalid_request", f"{found}, wanted a text or parts of text", param="messages")
        content = behind_images(self.images, with_images(self.content, "messages") or self.refusal or "")
        message: dict[str, object] = {"role": self.role, "content": content}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.model_dump(exclude_unset=True) for call in self.tool_calls]
        if thought := self.reasoning_content or self.thinking:
            message["reasoning_content"] = thought
        for name in ("tool_call_id", "name"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


WEB = ("http://", "https://")


def with_images(content: str | list[Part] | None, field: str) -> str | list[dict[str, object]]:
    """The text of parts, or texts and images in turn where there are any, as `LLM.chat` takes them. Never a path: what a
    stranger sends opens no file here."""
    if not isinstance(content, list) or all(part.type != "image_url" for part in content):
        return joined(content, ("text", "refusal"), field)
    made: list[dict[str, object]] = []
    for part in content:
        if part.type != "image_url":
            made.append({"type": "text", "text": joined([part], ("text", "refusal"), field)})
            continue
        url = part.image_url.url if isinstance(part.image_url, ImageURL) else part.image_url
        if url is None or not url.lower().startswith(("data:", *WEB)):
            found = "a message holds an image by an address that is not fetched"
            raise Refused(400, "unsupported", f"{found}: send it as data:image/png;base64,...", param=field)
        made.append({"type": "image_url", "image_url": {"url": url}})
    return made


def behind_images(images: Sequence[Any] | None, content: str | list[dict[str, object]]) -> str | list[dict[str, object]]:
    """A message's content with Ollama's images before it, as its own server puts them."""
    if not images:
        return content
    for image in images:
        if not isinstance(image, str):
            found = f"an image is a {type(image).__name__}"
            raise Refused(400, "invalid_request", f"{found}, wanted its bytes in base64", param="images")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*({"type": "image", "data": image} for image in images), *parts]


def joined(content: str | list[Part] | None, kinds: Sequence[str], field: str) -> str:
    """The text of parts, which must be of these types. field: what a refusal names."""
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type not in kinds or (part.refusal if part.type == "refusal" else part.text) is None:
            found = f"a message holds a part of type {str(part.type)[:40]!r}"
            raise Refused(400, "unsupported", f"{found}: only text and images are understood", param=field)
    return "".join((part.refusal if part.type == "refusal" else part.text) or "" for part in content)
