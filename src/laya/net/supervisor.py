"""Backends that are commands: which of them run, so that together they stay within the memory.

In: calls at the gates of their pools, the clock. Out: commands started in the order in which they were wanted, idle ones
stopped for them, busy ones let finish first. A running request is never ended for another's sake. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from laya.log import Log
from laya.net.clock import Clock
from laya.net.on_demand import OnDemandBackend
from laya.net.process import GRACE_S
from laya.net.room import Memory, make_room

# Beyond the grace of each command: what the kernel may need to take a killed process's memory back.
STOP_SLACK_S = 5.0


class Supervisor:
    """`limit`: what all commands may take together; `folder`: where they run; `show_output`: /ready and errors quote it."""

    def __init__(self, limit: Memory, folder: str, clock: Clock, log: Log, *, show_output: bool) -> None:
        self.limit = limit
        self._folder = folder
        self._clock = clock
        self._log = log
        self._show_output = show_output
        self._items: list[OnDemandBackend] = []  # those configured, and retired ones that are not gone yet
        self._line: list[OnDemandBackend] = []  # wanted, in the order of the first call that waits
        self._stopping = False
        clock.add(self)

    def watch(self, backends: Iterable) -> None:
        """Supervise these from now on (those with a command) and no others; the others stop when what runs there has ended."""
        wanted = [backend for backend in backends if backend.settings.command is not None]
        known = {item.backend for item in self._items}
        for item in self._items:
            if item.backend not in wanted and not item.retired:
                item.retire()
        for backend in wanted:
            if backend not in known:
                backend.process = OnDemandBackend(
                    backend, self._folder, self.advance, self._log, show_output=self._show_output
                )  # fmt: skip
                self._items.append(backend.process)

    def advance(self) -> None:
        """Start what is wanted and fits; make room for the first that does not."""
        if self._stopping:
            return
        now = self._clock.now
        self._line = [item for item in self._line if item.wanted]
        self._line += [item for item in self._items if item.wanted and item not in self._line]
        for item in tuple(self._line):
            if item.retry_at > now:
                continue  # it failed a moment ago; those behind it need not wait for that
            residents = [other for other in self._items if other.resident]
            room = make_room(item.need, residents, self.limit)
            if room.fits:
                self._line.remove(item)
                item.start()
                continue
            if not item.pool.held:
                continue  # started again without being asked: not at another's cost
            for other in room.idle:
                other.stop(f"{item.backend.name} needs its memory")
            for other in room.busy:
                other.give_way()
            return
        for item in self._items:
            item.stay()  # nobody is waiting for its memory any more

    def on_tick(self, now: float) -> None:
        for item in tuple(self._items):
            item.on_tick(now)
            if item.retired and not item.resident:
                self._items.remove(item)
        self.advance()

    async def stop(self) -> None:
        """End all commands and wait until they are gone."""
        self._stopping = True
        for item in self._items:
            item.stop("shutting down")
        until = asyncio.get_running_loop().time() + GRACE_S + STOP_SLACK_S
        while any(item.resident for item in self._items) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
            for item in self._items:
                item.on_tick(self._clock.now)
        self._clock.discard(self)
