"""Requests and tokens a minute of each key: the protocol, and token buckets in this process's memory.

In: a key, and how many tokens a request may take. Out: nothing, or how long to wait. What a request really used is settled when
it is over, so a bucket may stand below zero for a while: then the next requests wait for it. A store that several routers
share has the same three calls and answers them at once, from what it knows here; what it learns elsewhere corrects its levels.
Loop thread only.

A bucket holds a minute's worth and fills evenly, so a burst may spend a minute's share at once, and no more than two in any
minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from laya.config.structs import KeyConfig

MINUTE_S = 60.0


class Wait(NamedTuple):
    seconds: float
    what: str  # "requests" or "tokens"


class Standing(NamedTuple):
    """One limit as a client is told of it."""

    limit: int
    remaining: int
    reset_s: float  # until the whole minute's share is there again


class Limits(Protocol):
    def take(self, key: KeyConfig, tokens: int) -> Wait | None:
        """One request of `tokens` at most, as far as is known before it is served. None: it is taken. A request of more than
        a minute's tokens takes a whole minute's."""

    def settle(self, key: KeyConfig, taken: int, used: int) -> None:
        """The request of `taken` tokens is over and used `used`."""

    def standing(self, key: KeyConfig) -> tuple[Standing | None, Standing | None]:
        """Of requests and of tokens; None where there is no limit."""


class Bucket:
    """`size` a minute. The level is that of `at`; it is brought up to now at each call."""

    __slots__ = ("size", "level", "at")

    def __init__(self, size: int, now: float) -> None:
        self.size = size
        self.level = float(size)
        self.at = now

    def fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at) * self.size / MINUTE_S)
        self.at = now

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there."""
        return max(0.0, (amount - self.level) * MINUTE_S / self.size)

    def standing(self) -> Standing:
        return Standing(self.size, max(0, int(self.level)), self.wait(self.size))


class MemoryLimits:
    """Buckets by the keys' names: a reload that does not change a limit leaves its bucket as it is."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take(self, key: KeyConfig, tokens: int) -> Wait | None:
        requests, minute = self._bucket(key, "requests", key.rpm), self._bucket(key, "tokens", key.tpm)
        waits = [Wait(requests.wait(1), "requests")] if requests is not None else []
        if minute is not None:
            waits.append(Wait(minute.wait(min(tokens, minute.size)), "tokens"))
        longest = max(waits, default=None)
        if longest is not None and longest.seconds > 0:
            return longest
        if requests is not None:
            requests.level -= 1
        if minute is not None:
            minute.level -= min(tokens, minute.size)
        return None

    def settle(self, key: KeyConfig, taken: int, used: int) -> None:
        minute = self._bucket(key, "tokens", key.tpm)
        if minute is not None:
            minute.level = min(minute.size, minute.level + min(taken, minute.size) - used)

    def standing(self, key: KeyConfig) -> tuple[Standing | None, Standing | None]:
        requests, minute = self._bucket(key, "requests", key.rpm), self._bucket(key, "tokens", key.tpm)
        return requests and requests.standing(), minute and minute.standing()

    def _bucket(self, key: KeyConfig, what: str, size: int | None) -> Bucket | None:
        """Filled up to now. Names are those of the configuration, so there are no more buckets than keys."""
        if size is None:
            return None
        now = self._now()
        bucket = self._buckets.get((key.name, what))
        if bucket is None or bucket.size != size:
            bucket = self._buckets[key.name, what] = Bucket(size, now)
        bucket.fill(now)
        return bucket
