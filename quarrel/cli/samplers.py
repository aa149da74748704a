"""The fields of `SamplingParams` as options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from quarrel.engine.params import Sampling


@dataclass(frozen=True)
class Sampler:
    """One field and its spellings, the listed ones and those that only work. Without `type` it is a switch."""

    field: str
    flags: str
    help: str
    type: Callable[[str], Any] | None
    metavar: str = "N"
    hidden: str = ""
    many: bool = False


def add_samplers(parser: argparse.ArgumentParser, leave_out: tuple[str, ...] = ()) -> None:
    """Options without defaults: an option that is not given is left to `SamplingParams`."""
    from quarrel.engine.params import SamplingParams

    group = parser.add_argument_group("sampling")
    usual = SamplingParams()
    for sampler in SAMPLERS:
        if sampler.field in leave_out:
            continue
        default = getattr(usual, sampler.field)
        shown = isinstance(default, int | float) and not isinstance(default, bool)
        listed = f"{sampler.help} (default: {default:g})" if shown else sampler.help
        for flags, help in ((sampler.flags, listed), (sampler.hidden, argparse.SUPPRESS)):
            common: dict[str, Any] = {"dest": sampler.field, "default": argparse.SUPPRESS, "help": help}
            if not flags:
                continue
            if sampler.type is None:
                group.add_argument(*flags.split(), action="store_true", **common)
            else:
                action = "append" if sampler.many else "store"
                group.add_argument(*flags.split(), action=action, type=sampler.type, metavar=sampler.metavar, **common)


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The options that were given."""
    given = {sampler.field: getattr(args, sampler.field) for sampler in SAMPLERS if hasattr(args, sampler.field)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return cast("Sampling", given)


def _number_of_tokens(text: str) -> int | None:
    # -1 is how llama.cpp and Ollama say "without a limit".
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    return None if number == -1 else number


def _bias(text: str) -> tuple[int, float]:
    id, _, bias = text.partition("=")
    try:
        return int(id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-5 or 42=-inf") from None


SAMPLERS: tuple[Sampler, ...] = (
    Sampler(
        "max_tokens",
        "-n --max-tokens",
        "tokens to generate at most; -1 continues to the end of the context",
        _number_of_tokens,
        hidden="--n-predict --num-predict --predict",
    ),
    Sampler("min_tokens", "--min-tokens", "generate at least this many", int),
    Sampler("temperature", "--temperature --temp", "0 takes the most likely token each time", float, "T", "-temp"),
    Sampler("top_k", "--top-k", "keep the N most likely tokens; 0 is off", int, hidden="-topk --topk"),
    Sampler("top_p", "--top-p", "keep the most likely until they sum to P; 1 is off", float, "P", "-topp --topp"),
    Sampler("min_p", "--min-p", "keep those at least P times as likely as the best; 0 is off", float, "P"),
    Sampler("typical_p", "--typical-p", "keep the least surprising until they sum to P; 1 is off", float, "P", "--typical"),
    Sampler("seed", "-s --seed", "same seed, same text", int),
    Sampler(
        "repetition_penalty",
        "--repeat-penalty",
        "weakens tokens that came before; 1 is off",
        float,
        "X",
        "--repetition-penalty -penalty --penalty",
    ),
    Sampler("penalty_last_n", "--repeat-last-n", "tokens that the penalties look back; -1 is all", int),
    Sampler("presence_penalty", "--presence-penalty", "subtracted once from each token that came before", float, "X"),
    Sampler("frequency_penalty", "--frequency-penalty", "subtracted for each time that it came", float, "X"),
    Sampler("dry_multiplier", "--dry-multiplier", "weakens continuing a repetition; 0 is off", float, "X"),
    Sampler("dry_base", "--dry-base", "each further repeated token multiplies that by X", float, "X"),
    Sampler("dry_allowed_length", "--dry-allowed-length", "repetitions shorter than this are free", int),
    Sampler("dry_last_n", "--dry-last-n", "tokens that DRY looks back; -1 is all", int, hidden="--dry-penalty-last-n"),
    Sampler(
        "dry_sequence_breakers",
        "--dry-sequence-breaker",
        "no repetition is counted across this text; may be repeated",
        str,
        "TEXT",
        many=True,
    ),
    Sampler(
        "xtc_probability",
        "--xtc-probability",
        "how often XTC drops all but the least likely of the likely tokens; 0 is off",
        float,
        "P",
    ),
    Sampler("xtc_threshold", "--xtc-threshold", "the probability from which XTC calls a token likely", float, "P"),
    Sampler("top_n_sigma", "--top-n-sigma", "keep logits within N standard deviations of the best; 0 is off", float),
    Sampler("dynatemp_range", "--dynatemp-range", "the temperature moves so far, by how sure the model is", float, "T"),
    Sampler("dynatemp_exponent", "--dynatemp-exp", "the power of the entropy by which it does", float, "X"),
    Sampler("adaptive_target", "--adaptive-target", "draw tokens near this probability; below 0 is off", float, "P"),
    Sampler("adaptive_decay", "--adaptive-decay", "how long that remembers what was drawn", float, "X"),
    Sampler(
        "samplers",
        "--samplers",
        "an order to cut in, with semicolons, such as top_k;min_p;temperature; what it leaves out is off",
        lambda text: tuple(text.split(";")),
        "NAMES",
    ),
    Sampler("mirostat", "--mirostat", "1 and 2, its versions, keep the surprise of the text steady; 0 is off", int),
    Sampler("mirostat_tau", "--mirostat-tau", "the surprise it aims at, in bits", float, "X", "--mirostat-ent"),
    Sampler("mirostat_eta", "--mirostat-eta", "how fast it corrects itself", float, "X", "--mirostat-lr"),
    Sampler("logit_bias", "--logit-bias", "added to a token's logit; may be repeated", _bias, "ID=BIAS", many=True),
    Sampler("stop", "--stop", "end before this text; may be repeated", str, "TEXT", "--reverse-prompt", many=True),
    Sampler("stop_token_ids", "--stop-token", "end before this token id; may be repeated", int, "ID", many=True),
    Sampler("ignore_eos", "--ignore-eos", "continue after the model's own stop tokens", None),
    Sampler("logprobs", "--logprobs", "with --json: log probabilities, and those of N alternatives", int),
    Sampler("n", "--samples", "continuations of the prompt, printed one after the other", int),
)
