"""The open loop: requests at a constant rate, whatever the answers do. What a user waits for at a load that is no overload.

A request is due each 1/rate s and is sent then, on an idle connection or else on a new one, so a slow answer delays no other
request (no coordinated omission). Plain non-blocking sockets and `select`, whose time-out is finer than the 1 ms of event
loops; how late the sends were is told too.
"""

from __future__ import annotations

import select
import socket
import time

from gateway_bench.bodies import SMALL_BYTES, bodies, http
from gateway_bench.figures import percentile

MAX_CONNECTIONS = 900  # select() takes descriptors below 1024
LAST_CHUNK = b"\r\n0\r\n\r\n"
WAIT_S = 5.0  # for the last answers


class _Waiting:
    """A connection with a request under way."""

    __slots__ = ("sent", "data", "length")

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.data = b""
        self.length: int | None = None

    def take(self, data: bytes) -> bool:
        """Whether the answer is whole. Content-Length or chunked, as proxies choose."""
        self.data += data
        if self.length is None:
            head, border, _ = self.data.partition(b"\r\n\r\n")
            if not border:
                return False
            fields = head.lower()
            at = fields.find(b"\r\ncontent-length:")
            self.length = len(head) + 4 + int(fields[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else -1
        return self.data.endswith(LAST_CHUNK) if self.length < 0 else len(self.data) >= self.length


class SteadyLoad:
    """One run against one port."""

    def __init__(self, port: int, rate: int) -> None:
        self._port = port
        self._interval = 1 / rate
        self._requests = [http(data, port, number % 16) for number, data in enumerate(bodies(SMALL_BYTES))]
        self._idle: list[socket.socket] = []
        self._busy: dict[socket.socket, _Waiting] = {}
        self._latencies: list[float] = []
        self._late: list[float] = []
        self._errors = 0
        self._opened = 0

    def run(self, seconds: float) -> dict[str, float]:
        """Latencies in us: from sending to the whole answer."""
        began = time.perf_counter()
        total = round(seconds / self._interval)
        sent = 0
        while sent < total or (self._busy and time.perf_counter() < began + seconds + WAIT_S):
            due = began + sent * self._interval
            now = time.perf_counter()
            if sent < total and now >= due:
                self._late.append(now - due)
                self._send(self._requests[sent % len(self._requests)])
                sent += 1
                continue
            wait = due - now if sent < total else WAIT_S
            for sock in select.select(list(self._busy), [], [], wait)[0]:
                self._read(sock)
        self._errors += len(self._busy)
        for sock in (*self._idle, *self._busy):
            sock.close()
        return self._figures()

    def _figures(self) -> dict[str, float]:
        found = sorted(self._latencies)
        return {
            "p50_us": percentile(found, 50) * 1e6, "p99_us": percentile(found, 99) * 1e6, "answers": len(found),
            "errors": self._errors, "connections": self._opened, "late_p99_us": percentile(sorted(self._late), 99) * 1e6,
        }  # fmt: skip

    def _send(self, request: bytes) -> None:
        if self._idle:
            sock = self._idle.pop()
        elif self._opened >= MAX_CONNECTIONS:
            self._errors += 1
            return
        else:
            sock = socket.create_connection(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opened += 1
        self._busy[sock] = _Waiting(time.perf_counter())
        try:
            sock.sendall(request)
        except OSError:
            self._lose(sock)

    def _read(self, sock: socket.socket) -> None:
        waiting = self._busy[sock]
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._lose(sock)
        elif waiting.take(data):
            self._latencies.append(time.perf_counter() - waiting.sent)
            self._errors += not waiting.data.startswith(b"HTTP/1.1 200")
            del self._busy[sock]
            self._idle.append(sock)

    def _lose(self, sock: socket.socket) -> None:
        del self._busy[sock]
        sock.close()
        self._errors += 1


def run(port: int, rate: int, seconds: float) -> dict[str, float]:
    return SteadyLoad(port, rate).run(seconds)
