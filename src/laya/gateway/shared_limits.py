"""Requests and tokens a minute that several routers count together: each decides by its own buckets, Redis adds them up.

In and out: as `MemoryLimits`, at once and never waiting. What was taken here is told to Redis four times a second, and the
level that comes back, with what the other routers took, becomes the local one. A burst that reaches several routers within one
such turn may so pass each of them; the buckets then stand below zero until the minute is kept over all. Loop thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from laya.config.structs import KeyConfig
from laya.gateway.limits import MINUTE_S, Bucket, MemoryLimits, Wait
from laya.routing.sessions.redis_link import RedisLink

# A bucket in use learns what the others took this often even if nothing was taken here.
LEARN_EVERY_S = 1.0
# A bucket nobody used for so long is full again; Redis may forget it.
_FORGET_MS = int(2 * MINUTE_S * 1000)
# Filled up by Redis's own clock, then what this router took is taken. Atomic: scripts run one at a time.
_TAKE = """
local t = redis.call('TIME') local now = t[1] + t[2] / 1000000
local size, had = tonumber(ARGV[1]), redis.call('HMGET', KEYS[1], 'level', 'at')
local level = size
if had[1] then level = math.min(size, tonumber(had[1]) + math.max(0, now - tonumber(had[2])) * size / tonumber(ARGV[3])) end
level = math.min(size, level - tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return string.format('%.6f', level)
"""


class SharedLimits(MemoryLimits):
    """`on_tick` four times a second."""

    def __init__(self, link: RedisLink, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._link = link
        self._taken: dict[tuple[str, str], float] = {}  # here, and not told yet
        self._told: dict[tuple[str, str], float] = {}  # and on its way
        self._learn_at = 0.0

    def take(self, key: KeyConfig, tokens: int) -> Wait | None:
        wait = super().take(key, tokens)
        if wait is None:
            if key.rpm is not None:
                self._count(key.name, "requests", 1)
            if key.tpm is not None:
                self._count(key.name, "tokens", min(tokens, key.tpm))
        return wait

    def settle(self, key: KeyConfig, taken: int, used: int) -> None:
        super().settle(key, taken, used)
        if key.tpm is not None:
            self._count(key.name, "tokens", used - min(taken, key.tpm))

    def on_tick(self, now: float) -> None:
        if self._link.state != "ok":
            return  # what was taken meanwhile is told when it is back
        learn = now >= self._learn_at
        if learn:
            self._learn_at = now + LEARN_EVERY_S
        for name, bucket in self._buckets.items():
            taken = self._taken.get(name, 0)
            if name not in self._told and (taken or (learn and bucket.level < bucket.size)):
                self._tell(name, bucket, taken)

    def _count(self, key: str, what: str, amount: float) -> None:
        self._taken[key, what] = self._taken.get((key, what), 0) + amount

    def _tell(self, name: tuple[str, str], bucket: Bucket, taken: float) -> None:
        self._taken[name] = 0
        self._told[name] = taken
        sent = self._link.send(
            "EVAL", _TAKE, 1, f"laya:limit:{name[0]}:{name[1]}", bucket.size, taken, MINUTE_S, _FORGET_MS,
            done=lambda answer: self._learn(name, bucket, answer),
        )  # fmt: skip
        if not sent:
            self._taken[name] += self._told.pop(name)

    def _learn(self, name: tuple[str, str], bucket: Bucket, answer: Any) -> None:
        told = self._told.pop(name)
        if isinstance(answer, bytes):
            # Redis's level is without what was taken here since it was asked.
            bucket.level, bucket.at = float(answer) - self._taken.get(name, 0), self._now()
        else:
            self._taken[name] = self._taken.get(name, 0) + told  # rather counted twice, by a Redis that only hung, than never
