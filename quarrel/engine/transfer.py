"""Beginnings of texts taken out of an engine's cache, put into it and forgotten; on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from math import prod
from typing import NoReturn

from quarrel.engine.cache import Cache
from quarrel.engine.engine import Engine
from quarrel.engine.saved import Array, SavedPrefix
from quarrel.errors import RequestError
from quarrel.ops.transfer import CacheForm, Transfers

PIECE = 16 << 20
"""Bytes of keys and values that are put into a cache at once: requests in flight wait so long."""


def form_of(engine: Engine) -> CacheForm:
    """What a prefix of this engine's must look like."""
    window = engine.cache.rules.window if engine.cache.rules.window_groups else 0
    return replace(_step(engine).form(), window=window)


def take_out(engine: Engine, tokens: Tokens[int], salt: bytes) -> SavedPrefix:
    """A copy of the longest beginning of a text that is in the cache. Raises RequestError where there is none."""
    step, form = _step(engine), form_of(engine)
    engine.finish()  # what it computes may be wrong still
    found = engine.cache.known(list(tokens), salt)
    if not found.known:
        raise RequestError("nothing of this text is in the cache any more: send it once more, then save it")
    blocks = step.read_blocks(found.blocks)
    rest = found.known % form.block_size
    if rest:
        for array in blocks:
            array[-1, rest:] = 0  # of another text, it may be
    beside = found.windows[len(found.windows) - form.window_blocks(found.known) :] if form.window_groups else ()
    windows = step.read_blocks([b for row in beside for b in row]) if beside else []
    for array in windows if rest else ():
        array[-form.window_groups :, rest:] = 0
    states = [] if found.state is None else step.read_states([found.state])
    return SavedPrefix(tuple(tokens[: found.known]), form, tuple(blocks), tuple(windows), tuple(states))


def check(engine: Engine) -> CacheForm:
    """What a prefix must look like to be put into this engine's cache. Raises RequestError where none can."""
    form, cache = form_of(engine), engine.cache
    if not cache.rules.reuse or (form.states and not cache.snapshots.size):
        raise RequestError("this model was loaded without room for prompts that nobody uses: nothing can be restored to it")
    return form


def forget(cache: Cache, tokens: Tokens[int], salt: bytes, shared: int) -> None:
    """Forgets what is known of a text behind its first `shared` tokens, with all that stands on it."""
    size = cache.limits.block_size
    for i, node in enumerate(cache.prefixes.match(tokens, len(tokens), salt).nodes):
        if (i + 1) * size > shared and node.tokens == tuple(tokens[i * size : (i + 1) * size]):
            cache.prefixes.forget([node.block])
            return


def _step(engine: Engine) -> Transfers:
    if not isinstance(engine.step, Transfers):
        raise RequestError(
            "prompts of a model that several devices share, or that is checked, cannot be saved: use one device"
        )
    return engine.step


class Restore:
    """A saved prefix on its way into an engine's cache, for requests of this salt. `begin` gives it blocks, which belong to
    it from then on; they are written piece by piece, other steps between them, and are found by others when `enter` has
    named them. It stays as long as any text that nobody uses. Who makes one calls `release` in the end, whatever happened.
    """

    def __init__(self, saved: SavedPrefix, salt: bytes) -> None:
        self._saved, self._salt, self._restarts = saved, salt, 0
        self._blocks, self._windows = list[int](), list[int]()
        self._pieces: Iterator[tuple[list[int], list[Array]]] = iter(())

    def begin(self, engine: Engine) -> None:
        """Raises RequestError where the prefix is of another shape, or there is no room for it."""
        form, cache, size = check(engine), engine.cache, self._saved.form.block_size
        if self._saved.form != form:
            raise RequestError(
                f"the saved prompt's cache is {self._saved.form.kind} of another shape than this model's {form.kind}"
            )
        tokens, pool, tree = list(self._saved.tokens), cache.pool, cache.prefixes
        total = form.blocks(len(tokens))
        match = tree.match(tokens, len(tokens), self._salt)
        shared = [n.block for n in match.nodes[: match.known // size]]
        fresh, beside = total - len(shared), form.window_groups * form.window_blocks(len(tokens))
        tree.retain(shared)
        if cache.available < fresh + beside or not tree.make_room(fresh + beside):
            tree.release(shared)
            self._raise_no_room(engine)
        self._restarts = engine.stats.restarts
        self._blocks, self._windows = [*shared, *pool.allocate(fresh)], pool.allocate(beside)
        self._pieces = self._cut(len(shared))

    def write(self, engine: Engine) -> bool:
        """Writes the next piece; False where none is left."""
        self._check(engine)
        blocks, arrays = next(self._pieces, ([], []))
        if blocks:
            _step(engine).write_blocks(blocks, arrays)
        return bool(blocks)

    def enter(self, engine: Engine) -> int:
        """Writes recurrent states, and returns how many of its tokens are in the cache then."""
        self._check(engine)
        cache, form, tokens, step = engine.cache, self._saved.form, list(self._saved.tokens), _step(engine)
        tree, groups, size = cache.prefixes, form.window_groups, form.block_size
        first = len(self._blocks) - form.window_blocks(len(tokens))
        node, start = None, 0
        for i, start in enumerate(range(0, len(tokens), size)):
            at = groups * (i - first)
            own = tuple(self._windows[at : at + groups]) if at >= 0 else ()
            node = tree.insert(node, tokens[start : start + size], self._blocks[i], self._salt, own)
            if node is None:
                self._raise_no_room(engine)
        state = cache.snapshots.add(node.snapshots, len(tokens) - start) if node is not None and form.states else None
        if state is not None:
            try:
                step.write_states([state], self._saved.states)
            except BaseException:
                cache.snapshots.drop(state)
                raise
        return cache.known(tokens, self._salt).known

    def release(self, engine: Engine) -> None:
        blocks, self._blocks, self._windows = [*self._blocks, *self._windows], [], []
        engine.cache.prefixes.release(blocks)

    def _cut(self, first: int) -> Iterator[tuple[list[int], list[Array]]]:
        """Blocks and what is to be written there, piece by piece: from the first one on that was not there already, then
        those of windows."""
        saved = self._saved
        each = sum(prod(shape) for shape in saved.form.block_shapes(1))
        count = max(1, PIECE // max(1, each))
        for blocks, arrays in ((self._blocks[first:], [a[first:] for a in saved.blocks]), (self._windows, saved.windows)):
            for at in range(0, len(blocks), count):
                yield blocks[at : at + count], [a[at : at + count] for a in arrays]

    def _check(self, engine: Engine) -> None:
        if engine.stats.restarts != self._restarts:
            raise RequestError("the engine was started again while a saved prompt was put into its cache: restore it again")

    def _raise_no_room(self, engine: Engine) -> NoReturn:
        cache, wanted = engine.cache, self._saved.form.blocks(len(self._saved.tokens))
        raise RequestError(
            f"the saved prompt needs {wanted} cache blocks, and {cache.available} of {cache.pool.n_blocks} are free: "
            "wait for requests that run, or raise n_ctx or max_seqs"
        )
