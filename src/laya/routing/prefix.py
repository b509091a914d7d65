"""Which target has seen a prompt's beginning: the longest known one wins.

In: the prompt's bytes and names of targets. Out: the target whose KV cache holds the longest beginning, or None: then the
caller picks by load. A prompt is marked at a few lengths that double, so a lookup costs a dozen hashes however long the prompt
is, and a conversation that grows keeps its earlier marks. Loop thread only.
"""

from __future__ import annotations

from laya.routing.sessions.hot import HotTable

# Below this a prompt shares less than a KV block or two with another: not worth crowding a target for.
FIRST_MARK = 256
# At 64 KiB some 16,000 tokens are shared: what comes behind changes no decision.
LAST_MARK = 64 * 1024
_MARKS = tuple(FIRST_MARK << i for i in range((LAST_MARK // FIRST_MARK).bit_length()))
# A conversation has up to nine marks; this holds the last few thousand of them, in about 6 MB.
ENTRIES = 32_768


class PrefixTable:
    def __init__(self, entries: int = ENTRIES) -> None:
        self._targets = HotTable(entries)

    @staticmethod
    def marks(route: str, prompt: bytes) -> list[int]:
        """A hash for each marked beginning, shortest first."""
        seed, size = hash(route), len(prompt)
        return [hash((seed, prompt[:mark])) for mark in _MARKS if mark <= size]

    def find(self, marks: list[int]) -> str | None:
        for mark in reversed(marks):
            target = self._targets.get(mark)
            if target is not None:
                return target
        return None

    def assign(self, marks: list[int], target: str) -> None:
        """The target now has these beginnings. What another one is known for stays: an overflow does not move a prefix."""
        table = self._targets
        for mark in marks:
            if mark not in table:
                table.put(mark, target)

    def move(self, marks: list[int], target: str) -> None:
        """The target that was known cannot be used: from now on it is this one."""
        for mark in marks:
            self._targets.put(mark, target)
