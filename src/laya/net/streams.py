"""Plain sockets, clients' and backends': read and written in C (native/streams.c) where that was built, on Linux.

In: listening sockets, and addresses to connect to. Out: protocols with a `Stream` as their transport, an
asyncio.Transport in all that this room asks of one. Without C, and under TLS, connections keep the loop's own transports, and
this room sees no difference. Loop thread only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from laya.net.in_c import native_lane
from laya.net.loop import Loop

# Connections accepted in one turn of the loop: each takes some ten microseconds.
ACCEPTS_A_TURN = 64
# How long no connection is accepted when the system has no more files or memory for one: those that come wait in the kernel.
ACCEPT_AGAIN_S = 0.5


class Streams:
    """The sockets of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        if isinstance(loop, Loop):
            self._native = loop.streams
        else:
            self._native = native_lane.Streams(loop)
            loop.add_reader(self._native.fileno(), self._native.run)

    def close(self) -> None:
        """Nothing is read or written any more, unless the loop is their own and sees to them to its end."""
        if not isinstance(self._loop, Loop):
            self._loop.remove_reader(self._native.fileno())
            self._native.close()

    def open(self, sock: socket.socket, protocol: Any) -> None:
        """`sock` is connected, and is the stream's from now on. Raises OSError when it cannot be watched."""
        _prepare(sock)
        peer: Any = "" if sock.family == socket.AF_UNIX else sock.getpeername()
        self._native.open(sock, protocol, peer, False)

    async def connect(self, family: int, where: Any, protocol: Any) -> None:
        """Connect to the address `where`; `protocol` has the stream then. Raises OSError."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _prepare(sock)
            number = sock.connect_ex(where)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
            there: asyncio.Future[None] = self._loop.create_future()
            stream = self._native.open(sock, Connecting(there), where, True)
        except BaseException:
            sock.close()
            raise
        try:
            await there
        except BaseException:  # refused, or nobody waits any more
            stream.abort()
            raise
        stream.set_protocol(protocol)
        protocol.connection_made(stream)
        stream.resume_reading()

    def listen(self, sock: socket.socket, make: Callable[[], Any]) -> Listener:
        """A protocol by `make` for each connection to `sock`, which listens."""
        return Listener(self, self._loop, sock, make)


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Connecting:
    """The protocol of a stream until it is connected, or is not."""

    __slots__ = ("_there",)

    def __init__(self, there: asyncio.Future[None]) -> None:
        self._there = there

    def connection_made(self, stream: Any) -> None:
        if not self._there.done():
            self._there.set_result(None)

    def connection_lost(self, why: Exception | None) -> None:
        if not self._there.done():
            self._there.set_exception(why or ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)))


class Listener:
    """As asyncio.Server, as far as this room needs it."""

    def __init__(
        self, streams: Streams, loop: asyncio.AbstractEventLoop, sock: socket.socket, make: Callable[[], Any]
    ) -> None:
        sock.setblocking(False)
        self.sockets = (sock,)
        self._socket = sock
        self._streams = streams
        self._loop = loop
        self._make = make
        self._pause: asyncio.TimerHandle | None = None
        self._go_on()

    def close(self) -> None:
        """No more connections; those that are there stay."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except (InterruptedError, ConnectionAbortedError):
                continue
            except OSError as fault:  # no more files, or no memory
                self._loop.call_exception_handler({"message": "a connection was not accepted", "exception": fault})
                self._loop.remove_reader(self._socket.fileno())
                self._pause = self._loop.call_later(ACCEPT_AGAIN_S, self._go_on)
                return
            try:
                self._streams.open(sock, self._make())
            except OSError:  # it has left already, or the kernel has no room to watch it
                sock.close()


def streams_on(loop: asyncio.AbstractEventLoop) -> Streams | None:
    """None where connections stay the loop's."""
    return Streams(loop) if hasattr(native_lane, "Streams") else None
