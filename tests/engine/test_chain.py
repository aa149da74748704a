"""Each sampler does what its formula says: by hand on small rows, and by the frequencies of many draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarrel.engine import Sampling, SamplingParams, merged, rng
from quarrel.engine import chain as chains
from quarrel.engine.chain import Counts, HostChain, Peaks
from quarrel.engine.cuts import softmax, typical, without_top_choices
from quarrel.ops.sample import draw_token
from tests.engine.toys import Letters, letter

Array = np.ndarray[Any, Any]
PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
P = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
ROW = np.log(P).astype(np.float32)
DRAWS = 4000


def chain(stop_ids: Sequence[int] = (), **options: Any) -> HostChain:
    return HostChain(merged(PLAIN, options), stop_ids, Letters())  # type: ignore[arg-type]


def draw(c: HostChain, row: Array, position: int, tokens: Sequence[int] = (), generated: int = 9) -> int:
    return c.draw(row, tokens, generated, rng.uniform(11, position), rng.uniform(11, position, rng.XTC))


def frequencies(row: Array = ROW, tokens: Sequence[int] = (), **options: Any) -> Array:
    """Of many draws at counted positions, by one seed."""
    c = chain(**options)
    drawn = [draw(c, row, i, tokens) for i in range(DRAWS)]
    return np.bincount(drawn, minlength=len(row)) / DRAWS


def assert_near(found: Array, wanted: Array) -> None:
    """Within five standard deviations of a binomial; what is cut off never appears."""
    wanted = wanted / wanted.sum()
    assert found[wanted == 0].sum() == 0
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-12).all(), (found, wanted)


def at(*kept: int) -> Array:
    """P with only these left."""
    return np.where(np.isin(np.arange(len(P)), kept), P, 0.0)


def test_plain_draws_follow_the_softmax() -> None:
    assert_near(frequencies(), P)


def test_temperature_sharpens_and_flattens() -> None:
    assert_near(frequencies(temperature=0.5), P**2)
    assert_near(frequencies(temperature=2.0), P**0.5)


def test_temperature_zero_takes_the_best_and_the_lowest_among_equals() -> None:
    assert draw(chain(temperature=0), np.array([1, 3, 2, 3], np.float32), 0) == 1


def test_top_k_keeps_the_k_best() -> None:
    assert_near(frequencies(top_k=2), at(0, 1))


def test_top_p_keeps_the_best_until_their_sum() -> None:
    assert_near(frequencies(top_p=0.7), at(0, 1, 2))


def test_min_p_keeps_what_is_near_the_best() -> None:
    assert_near(frequencies(min_p=0.3), at(0, 1, 2))


def test_typical_keeps_what_surprises_as_much_as_expected() -> None:
    # The entropy is 1.543 nats; the surprises are 0.92, 1.39, 1.90, 2.30, 2.81, 3.22: nearest are tokens 1, 2, 0.
    assert_near(frequencies(typical_p=0.3), at(1, 2))
    assert_near(frequencies(typical_p=0.2), at(1))
    assert_near(frequencies(typical_p=0.5), at(1, 2, 0))


def test_typical_looks_at_what_top_k_left() -> None:
    # Of the first three, at .5, .3125 and .1875, the entropy is 1.02 nats: 1.16 is nearest, then 0.69.
    assert_near(frequencies(typical_p=0.3, top_k=3), at(1))
    assert_near(frequencies(typical_p=0.4, top_k=3), at(0, 1))


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_typical_keeps_the_smallest_set_that_reaches_its_mass(logits: list[float], mass: float) -> None:
    p = softmax(np.array(logits))
    mask = typical(p, mass)
    assert p[mask].sum() >= mass - 1e-9
    entropy = -(p * np.log(p)).sum()
    away = np.abs(-np.log(p) - entropy)
    assert away[mask].max() <= away[~mask].min(initial=math.inf) + 1e-9


def test_xtc_leaves_only_the_least_likely_of_the_likely() -> None:
    assert_near(frequencies(xtc_probability=1.0, xtc_threshold=0.12), at(2, 3, 4, 5))
    assert_near(frequencies(xtc_probability=1.0, xtc_threshold=0.3), P)  # one likely token is never removed
    half = 0.5 * P + 0.5 * at(2, 3, 4, 5) / at(2, 3, 4, 5).sum()
    assert_near(frequencies(xtc_probability=0.5, xtc_threshold=0.12), half)


def test_xtc_chooses_among_what_the_cuts_left() -> None:
    # After top_k 3 the probabilities are .5, .3125, .1875.
    assert_near(frequencies(xtc_probability=1.0, xtc_threshold=0.18, top_k=3), at(2))
    assert without_top_choices(np.array([0.5, 0.3, 0.2]), 0.25).tolist() == [False, True, True]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 4.0, 6.0])
def test_mirostat_holds_the_surprise_at_its_target(tau: float, version: int) -> None:
    row = (-0.9 * np.log(np.arange(1, 2001))).astype(np.float32)
    surprise = -np.log2(softmax(row.astype(np.float64)))
    c = chain(mirostat=version, mirostat_tau=tau)
    drawn = [draw(c, row, i) for i in range(1500)]
    # The surprise of a draw is counted within what was left to draw from: mu moved by eta times its distance to tau.
    assert abs((2 * tau - c._mu) / 0.1 / len(drawn)) < 0.1
    assert surprise[drawn[300:]].max() < surprise.max()
    assert c._mu > tau


def test_mirostat_cuts_by_surprise_and_learns_from_each_draw() -> None:
    # mu starts at 2 tau = 2.2 bits: surprises are 1.32, 2.00, 2.74 ..., so two tokens are left.
    first = [chain(mirostat=2, mirostat_tau=1.1) for _ in range(400)]
    assert {draw(c, ROW, i) for i, c in enumerate(first)} == {0, 1}
    # One token alone is no surprise, so mu grows by eta tau each time: from 0.4 to the second token's 2.0 in 8 draws.
    c = chain(mirostat=2, mirostat_tau=0.2, mirostat_eta=1.0)
    drawn = [draw(c, ROW, i) for i in range(40)]
    assert drawn[:8] == [0] * 8
    assert 1 in drawn[8:]
    c = chain(mirostat=2, mirostat_tau=30.0)
    assert {draw(c, ROW, i) for i in range(400)} == set(range(6))


def test_mirostat_one_keeps_as_many_as_its_estimate_says() -> None:
    # p falls as rank ** -2: eps is 1, so k is (2 ** mu / (1 - 1 / n)) ** (1 / 2), with n = 2000 and mu = 2 tau.
    row = (-2.0 * np.log(np.arange(1, 2001))).astype(np.float32)
    for tau, k in ((1.0, 2), (2.0, 4), (3.5, 11)):
        first = [chain(mirostat=1, mirostat_tau=tau) for _ in range(600)]
        assert k // 2 <= max(draw(c, row, i) for i, c in enumerate(first)) < k
    flat = np.zeros(300, np.float32)
    only = np.full(300, -np.inf, np.float32)
    only[7] = 1.0
    assert draw(chain(mirostat=1), flat, 0) in range(300)
    assert [draw(chain(mirostat=1), only, i) for i in range(3)] == [7] * 3


def test_logit_bias_shifts_and_minus_infinity_bans() -> None:
    assert_near(frequencies(logit_bias={5: math.log(10.0)}), P * [1, 1, 1, 1, 1, 10])
    assert_near(frequencies(logit_bias={0: -math.inf}), at(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "options",
    [{}, {"mirostat": 2}, {"typical_p": 0.9}, {"xtc_probability": 1.0}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.7}],
)
def test_what_a_grammar_does_not_allow_is_as_if_banned(options: dict[str, Any]) -> None:
    row = np.random.default_rng(4).standard_normal(50).astype(np.float32)
    allowed = np.arange(50) % 3 == 1
    banned = np.where(allowed, row, -np.inf).astype(np.float32)
    one, other = chain(presence_penalty=0.5, **options), chain(presence_penalty=0.5, **options)
    for i in range(100):
        at, xtc = rng.uniform(11, i), rng.uniform(11, i, rng.XTC)
        drawn = one.draw(row, [4, 7], 9, at, xtc, allowed)
        assert drawn == other.draw(banned, [4, 7], 9, at, xtc)
        assert allowed[drawn]
    assert chain(**options).draw(row, (), 9, 0.5, 0.5, np.zeros(50, bool)) == -1


def test_when_everything_is_banned_nothing_is_drawn() -> None:
    assert draw(chain(logit_bias=dict.fromkeys(range(6), -math.inf)), ROW, 0) == -1
    for broken in (np.full(6, np.nan), np.full(6, -np.inf), np.full(6, np.inf)):
        for options in ({}, {"temperature": 0}, {"mirostat": 2}, {"typical_p": 0.5}, {"xtc_probability": 1.0}):
            assert draw(chain(**options), broken.astype(np.float32), 0) == -1


@pytest.mark.parametrize("options", [{}, {"mirostat": 2}, {"typical_p": 0.9}, {"xtc_probability": 1.0}, {"temperature": 0}])
def test_a_logit_that_is_not_finite_never_wins(options: dict[str, Any]) -> None:
    row = np.array([np.nan, 0, np.inf, 1, -np.inf], np.float32)
    c = chain(**options)
    assert {draw(c, row, i) for i in range(200)} <= {1, 3}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    row = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    wanted = np.exp([1.0, 1.9, -2.0, -1.1])
    assert_near(frequencies(row, tokens=[0, 2, 0], repetition_penalty=2.0), wanted)


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-30])
@pytest.mark.parametrize(
    "options",
    [{}, {"mirostat": 2}, {"typical_p": 0.5}, {"xtc_probability": 1.0, "xtc_threshold": 0.1}, {"top_k": 3}],
)
def test_the_smallest_numbers_in_range_draw_a_token_that_there_is(tiny: float, options: dict[str, Any]) -> None:
    row = np.array([2.0, 1.9, -1.0, -np.inf, 30.0, 2.0], np.float32)
    for small in ({"repetition_penalty": tiny}, {"temperature": tiny}, {"repetition_penalty": tiny, "temperature": tiny}):
        c = chain(**options, **small)
        assert {draw(c, row, i, [0, 2, 0, 5]) for i in range(20)} <= {0, 1, 2, 4, 5}


def test_presence_counts_once_and_frequency_each_time() -> None:
    tokens = [1, 1, 1, 4]
    assert_near(frequencies(tokens=tokens, presence_penalty=0.5), P * np.exp([0, -0.5, 0, 0, -0.5, 0]))
    assert_near(frequencies(tokens=tokens, frequency_penalty=0.5), P * np.exp([0, -1.5, 0, 0, -0.5, 0]))


def test_penalties_look_back_as_far_as_they_are_told() -> None:
    tokens = [0, 1, 2]
    assert_near(frequencies(tokens=tokens, presence_penalty=9.0, penalty_last_n=1), P * np.exp([0, 0, -9, 0, 0, 0]))
    assert_near(frequencies(tokens=tokens, presence_penalty=9.0, penalty_last_n=-1), P * np.exp([-9, -9, -9, 0, 0, 0]))
    assert_near(frequencies(tokens=tokens, presence_penalty=9.0, penalty_last_n=0), P)


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    c = chain((0, 1), min_tokens=3)
    assert {draw(c, ROW, i, generated=2) for i in range(300)} == {2, 3, 4, 5}
    assert {draw(c, ROW, i, generated=3) for i in range(300)} == set(range(6))


def ids(text: str) -> list[int]:
    return [27 if c == " " else ord(c) - 96 for c in text]


def dry_penalty(text: str, **options: Any) -> dict[str, float]:
    """What DRY takes from each letter's logit behind `text`."""
    c = chain(**{"dry_multiplier": 1.0, "dry_base": 2.0, "dry_sequence_breakers": ("x",), **options})
    assert c._dry is not None
    tokens, penalties = c._dry.penalties(ids(text))
    return {letter(int(t)): float(p) for t, p in zip(tokens, penalties)}


