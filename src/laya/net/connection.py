"""One client connection: bytes through `wire.inbound`, whole requests to the gateway, its answers back to the socket.

In: the transport's callbacks. Out: `gateway.accept(connection, request, body)` for each request in order; the gateway's
exchange answers through `reply`, or `start`/`write`/`finish`. It is told through `exchange.cancel()` when the client has
gone. Loop thread only.
"""

from __future__ import annotations

import asyncio
from io import BytesIO
from time import perf_counter
from typing import Any

from laya.errors import LayaError, RequestTimeout, Unavailable, by_status
from laya.gateway.error_forms import error_bytes
from laya.net.answering import Answering
from laya.net.clock import NEVER
from laya.net.flow import HIGH_WATER, LARGE_READ, READ_AHEAD
from laya.net.lane import prepared
from laya.wire.inbound import Inbound
from laya.wire.messages import EOF, NEED_DATA, PAUSED, BodyData, EndOfBody, Request
from laya.wire.reply import CONTINUE

BURST_S = 0.001  # of one client's input at a time: others wait no longer for a burst of small requests or chunks
LINGER_S = 1.0  # how long input is thrown away after a refusal, so that the client can read the answer before a reset
MIN_RATE = 16 * 1024  # bytes a second of a body after which its deadline moves on


