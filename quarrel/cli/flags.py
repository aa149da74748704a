"""Errors of the library in the words of the command line: `n_ctx` is `--ctx` there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quarrel.cli.samplers import SAMPLERS

_OTHERWISE = {
    **{sampler.field: next(f for f in sampler.flags.split() if f.startswith("--")) for sampler in SAMPLERS},
    "n_ctx": "--ctx",
    "max_seqs": "--parallel",
    "speculate": "--lookup",
    "draft": "--draft-max",
    "total_seconds": "--timeout",
    "k": "-k",
}
"""Where the flag is not the name with dashes."""


def in_flags(sentence: str, flags: Iterable[str]) -> str:
    """The sentence with Python's arguments as the flags that set them: `rope_scaling='yarn'` as `--rope-scaling yarn`.

    A name of one plain word ("memory") is one only where a value follows it, or where it begins the sentence: "seed is -1".
    Nobody types None.
    """
    known = set(flags)
    names = {flag[2:].replace("-", "_"): flag for flag in known if flag.startswith("--")}
    names |= {name: flag for name, flag in _OTHERWISE.items() if flag in known}
    for name, flag in names.items():
        sentence = re.sub(rf"(?<![\w.-]){name}=(?:'([^']*)'|\"([^\"]*)\"|([\w.%]+))", rf"{flag} \1\2\3", sentence)
        sentence = re.sub(rf"^(an entry of )?{name}(?= (?:is|has|holds) )", rf"\g<1>{flag}", sentence)
        if "_" in name:
            sentence = re.sub(rf"(?<![\w.-]){name}(?![\w=.])", flag, sentence)
    return re.sub(r",? or None\b", "", sentence)
