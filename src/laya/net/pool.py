"""The keep-alive connections to one backend, bounded; a call waits in line when all are busy.

In: the gateway calls `submit`. Out: `Call`, which the exchange may cancel; events go to the call's listener. `inflight`
counts calls that wait or run and is what the balancer reads. Loop thread only.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from laya.net.clock import Clock
from laya.net.streams import Streams
from laya.net.upstream import Body, Call, Failure, UpstreamConnection
from laya.wire.messages import Limits

# Idle time after which we close first: below uvicorn's 5 s, the shortest default among common servers, so that the
# race between our next request and their close stays rare.
IDLE_S = 4.0
# A call that finds no connection in this time is refused: longer waits help no client.
QUEUE_S = 30.0


class Address:
    """Where a backend listens, and the path its API starts with."""

    __slots__ = ("host", "port", "unix", "tls", "base", "authority")

    def __init__(self, url: str, base: str | None = None) -> None:
        self.unix: str | None = None
        if url.startswith("unix:"):
            self.unix, self.host, self.port, self.tls = url[5:], "", 0, False
            self.base, self.authority = (base or "").rstrip("/"), b"localhost"
            return
        parts = urlsplit(url)
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.base = (base if base is not None else parts.path).rstrip("/")
        shown = f"[{self.host}]" if ":" in self.host else self.host
        authority = shown if parts.port is None else f"{shown}:{self.port}"
        self.authority = authority.encode("ascii" if shown.isascii() else "idna")


class PoolState:
    """What changes with each request, in slots for the lane. `connected`, `connecting`: numbers of connections."""

    __slots__ = ("idle", "inflight", "waiting", "retired", "connected", "connecting")


class Pool(PoolState):
    """Connections to one address. `settings` is the backend's configuration."""

    waits = False  # for a backend that is away: see `GatedPool`
    unreachable = False  # as health probes found it: no connection to its host can be made

    def __init__(
        self, name: str, settings, clock: Clock, loop: asyncio.AbstractEventLoop, streams: Streams | None = None
    ) -> None:
        self.name = name
        self.settings = settings
        self.address = Address(settings.url, settings.base)
        self.clock = clock
        self.limits = Limits(max_body_bytes=1 << 62)  # a response may be of any length: it is not kept
        self.inflight = 0
        self.loop = loop
        self.idle: list[UpstreamConnection] = []
        self.connected = 0
        self.connecting = 0
        self.retired = False
        self.waiting: deque[Call] = deque()
        self._tasks: set[asyncio.Task] = set()
        self.tls = ssl.create_default_context() if self.address.tls else None
        self._streams = streams if self.tls is None else None
        clock.add(self)

    # -- for the gateway -----------------------------------------------------------------------------------------------

    def submit(self, listener, method: bytes, head: bytes, body: Body, fresh_only: bool = False) -> Call:
        """Send now on an idle connection, else when one is there. `fresh_only` avoids kept ones (after a stale one)."""
        call = Call(self, listener, method, head, body)
        self.inflight += 1
        idle = self.idle
        try:
            while idle:
                connection = idle.pop()
                if fresh_only:
                    connection.drop()  # its siblings are as old as the one that was found dead
                elif not connection.gone and not connection.transport.is_closing():
                    connection.send(call)
                    return call
            call.fresh_only = fresh_only
            self.line_up(call)
        except Exception:
            call.cancel()  # the caller does not hold it yet
            raise
        return call

    def line_up(self, call: Call) -> None:
        """`call`, counted in `inflight`, goes when a connection is free."""
        call.deadline = self.clock.now + QUEUE_S
        self.waiting.append(call)
        self._grow()

    def close(self) -> None:
        """Close idle connections now; active ones end with their calls."""
        self.clock.discard(self)
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.drop()
        for task in self._tasks:
            task.cancel()

    def retire(self) -> None:
        """The backend is not configured any more: what runs and waits here goes on to its end, nothing is kept for later."""
        self.retired = True
        idle, self.idle = self.idle, []
        for connection in idle:
            connection.drop()

    def forget(self, call: Call) -> None:
        """A waiting call was cancelled; it is skipped when its turn comes."""
        self.inflight -= 1
        try:
            self.waiting.remove(call)
        except ValueError:
            pass  # it had already been taken out of the line

    # -- for its connections -------------------------------------------------------------------------------------------

    def give_back(self, connection: UpstreamConnection) -> None:
        self.inflight -= 1
        call = self._next_call(reused=True)
        if call is not None:
            connection.send(call)
            return
        if self.retired:
            connection.drop()
            return
        connection.deadline = self.clock.now + IDLE_S
        self.idle.append(connection)

    def lose(self, connection: UpstreamConnection, active: bool) -> None:
        self.connected -= 1
        if active:
            self.inflight -= 1
        else:
            try:
                self.idle.remove(connection)
            except ValueError:
                pass  # it was between a finished response and the idle list
        self._grow()

    def on_tick(self, now: float) -> None:
        for call in [call for call in self.waiting if now > call.deadline]:
            self.waiting.remove(call)
            self._fail(call, Failure.BUSY, "no connection to the backend became free in time")
        if self.retired and not self.inflight:
            self.clock.discard(self)

    # -- growing -------------------------------------------------------------------------------------------------------

    def _next_call(self, *, reused: bool) -> Call | None:
        waiting = self.waiting
        if not waiting:
            return None
        for _ in range(len(waiting)):
            call = waiting.popleft()
            if reused and call.fresh_only:
                waiting.append(call)
                continue
            return call
        return None

    def _grow(self) -> None:
        """Open as many connections as there are calls in line, within the backend's bound."""
        while self.connecting < len(self.waiting) and self.connected + self.connecting < self.settings.max_inflight:
            self.connecting += 1
            task = self.loop.create_task(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        error = ""
        connection: UpstreamConnection | None = None
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                connection = await self._open_connection()
        except TimeoutError:
            error = "connecting timed out"
        except (OSError, UnicodeError) as exc:
            error = getattr(exc, "strerror", None) or type(exc).__name__
        finally:
            self.connecting -= 1
        if connection is not None and connection.gone:  # lost again before this line: nothing was sent
            self.connected += 1  # `lose` has counted it off
            connection, error = None, "the backend closed the connection at once"
        if connection is None:
            # One attempt answers for one call: each caller decides alone where to go next.
            call = self._next_call(reused=False)
            if call is not None:
                self._fail(call, Failure.CONNECT, f"cannot connect: {error}")
            self._grow()  # for those still in line
            return
        self.connected += 1
        call = self._next_call(reused=False)
        if call is not None:
            connection.send(call)
        else:
            connection.deadline = self.clock.now + IDLE_S
            self.idle.append(connection)

    async def _open_connection(self) -> UpstreamConnection:
        """Try each address of the name in turn, each for its share of the connect time-out."""
        address = self.address
        if address.unix is not None:
            return await self._connected(socket.AF_UNIX, address.unix)
        found = await self.loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        share = self.settings.connect_timeout_s / len(found)
        failure: OSError = TimeoutError()
        for family, *_, where in found:
            try:
                async with asyncio.timeout(share):
                    return await self._connected(family, where)
            except OSError as exc:
                failure = exc
        raise failure

    async def _connected(self, family: int, where: Any) -> UpstreamConnection:
        """A connection to one address. Raises OSError."""
        make = partial(UpstreamConnection, self)
        if self._streams is not None:
            connection = make()
            await self._streams.connect(family, where, connection)
        elif family == socket.AF_UNIX:
            _, connection = await self.loop.create_unix_connection(make, where)
        else:
            _, connection = await self.loop.create_connection(
                make, str(where[0]), int(where[1]), ssl=self.tls, server_hostname=self.address.host if self.tls else None
            )
        return connection

    def _fail(self, call: Call, failure: Failure, message: str) -> None:
        call.done = True
        self.inflight -= 1
        try:
            call.listener.on_upstream_failure(failure, message)
        except Exception as fault:
            call.listener.on_fault(fault)