def test_dry_penalises_the_token_that_goes_on_with_a_repetition() -> None:
    assert dry_penalty("abcdeabc") == {"d": 2.0}  # "abc" came before "d": 2 ** (3 - 2)
    assert dry_penalty("abcdeabcd") == {"e": 4.0}
    assert dry_penalty("abcdeabc", dry_multiplier=3.0) == {"d": 6.0}
    assert dry_penalty("abcdeabc", dry_base=3.0) == {"d": 3.0}
    assert dry_penalty("abcdeabc", dry_allowed_length=3) == {"d": 1.0}
    assert dry_penalty("abcdeabc", dry_allowed_length=4) == {}
    assert dry_penalty("abcde") == {}


def test_dry_takes_the_longest_repetition_of_each_token() -> None:
    assert dry_penalty("bcd abcd bce abc") == {"d": 4.0, "e": 1.0}


def test_dry_does_not_count_across_breakers() -> None:
    assert dry_penalty("axbcdeaxbc") == {"d": 1.0}
    assert dry_penalty("abxdeabx") == {}
    assert dry_penalty("abxcdabx") == {}
    assert dry_penalty("abcxeabc") == {}  # the breaker itself may be repeated


def test_dry_finds_breakers_that_span_tokens() -> None:
    assert dry_penalty("abcdefabcde", dry_sequence_breakers=()) == {"f": 8.0}
    assert dry_penalty("abcdefabcde", dry_sequence_breakers=("bc",)) == {"f": 1.0}  # the break is at its last letter
    assert dry_penalty("abcdefabcde", dry_sequence_breakers=("bd",)) == {"f": 8.0}


