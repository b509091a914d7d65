"""How much may be in memory: the account of all requests' bodies, and the marks of one connection.

In: connections take bytes before they keep them. Out: False when the process-wide bound is reached (the caller answers 503).
Loop thread only.
"""

from __future__ import annotations

# Unsent output of one connection at which its source is paused: any that the kernel does not take, whose own buffer keeps a
# fast reader busy. A stream of ours always writes at once; uvloop does so for what would pass this mark, and else only when
# everything that has come was read.
HIGH_WATER = 1
# A read of so much of a body ends its connection's turn: libuv would read up to 32 times on, a quarter of a MiB each, and all
# others wait. Below it, reading once more is cheaper than another turn.
LARGE_READ = 32 * 1024
# A body shorter than this goes out behind its head in one buffer: the copy is cheaper than a second one in the write queue.
JOIN_BELOW = 16 * 1024
# Bytes one client may send behind the request under way. Reading cannot pause for them: then nobody would see it leave.
# Past the bound it is cut off; no known client pipelines even one request.
READ_AHEAD = 256 * 1024
# Unsent text of one local stream (which cannot be paused token by token) before its reader is given up.
MAX_UNSENT = 4 * 1024 * 1024


class Ledger:
    """Bytes held now against `limit`."""

    __slots__ = ("limit", "held")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, count: int) -> bool:
        if self.held + count > self.limit:
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        self.held -= count
