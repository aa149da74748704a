"""The command line of `python -m quarrel.bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from quarrel.bench.report import FORMATS
from quarrel.env import BACKENDS, COMPUTE


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="python -m quarrel.bench", description=__doc__, allow_abbrev=False)
    p.description = "Measures how fast models run: prompts, decoding, at depths, in batches; or one kernel."
    what = p.add_argument_group("what to measure")
    what.add_argument("-m", "--model", action="append", metavar="FILE", help="a GGUF file or a model's name; several")
    what.add_argument("-p", "--prompt", type=numbers, default=[512], metavar="N,..", help="prompt lengths, 0 for none")
    what.add_argument("-n", "--tokens", type=numbers, default=[128], metavar="N,..", help="tokens to decode, 0 for none")
    what.add_argument("-d", "--depth", type=numbers, default=[0], metavar="N,..", help="tokens in the cache before")
    what.add_argument("-b", "--batch", type=counts, default=[], metavar="N,..", help="sequences that decode together")
    what.add_argument("--prompt-length", type=number, default=128, metavar="N", help="tokens before, in batches")
    what.add_argument("--engine", action="store_true", help="decode through the engine too, end to end")
    what.add_argument("--phases", action="store_true", help="where a token's time goes: attention, ffn, experts, ...")
    how = p.add_argument_group("how")
    how.add_argument("-r", "--rounds", type=number, default=5, metavar="N", help="repetitions; the median counts")
    how.add_argument("--backend", type=words(BACKENDS), default=["auto"], metavar="NAME,..", help=", ".join(BACKENDS))
    how.add_argument("--compute", choices=COMPUTE, default="auto", help="the arithmetic")
    how.add_argument("--threads", type=number, metavar="N", help="of the CPU backend")
    how.add_argument("--step-tokens", type=number, metavar="N", help="rows of a prefill step, instead of the backend's")
    how.add_argument("--seconds", type=float, metavar="S", help="begin no further test after so many seconds")
    how.add_argument("--jobs", type=number, default=1, metavar="N", help="processes that compile kernels beforehand")
    how.add_argument("--no-check", action="store_true", help="skip the check against the references; every row says so")
    one = p.add_argument_group("one kernel")
    one.add_argument("--op", choices=["linear"], help="time one kernel instead of a model")
    one.add_argument("--format", type=words(None), default=["q4_k"], metavar="NAME,..", help="block formats")
    one.add_argument("--shape", type=shapes, default=[(4096, 14336)], metavar="KxN,..", help="input width x output width")
    one.add_argument("--rows", type=counts, default=[1], dest="rows_of_input", metavar="N,..", help="tokens")
    out = p.add_argument_group("output")
    out.add_argument("-o", "--output", choices=FORMATS, default="markdown", help="on standard output")
    out.add_argument("--out", type=place, metavar="FILE", help="all figures as JSON, rewritten as they come")
    out.add_argument("--vs", type=Path, metavar="FILE", help="ratios against an earlier document")
    out.add_argument("--plot", type=place, metavar="FILE.svg", help="decode speed against depth and batch, or phases")
    return p


def number(text: str) -> int:
    """A whole number above 0."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    values = [_whole(part) for part in text.split(",")]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{min(values)} is below 0")
    return values


def counts(text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    return [number(part) for part in text.split(",")]


def place(text: str) -> Path:
    """The path of a file in a folder that exists, so that a long run does not fail at its end."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def words(allowed: tuple[str, ...] | None) -> Callable[[str], list[str]]:
    """Words separated by commas."""

    def read(text: str) -> list[str]:
        found = text.lower().split(",")
        for word in found:
            if allowed is not None and word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(allowed)}")
        return found

    return read


def shapes(text: str) -> list[tuple[int, int]]:
    """Pairs such as 4096x14336."""
    found = []
    for part in text.lower().split(","):
        k, _, n = part.partition("x")
        found.append((number(k), number(n)))
    return found
