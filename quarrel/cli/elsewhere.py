"""Options that other programs have, this one's first version among them: what does the same here."""

from __future__ import annotations

from collections.abc import Sequence

_DEVICE = "a model runs on one device, whole: --backend names it"
_SPEED = "`python -m quarrel.bench` measures speed"
_CHECK = "QUARREL_CHECK=1 compares every op with its reference while it runs"
OPTIONS = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers", "-gpu", "--gpu"), _DEVICE),
    **dict.fromkeys(("-interactive", "--interactive"), "`quarrel chat` is a conversation"),
    **dict.fromkeys(("-benchmark", "--benchmark", "-debug-perf"), _SPEED),
    **dict.fromkeys(("-debug-dequant", "-debug-activations"), _CHECK),
    **dict.fromkeys(("-metrics", "--metrics"), "`quarrel serve` tells them, at /metrics"),
    "-quality": "how a text is drawn is said by the options under sampling",
    "--api-key": "`quarrel keys create` makes a key, and WEBUI_API_KEY gives one; a command line is seen by others",
}


def unknown_option(words: Sequence[str]) -> str | None:
    """A sentence for an option that is known from elsewhere only."""
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name in OPTIONS:
            return f"{name!r} is not understood here; {OPTIONS[name]}"
    return None
