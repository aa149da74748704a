"""What becomes of a conversation, or a text, that is longer than the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Overflow = Literal["stop", "shift", "summary"]
"""stop: it is refused. shift: the oldest turns are left out, never the system message; an answer that comes to the end
of the context goes on, up to `max_tokens` or as many as the context has, without the older half of what is not the system
message. summary: in the place of the oldest turns stands a summary, which the model writes first."""
Message = Mapping[str, object]
SINKS = 4
"""First tokens of a text that are kept: models attend to them whatever they say."""
SHARE = 4
"""One part in so many of the context is left free for the answer, or what `max_tokens` says if that is less."""
STRIDE = 4
"""So many questions are left out at a time, where that is enough: the next requests then find the rest in the cache."""
LONGEST = 512
"""Tokens of a summary."""


def limit(n_ctx: int, max_tokens: int | None) -> int:
    """The tokens that a prompt may have when room for its answer is left."""
    most = n_ctx // SHARE
    return n_ctx - max(1, most if max_tokens is None else min(most, max_tokens))


def shift_messages(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Sequence[int]], most: int
) -> tuple[Sequence[int], int]:
    """The ids of as many of the newest turns as `most` tokens hold, behind the system messages; and how many messages were
    left out. A turn begins with a user's message; the last one stays whatever its length."""
    ids = encode(messages)
    head = head_of(messages)
    cuts = [i for i in range(head + 1, len(messages)) if messages[i].get("role") == "user"]
    if len(ids) <= most or not cuts:
        return ids, 0

    def rest(cut: int) -> Sequence[int]:
        return encode([*messages[:head], *messages[cut:]])

    for some in (cuts[STRIDE - 1 :: STRIDE], cuts):
        at = bisect_left(some, True, key=lambda cut: len(rest(cut)) <= most)
        if at < len(some):
            return rest(some[at]), some[at] - head
    return rest(cuts[-1]), cuts[-1] - head


def shift_ids(ids: Sequence[int], most: int) -> tuple[Sequence[int], int]:
    """The first few ids and the newest ones, `most` together; and how many were left out."""
    if len(ids) <= most or most <= SINKS:
        return ids, 0
    return [*ids[:SINKS], *ids[SINKS - most :]], len(ids) - most


def asking(messages: Sequence[Message], dropped: int, n_ctx: int) -> tuple[list[Message], int]:
    """What to say to the model for a summary of what `shift_messages` would leave out; and the tokens that it may take."""
    tokens = min(LONGEST, max(1, n_ctx // 8))
    words = max(10, tokens // 2)
    wanted = (
        f"Summarise our conversation so far in at most {words} words: facts, names, numbers, decisions, open questions."
        " Write the summary only."
    )
    return [*messages[: head_of(messages) + dropped], {"role": "user", "content": wanted}], tokens


def summarised(messages: Sequence[Message], dropped: int, summary: str) -> list[Message]:
    """The messages with a summary in the place of those that are left out: before the first question that stays."""
    head = head_of(messages)
    first, content = messages[head + dropped], messages[head + dropped].get("content")
    text = f"(A summary of our conversation before this: {summary.strip()})\n\n"
    made = [{"type": "text", "text": text}, *content] if isinstance(content, list) else f"{text}{content}"
    return [*messages[:head], {**first, "content": made}, *messages[head + dropped + 1 :]]


def head_of(messages: Sequence[Message]) -> int:
    """How many system messages it begins with."""
    return next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
