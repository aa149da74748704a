"""What a request may ask of sampling, checked field by field before anything runs."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypedDict

from quarrel.errors import RequestError

MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 256
MAX_BREAKERS = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_TEMPERATURE = 100.0
ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p")
"""Samplers in llama.cpp's order. Wherever penalties and dry stand, they come first."""
COLDEST = 1e-5
"""A temperature below this is greedy: it would separate logits that no arithmetic here tells apart."""


@dataclass(frozen=True)
class _Range:
    """Limits of a number, both included unless `above`, which leaves `low` out."""

    whole: bool
    low: float
    high: float
    above: bool = False
    optional: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = f"above {self.low:g} and up to" if self.above else f"from {int(self.low) if self.whole else self.low:g} to"
        none = " or None" if self.optional else ""
        return f"{kind} {low} {int(self.high) if self.whole else f'{self.high:g}'}{none}"

    def take(self, name: str, value: Any) -> float | int | None:
        """The plain number, or `RequestError`. NaN lies in no range; True is no number."""
        if value is None and self.optional:
            return None
        if not _is_number(value, numbers.Integral if self.whole else numbers.Real):
            raise _refuse(name, value, self)
        if not (self.low <= value <= self.high) or (self.above and value == self.low):
            raise _refuse(name, value, self)
        return int(value) if self.whole else float(value)


def _whole(default: int | None, low: int, high: int) -> Any:
    return field(default=default, metadata={"range": _Range(True, low, high, optional=default is None)})


def _real(default: float, low: float, high: float, *, above: bool = False) -> Any:
    return field(default=default, metadata={"range": _Range(False, low, high, above)})


