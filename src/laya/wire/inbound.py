"""The server's side: bytes of a client's connection in, requests out.

The fast parser is tried first; a message whose head is outside its subset goes to h11.
One request is out at a time: those pipelined behind it wait until `start_next`. Loop thread.
"""

from __future__ import annotations

from laya.wire import authority, fast, recall
from laya.wire.messages import EOF, NEED_DATA, PAUSED, Limits, Request, Signal
from laya.wire.parser import DONE, HEAD, Event, MessageParser
from laya.wire.policy import REQUEST_LINE_ROOM, Refused


class Inbound(MessageParser):
    """Parser of one client connection. `fast=False` leaves everything to h11 (the fuzz compares both)."""

    __slots__ = ()

    def __init__(self, limits: Limits, *, fast: bool = True) -> None:
        super().__init__(limits, fast)
        self._line_bound = limits.max_target_bytes + REQUEST_LINE_ROOM

    def take_whole(self, data: bytes) -> tuple[Request, bytes] | None:
        """(request, body) when `data`, just received, is exactly one request with a known head; None: call `receive`.

        The request is shared between all with this head: its own length, body and content-length field are not set.
        """
        if self.buffer or self.phase != HEAD or not self.fast:
            return None
        limits = self._limits
        found = recall.whole(data, limits.request_heads, limits.max_head_bytes, limits.max_body_bytes)
        if found is None:
            return None
        self.phase = DONE
        return found[0], found[1]

    def start_next(self) -> None:
        """The answer to the request that is out was sent. Only after its body ended."""
        if self.phase != DONE:
            raise RuntimeError("start_next before the request was read to its end")
        self.phase = HEAD
        self.fast = self.tries_fast

    @property
    def at_boundary(self) -> bool:
        """No byte of an unfinished request is held."""
        return not self.buffer and (self.phase == HEAD or self.phase == DONE)

    def _between(self) -> Signal:
        return PAUSED if self.buffer else NEED_DATA

    def _next_head(self) -> Event:
        buffer = self.buffer
        if not buffer:
            return EOF if self._eof else NEED_DATA
        head_end = self._find_head()
        if head_end < 0:
            if self._eof:
                raise Refused(400, "the connection was closed in the middle of a head")
            return NEED_DATA
        start = head_end + 4
        request = recall.read_request(buffer, head_end, self._limits) if self.fast else None
        if request is None:
            self.fast = False
            request, body = authority.read_request(buffer[:start], self._limits)
            self._begin_body(request, body, buffer[start:])
            return request
        length = request.content_length
        if not length:
            request.body = b""
            self.buffer = buffer[start:]
            self.phase = DONE
            return request
        request.body = fast.cut_body(buffer, start, length)
        if request.body is None:
            self._begin_body(request, fast.LengthBody(length), buffer[start:])
        else:
            self.buffer = buffer[start + length :]
            self.phase = DONE
        return request
