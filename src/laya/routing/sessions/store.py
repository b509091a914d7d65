"""Which target holds a session's KV cache: one small protocol, in memory alone or with the disk behind it.

In: `session_key`s and names of targets. Out: the name last assigned. `find` answers from memory; what only the disk may know is
asked for with `fetch`, which answers within `timeout_ms` whatever the disk does. Loop thread only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from laya.config import RouterConfig
from laya.routing.sessions.database import PUT_SESSION
from laya.routing.sessions.hot import HotTable
from laya.routing.sessions.journal import Journal
from laya.routing.sessions.once import Once
from laya.routing.sessions.redis_link import RedisLink
from laya.routing.sessions.shared import SharedSessions

# Last-use times are written this often, so many at a time: they only decide what the disk forgets first.
TOUCH_EVERY_S = 10.0
TOUCH_AT_ONCE = 1000

Later = Callable[[float, Callable[[], None]], Any]  # runs a call after so many seconds; the result has `cancel`

_FIND = "SELECT target FROM sessions WHERE key = ?"
_COUNT = "SELECT sessions FROM totals"
_TOUCH = "UPDATE sessions SET used = ? WHERE key = ?"


def session_key(scope: str, route: str, session: bytes) -> bytes:
    """16 bytes that stand for a session of one API key on one route; what the client wrote is kept nowhere."""
    data = b"\0".join((scope.encode("utf-8", "surrogatepass"), route.encode("utf-8", "surrogatepass"), session))
    return hashlib.blake2b(data, digest_size=16).digest()


class SessionStore(Protocol):
    late: int  # steps that did not end within the bound

    def find(self, key: bytes) -> str | None:
        """From memory."""

    def may_fetch(self) -> bool:
        """Whether the disk may know a session that memory does not."""

    def fetch(self, key: bytes, done: Callable[[str | None, bool], None]) -> None:
        """`done(target, in_time)` once, within the bound; late means: route without affinity, and record nothing."""

    def assign(self, key: bytes, target: str, done: Callable[[], None]) -> bool:
        """Record it. True: go on. False: `done` is called when it is on disk, or the bound has passed."""

    def on_tick(self, now: float) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def figures(self) -> tuple[int, int]:
        """Entries in memory, evictions so far."""


class MemorySessions:
    """Nothing on disk."""

    late = 0

    def __init__(self, capacity: int) -> None:
        self._hot = HotTable(capacity)
        self.find = self._hot.get  # the same question

    def may_fetch(self) -> bool:
        return False

    def fetch(self, key: bytes, done: Callable[[str | None, bool], None]) -> None:
        done(None, True)

    def assign(self, key: bytes, target: str, done: Callable[[], None]) -> bool:
        self._hot.put(key, target)
        return True

    def on_tick(self, now: float) -> None:
        """Nothing to write."""

    def status(self) -> dict[str, Any]:
        return {"mode": "memory", "state": "ok", "entries": len(self._hot)}

    def figures(self) -> tuple[int, int]:
        return len(self._hot), self._hot.evictions


class DiskSessions:
    """`durable`: a new or changed session waits for its commit (persistent); else it is written behind (hybrid)."""

    def __init__(
        self, capacity: int, journal: Journal, *, durable: bool, timeout_s: float, later: Later,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.late = 0
        self._behind = False  # the last commit that was waited for came too late
        self._hot = HotTable(capacity)
        self._journal = journal
        self._durable = durable
        self._timeout_s = timeout_s
        self._later = later
        self._wall = wall
        self._cold = True  # the disk may have more than memory; not so when it was empty and nothing was evicted
        self._touched: set[bytes] = set()
        self._touch_at = 0.0
        journal.read(_COUNT, (), self._counted)

    def find(self, key: bytes) -> str | None:
        target = self._hot.get(key)
        if target is not None and len(self._touched) < TOUCH_AT_ONCE:
            self._touched.add(key)
        return target

    def may_fetch(self) -> bool:
        return self._cold or self._hot.evictions > 0

    def fetch(self, key: bytes, done: Callable[[str | None, bool], None]) -> None:
        waiting = Once(self, done)

        def found(rows: list[tuple] | None) -> None:
            target = self._hot.get(key) or (rows[0][0] if rows else None)  # assigned meanwhile, or as the disk has it
            if target is not None:
                self._hot.put(key, target)
                self._touched.add(key)
            waiting.settle(target, True)

        if not self._journal.read(_FIND, (key,), found):
            self.late += 1
            done(None, False)
            return
        waiting.timer = self._later(self._timeout_s, lambda: waiting.settle(None, False))

    def assign(self, key: bytes, target: str, done: Callable[[], None]) -> bool:
        if self._hot.get(key) == target:
            return True
        self._hot.put(key, target)
        params = (key, target, int(self._wall()))
        if not self._durable:
            self._journal.write(key, PUT_SESSION, params)
            return True
        if self._journal.state == "degraded":  # known not to be in time: nobody waits for nothing
            self._journal.write(key, PUT_SESSION, params)
            self.settled(False)
            return True
        waiting = Once(self, lambda *_: done())
        if not self._journal.write(key, PUT_SESSION, params, lambda rows: waiting.settle(None, rows is not None)):
            self.late += 1
            self._behind = True
            return True
        waiting.timer = self._later(self._timeout_s, lambda: waiting.settle(None, False))
        return False

    def on_tick(self, now: float) -> None:
        if now < self._touch_at:
            return
        self._touch_at = now + TOUCH_EVERY_S
        touched, self._touched = self._touched, set()
        stamp = int(self._wall())
        for key in touched:
            self._journal.write((b"touch", key), _TOUCH, (stamp, key))

    def status(self) -> dict[str, Any]:
        status = {"mode": "persistent" if self._durable else "hybrid", "entries": len(self._hot), **self._journal.status()}
        if status["state"] == "ok" and self._behind:
            if self._journal.pending:
                status["state"], status["reason"] = "degraded", "late"
            else:
                self._behind = False  # what came too late is there by now
        if self.late:
            status["late"] = self.late
        return status

    def figures(self) -> tuple[int, int]:
        return len(self._hot), self._hot.evictions

    def settled(self, in_time: bool) -> None:
        self._behind = not in_time
        if not in_time:
            self.late += 1

    def _counted(self, rows: list[tuple] | None) -> None:
        self._cold = rows is None or rows[0][0] > 0


def open_sessions(
    settings: RouterConfig, journal: Journal | None, later: Later, link: RedisLink | None = None
) -> SessionStore:
    """The store of the configured mode; `journal` and `link` are what `open_journal` and `open_redis` gave."""
    if link is not None:
        return SharedSessions(settings.cache_size, link, timeout_s=settings.timeout_ms / 1000, later=later)
    if journal is None:
        return MemorySessions(settings.cache_size)
    return DiskSessions(
        settings.cache_size, journal, durable=settings.mode == "persistent", timeout_s=settings.timeout_ms / 1000, later=later
    )
