"""Answers that may be given again: kept in memory, bounded in bytes and time.

In: a `Question` (what a request asks, see cache_key.py) and answers in one form (see replay.py). Out: the answer that was kept
for the same question, if it is young enough. Loop thread only.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from laya.stages.cache_key import Question

# What an entry costs besides its answer: key, struct, and the table's own share.
ENTRY_BYTES = 500
# The largest answer that is kept, as a share of the cache: one entry must not push out all others.
LARGEST_SHARE = 1 / 8
# However large the cache is. A window of 200,000 tokens gives no more, and reading or telling an answer anew, which is done in
# one piece, holds the interpreter for 1 to 2 ms. Told as one event it stays below what readers of streams take (1 MiB).
LARGEST_BYTES = 960 * 1024


class Table(Protocol):
    """The session table's bounded mapping (routing/sessions/hot.py)."""

    weight: int
    evictions: int

    def get(self, key: bytes) -> Any: ...

    def put(self, key: bytes, value: Any, weight: int) -> None: ...


class Kept(msgspec.Struct, frozen=True, gc=False):
    """An answer as its plain body. `counted`: it has the numbers of tokens, as far as its model tells them. `at`: when it was
    given, in the loop's seconds."""

    body: bytes
    counted: bool
    at: float = 0.0


class ResultCache:
    def __init__(self, table: Table, *, max_bytes: int, ttl_s: float) -> None:
        self.largest = min(int(max_bytes * LARGEST_SHARE), LARGEST_BYTES)
        self.hits = 0
        self.misses = 0
        self._table = table
        self._ttl_s = ttl_s

    @property
    def bytes(self) -> int:
        return self._table.weight

    @property
    def evictions(self) -> int:
        return self._table.evictions

    def find(self, question: Question, now: float) -> Kept | None:
        """The kept answer, if the question takes one of its age and it can be told in the form asked for."""
        kept = None if question.max_age == 0 else self._table.get(question.key)
        if kept is None or now - kept.at >= min(self._ttl_s, question.max_age) or (question.wants_count and not kept.counted):
            return None
        return kept

    def keep(self, question: Question, kept: Kept, now: float) -> None:
        weight = len(kept.body) + ENTRY_BYTES
        if weight <= self.largest:
            self._table.put(question.key, msgspec.structs.replace(kept, at=now), weight)
