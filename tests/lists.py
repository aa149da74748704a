"""What every backend's step must make of lists of tokens: biases, bans and penalties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quarrel.errors import RequestError
from quarrel.ops.adjust import AdjustSpec, adjust_reference, packed
from quarrel.ops.step import LIST_INPUTS, MASK_INPUTS, Lists, Masks, Step, StepInputs


def drawn_lists(rows: int, vocabulary: int) -> Lists:
    """Lists of some lengths, the first one empty, in which ids come more than once."""
    rng = np.random.default_rng(rows)
    lengths = rng.integers(3, 30, rows) * (np.arange(rows) > 0)
    ids = rng.integers(max(0, vocabulary - 20), vocabulary, lengths.sum()).astype(np.int32)
    biases = rng.choice(np.array([0.0, 0.0, 3.0, -np.inf], np.float32), len(ids))
    strengths = (rng.choice(np.array(s, np.float32), rows) for s in ((1.3, 0.5), (0.5, -1.0), (0.2, 0.4)))
    return Lists(np.cumsum(lengths, dtype=np.int32), ids, np.ones(len(ids), np.float32), biases, *strengths)


def check_lists(step: Step, inputs: StepInputs, later: StepInputs) -> None:
    """The best token of each row is that of the step's logits, adjusted. later: a token more of each sequence."""
    rows, sample = len(inputs.out_rows), inputs.sample
    assert sample is not None
    logits = step(inputs, "logits").logits
    assert logits is not None
    vocabulary = logits.shape[1]
    lists = drawn_lists(rows, vocabulary)
    with_lists = replace(inputs, sample=replace(sample, lists=lists))

    def best(given: StepInputs, logits: np.ndarray) -> list[int]:
        columns = [given.named(name) for name in (*LIST_INPUTS, *MASK_INPUTS)]
        (adjusted,) = adjust_reference(AdjustSpec(vocabulary), logits, given.ids, given.out_rows, *columns)  # type: ignore[arg-type]
        return [int(row.argmax()) for row in adjusted]

    outputs = step(with_lists, "both")
    assert outputs.tokens is not None
    assert outputs.tokens.tolist() == best(with_lists, logits)
    assert np.array_equal(outputs.logits, logits)  # type: ignore[arg-type]
    plain = step(inputs, "tokens").tokens
    assert plain is not None
    assert plain.tolist() == [int(row.argmax()) for row in logits]
    # Masks beside lists, and alone; the last row may draw any token.
    rng = np.random.default_rng(rows + 1)
    allowed = rng.random((rows, vocabulary)) < 0.2
    allowed[:, 0] = True
    masks = Masks(np.append(np.arange(rows - 1)[::-1], -1).astype(np.int32), np.stack([packed(a) for a in allowed[1:]]))
    masked = [replace(sample, masks=masks), replace(sample, lists=lists, masks=masks)] if rows > 1 else []
    for given in masked:
        drawn = step(replace(inputs, sample=given), "tokens").tokens
        assert drawn is not None
        assert drawn.tolist() == best(replace(inputs, sample=given), logits)
    for wrong in (replace(masks, mask_row=masks.mask_row + 1), replace(masks, masks=masks.masks[:, :0])) if masked else ():
        with pytest.raises(RequestError, match="masks"):
            step(replace(inputs, sample=replace(sample, masks=wrong)), "tokens")
    # A token that only the device knows counts too: it is the most likely one again, but for the penalty.
    zero = np.zeros(rows, np.float32)
    none = replace(lists, list_end=np.zeros(rows, np.int32), list_ids=lists.list_ids[:0], list_counts=zero[:0])
    own = replace(none, list_biases=zero[:0], repetition=zero + 1, presence=zero + 100, frequency=zero)
    known = replace(later, ids=plain, sample=replace(later.sample or sample, lists=own))
    following = step(replace(known, sample=sample), "logits").logits
    assert following is not None
    step(inputs, "tokens")
    unknown = replace(known, ids=np.zeros(rows, np.int32), from_last=np.arange(rows, dtype=np.int32))
    assert step(unknown, "tokens").tokens.tolist() == best(known, following)  # type: ignore[union-attr]
    bad = replace(lists, list_ids=lists.list_ids + np.int32(vocabulary))
    with pytest.raises(RequestError, match="lists of tokens"):
        step(replace(inputs, sample=replace(sample, lists=bad)), "tokens")
