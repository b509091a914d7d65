"""A bounded mapping with S3-FIFO eviction: every operation takes constant time, and a scan does not push out what is in use.

In: keys and values of its owner, each of weight 1 (the session table) or of as many bytes as it takes (the result cache). Out:
values, and what was evicted. Pure; one owner thread.

New keys enter a small queue. Those asked for again before they reach its end move on to the main queue, the others leave and
only their keys are remembered for a while, as ghosts; a ghost that comes back enters the main queue at once. (Yang, Zhang, Qiu,
Yue, Rashmi: FIFO queues are all you need for cache eviction, SOSP 2023.)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any

SMALL_SHARE = 0.1  # of the capacity; the paper's figure, which it shows to be uncritical
# Uses that are remembered: each earns one more round through the main queue.
MAX_USES = 3
# Rounds granted in one eviction. Without a bound a table full of used entries would go round up to three times at once.
MAX_ROUNDS = 16


class Entry:
    __slots__ = ("value", "uses", "weight", "small")

    def __init__(self, value: Any, weight: int, small: bool) -> None:
        self.value = value
        self.uses = 0
        self.weight = weight
        self.small = small  # it is in the small queue


class HotTable:
    """Entries that weigh at most `capacity` together. `evictions` counts those that left to make room."""

    __slots__ = ("capacity", "evictions", "weight", "_entries", "_small", "_main", "_ghosts", "_small_bound", "_small_weight")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self.weight = 0
        self._entries: dict[Hashable, Entry] = {}
        self._small: deque = deque()
        self._main: deque = deque()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._small_bound = max(1, int(capacity * SMALL_SHARE))
        self._small_weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def items(self) -> Iterator[tuple[Hashable, Any]]:
        return ((key, entry.value) for key, entry in self._entries.items())

    def get(self, key: Hashable, default: Any = None) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            return default
        if entry.uses < MAX_USES:
            entry.uses += 1
        return entry.value

    def put(self, key: Hashable, value: Any, weight: int = 1) -> None:
        """One that is heavier than the whole table is not taken."""
        if weight > self.capacity:
            return
        entry = self._entries.get(key)
        if entry is not None:
            entry.value = value
            if entry.weight != weight:
                self._reweigh(entry, weight)
            return
        while self.weight + weight > self.capacity:
            self._evict()
        self.weight += weight
        came_back = key in self._ghosts
        self._entries[key] = Entry(value, weight, not came_back)
        if came_back:
            del self._ghosts[key]
            self._main.append(key)
        else:
            self._small.append(key)
            self._small_weight += weight

    def _reweigh(self, entry: Entry, weight: int) -> None:
        more = weight - entry.weight
        entry.weight = weight
        self.weight += more
        if entry.small:
            self._small_weight += more
        while self.weight > self.capacity:
            self._evict()

    def _evict(self) -> None:
        """Take one entry out."""
        for round_ in range(MAX_ROUNDS + 1):
            last = round_ == MAX_ROUNDS
            if self._small and (self._small_weight >= self._small_bound or not self._main):
                if self._leave_small(last):
                    return
            elif self._leave_main(last):
                return

    def _leave_small(self, forced: bool) -> bool:
        key = self._small.popleft()
        entry = self._entries[key]
        self._small_weight -= entry.weight
        if entry.uses and not forced:
            entry.uses = 0
            entry.small = False
            self._main.append(key)
            return False
        ghosts = self._ghosts
        ghosts[key] = None
        if len(ghosts) > len(self._entries):
            ghosts.popitem(last=False)
        self._drop(key)
        return True

    def _leave_main(self, forced: bool) -> bool:
        key = self._main.popleft()
        entry = self._entries[key]
        if entry.uses and not forced:
            entry.uses -= 1
            self._main.append(key)
            return False
        self._drop(key)
        return True

    def _drop(self, key: Hashable) -> None:
        self.weight -= self._entries.pop(key).weight
        self.evictions += 1
