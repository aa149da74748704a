"""Limits that several servers count together, in Redis or Valkey; each goes on by its own count while that is gone.

quarrel:KIND:CALLER   hash      level, at    a bucket, as `limits.py` has it, by the store's clock
quarrel:streams:CALLER  sorted set  id -> when it is given up if its server has died
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from quarrel.errors import ConfigError, installing
from quarrel.server.limits import Limiter, crowded, over
from quarrel.server.settings import Rates

SECONDS = 1.0
"""For which a request waits for the store, and no longer."""
PAUSE = 5.0
"""For which the store is left alone when it did not answer."""
CONNECTIONS = 32
PREFIX = "quarrel:"
log = logging.getLogger("quarrel.server")

_CLOCK = "local t = redis.call('TIME') local now = t[1] + t[2] / 1e6\n"
_TAKE = (
    _CLOCK
    + """
local rate, cost, must = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local found = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(found[1] or rate), tonumber(found[2] or now)
level = math.min(rate, level + math.max(0, now - at) * rate / 60)
local missing = math.min(cost, rate) - level
if missing > 0 and not must then return tostring(missing * 60 / rate) end
level = math.min(rate, level - cost)
redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level), 'at', string.format('%.17g', now))
redis.call('EXPIRE', KEYS[1], math.ceil((rate - level) * 60 / rate) + 1)
return '0'
"""
)
_ENTER = (
    _CLOCK
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local n = redis.call('ZCARD', KEYS[1])
if n >= tonumber(ARGV[1]) then return n end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[1], math.ceil(ARGV[2]) + 1)
return -1
"""
)


class Limits:
    """Counts what each caller uses, here and, with the address of a store, with all others there. For one event loop.

    url: redis://, rediss:// (or valkey://, valkeys://) HOST:PORT/DATABASE, or unix://PATH. seconds: the longest that a
    request may be in flight; its place is free behind that, also if its server has died. Raises ConfigError for an address
    that is none, and where the package `redis` is not installed.
    """

    def __init__(self, rates: Rates, url: str = "", seconds: float = 300.0, local: Limiter | None = None) -> None:
        self.local = Limiter(rates) if local is None else local
        self._rates, self._seconds = rates, seconds
        self._store = _store(url) if url else None
        self._back, self._gone = 0.0, False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def charge(self, caller: str, kind: str, cost: float) -> None:
        """As `Limiter.charge`. What is counted here alone never exceeds what all have counted: it is asked first."""
        self.local.charge(caller, kind, cost)
        rate = getattr(self._rates, kind)
        if not rate or self._store is None:
            return
        wait = await self._ask("eval", *self._taking(caller, kind, cost))
        if wait is not None and (seconds := float(wait)) > 0:
            self.local.refund(caller, kind, cost)
            raise over(kind, rate, seconds)

    def refund(self, caller: str, kind: str, amount: float) -> None:
        """As `Limiter.refund`; the store learns of it a moment later."""
        self.local.refund(caller, kind, amount)
        if amount and getattr(self._rates, kind) and self._store is not None:
            self._later("eval", *self._taking(caller, kind, -amount, must=True))

    @asynccontextmanager
    async def stream(self, caller: str) -> AsyncIterator[None]:
        """Holds one of the caller's places for requests in flight."""
        with self.local.stream(caller):
            most = self._rates.streams
            if not most or self._store is None:
                yield
                return
            key, place = f"{PREFIX}streams:{caller}", secrets.token_hex(8)
            try:
                found = await self._ask("eval", _ENTER, 1, key, most, self._seconds, place)
                if found is not None and found >= 0:
                    raise crowded(found, most)
                yield
            finally:
                self._later("zrem", key, place)

    async def close(self) -> None:
        """Waits for what the store is still to learn."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.aclose()

    def _taking(self, caller: str, kind: str, cost: float, *, must: bool = False) -> tuple[Any, ...]:
        return _TAKE, 1, f"{PREFIX}{kind}:{caller}", getattr(self._rates, kind), cost, int(must)

    def _later(self, command: str, *words: Any) -> None:
        task = asyncio.ensure_future(self._ask(command, *words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, command: str, *words: Any) -> Any:
        """The store's answer; None while it is gone, of which one line of the log tells."""
        from redis.exceptions import RedisError

        if time.monotonic() < self._back:
            return None
        try:
            async with asyncio.timeout(SECONDS):
                answer = await getattr(self._store, command)(*words)
        except (RedisError, OSError, TimeoutError) as error:
            self._back = time.monotonic() + PAUSE
            if not self._gone:
                self._gone = True
                why = str(error) or f"no answer in {SECONDS:g} s"
                log.warning("the store of shared limits is gone, and this server counts for itself: %s", why)
            return None
        if self._gone:
            self._gone = False
            log.info("the store of shared limits is there again")
        return answer


def _store(url: str) -> Any:
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(f"shared limits need the package redis: {installing('redis')}") from None
    scheme, _, rest = url.partition("://")
    words = f"{scheme.replace('valkey', 'redis')}://{rest}"
    try:
        # Once more at once: a connection that was kept may have been closed by the other side.
        pool = BlockingConnectionPool.from_url(
            words, max_connections=CONNECTIONS, timeout=SECONDS, socket_timeout=SECONDS, retry=Retry(NoBackoff(), 1)
        )
        pool.make_connection()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the store of shared limits is no address ({error}): wanted redis://HOST:PORT/DATABASE or unix://PATH"
        ) from None
    return Redis.from_pool(pool)
