"""A request that no backend and no engine answers: from the cache, or with a twin's generation.

In: a kept answer, or the pieces of a generation under way. Out: them on the client's connection, under the request's own id,
counted and logged as a request of its own. Loop thread only.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from laya.errors import LayaError
from laya.gateway.exchange import DONE, STREAMING, WAITING, Exchange

# Of the lines of an answer that several get: the others are about the one who asked first.
_SHARED = (b"content-type:", b"cache-control:", b"retry-after", b"x-should-retry:")


class CachedExchange(Exchange):
    """`flight`: the generation that it waits for; None where the answer is there."""

    flight: Any = None

    def __init__(self, gateway, connection, request, body: bytes, plan, model: str, route: str, backend: str) -> None:
        super().__init__(gateway, connection, request, body, plan)
        self.model = model
        self.route = route
        self.backend = backend

    def follow(self, flight) -> None:
        self.flight = flight
        self.move(WAITING)

    def tell(self, lines: bytes, data: bytes | LayaError) -> None:
        """The whole of a stream."""
        if self.state is DONE:
            return  # the client left while it was made
        if isinstance(data, LayaError):
            self.fail(data)
            return
        self.begin(200, lines, data)
        self.end()

    # -- the generation's pieces ---------------------------------------------------------------------------------------

    def begin(self, status: int, lines: bytes, first: bytes) -> None:
        self.move(STREAMING)
        self.status, self.first_at = status, perf_counter()
        self.connection.start(status, shared_lines(lines) + self.own_lines(), first)

    def piece(self, data: bytes) -> None:
        if self.state is STREAMING:
            self.connection.write(data)

    def whole(self, status: int, lines: bytes, body: bytes, outcome: str) -> None:
        if self.state is not DONE:
            self.answer(status, shared_lines(lines), body, outcome)

    def end(self) -> None:
        if self.state is STREAMING:
            connection = self.connection
            self._end("ok")
            connection.finish()

    def broken(self, last: bytes) -> None:
        if self.state is STREAMING:
            connection = self.connection
            self._end("upstream_error")
            connection.break_off(last)

    # -- the connection's calls ----------------------------------------------------------------------------------------

    def on_writable(self) -> None:
        if self.flight is not None:
            self.flight.on_writable()

    def _release(self) -> None:
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.leave(self)


def shared_lines(lines: bytes) -> bytes:
    return b"".join([line + b"\r\n" for line in lines.split(b"\r\n") if line.startswith(_SHARED)])