class ClientConnection(Answering):
    """States: idle (`request` and `exchange` None), receiving (`request` set), busy (`exchange` set), closing."""

    __slots__ = (
        "gateway", "inbound", "request", "deadline", "closing", "peer", "_parts", "held", "_ahead", "_body_began", "_pumping",
        "_waiting", "in_head", "_lingers", "_stuck", "_held_back",
    )  # fmt: skip

    def __init__(self, server) -> None:
        super().__init__(server)
        self.gateway = server.gateway
        self.inbound = Inbound(server.limits)
        self.request: Request | None = None
        self.deadline = NEVER
        self.closing = False
        self.peer = ""
        self._parts: BytesIO | None = None  # of a body that comes in pieces
        self.held = 0
        self._pumping = False
        self._ahead = 0
        self._body_began = 0.0
        self._waiting: asyncio.Handle | None = None  # the rest of a long burst of input, for the loop's next turn
        self.in_head = False  # a head has begun and is not whole
        self._lingers = False  # the answer is an early one: what still comes of the request is thrown away
        self._stuck: tuple[int, float] | None = None  # unsent bytes of a paused reader, and since when it is so many
        self._held_back = NEVER  # since when it is not read, because it does not read its answers

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport) -> None:
        self.transport = transport
        server = self.server
        server.connections.add(self)
        transport.set_write_buffer_limits(high=HIGH_WATER)
        name = transport.get_extra_info("peername")
        self.peer = name[0] if isinstance(name, tuple) else "unix"
        self.deadline = server.clock.now + server.settings.header_timeout_s
        server.clock.add(self)
        if len(server.connections) > server.settings.max_connections:
            self.refuse(Unavailable("too many connections", retry_after=1))

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if self.exchange is None and not self.paused:
            try:
                if ask(self, data):
                    return
            except Exception as fault:
                if self.exchange is not None:
                    self.exchange.on_fault(fault)
                    return
                self.gateway.fault(fault)  # in the log. Nothing was touched: the long way may fare better, or answers for it
        self.receive(data)

    def receive(self, data: bytes) -> None:
        """What the lane does not take."""
        if self.exchange is None and not self.paused:
            found = self.inbound.take_whole(data)
            if found is not None:
                self._begin(*found)
                return
        self.inbound.receive(data)
        if self.exchange is not None:
            self._read_ahead(len(data))
        elif not self._pumping:
            self._pump()
            if len(data) > LARGE_READ and self.request is not None and self._waiting is None and self._held_back == NEVER:
                self.transport.pause_reading()
                self._waiting = self.server.loop.call_soon(self._go_on)

    def _read_ahead(self, count: int) -> None:
        """Requests pipelined behind the one under way. Reading never pauses, so that the client's leaving is always seen."""
        if self._ahead + count > READ_AHEAD or not self.server.ledger.take(count):
            self._leave()
            self.transport.abort()
        else:
            self._ahead += count

    def eof_received(self) -> bool:
        """The client sends nothing more: whatever it waits for is not wanted any more."""
        self._leave()
        self.closing = True
        self.deadline = self.server.clock.now + self.server.settings.keepalive_timeout_s  # to take what was written
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.closing = True
        if self._waiting is not None:
            self._waiting.cancel()
        self.server.connections.discard(self)
        self.server.clock.discard(self)
        self._release_body()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._stuck = None
        if self.exchange is not None:
            self.exchange.on_writable()
        elif not self.closing:
            self._reads_again()

    def on_tick(self, now: float) -> None:
        if self.paused:  # the other deadlines are for what it sends
            if self._reader_is_gone(now):
                self._leave()
                self.transport.abort()
                return
        elif now > self.deadline:
            self._expire()
            return
        exchange = self.exchange
        if exchange is not None:
            try:
                exchange.on_tick(now)
            except Exception as fault:
                exchange.on_fault(fault)

    def _reader_is_gone(self, now: float) -> bool:
        """It took nothing of its answer for as long as a request's body may be silent: others need the place at the backend.
        Once nothing more can come of it, for as long as it might be idle."""
        unsent = self._unsent()
        if self._stuck is None or self._stuck[0] != unsent:
            self._stuck = (unsent, now)
        settings = self.server.settings
        return now - self._stuck[1] > (settings.keepalive_timeout_s if self.closing else settings.body_timeout_s)

    # -- input ---------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Hand out what the parser has until it needs more bytes, an exchange is under way, the client does not read its
        answers, or the loop's other work is due."""
        self._pumping = True
        inbound = self.inbound
        until = perf_counter() + BURST_S
        try:
            while not self.closing and self.exchange is None:
                if self.paused:
                    self._hold_back()
                    return
                if inbound.buffered and perf_counter() > until:
                    self.transport.pause_reading()
                    self._waiting = self.server.loop.call_soon(self._go_on)
                    return
                event: Any = inbound.next_event()
                kind = type(event)
                if kind is Request:
                    self._on_request(event)
                elif event is NEED_DATA or event is PAUSED:
                    if self.request is None and not inbound.at_boundary and not self.in_head:
                        self.in_head = True
                        self.deadline = self.server.clock.now + self.server.settings.header_timeout_s
                    return
                elif kind is BodyData:
                    self._on_body(event.data)
                elif kind is EndOfBody:
                    self._on_whole_body()
                elif event is EOF:
                    return
                else:
                    self.refuse(by_status(event.status, event.message))
        finally:
            self._pumping = False

    def _hold_back(self) -> None:
        """Read no more until the answers are read: what comes would be kept. Nobody works for this client, so that it has left
        may be seen later."""
        if self._held_back == NEVER:
            self._held_back = self.server.clock.now
            self.transport.pause_reading()

    def _reads_again(self) -> None:
        """All answers were taken: on with what it sends. The silence until now was ours."""
        now, settings = self.server.clock.now, self.server.settings
        since, self._held_back = self._held_back, NEVER
        if self.request is not None:
            self._body_began += max(0.0, now - since)
            self.deadline += max(0.0, now - since)
        else:
            self.deadline = now + (settings.header_timeout_s if self.in_head else settings.keepalive_timeout_s)
        if since != NEVER:
            self.transport.resume_reading()
        if self.inbound.buffered and not self._pumping and self._waiting is None:
            self._pump()

    def _go_on(self) -> None:
        self._waiting = None
        if not self.closing:
            self.transport.resume_reading()
            self._pump()

    def _begin(self, request: Request, body: bytes) -> None:
        """A whole request that came together."""
        self.in_head = False
        self.keep_alive = request.keep_alive and not request.http10
        self.head_only = request.method == b"HEAD"
        self.chunked = not request.http10
        if body:
            if not self.server.ledger.take(len(body)):
                self.refuse(Unavailable("too much data is held in memory just now"))
                return
            self.held = len(body)
        self.deadline = NEVER
        self.gateway.accept(self, request, body)

    def _on_request(self, request: Request) -> None:
        if request.body is not None:
            self._begin(request, request.body)
            return
        self.in_head = False
        self.keep_alive = request.keep_alive and not request.http10
        self.head_only = request.method == b"HEAD"
        self.chunked = not request.http10
        if self.gateway.precheck(self, request) is not None:
            self._lingers = True
            self.keep_alive = False
            self.deadline = NEVER
            self.gateway.accept(self, request, b"")  # which answers with the refusal
            return
        self.request = request
        self._body_deadline()
        if request.expect_continue:
            self.transport.write(CONTINUE)

    def _on_body(self, data: bytes) -> None:
        if not self.server.ledger.take(len(data)):
            return self.refuse(Unavailable("too much data is held in memory just now"))
        self.held += len(data)
        if self._parts is None:
            self._parts = BytesIO()
        self._parts.write(data)
        self._body_deadline()

    def _body_deadline(self) -> None:
        """`body_timeout_s` in all, and more only as bytes come at MIN_RATE: one byte a minute does not hold a place."""
        if not self.held:
            self._body_began = self.server.clock.now
        self.deadline = self._body_began + self.server.settings.body_timeout_s + self.held / MIN_RATE

    def _on_whole_body(self) -> None:
        parts, self._parts = self._parts, None
        request, self.request = self.request, None
        self.deadline = NEVER
        # `getvalue` copies nothing: to join 32 MiB here would hold the loop for 10 ms.
        self.gateway.accept(self, request, parts.getvalue() if parts is not None else b"")

    def hold(self, count: int) -> bool:
        """Count `count` more bytes that belong to the request under way; False: too much is held already."""
        if not self.server.ledger.take(count):
            return False
        self.held += count
        return True

    def _release_body(self) -> None:
        """Give back the request's bytes; what the parser still holds of the requests behind it stays counted."""
        ahead = 0 if self.closing else self.inbound.buffered
        self.server.ledger.give(self.held + self._ahead - ahead)
        self.held, self._ahead = 0, ahead
        self._parts = None

    # -- the end of a connection ---------------------------------------------------------------------------------------

    def _leave(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.cancel()
        self.request = None

    def _expire(self) -> None:
        if self.closing or self.exchange is not None:
            self.deadline = NEVER
            self._leave()
            self.transport.abort()  # it does not read, or does not finish closing
        elif self.request is None and self.inbound.at_boundary:
            self.close()  # idle keep-alive
        else:
            what = "body" if self.request is not None else "head"
            self.refuse(RequestTimeout(f"the request's {what} did not arrive in time"))

    def close(self) -> None:
        """Close when what was written has gone out; a peer that does not read is cut after the keep-alive time."""
        if not self.closing:
            self.closing = True
            self.deadline = self.server.clock.now + self.server.settings.keepalive_timeout_s
            self.transport.close()

    def end_now(self) -> None:
        """The drain limit has passed: an exchange ends with an error, then the connection closes."""
        if self.exchange is not None:
            self.exchange.shut_down(Unavailable("The server is shutting down."))
        if not self.closing:
            self.close()

    def refuse(self, error: LayaError) -> None:
        """Answer with the error and close, reading (and dropping) what still comes for a moment."""
        self.gateway.count_refusal(error)
        body = error_bytes(self.request.path if self.request is not None else b"", error)
        lines = b"content-type: application/json\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in error.hint_headers())
        self.head_only = False
        self._write_reply(error.status, lines, body, close=True)
        self._linger()

    def _linger(self) -> None:
        """Close, reading (and dropping) what still comes for a moment, so that the answer is not lost to a reset."""
        self.closing = True
        self.request = None
        self._release_body()
        self.deadline = self.server.clock.now + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    # -- the end of an exchange -------------------------------------------------------------------------------------------

    def done(self) -> None:
        """The exchange is over: on to the next request."""
        self.exchange = None
        self._streaming = False
        if self._lingers:
            self._linger()
            return
        self.inbound.start_next()
        if self.held or self._ahead:
            self._release_body()
        if not self.keep_alive or self.server.draining:
            self.close()
            return
        self.deadline = self.server.clock.now + self.server.settings.keepalive_timeout_s
        if self.inbound.buffered and not self._pumping and self._waiting is None:
            self._pump()


ask = prepared(ClientConnection)