_INT = (1 << 31) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How a continuation is drawn. Every field is checked; `RequestError` names the field, the value and its range.

    Order: bans (`min_tokens`) and `logit_bias`, penalties, DRY; then greedy, or mirostat, or temperature, `top_k`,
    `typical_p`, `top_p`, `min_p`, XTC and one draw (`quarrel.ops.sample`); or another order (`samplers`). The defaults keep
    the most likely 40 tokens of the best 95 %, at temperature 0.8.
    """

    max_tokens: int | None = field(default=512, metadata={"range": _Range(True, 0, _INT, optional=True)})
    """Tokens to generate at most; None goes on to the end of the context."""
    min_tokens: int = _whole(0, 0, _INT)
    """Before this many tokens no stop token is drawn and no stop string matched."""
    temperature: float = _real(0.8, 0.0, MAX_TEMPERATURE)
    """0 is greedy: the most likely token each time."""
    top_k: int = _whole(40, 0, _INT)
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = _real(0.95, 0.0, 1.0)
    """Keep the most likely tokens until their sum reaches this; 1 is off."""
    min_p: float = _real(0.05, 0.0, 1.0)
    """Keep tokens at least this fraction as likely as the best; 0 is off."""
    typical_p: float = _real(1.0, 0.0, 1.0, above=True)
    """Keep the tokens closest to the expected surprise until their sum reaches this; 1 is off."""
    seed: int | None = field(default=None, metadata={"range": _Range(True, 0, (1 << 64) - 1, optional=True)})
    """Same seed, same tokens; None draws a seed, which the result reports."""
    penalty_last_n: int = _whole(64, -1, _INT)
    """How many of the last tokens, prompt included, the three penalties look at; 0 is none, -1 all."""
    repetition_penalty: float = _real(1.0, 0.0, 100.0, above=True)
    """Divides positive logits of seen tokens and multiplies negative ones; 1 is off."""
    presence_penalty: float = _real(0.0, -100.0, 100.0)
    """Subtracted from the logit of each seen token."""
    frequency_penalty: float = _real(0.0, -100.0, 100.0)
    """Subtracted once for each time that a token was seen."""
    dry_multiplier: float = _real(0.0, 0.0, 100.0)
    """Strength of DRY, which penalises going on with a repetition; 0 is off."""
    dry_base: float = _real(1.75, 1.0, 100.0)
    """Each further repeated token multiplies the penalty by this."""
    dry_allowed_length: int = _whole(2, 1, _INT)
    """Repetitions shorter than this cost nothing."""
    dry_last_n: int = _whole(-1, -1, _INT)
    """How many of the last tokens DRY looks at; -1 all, 0 none."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts across which no repetition is counted."""
    xtc_probability: float = _real(0.0, 0.0, 1.0)
    """How often XTC removes all but the least likely of the tokens above its threshold; 0 is off."""
    xtc_threshold: float = _real(0.1, 0.0, 1.0)
    """The probability from which XTC calls a token likely; above 0.5 is off."""
    top_n_sigma: float = _real(0.0, 0.0, 100.0)
    """Keep tokens whose logit is within so many standard deviations of the best; 0 is off."""
    dynatemp_range: float = _real(0.0, 0.0, 100.0)
    """The temperature moves so far up and down, by how sure the model is; 0 is off."""
    dynatemp_exponent: float = _real(1.0, 0.0, 100.0)
    """How: the power of the entropy's share of the largest possible one."""
    adaptive_target: float = _real(-1.0, -1.0, 1.0)
    """Draw tokens near this probability (adaptive-p); below 0 is off."""
    adaptive_decay: float = _real(0.9, 0.0, 0.99)
    """How long adaptive-p remembers the probabilities that it drew."""
    samplers: tuple[str, ...] = ()
    """An order to cut in, of `ORDER`; what it leaves out is off. By default the one above, or, where top_n_sigma,
    dynatemp_range or adaptive_target are set, `ORDER`, in which the temperature comes behind the cuts, as in llama.cpp."""
    mirostat: int = _whole(0, 0, 2)
    """1 or 2, its two versions, hold the surprise of the text near `mirostat_tau`, instead of the cuts by top_k, top_p,
    min_p, typical_p, XTC. The second needs no estimate of how fast probabilities fall."""
    mirostat_tau: float = _real(5.0, 0.0, 100.0, above=True)
    """The surprise aimed at, in bits."""
    mirostat_eta: float = _real(0.1, 0.0, 1.0, above=True)
    """How fast mirostat corrects itself."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids, -100 to 100; -inf bans a token."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation and are not part of it; a single string may be given."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end it, besides the model's own."""
    ignore_eos: bool = False
    """Go on behind the model's own stop tokens, as if they were words."""
    logprobs: int | None = field(default=None, metadata={"range": _Range(True, 0, 20, optional=True)})
    """Report the log probability of each token (before any sampling setting) and of this many best alternatives."""
    n: int = _whole(1, 1, 8)
    """Continuations of each prompt."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            if "range" in entry.metadata:
                self._set(entry.name, entry.metadata["range"].take(entry.name, getattr(self, entry.name)))
        if not isinstance(self.ignore_eos, bool):
            raise _refuse("ignore_eos", self.ignore_eos, "True or False")
        self._set("samplers", _order(self.samplers))
        self._set("stop", _texts("stop", self.stop, MAX_STOPS))
        self._set("dry_sequence_breakers", _texts("dry_sequence_breakers", self.dry_sequence_breakers, MAX_BREAKERS))
        self._set("stop_token_ids", _ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        if self.temperature < COLDEST:
            self._set("temperature", 0.0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raises `RequestError` for a token id that the model does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for id in ids:
                if id >= n_vocab:
                    raise RequestError(f"{name} holds the token id {id}, wanted ids from 0 to {n_vocab - 1}", name)

    @property
    def penalises(self) -> bool:
        """Whether any of the three penalties does anything."""
        strengths = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        return self.penalty_last_n != 0 and any(strengths) and (not self.samplers or "penalties" in self.samplers)

    @property
    def dries(self) -> bool:
        """Whether DRY does anything."""
        return bool(self.dry_multiplier and self.dry_last_n) and (not self.samplers or "dry" in self.samplers)

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers behind the penalties that do anything, one after the other; empty where all cut at once."""
        names = self.samplers or (ORDER if self._ordered else ())
        on = {
            "top_n_sigma": self.top_n_sigma > 0,
            "top_k": self.top_k > 0,
            "typical_p": self.typical_p < 1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "xtc": self.xtc_probability > 0,
            "temperature": True,
            "adaptive_p": self.adaptive_target >= 0,
        }
        found = tuple(dict.fromkeys(name for name in names if on.get(name, False)))
        return found or (("temperature",) if names else ())

    @property
    def _ordered(self) -> bool:
        return self.top_n_sigma > 0 or self.dynatemp_range > 0 or self.adaptive_target >= 0

    @property
    def on_device(self) -> bool:
        """Whether the ops `adjust` and `sample` can draw this by themselves, if its lists are not too long: biases, bans
        and penalties, temperature, top_k, top_p and min_p, nothing else."""
        cuts = self.temperature > 0.0 and (self.typical_p < 1.0 or self.xtc_probability or self.mirostat or self.order)
        return not self.dries and not cuts


