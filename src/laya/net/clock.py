"""One coarse clock and one sweep for every deadline of the loop.

In: connections register and set `deadline`. Out: `on_tick(now)` on each, four times a second. A timer per request would
cost a microsecond or more each; a deadline is an attribute, and is met within a quarter of a second. Loop thread only.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

TICK_S = 0.25  # how late a deadline may be seen
# How often the loop is asked whether it is on time: a stall shows with at least all but so much of its length.
BEAT_S = 0.01
NEVER = float("inf")


class Ticking(Protocol):
    def on_tick(self, now: float) -> None: ...


class Clock:
    """`now` is the loop's monotonic time of the last tick, good for deadlines but not for measuring."""

    __slots__ = ("now", "_loop", "_on_stall", "_members", "_due", "_next_tick", "_timer", "__weakref__")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_stall) -> None:
        self.now = time.monotonic()
        self._loop = loop
        self._on_stall = on_stall
        self._members: set[Ticking] = set()
        self._due = self._next_tick = self.now
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Beat fast while there is anybody to be late for, else only tick."""
        wait = BEAT_S if self._members else TICK_S
        self._due = time.monotonic() + wait
        self._timer = self._loop.call_later(wait, self._beat)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, member: Ticking) -> None:
        self._members.add(member)

    def discard(self, member: Ticking) -> None:
        self._members.discard(member)

    def _beat(self) -> None:
        now = time.monotonic()
        # The kernel is asked to wait for whole milliseconds: less than that late is not a stall.
        self._on_stall(max(0.0, now - self._due - 0.001))
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self.now = now
            for member in tuple(self._members):
                try:
                    member.on_tick(now)
                except Exception as fault:  # a mistake of ours: the others' deadlines hold all the same
                    self._loop.call_exception_handler({"message": "a tick failed", "exception": fault})
        self.start()
