"""What both directions share: the buffer, the phases of a message, and bodies that come in segments.

In: `receive(data)` and `receive_eof()` from a transport's callbacks. Out: `next_event()`, to be called until it says
NEED_DATA or PAUSED. No socket, no clock; one object a connection, used on the loop thread only. Data must be `bytes`.

    HEAD -> BODY -> END -> DONE          whole message in one segment: HEAD -> DONE
    any  -> REFUSED                      nothing more comes out, what comes in is dropped

At most one segment beyond an unfinished head is held: body bytes leave with the next call. Only a caller that receives
while a message waits (PAUSED) lets `buffered` grow, and stops reading at its own bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from laya.wire.chunked import Body
from laya.wire.messages import END_OF_BODY, NEED_DATA, BodyData, EndOfBody, Limits, Refusal, Request, Response, Signal
from laya.wire.policy import Refused, check_bytes

HEAD, BODY, END, DONE, REFUSED = range(5)

Event = Request | Response | BodyData | EndOfBody | Refusal | Signal


class MessageParser(ABC):
    """Base of `Inbound` and `Outbound`, which read heads and say what happens between messages."""

    __slots__ = (
        "_limits", "tries_fast", "fast", "buffer", "_eof", "_scanned", "phase", "_body", "_pending", "_failure",
        "_line_bound",
    )  # fmt: skip

    def __init__(self, limits: Limits, fast: bool) -> None:
        self._limits = limits
        self.tries_fast = fast
        self.fast = fast  # False: h11 reads the message under way
        self.buffer = b""
        self._eof = False
        self._scanned = 0  # bytes of an unfinished head that policy has seen
        self.phase = HEAD
        self._body: Any = None  # a Body while one is read
        self._pending = b""  # the piece of body that came along with the head
        self._failure: Refused | None = None  # found in that piece; told after the head
        self._line_bound: int | None = None

    def receive(self, data: bytes) -> None:
        if self.phase != REFUSED:
            self.buffer = self.buffer + data if self.buffer else data

    def receive_eof(self) -> None:
        self._eof = True

    @property
    def buffered(self) -> int:
        """Bytes received and not handed out yet."""
        return len(self.buffer) + len(self._pending)

    def next_event(self) -> Event:
        try:
            phase = self.phase
            if phase == HEAD:
                return self._next_head()
            if phase == DONE:
                return self._between()
            if phase == REFUSED:
                return NEED_DATA
            return self._next_body()
        except Refused as refused:
            return self._refuse(refused)

    @abstractmethod
    def _next_head(self) -> Event:
        """Read the head at the start of the buffer, or say what is missing."""

    @abstractmethod
    def _between(self) -> Event:
        """What there is to say after a message, before the next one is wanted."""

    def _find_head(self) -> int:
        """Where the head's blank line begins; -1 when it has not come. Policy sees an unfinished head as it grows."""
        buffer = self.buffer
        bound = self._limits.max_head_bytes
        scanned = self._scanned
        end = buffer.find(b"\r\n\r\n", scanned - 3 if scanned > 3 else 0, bound)
        if end >= 0:
            self._scanned = 0
            return end
        stop = min(len(buffer), bound)
        check_bytes(buffer, scanned, stop, self._line_bound)
        if stop == bound:
            raise Refused(431, f"the head is longer than {bound} bytes")
        self._scanned = stop
        return -1

    def _begin_body(self, message: Request | Response, body: Body, rest: bytes) -> None:
        """Take what has come of the body: the whole goes out with `message`, a part with the next call."""
        try:
            payload, self.buffer, whole = body.feed(rest)
        except Refused as failure:
            payload, self.buffer, whole = b"", b"", False
            self._failure = failure
        if whole:
            message.body = payload
            self.phase = DONE
        else:
            self._body = body
            self._pending = payload
            self.phase = BODY

    def _next_body(self) -> Event:
        if self._pending:
            piece, self._pending = self._pending, b""
            return BodyData(piece)
        if self.phase == END:
            return self._end_body()
        if self._failure is not None:
            raise self._failure
        while self.buffer:
            payload, self.buffer, whole = self._body.feed(self.buffer)
            if whole:
                self.phase = END
            if payload:
                return BodyData(payload)
            if whole:
                return self._end_body()
        if not self._eof:
            return NEED_DATA
        if not self._body.ends_at_eof():
            raise Refused(400, "the connection was closed in the middle of a body")
        return self._end_body()

    def _end_body(self) -> EndOfBody:
        self.phase = DONE
        self._body = None
        return END_OF_BODY

    def _refuse(self, refused: Refused) -> Refusal:
        self.phase = REFUSED
        self.buffer = self._pending = b""
        self._body = self._failure = None
        return Refusal(refused.status, refused.message)
