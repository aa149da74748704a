"""Which of several replicas a request goes to: the one that has the beginning of its prompt in its cache.

What the requests of a conversation have in common is digested, and each digest ranks the replicas by a hash of both
(rendezvous hashing, a form of consistent hashing): one that comes or goes moves its own share of the conversations and no
other. A replica with more than its share of the work is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

BEGINNING = 1024
"""Characters of a plain prompt, and of a message, that count: what follows the beginning of two prompts may differ."""
OVERLOAD = 1.25
"""Times the mean of all replicas that one may have before others are asked."""


def prefix_of(body: bytes) -> bytes | None:
    """A digest of the model and of a conversation as far as its first message by a user, or of a prompt's beginning, in
    any of the server's protocols; None where there is neither. A body need not be valid."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    begins: list[Any] = [fields.get("system"), fields.get("instructions")]
    text = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if text is None:
        return None
    if isinstance(text, list) and all(isinstance(entry, dict) for entry in text):
        for message in text:
            begins += [message.get("role"), _begins(message.get("content"))]
            if message.get("role") == "user":
                break
    else:
        begins.append(_begins(text))
    return blake2b(json.dumps([fields.get("model"), *begins]).encode(), digest_size=16).digest()


def ranked(prefix: bytes, replicas: Iterable[str]) -> list[str]:
    """The replicas' names, the one first that has this prefix."""
    return sorted(replicas, key=lambda name: blake2b(name.encode(), key=prefix, digest_size=8).digest())


def routed(prefix: bytes, loads: Mapping[str, int], room: int) -> list[str]:
    """Replicas in the order to be asked in. loads: requests that each has. room: how many each runs side by side, below
    which none has too many."""
    most = max(room, math.ceil(OVERLOAD * (sum(loads.values()) + 1) / max(1, len(loads))))
    names = ranked(prefix, loads)
    free = [name for name in names if loads[name] < most]
    return free + sorted((name for name in names if loads[name] >= most), key=lambda name: loads[name])


def _begins(content: Any) -> Any:
    return content[:BEGINNING] if isinstance(content, str | list) else content
