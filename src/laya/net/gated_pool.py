"""A pool whose backend may be away for a while: calls wait at its gate, bounded in number and time, and go when it is there.

In: the gateway's calls as for any pool; `open`, `hold` and `shut` from whoever watches the backend. Out: the same calls, later;
`on_wanted` when one waits at a shut gate, `on_unreachable` when connecting failed although the gate was open. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from laya.net.clock import Clock
from laya.net.pool import QUEUE_S, Pool
from laya.net.streams import Streams
from laya.net.upstream import Call, Failure


def _nobody() -> None:
    """Before somebody watches the backend."""


class GatedPool(Pool):
    """`limit` calls wait at the gate at most, each for `wait_s` seconds; `absent` says in words why they wait."""

    waits = True

    def __init__(
        self, name: str, settings, clock: Clock, loop: asyncio.AbstractEventLoop, streams: Streams | None = None, *,
        limit: int, wait_s: float,
    ) -> None:  # fmt: skip
        super().__init__(name, settings, clock, loop, streams)
        self.limit = limit
        self.wait_s = wait_s
        self.is_open = False
        self.absent = "it is not there"
        self.last_used = clock.now  # a call waited or ran then
        self.on_wanted: Callable[[], None] = _nobody
        self.on_unreachable: Callable[[], None] = _nobody
        self._held: deque[Call] = deque()
        self._used = False  # since the last tick

    @property
    def held(self) -> int:
        """Calls at the gate."""
        return len(self._held)

    @property
    def running(self) -> int:
        """Calls beyond the gate: at the backend, or waiting for a connection to it."""
        return self.inflight - len(self._held)

    # -- for the gateway -----------------------------------------------------------------------------------------------

    def submit(self, listener, method: bytes, head: bytes, body: bytes, fresh_only: bool = False) -> Call:
        self._used = True
        if self.is_open:
            return super().submit(listener, method, head, body, fresh_only)
        call = Call(self, listener, method, head, body)
        self.inflight += 1
        if len(self._held) >= self.limit:
            self.loop.call_soon(self._turn_away, call)  # not at once: the caller does not hold the call yet
        else:
            call.deadline = self.clock.now + self.wait_s
            self._held.append(call)
            self.on_wanted()
        return call

    def forget(self, call: Call) -> None:
        try:
            self._held.remove(call)
        except ValueError:
            super().forget(call)  # it is in the line beyond the gate
        else:
            self.inflight -= 1

    def retire(self) -> None:
        super().retire()
        self.turn_away("it is not configured any more")

    # -- for the watcher -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The backend is there: those that wait go, and all that come."""
        self.is_open = True
        for call in self._held:
            call.deadline = self.clock.now + QUEUE_S
        self.waiting.extend(self._held)
        self._held.clear()
        self._grow()

    def renew(self) -> None:
        """What the calls at the gate wait for has begun: their time runs anew."""
        for call in self._held:
            call.deadline = self.clock.now + self.wait_s

    def hold(self, absent: str) -> None:
        """Calls that come wait from now on; those that are beyond the gate go to their end."""
        self.is_open = False
        self.absent = absent

    def shut(self, absent: str) -> None:
        """The backend is away: calls that were not sent yet wait at the gate, and no kept connection is good any more."""
        self.hold(absent)
        for call in self.waiting:
            call.deadline = self.clock.now + self.wait_s
        self._held.extendleft(reversed(self.waiting))
        self.waiting.clear()
        for connection in tuple(self.idle):
            connection.drop()

    def turn_away(self, message: str) -> None:
        """The backend will not come: all at the gate hear why, and go elsewhere where they can."""
        held = tuple(self._held)
        self._held.clear()
        for call in held:
            self._fail(call, Failure.ABSENT, message)

    # -- for its connections and the clock -----------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        if self.inflight or self._used:
            self.last_used = now
        self._used = self.inflight > 0  # one that ends before the next tick counts until then
        for call in [call for call in self._held if now > call.deadline]:
            self._held.remove(call)
            self._fail(call, Failure.BUSY, f"{self.absent}, and waiting took too long")
        super().on_tick(now)

    def _turn_away(self, call: Call) -> None:
        if not call.done:
            self._fail(call, Failure.BUSY, f"{self.absent}, and too many requests wait for it")

    def _fail(self, call: Call, failure: Failure, message: str) -> None:
        if failure is Failure.CONNECT and self.is_open:
            self.on_unreachable()
        super()._fail(call, failure, message)
