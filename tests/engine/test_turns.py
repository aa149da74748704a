"""Each step's work, and who is admitted for it, against a plain account of who is next and what is left for him."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from quarrel.engine.scheduler import Part
from quarrel.engine.sequence import Sequence as Run_
from tests.engine.test_scheduler import BLOCK, Run, Scored, Table


class Guessing(Run):
    """Drafts for itself, or has a model draft, or waits for its token to be drawn on the host."""

    waits = True

    def __init__(self, tokens: list[int], more: int, own: int, asked: int) -> None:
        super().__init__(tokens, more)
        self.own, self.asked = own, asked

    def draft(self, room: int) -> Sequence[int]:
        assert room > 0  # nobody is asked for what there is no room for
        return [1] * min(room, self.own)

    def ahead(self) -> int:
        return self.asked


class Account(Table):
    """A table whose steps are checked and not run."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        seqs = chance.randint(1, 4)
        super().__init__(
            max_tokens=seqs + chance.randint(0, 9),
            max_seqs=seqs,
            n_blocks=chance.choice([7, 12, 40]),
            max_rows=chance.choice([1, 5, 100]),
            beside=chance.choice([None, 0, 2, 5]),
        )
        self.beside = self.scheduler._beside
        self.rows = self.scheduler._max_rows
        self.asked: dict[Run_, int] = {}
        self.scheduler._propose = self.propose
        self.last = ""
        self.told: list[Run] = []  # who was put out

    def propose(self, wanted: Mapping[Run_, int]) -> dict[Run_, tuple[int, ...]]:
        self.asked = dict(wanted)
        return {s: (2,) * (n - n // 3) for s, n in wanted.items()}  # fewer than it was asked for, now and then

    def kind(self, run: Run_) -> str:
        return run.want if run.every_row else "drawn"

    def arrive(self) -> None:
        chance = self.chance
        prompt = chance.choices(range(5), k=chance.randint(1, 14))
        more = chance.randint(1, 24 - len(prompt))
        match chance.randrange(5):
            case 0:
                run: Run = Scored(prompt, 1, chance.choice(["hidden", "logits"]))
                run.whole = len(prompt) <= self.scheduler.max_tokens and chance.random() < 0.5
            case 1:
                run = Guessing(prompt, more, chance.choice([0, 1, 4]), chance.choice([0, 2, 6]))
            case _:
                run = Run(prompt, more, chance.choice(["tokens", "tokens", "logprobs", "logits"]))
        run.rank = int(chance.random() < 0.3)
        run.on_preempt = lambda: self.told.append(run)  # type: ignore[method-assign]
        self.add(run)

    def work(self, mine: list[Run_], lost: set[Run_]) -> list[tuple[Run_, int, int, int]]:
        """(sequence, tokens, rows, tokens of a draft): those who decode first, with drafts where nobody loses a token by
        them; then prompts by turn, with what is left. lost: whose drafts find no blocks."""
        tokens, rows = self.scheduler.max_tokens, self.rows
        parts: list[tuple[Run_, int, int, int]] = []
        decoding = [s for s in mine if s.pending == 1 and not s.every_row]
        asked: dict[Run_, int] = {}
        spare = min(tokens, rows) - len(decoding)
        for at, s in enumerate(decoding):
            guesses = 0
            if isinstance(s, Guessing):
                room = min(spare, s.length - len(s.tokens))
                guesses = min(s.own, max(room, 0))
                if not guesses and room > 0 and s.asked:
                    asked[s] = min(room, s.asked)
                    guesses = asked[s] - asked[s] // 3
            guesses = 0 if s in lost else max(0, min(guesses, min(tokens, rows) - (len(decoding) - at)))
            parts.append((s, 1 + guesses, 1 + guesses, guesses))
            tokens, rows = tokens - 1 - guesses, rows - 1 - guesses
        assert self.asked == asked
        beside = self.beside if decoding else tokens
        for s in mine:
            if s in decoding:
                continue
            if s.whole:
                count = s.pending if s.pending <= tokens else 0
            else:
                count = min(s.pending, tokens, max(beside, 0), rows if s.every_row else tokens)
            wanted = count if s.every_row else int(count == s.pending)
            if count <= 0 or (wanted > rows and not s.whole):
                continue
            parts.append((s, count, wanted, 0))
            tokens, rows, beside = tokens - count, rows - wanted, beside - count
        return parts

    def checked(self) -> bool:
        queue, before = list(self.scheduler.waiting), list(self.scheduler.running)
        assert queue == sorted(queue, key=lambda s: s.place)
        self.asked = {}
        put_out = self.scheduler.preempted
        batch = self.scheduler.next()
        running = self.scheduler.running
        assert running == sorted(running, key=lambda s: s.place)
        if put_out == self.scheduler.preempted:
            # As many as there is room for, none before those in front of him.
            came = [s for s in queue if s in running]
            assert came == queue[: len(came)]
            assert [s for s in running if s not in came] == before
            room = self.cache.available - sum(
                self.cache.blocks_for(len(s.tokens)) for s in queue[len(came) : len(came) + 1]
            )
            assert len(came) == len(queue) or len(running) == self.scheduler.limits.max_seqs or room < len(running) + 1
        else:
            assert len(self.told) == self.scheduler.preempted
            gone = [s for s in before if s not in running]
            assert all(g.rank > min(s.rank for s in running) or g.place >= max(s.place for s in running) for g in gone)
        if batch is None:
            assert not running
            return False
        ready = list(running)
        kinds = sorted({self.kind(s) for s in ready})
        self.last = next((k for k in kinds if k > self.last), kinds[0])
        assert {self.kind(p.sequence) for p in batch.parts} == {self.last}
        parts = [(p.sequence, p.count, p.rows, len(p.draft)) for p in batch.parts]
        mine = [s for s in ready if self.kind(s) == self.last]
        # Where blocks are short, a draft is the first to go.
        lost = {p.sequence for p in batch.parts if not p.draft} if self.cache.available < 8 else set()
        assert parts == self.work(mine, lost)
        assert sum(p.count for p in batch.parts) <= self.scheduler.max_tokens
        assert sum(p.rows for p in batch.parts if not p.sequence.whole) <= self.rows
        assert batch.waits == (
            batch.want not in ("tokens", "logprobs") or any(p.sequence.waits and p.rows for p in batch.parts)
        )
        for part in batch.parts:
            self.take(part)
        return True

    def take(self, part: Part) -> None:
        run = part.sequence
        assert isinstance(run, Run)
        assert (part.start, part.drafted) == (run.computed, run in self.asked)
        assert len(run.cache.blocks) * BLOCK >= run.computed + part.count
        run.computed += part.count - len(part.draft)
        self.cache.commit(run)
        if run.every_row:
            run.finished = run.computed == len(run.tokens)
        elif part.rows:
            run.advance()
        if run.finished:
            self.scheduler.remove(run)


def test_a_prompt_whose_row_has_no_room_lets_others_by_that_want_none_yet() -> None:
    table = Table(max_tokens=12, max_rows=3)
    guessing = Guessing([1], 9, 4, 0)
    table.add(guessing)
    assert table.scheduler.next() is not None
    guessing.computed = 1
    guessing.tokens.append(2)
    table.add(Run([3, 4]), Run([4] * 14))
    batch = table.scheduler.next()
    assert batch is not None
    assert [(p.count, p.rows) for p in batch.parts] == [(3, 3), (9, 0)]


def test_who_has_nothing_to_run_or_is_about_to_end_has_no_turn() -> None:
    table = Table()
    run = Run([1, 2, 3], 1)
    table.add(run)
    assert table.scheduler.next() is not None
    run.computed, run.drawn = 3, 1  # its only token is on its way
    assert table.scheduler.next() is None
    table = Table()
    scored, run = Scored([1, 2], want="hidden"), Run([1], 9)
    table.add(scored, run)
    wants = []
    for _ in range(4):
        batch = table.scheduler.next()
        assert batch is not None
        wants.append(batch.want)
        for part in batch.parts:
            part.sequence.computed += part.count
            if part.sequence is run:
                run.tokens.append(1)
    assert wants == ["tokens", "hidden", "tokens", "tokens"]


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in (0, 10, 20)], ids=str)
def test_a_step_s_work_is_what_a_plain_account_gives(seeds: range) -> None:
    preempted = 0
    for seed in seeds:
        account = Account(random.Random(seed))
        for _ in range(60):
            account.now += account.chance.choice([0.0, 0.01, 4.0])
            while account.chance.random() < 0.4 and len(account.scheduler.waiting) < 9:
                account.arrive()
            account.checked()
        while account.checked():
            pass
        preempted += account.scheduler.preempted
        assert sorted(account.scheduler._slots) == list(range(account.scheduler.limits.max_seqs))
    assert preempted