def test_dry_looks_back_as_far_as_it_is_told() -> None:
    assert dry_penalty("abcdeabc", dry_last_n=8) == {"d": 2.0}
    assert dry_penalty("abcdeabc", dry_last_n=7) == {"d": 1.0}
    assert dry_penalty("abcdeabc", dry_last_n=5) == {}


def test_dry_follows_a_growing_text_and_never_overflows() -> None:
    grown = chain(dry_multiplier=100.0, dry_base=100.0)
    text: list[int] = []
    for _ in range(600):
        text.append(1)
        token = draw(grown, np.zeros(6, np.float32), len(text), text)
        assert 0 <= token < 6
    assert grown._dry is not None
    _, penalties = grown._dry.penalties(text)
    assert penalties.max() == 1e30


def naive_dry(text: Sequence[int], multiplier: float, base: float, allowed: int, breaks: set[int]) -> dict[int, float]:
    """By the description, one place after the other."""
    longest: dict[int, int] = {}
    for i in range(len(text) - 1):
        n = 0
        while n <= i and text[i - n] == text[-1 - n] and text[-1 - n] not in breaks:
            n += 1
        if n and text[i + 1] not in breaks:
            longest[text[i + 1]] = max(longest.get(text[i + 1], 0), n)
    return {t: multiplier * base ** (n - allowed) for t, n in sorted(longest.items()) if n >= allowed}


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(1, 4), st.sets(st.integers(1, 4), max_size=2))
def test_dry_agrees_with_its_description(text: list[int], allowed: int, breaks: set[int]) -> None:
    c = chain(
        dry_multiplier=0.5, dry_base=1.5, dry_allowed_length=allowed, dry_sequence_breakers=[letter(b) for b in breaks]
    )
    assert c._dry is not None
    tokens, penalties = c._dry.penalties(text)
    assert dict(zip(tokens.tolist(), penalties.tolist())) == pytest.approx(naive_dry(text, 0.5, 1.5, allowed, breaks))


