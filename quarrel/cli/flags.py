"""Errors of the library in the words of the command line: `n_ctx` is `--ctx` there."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OTHERWISE = {"n_ctx": "--ctx", "max_seqs": "--parallel"}


def in_flags(sentence: str, flags: Iterable[str]) -> str:
    """The sentence with Python's arguments as the flags that set them: `rope_scaling='yarn'` as `--rope-scaling yarn`.

    A name of one plain word ("memory") is one only where a value follows it.
    """
    known = set(flags)
    names = {flag[2:].replace("-", "_"): flag for flag in known if flag.startswith("--")}
    names |= {name: flag for name, flag in _OTHERWISE.items() if flag in known}
    for name, flag in names.items():
        sentence = re.sub(rf"(?<![\w.-]){name}=(?:'([^']*)'|\"([^\"]*)\"|([\w.%]+))", rf"{flag} \1\2\3", sentence)
        if "_" in name:
            sentence = re.sub(rf"(?<![\w.-]){name}(?![\w=.])", flag, sentence)
    return sentence
