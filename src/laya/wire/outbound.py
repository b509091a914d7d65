"""The client's side: bytes of an upstream's connection in, responses out.

`expect(method)` says that a request was written; the next response is its answer. Every refusal here is a 502. The fast
parser is tried first, as in `inbound`. Loop thread.
"""

from __future__ import annotations

from typing import Any

from laya.wire import authority, fast, recall
from laya.wire.chunked import ChunkedBody
from laya.wire.messages import EOF, NEED_DATA, Limits, Refusal, Response
from laya.wire.parser import BODY, DONE, HEAD, REFUSED, Event, MessageParser
from laya.wire.policy import Refused

MAX_INFORMATIONAL = 16  # 1xx heads before one response; a server that sends more is stuck or hostile


class Outbound(MessageParser):
    """Parser of one upstream connection. `fast=False` leaves everything to h11."""

    __slots__ = ("method", "_head", "keep_alive", "informational", "started")

    def __init__(self, limits: Limits, *, fast: bool = True) -> None:
        super().__init__(limits, fast)
        self.phase = DONE  # nothing is expected yet
        self.method = b"GET"
        self._head = b""  # of the response whose chunked body is under way: h11 wants it if it has to take over
        self.keep_alive = True
        self.informational = 0
        self.started = False  # any byte of the current response was received

    def expect(self, method: bytes) -> None:
        """A request with `method` was written. Only on a fresh connection or when the last response has ended."""
        if self.phase != DONE:
            raise RuntimeError("expect while a response is being read")
        self.phase = HEAD
        self.fast = self.tries_fast
        self.method = method
        self.informational = 0
        self.started = bool(self.buffer)

    def receive(self, data: bytes) -> None:
        self.started = True
        if self.phase != REFUSED:
            self.buffer = self.buffer + data if self.buffer else data

    def take_whole(self, data: bytes) -> Response | None:
        """The response when `data`, just received, is exactly one with a known head; None: call `receive`."""
        if self.buffer or self.phase != HEAD or not self.fast or self.method == b"HEAD":
            return None
        limits = self._limits
        found = recall.whole(data, limits.response_heads, limits.max_head_bytes, limits.max_body_bytes)
        if found is None:
            return None
        known, body, digits = found
        fields = known.fields
        if digits is not None and digits != fields[b"content-length"]:
            fields = {**fields, b"content-length": digits}
        response = known.again(len(body) if digits is not None else None, fields)
        response.body = body
        self.keep_alive = known.keep_alive
        self.phase = DONE
        return response

    def take_piece(self, data: bytes) -> bytes | None:
        """The payload when `data`, just received, is exactly one more chunk of the body under way; None: call `receive`."""
        body = self._body
        if self.phase != BODY or self.buffer or self._pending or self._failure is not None or type(body) is not ChunkedBody:
            return None
        return body.one(data)

    @property
    def reusable(self) -> bool:
        """The last response has ended in a way that lets another request go out on this connection."""
        return self.phase == DONE and self.keep_alive and not self.buffer and not self._eof

    def _between(self) -> Event:
        if self.buffer:
            raise Refused(502, "the upstream sent bytes that no request asked for")
        return EOF if self._eof else NEED_DATA

    def _next_head(self) -> Event:
        while True:
            buffer = self.buffer
            head_end = self._find_head() if buffer else -1
            if head_end < 0:
                if self._eof:
                    raise Refused(502, "the upstream closed the connection before its response head was whole")
                return NEED_DATA
            start = head_end + 4
            response = recall.read_response(buffer, head_end, self._limits, self.method) if self.fast else None
            if response is not None:
                return self._fast_response(response, buffer, start)
            self.fast = False
            response, body = authority.read_response(buffer[:start], self._limits, self.method)
            if body is not None:
                self.keep_alive = response.keep_alive and not body.ends_at_eof()
                self._begin_body(response, body, buffer[start:])
                return response
            self._count_informational()
            self.buffer = buffer[start:]
            self.fast = self.tries_fast

    def _fast_response(self, response: Response, buffer: bytes, start: int) -> Response:
        self.keep_alive = response.keep_alive
        if response.body is None and response.chunked:
            self._head = buffer[:start]
            self._begin_body(response, ChunkedBody(self._hand_over), buffer[start:])
            return response
        length = (response.content_length or 0) if response.body is None else 0
        response.body = fast.cut_body(buffer, start, length)
        if response.body is None:
            self._begin_body(response, fast.LengthBody(length), buffer[start:])
        else:
            self.buffer = buffer[start + length :]
            self.phase = DONE
        return response

    def _hand_over(self) -> Any:
        """h11's reader for the body under way, at a chunk's border."""
        self.fast = False
        return authority.read_response(self._head, self._limits, self.method)[1]

    def _count_informational(self) -> None:
        self.informational += 1
        if self.informational > MAX_INFORMATIONAL:
            raise Refused(502, f"the upstream sent more than {MAX_INFORMATIONAL} informational responses")

    def _refuse(self, refused: Refused) -> Refusal:
        self.keep_alive = False
        return super()._refuse(Refused(502, refused.message))