def test_dry_changes_what_is_drawn() -> None:
    row = np.zeros(30, np.float32)
    row[ids("d")] = 3.0
    assert draw(chain(temperature=0), row, 0, ids("abcdeabc")) == ids("d")[0]
    assert draw(chain(temperature=0, dry_multiplier=2.0), row, 0, ids("abcdeabc")) != ids("d")[0]


def test_log_probabilities_are_the_model_s_own() -> None:
    c = chain(logprobs=3, temperature=0.1, logit_bias={0: -math.inf}, top_k=1)
    token = draw(c, ROW, 0)
    got = c.logprob(ROW, token)
    assert token == 1
    assert got.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [t for t, _ in got.top] == [0, 1, 2]
    assert [p for _, p in got.top] == pytest.approx(np.log(P[:3]), abs=1e-6)
    assert chain(logprobs=0).logprob(ROW, 5).top == ()
    assert len(chain(logprobs=20).logprob(ROW, 5).top) == 6


def test_equal_alternatives_come_in_order_of_id() -> None:
    assert [t for t, _ in chain(logprobs=2).logprob(np.zeros(9, np.float32), 0).top] == [0, 1]


ROWS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=60)


@given(ROWS, st.floats(0, 2), st.integers(0, 70), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_with_the_op_s_settings_alone_the_host_draws_what_the_op_draws(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    options: Sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "logprobs": 1}
    c = chain(**options)
    x = np.array(row, np.float32)
    p = c._p
    assert draw(c, x, position) == draw_token(x, p.temperature, top_k, top_p, min_p, rng.uniform(11, position))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "logprobs": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "penalty_last_n": -1},
        {"top_k": 40, "top_p": 0.95},
        {"top_k": 5, "repetition_penalty": 0.5, "frequency_penalty": 0.2, "presence_penalty": -0.5},
        {"top_k": 40, "logit_bias": {7: 30.0, 4100: -100.0, 9: 2.0}, "min_tokens": 10},
        {"top_k": 30, "typical_p": 0.6, "min_p": 0.05},
        {"top_k": 30, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"top_k": 40, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    ],
    ids=str,
)
def test_a_look_at_the_likely_alone_draws_the_same_token(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers that the draw comes to see are the same ones, also among equals and where some are missing."""
    numbers, kinds = np.random.default_rng(4), [None, 0.5, 0.001]
    tokens = [*numbers.integers(0, 9000, 300).tolist(), 7, 8, 7, 8, 7]
    rows = numbers.standard_normal((18, 9001)).astype(np.float32) * 4
    rows[1] = np.round(rows[1])  # many equals
    rows[2, 100:] = -np.inf
    rows[3, 50] = np.inf
    rows[4, 9000] = 40.0  # behind the last whole group
    rows[5, ::2] = 20.0
    allowed = [None if share is None else numbers.random(9001) < share for share in kinds]
    allowed.append(rows[0] < 1.0)  # what this row likes most is not allowed
    found: list[list[tuple[int, object]]] = []
    for least in (4096, 1 << 30):
        monkeypatch.setattr(chains, "LEAST", least)
        made = chain((0, 5), **options)
        found.append([])
        for i, row in enumerate(rows):
            for mask in allowed:
                token = made.draw(row, tokens[: 200 + 5 * i], i, (i * 0.37 + 0.1) % 1, 0.5, mask)
                found[-1].append((token, made.logprob(row, token) if options.get("logprobs") else None))
    assert found[0] == found[1]
    assert len({token for token, _ in found[0]}) > 20


def test_penalties_follow_the_text_as_it_grows() -> None:
    tokens = np.random.default_rng(0).integers(0, 6, 60).tolist()
    for last in (-1, 0, 1, 7):
        counts = Counts(last)
        for end in (3, 4, 5, 30, 31, 60):
            window = tokens[:end] if last < 0 else tokens[max(0, end - last) : end]
            ids, found = counts.of(tokens[:end])
            assert dict(zip(ids.tolist(), found.tolist())) == dict(Counter(window))


def test_the_largest_of_a_row_are_among_the_peaks() -> None:
    for size in (5, 4096, 5003):
        row = np.random.default_rng(1).standard_normal(size).astype(np.float32)
        found = Peaks(row)
        assert found.top == row.max()
        ids = found.largest(20)
        assert (ids is None) == (size == 5)
        if ids is not None:
            assert (np.diff(ids) > 0).all()
            assert set(np.argsort(-row)[:20].tolist()) <= set(ids.tolist())
        row[size // 2] = np.nan
        assert np.isnan(Peaks(row).top)
        assert Peaks(row).largest(2) is None
