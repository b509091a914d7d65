"""Stored conversations of /v1/responses: bounded in bytes and time, scoped by API key, on disk in the modes that promise it.

In: the Responses API puts, gets and deletes values it made itself. Out: the value, or None where there is none for that scope:
another key's id is as unknown as an invented one. `done` is called on the loop thread, at once when the answer is in memory.
Loop thread only.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from laya.routing.sessions.journal import Journal

# What an entry costs besides its value: key, tuple and the mapping's own share.
ENTRY_BYTES = 300
# Kept in memory where the disk has everything: conversations go on within minutes, and a miss costs a read.
HOT_BYTES = 32 * 1024 * 1024

_PUT = (
    "INSERT INTO responses VALUES (?, ?, ?, ?) ON CONFLICT (scope, id) DO UPDATE SET value = excluded.value, "
    "created = excluded.created"
)
_GET = "SELECT value, created FROM responses WHERE scope = ? AND id = ?"
_DELETE = "DELETE FROM responses WHERE scope = ? AND id = ?"
# Run with each stored response: what is too old, and when all together are too much, the oldest.
_EXPIRE = "DELETE FROM responses WHERE created < ?"
# To nine tenths at once, because finding the oldest means looking at every row.
_SHRINK = (
    "DELETE FROM responses WHERE (SELECT response_bytes FROM totals) > ?1 AND rowid IN (SELECT rowid FROM "
    "(SELECT rowid, sum(length(value)) OVER (ORDER BY created DESC) AS upto FROM responses) WHERE upto > ?1 * 0.9)"
)


class ResponseStore:
    """`journal` None: memory alone, lost at a restart. `wall` tells the time of day in seconds: stored times outlive us."""

    def __init__(
        self, *, max_bytes: int, ttl_s: float, journal: Journal | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._hot_bytes = max_bytes if journal is None else min(max_bytes, HOT_BYTES)
        self._ttl_s = ttl_s
        self._journal = journal
        self._wall = wall
        self._entries: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()  # oldest first
        self._coming: dict[tuple[str, str], list[Callable[[], None]]] = {}  # being made, and who waits for it

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, id: str, scope: str, value: bytes) -> None:
        """Keep it. One larger than the whole store is not kept: a later `get` finds nothing."""
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        now = self._wall()
        self._forget((scope, id))
        self._entries[scope, id] = (value, now)
        self.bytes += len(value) + ENTRY_BYTES
        self._shrink(now)
        self._put_behind(id, scope, value, now)

    def promise(self, id: str, scope: str) -> None:
        """Its value is being made: who asks for it waits until `settle`, which must follow."""
        self._coming[scope, id] = []

    def settle(self, id: str, scope: str, value: bytes | None) -> None:
        """What was promised is here; None: it could not be made."""
        if value is not None:
            self.put(id, scope, value)
        for ask in self._coming.pop((scope, id), ()):
            ask()

    def find(self, id: str, scope: str, done: Callable[[bytes | None], Any]) -> None:
        """`get`, of one that was promised when it is there."""
        waiting = self._coming.get((scope, id))
        if waiting is None:
            self.get(id, scope, done)
        else:
            waiting.append(lambda: self.get(id, scope, done))

    def get(self, id: str, scope: str, done: Callable[[bytes | None], Any]) -> None:
        """For `find`: what is kept now."""
        entry = self._entries.get((scope, id))
        if entry is not None:
            done(entry[0] if self._wall() - entry[1] < self._ttl_s else None)
        elif self._journal is None or not self._journal.read(_GET, (scope, id), lambda rows: done(self._fresh(rows))):
            done(None)

    def delete(self, id: str, scope: str, done: Callable[[bool], Any]) -> None:
        """`done(True)` when there was one."""
        had = self._forget((scope, id))
        journal = self._journal
        if journal is None or not journal.write(("response", scope, id), _DELETE, (scope, id), lambda n: done(had or bool(n))):
            done(had)

    def _put_behind(self, id: str, scope: str, value: bytes, now: float) -> None:
        if self._journal is not None:
            self._journal.write(("response", scope, id), _PUT, (scope, id, value, now), size=len(value))
            self._journal.write("expire", _EXPIRE, (now - self._ttl_s,))
            self._journal.write("shrink", _SHRINK, (self._max_bytes,))

    def _fresh(self, rows: list[tuple] | None) -> bytes | None:
        if not rows or self._wall() - rows[0][1] >= self._ttl_s:
            return None
        return rows[0][0]

    def _shrink(self, now: float) -> None:
        while self._entries:
            key, (_, created) = next(iter(self._entries.items()))
            if self.bytes <= self._hot_bytes and now - created < self._ttl_s:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= len(entry[0]) + ENTRY_BYTES
        return entry is not None
