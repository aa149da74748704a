"""Beginnings of texts taken out of an engine's cache, put into it and forgotten; on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import NoReturn

from quarrel.engine.cache import Cache
from quarrel.engine.engine import Engine
from quarrel.engine.saved import Array, SavedPrefix
from quarrel.errors import RequestError
from quarrel.ops.transfer import CacheForm, Transfers

PIECE = 4 << 20
"""Bytes of keys and values that are put into a cache at once."""
HOLD, MOST = 1e-3, 32 << 20
"""Behind so many seconds, or bytes, of such pieces the requests in flight go on: a host copies 5 to 10 GB a second, a GPU
50 from memory that is pinned, by itself."""
Place = Callable[[tuple[int, ...], CacheForm], "SavedPrefix | None"]
"""Where a beginning of a text shall lie, if not in arrays of its own."""


def form_of(engine: Engine) -> CacheForm:
    """What a prefix of this engine's must look like."""
    window = engine.cache.rules.window if engine.cache.rules.window_groups else 0
    return replace(_step(engine).form(), window=window)


def take_out(engine: Engine, tokens: Tokens[int], salt: bytes, place: Place | None = None) -> Callable[[], SavedPrefix]:
    """A copy of the longest beginning of a text that is in the cache: what is returned waits for it, on any thread. Raises
    RequestError where there is none."""
    step, form = _step(engine), form_of(engine)
    found = engine.cache.known(list(tokens), salt)
    if engine.computes(found.blocks):
        engine.finish()  # what it computes may be wrong still
        found = engine.cache.known(list(tokens), salt)
    if not found.known:
        raise RequestError("nothing of this text is in the cache any more: send it once more, then save it")
    text = tuple(tokens[: found.known])
    own = SavedPrefix(text, form, ()) if place is None else place(text, form) or SavedPrefix(text, form, ())
    blocks = step.read_blocks(found.blocks, own.blocks)
    beside = found.windows[len(found.windows) - form.window_blocks(found.known) :] if form.window_groups else ()
    windows = step.read_blocks([b for row in beside for b in row], own.windows) if beside else []
    states = [] if found.state is None else step.read_states([found.state])
    for array, state in zip(own.states, states):
        array[:] = state
    saved = SavedPrefix(text, form, tuple(blocks), tuple(windows), own.states or tuple(states))
    wait = step.transferred()

    def taken() -> SavedPrefix:
        wait()
        if rest := found.known % form.block_size:
            for array in blocks:
                array[-1, rest:] = 0  # of another text, it may be
            for array in windows:
                array[-form.window_groups :, rest:] = 0
        return saved

    return taken


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
    named them. It stays as long as any text that nobody uses. Who makes one calls `release` in the end, whatever happened,
    and then what that returns, on a thread of their own, before the saved arrays change.
    """

    def __init__(self, saved: SavedPrefix, salt: bytes) -> None:
        self._saved, self._salt, self._restarts = saved, salt, 0
        self._blocks, self._windows = list[int](), list[int]()
        self._pieces: Iterator[tuple[list[int], list[Array], int]] = iter(())

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
        """Writes the next pieces; False where none is left."""
        self._check(engine)
        end, left = time.perf_counter() + HOLD, MOST
        for blocks, arrays, layer in self._pieces:
            _step(engine).write_blocks(blocks, arrays, layer)
            left -= sum(array.nbytes for array in arrays)
            if left <= 0 or time.perf_counter() >= end:
                return True
        return False

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

    def release(self, engine: Engine) -> Callable[[], None]:
        blocks, self._blocks, self._windows = [*self._blocks, *self._windows], [], []
        engine.cache.prefixes.release(blocks)
        return _step(engine).transferred()

    def _cut(self, first: int) -> Iterator[tuple[list[int], list[Array], int]]:
        """Blocks, what is to be written there, and of which layer, piece by piece: from the first block on that was not
        there already, then those of windows. A piece is of as many layers as it has room for, or of some blocks of one."""
        saved = self._saved
        for blocks, arrays in ((self._blocks[first:], [a[first:] for a in saved.blocks]), (self._windows, saved.windows)):
            layer, layers = 0, len(arrays) // 2
            while blocks and layer < layers:
                each = sum(a[:1].nbytes for a in arrays[2 * layer : 2 * layer + 2])
                count = max(1, min(len(blocks), PIECE // max(1, each)))
                end = layer + 1
                if count == len(blocks):
                    size = each * count
                    while end < layers and (size := size + arrays[2 * end].nbytes + arrays[2 * end + 1].nbytes) <= PIECE:
                        end += 1
                for at in range(0, len(blocks), count):
                    yield blocks[at : at + count], [a[at : at + count] for a in arrays[2 * layer : 2 * end]], layer
                layer = end

    def _check(self, engine: Engine) -> None:
        if engine.stats.restarts != self._restarts:
            raise RequestError("the engine was started again while a saved prompt was put into its cache: restore it again")

    def _raise_no_room(self, engine: Engine) -> NoReturn:
        cache, wanted = engine.cache, self._saved.form.blocks(len(self._saved.tokens))
        raise RequestError(
            f"the saved prompt needs {wanted} cache blocks, and {cache.available} of {cache.pool.n_blocks} are free: "
            "wait for requests that run, or raise n_ctx or max_seqs"
        )
