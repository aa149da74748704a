"""Beginnings of texts taken out of an engine's cache, put into it and forgotten; on the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

from quarrel.engine.cache import Cache
from quarrel.engine.engine import Engine
from quarrel.engine.saved import SavedPrefix
from quarrel.errors import RequestError
from quarrel.ops.transfer import CacheForm, Transfers


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


def put_in(engine: Engine, saved: SavedPrefix, salt: bytes) -> int:
    """Puts it into the cache, for requests of this salt, and returns how many of its tokens are there then. It stays as
    long as any text that nobody uses. Raises RequestError where there is no room for it."""
    form, cache = check(engine), engine.cache
    if saved.form != form:
        raise RequestError(f"the saved prompt's cache is {saved.form.kind} of another shape than this model's {form.kind}")
    if not _enter(engine, saved, salt):
        message = f"the saved prompt needs {form.blocks(len(saved.tokens))} cache blocks, and {cache.available} of"
        raise RequestError(
            f"{message} {cache.pool.n_blocks} are free: wait for requests that run, or raise n_ctx or max_seqs"
        )
    return cache.known(list(saved.tokens), salt).known


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


def _enter(engine: Engine, saved: SavedPrefix, salt: bytes) -> bool:
    """Whether there is room. Nothing runs meanwhile: who finds the blocks from here on finds them written."""
    cache, form, tokens = engine.cache, saved.form, list(saved.tokens)
    pool, tree, groups, size = cache.pool, cache.prefixes, form.window_groups, form.block_size
    total = form.blocks(len(tokens))
    match = tree.match(tokens, len(tokens), salt)
    shared = [n.block for n in match.nodes[: match.known // size]]
    fresh, beside = total - len(shared), form.window_blocks(len(tokens))
    tree.retain(shared)
    if not tree.make_room(fresh + groups * beside):
        tree.release(shared)
        return False
    blocks, windows = [*shared, *pool.allocate(fresh)], pool.allocate(groups * beside)
    node, start = None, 0
    try:
        step = _step(engine)
        if fresh:
            step.write_blocks(blocks[len(shared) :], [a[len(shared) :] for a in saved.blocks])
        if windows:
            step.write_blocks(windows, saved.windows)
        for start in range(0, len(tokens), size):
            at = groups * (start // size - total + beside)
            own = tuple(windows[at : at + groups]) if at >= 0 else ()
            node = tree.insert(node, tokens[start : start + size], blocks[start // size], salt, own)
            if node is None:
                return False
        state = cache.snapshots.add(node.snapshots, len(tokens) - start) if node is not None and form.states else None
        if state is not None:
            try:
                step.write_states([state], saved.states)
            except BaseException:
                cache.snapshots.drop(state)
                raise
        return True
    finally:
        tree.release([*blocks, *windows])
