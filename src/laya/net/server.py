"""Listening, signals and the drain.

In: settings and a gateway. Out: `ClientConnection`s; `run` returns when the process should end. Loop thread only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import stat
from typing import Any

from laya.errors import StartError
from laya.net.clock import Clock
from laya.net.connection import ClientConnection
from laya.net.flow import Ledger
from laya.net.lane import ServerState
from laya.net.streams import Listener, Streams
from laya.wire.messages import Limits

BACKLOG = 1024  # connections the kernel may hold while the loop is busy; Linux caps it at net.core.somaxconn


class Server(ServerState):
    def __init__(self, settings, clock: Clock, loop: asyncio.AbstractEventLoop, streams: Streams | None = None) -> None:
        self.settings = settings
        self.clock = clock
        self.gateway = None  # set before `listen`
        self.ledger = Ledger(settings.max_buffered_bytes)
        self.limits = Limits(max_head_bytes=settings.max_head_bytes, max_body_bytes=settings.max_body_bytes)
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.addresses: list[str] = []
        self.loop = loop
        self._streams = streams
        self._listeners: list[asyncio.Server | Listener] = []
        self._stopped = asyncio.Event()
        self._hurry = asyncio.Event()
        self._socket_inode = 0

    async def listen(self) -> None:
        """Bind; raises StartError in one line."""
        settings = self.settings
        if settings.host:
            await self._listen_tcp()
        if settings.unix_socket:
            await self._listen_unix(settings.unix_socket)

    async def _listen_tcp(self) -> None:
        settings, loop = self.settings, self.loop
        tls = _tls_context(settings.tls) if settings.tls.certificate else None
        try:
            for sock in await _bound(loop, settings.host, settings.port):
                await self._serve(sock, tls)
        except (OSError, UnicodeError) as exc:
            number = getattr(exc, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else exc
            mend = "server.port, or end what listens there" if number == errno.EADDRINUSE else "server.host or server.port"
            raise StartError(f"cannot listen on {settings.host}:{settings.port}: {reason}; change {mend}") from None
        scheme = "https" if tls else "http"
        for sock in [sock for listener in self._listeners for sock in listener.sockets]:
            host, port = sock.getsockname()[:2]
            self.addresses.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    async def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Take connections to `sock`, which is bound."""
        if self._streams is not None and tls is None:
            sock.listen(BACKLOG)
            self._listeners.append(self._streams.listen(sock, lambda: ClientConnection(self)))
            return
        limit = self.settings.header_timeout_s if tls else None
        create = self.loop.create_unix_server if sock.family == socket.AF_UNIX else self.loop.create_server
        self._listeners.append(await create(
            lambda: ClientConnection(self), sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=limit
        ))  # fmt: skip

    async def _listen_unix(self, path: str) -> None:
        if await self._answers(path):
            raise StartError(f"cannot listen on {path}: another process does")
        try:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)  # left by a process that was killed
        except FileNotFoundError:
            pass
        except OSError as exc:
            raise StartError(f"cannot use the socket {path}: {exc.strerror}") from None
        try:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(path)
            await self._serve(sock)
        except OSError as exc:
            raise StartError(f"cannot listen on {path}: {exc.strerror or exc}") from None
        self._socket_inode = os.stat(path).st_ino
        self.addresses.append(f"unix:{path}")

    async def _answers(self, path: str) -> bool:
        try:
            transport, _ = await self.loop.create_unix_connection(asyncio.Protocol, path)
        except OSError:
            return False
        transport.abort()
        return True

    def stop(self) -> None:
        """First call: drain. Second call: now."""
        if self._stopped.is_set():
            self._hurry.set()
        self._stopped.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain: no new connections, running requests finish within the limit."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop)
        await self._stopped.wait()
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self.connections):
            if connection.exchange is None and connection.request is None:
                connection.close()
        await self._drained(self.settings.drain_timeout_s)
        for connection in tuple(self.connections):
            connection.end_now()
        await self._drained(1.0)  # what was written last gets a moment to go out
        for connection in tuple(self.connections):
            connection.transport.abort()
        self._remove_socket()

    def _remove_socket(self) -> None:
        """Ours only: another process may have made its own at the same place."""
        path = self.settings.unix_socket
        if path and os.path.exists(path) and os.stat(path).st_ino == self._socket_inode:
            os.unlink(path)

    async def _drained(self, limit_s: float) -> None:
        until = self.loop.time() + limit_s
        while self.connections and self.loop.time() < until and not self._hurry.is_set():
            try:
                await asyncio.wait_for(self._hurry.wait(), 0.05)
            except TimeoutError:
                pass


# What a socket says for an address of a kind that this machine has not, as with ::1 for `localhost` where IPv6 is off.
_ELSEWHERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


async def _bound(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host` that this machine has. Raises OSError, UnicodeError."""
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, *_, address in dict.fromkeys(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            try:
                sockets.append(_bound_to(family, address))
            except OSError as exc:
                if exc.errno not in _ELSEWHERE:
                    raise
                absent = exc
        if absent is not None and not sockets:
            raise absent
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound_to(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _tls_context(tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as exc:
        raise StartError(f"server.tls: cannot use {tls.certificate} with {tls.key}: {exc.strerror or exc}") from None
    return context
