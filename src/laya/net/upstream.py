"""One connection to a backend: a request out, a response in, then back to its pool.

In: `Pool` hands it a `Call`. Out: the call's listener (the gateway's exchange) hears of head, body, end or failure. Loop
thread only.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from laya.net.clock import NEVER
from laya.net.flow import HIGH_WATER, JOIN_BELOW, LARGE_READ
from laya.wire.messages import NEED_DATA, BodyData, EndOfBody, Response
from laya.wire.outbound import Outbound

# Events handed on in one turn of the loop; each is a piece of at most a quarter of a millisecond's parsing.
PIECES_A_TURN = 4


class Failure(enum.Enum):
    """Why a call ended without a whole response; what may be tried next depends on it (`gateway.dispatch`)."""

    CONNECT = "connect"  # refused, timed out, no such name: nothing was sent
    STALE = "stale"  # a reused connection died before any response byte
    RESET = "reset"  # a fresh connection died before any response byte
    FIRST_BYTE = "first_byte_timeout"
    IDLE = "idle_timeout"  # silence inside a response
    BROKEN = "broken"  # cut or malformed inside a response
    BUSY = "busy"  # no connection became free in time
    ABSENT = "absent"  # it is started on demand and could not be


class UpstreamListener(Protocol):
    """on_upstream_head, on_upstream_data*, on_upstream_end; or at any time on_upstream_failure, which is the last. What one of
    them raises comes back by on_fault, and is the last too.

    When the whole response arrives together, `on_upstream_head` is the only call and `response.body` is set.
    """

    def on_upstream_head(self, response: Response) -> None: ...

    def on_upstream_data(self, data: bytes) -> None: ...

    def on_upstream_end(self) -> None: ...

    def on_upstream_failure(self, failure: Failure, message: str) -> None: ...

    def on_fault(self, fault: Exception) -> None: ...


# Of a request: whole, or in pieces that follow one another.
Body = bytes | tuple[bytes | memoryview, ...]


class Call:
    """One request on its way through a pool. `cancel` is idempotent and closes a connection that carries it."""

    __slots__ = ("pool", "listener", "method", "head", "body", "connection", "deadline", "done", "fresh_only", "in_one_step")

    def __init__(self, pool, listener: UpstreamListener, method: bytes, head: bytes, body: Body) -> None:
        self.pool = pool
        self.listener = listener
        self.method = method
        self.head = head
        self.body = body
        self.connection: UpstreamConnection | None = None
        self.deadline = 0.0  # while it waits for a connection
        self.done = False
        self.fresh_only = False
        # Takes the whole answer, or the next frame of a stream, if it can: `lane` sets it.
        self.in_one_step: Callable[[UpstreamConnection, Call, bytes], bool] | None = None

    def cancel(self) -> None:
        if not self.done:
            self.done = True
            if self.connection is not None:
                self.connection.drop()
            else:
                self.pool.forget(self)

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()


class UpstreamConnection:
    """States: idle (`call` None, in the pool), active (`call` set), gone. A protocol as `Answering` is."""

    __slots__ = ("pool", "transport", "outbound", "call", "deadline", "reused", "gone", "paused", "in_body", "_waiting")

    def __init__(self, pool) -> None:
        self.pool = pool
        self.transport: Any = None  # an asyncio.Transport from `connection_made` on
        self.outbound = Outbound(pool.limits)
        self.call: Call | None = None
        self.deadline = NEVER
        self.reused = False
        self.gone = False
        self.paused = False
        self.in_body = False  # the response's final head has come
        self._waiting: asyncio.Handle | None = None  # the rest of a long burst of input, for the loop's next turn

    # -- for the pool and the call -------------------------------------------------------------------------------------

    def send(self, call: Call) -> None:
        self.call = call
        self.in_body = False
        call.connection = self
        self.outbound.expect(call.method)
        self.deadline = self.pool.clock.now + self.pool.settings.first_byte_timeout_s
        body = call.body
        if not body:
            self.transport.write(call.head)
        elif type(body) is tuple:
            self.transport.writelines((call.head, *body))
        elif len(body) < JOIN_BELOW:
            self.transport.write(call.head + body)
        else:
            self.transport.writelines((call.head, body))

    def drop(self) -> None:
        """The client has gone: close at once, so that the backend stops working for nobody."""
        self._detach()
        self.transport.abort()

    def pause(self) -> None:
        if not self.paused and not self.gone:
            self.paused = True
            self.deadline = NEVER  # the silence is ours
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused and not self.gone:
            self.paused = False
            self.deadline = self.pool.clock.now + self.pool.settings.idle_timeout_s
            self.transport.resume_reading()
            if self._waiting is None:  # for what the parser has still: the end of the body, at least
                self._waiting = self.pool.loop.call_soon(self._go_on, self.call)

    @property
    def heard_at(self) -> float:
        """The clock's time when bytes of a body last came; never while reading is paused."""
        return self.deadline - self.pool.settings.idle_timeout_s

    # -- transport callbacks -------------------------------------------------------------------------------------------

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)
        self.pool.clock.add(self)

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:
            # Bytes without a request: whatever they are, this connection cannot be trusted with the next one.
            self._detach()
            self.transport.abort()
            return
        try:
            if call.in_one_step is not None and call.in_one_step(self, call, data):
                return
        except Exception as fault:
            self.on_fault(call, fault)
            return
        self.receive(data)

    def receive(self, data: bytes) -> None:
        """What the call's one step does not take."""
        call: Any = self.call
        try:
            if self.in_body:
                piece = self.outbound.take_piece(data)
                if piece is not None:
                    call.listener.on_upstream_data(piece)
                    self._heard()
                    if len(data) > LARGE_READ:
                        self._yield(call)
                    return
            else:
                response = self.outbound.take_whole(data)
                if response is not None:
                    self._finish(call)
                    call.listener.on_upstream_head(response)
                    return
        except Exception as fault:
            self.on_fault(call, fault)
            return
        self.outbound.receive(data)
        self._advance(call)
        if len(data) > LARGE_READ:
            self._yield(call)

    def eof_received(self) -> bool:
        call = self.call
        if call is not None:
            self.outbound.receive_eof()
            self._advance(call, whole=True)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        call = self.call
        self.pool.clock.discard(self)
        if call is not None:
            if exc is None:
                self.outbound.receive_eof()
                self._advance(call, whole=True)
            if self.call is not None:
                how = "the backend closed the connection" if exc is None else "the connection was reset"
                self._fail(call, self._cut(), how)
        self._detach()

    def pause_writing(self) -> None:
        """The backend does not read: the client's bytes are held already, so there is nobody to slow down."""

    def resume_writing(self) -> None: ...

    def on_tick(self, now: float) -> None:
        call = self.call
        if call is not None and not self.in_body and self.pool.unreachable:
            self._fail(call, self._cut(), "the backend's host cannot be reached any more")
            return
        if now <= self.deadline:
            return
        if call is None:
            self._detach()
            self.transport.abort()  # idle long enough
        elif self.in_body:
            self._fail(call, Failure.IDLE, "the backend went silent inside its response")
        else:
            self._fail(call, Failure.FIRST_BYTE, "the backend did not answer in time")

    # -- the response --------------------------------------------------------------------------------------------------

    def _advance(self, call: Call, whole: bool = False) -> None:
        """Hand on what the parser has: `whole`: all of it, else a few pieces and the rest in the loop's next turn."""
        try:
            for _ in count() if whole else range(PIECES_A_TURN):
                if self.call is not call or not self._hand_on(call) or (self.paused and not whole):
                    return  # `resume` goes on where it was paused
        except Exception as fault:
            self.on_fault(call, fault)
            return
        self._yield(call)

    def _yield(self, call: Call) -> None:
        """The rest in the loop's next turn."""
        if self.call is call and self._waiting is None and not self.paused:
            self.transport.pause_reading()
            self._waiting = self.pool.loop.call_soon(self._go_on, call)

    def _go_on(self, call: Call) -> None:
        self._waiting = None
        if self.call is call and not self.paused:
            self.transport.resume_reading()
            self._advance(call)

    def _hand_on(self, call: Call) -> bool:
        """The parser's next event to the listener. False when there is nothing more to hand on now."""
        outbound, listener = self.outbound, call.listener
        event: Any = outbound.next_event()
        kind = type(event)
        if kind is BodyData:
            listener.on_upstream_data(event.data)
        elif event is NEED_DATA:
            self._heard()
            return False
        elif kind is Response:
            if event.body is not None:
                self._finish(call)
                listener.on_upstream_head(event)
                return False
            self.in_body = True
            listener.on_upstream_head(event)
        elif kind is EndOfBody:
            self._finish(call)
            listener.on_upstream_end()
            return False
        else:
            self._fail(call, Failure.BROKEN if outbound.started else self._cut(), event.message)
            return False
        return True

    def _heard(self) -> None:
        """Something came: of a body, the next silence begins now."""
        if self.in_body and not self.paused and self.call is not None:
            self.deadline = self.pool.clock.now + self.pool.settings.idle_timeout_s

    def on_fault(self, call: Call, fault: Exception) -> None:
        """The listener made a mistake. It answers for itself; the connection is not trusted further, unless another call has
        it already."""
        call.done = True
        if self.call is None or self.call is call:
            self._detach()
            self.transport.abort()
        call.listener.on_fault(fault)

    def _cut(self) -> Failure:
        if self.outbound.started:
            return Failure.BROKEN
        return Failure.STALE if self.reused else Failure.RESET

    def _finish(self, call: Call) -> None:
        """The response is whole: the connection may carry the next request."""
        call.done = True
        self.call = None
        self.deadline = NEVER
        self.reused = True
        if self.paused:
            self.paused = False
            self.transport.resume_reading()
        if self.transport.get_write_buffer_size():
            self._detach(active=True)  # answered before it had read the request: the rest of that is of no use to anybody
            self.transport.abort()
        elif self.outbound.reusable and not self.transport.is_closing():
            self.pool.give_back(self)
        else:
            self._detach(active=True)
            self.transport.close()

    def _fail(self, call: Call, failure: Failure, message: str) -> None:
        call.done = True
        self._detach()
        self.transport.abort()
        try:
            call.listener.on_upstream_failure(failure, message)
        except Exception as fault:
            call.listener.on_fault(fault)

    def _detach(self, active: bool = False) -> None:
        """Leave the pool, once. `active`: a call was running here that `call` does not show any more."""
        if not self.gone:
            self.gone = True
            active = active or self.call is not None
            self.call = None
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None
            self.pool.clock.discard(self)
            self.pool.lose(self, active)