class Sampling(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int | None
    penalty_last_n: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int
    dry_sequence_breakers: Collection[str]
    xtc_probability: float
    xtc_threshold: float
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float
    adaptive_target: float
    adaptive_decay: float
    samplers: Collection[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float]
    stop: str | Collection[str]
    stop_token_ids: Collection[int]
    ignore_eos: bool
    logprobs: int | None
    n: int


def merged(base: SamplingParams, options: Sampling) -> SamplingParams:
    """`base` with some fields replaced; `RequestError` for a name that is none."""
    known = {entry.name: getattr(base, entry.name) for entry in fields(base)}
    for name in options:
        if name not in known:
            near = _ELSEWHERE.get(name) or next(iter(get_close_matches(name, known, 1)), None)
            hint = f"; perhaps {near} is meant" if near else ""
            raise RequestError(f"there is no sampling parameter {name!r}{hint}, wanted one of {', '.join(known)}")
    return SamplingParams(**{**known, **options})


_ELSEWHERE = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "max_tokens"),
    **dict.fromkeys(("repeat_penalty", "penalty"), "repetition_penalty"),
    **dict.fromkeys(("repeat_last_n", "repetition_context_size"), "penalty_last_n"),
    "temp": "temperature",
    "stream": "the method stream",
    **dict.fromkeys(("grammar", "response_format", "guided_json"), "structure"),
}
"""What other programs call it."""


def _is_number(value: Any, kind: type) -> bool:
    """True is no number here."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse(name: str, value: object, wanted: object, subject: str | None = None) -> RequestError:
    """subject: what the sentence is about, where that is a part of the field."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{subject or name} is {shown}, wanted {wanted}", name)


def _order(value: object) -> tuple[str, ...]:
    given = _listed("samplers", value, "names", 2 * len(ORDER))
    for name in given:
        if name not in ORDER:
            raise _refuse("samplers", name, f"one of {', '.join(ORDER)}", "an entry of samplers")
    return tuple(str(name) for name in given)


def _texts(name: str, value: object, most: int) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else _listed(name, value, "texts", most)
    for text in given:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise _refuse(name, text, f"a text of 1 to {MAX_STOP_CHARS} characters", f"an entry of {name}")
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise _refuse(name, text, "valid Unicode without lone surrogates", f"an entry of {name}")
    return tuple(str(text) for text in given)


def _ids(value: object) -> tuple[int, ...]:
    given = _listed("stop_token_ids", value, "token ids", MAX_STOP_IDS)
    return tuple(token_id("stop_token_ids", id) for id in given)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a mapping from token id to bias")
    if len(value) > MAX_BIASES:
        raise RequestError(f"logit_bias holds {len(value)} ids, wanted at most {MAX_BIASES}", "logit_bias")
    biases = {}
    for id, bias in value.items():
        wanted = f"a number from -{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf to ban the token"
        if not _is_number(bias, numbers.Real) or not (-MAX_BIAS <= bias <= MAX_BIAS or bias == -math.inf):
            raise _refuse("logit_bias", bias, wanted, f"the bias of token {id!r}")
        biases[token_id("logit_bias", id)] = float(bias)
    return biases


def _listed(name: str, value: object, what: str, most: int) -> tuple[object, ...]:
    """The elements of a list, tuple or set. No other iterable: it could be endless, or `range(10**18)`."""
    if not isinstance(value, list | tuple | AbstractSet):
        raise _refuse(name, value, f"a list of {what}")
    if len(value) > most:
        raise RequestError(f"{name} holds {len(value)} {what}, wanted at most {most}", name)
    return tuple(value)


def token_id(name: str, id: Any) -> int:
    """A plain token id, or `RequestError`; the vocabulary's end is checked where it is known."""
    if not _is_number(id, numbers.Integral) or not 0 <= id <= _INT:
        raise _refuse(name, id, "a whole number, 0 or more", f"a token id in {name}")
    return int(id)
