"""The output side of a client connection: what an exchange calls to answer.

In: status, rendered header lines, bodies and pieces from the gateway. Out: bytes on the transport, framed as the client's
version of HTTP wants them. Loop thread only.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from abc import ABC, abstractmethod
from typing import Any

from laya.net.flow import JOIN_BELOW, MAX_UNSENT
from laya.wire.reply import LAST_CHUNK, chunk, response_start

BODILESS = (204, 304)


class Answering(ABC):
    """Base of `ClientConnection`, which is an asyncio.Protocol in all but name: that base has a dict, and the lane reads slots.
    `chunked`, `keep_alive` and `head_only` belong to the request that is answered."""

    __slots__ = ("server", "transport", "exchange", "paused", "keep_alive", "chunked", "_streaming", "head_only")

    # What `gateway.between` says otherwise, where something stands before this connection.
    staged = False
    reads_answers = False

    def __init__(self, server) -> None:
        self.server = server
        self.transport: Any = None  # an asyncio.Transport from `connection_made` on
        self.exchange: Any = None
        self.paused = False
        self.keep_alive = True
        self.chunked = False
        self._streaming = False
        self.head_only = False

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _leave(self) -> None: ...

    @abstractmethod
    def _release_body(self) -> None: ...

    @abstractmethod
    def done(self) -> None: ...

    def ready_for(self, route) -> bool:
        """Whether what `route` wants done to the request was done."""
        return False

    def reply(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole answer; `lines` are rendered header lines. The exchange is over."""
        self.send(status, lines, body)
        self.done()

    def send(self, status: int, lines: bytes, body: bytes) -> None:
        """The whole answer, with `done` to follow: what can wait until the client has its bytes is done in between."""
        self._write_reply(status, lines, body, close=not self.keep_alive or self.server.draining)

    def _write_reply(self, status: int, lines: bytes, body: bytes, *, close: bool) -> None:
        head = response_start(status, lines, content_length=None if status in BODILESS else len(body), close=close)
        if len(body) < JOIN_BELOW or self.head_only:
            self.transport.write(head if self.head_only else head + body)
        else:
            self.transport.writelines((head, body))

    def start(self, status: int, lines: bytes, first: bytes = b"") -> None:
        """Begin an answer of unknown length, with its first piece if there is one."""
        self._streaming = True
        close = not self.keep_alive or not self.chunked or self.server.draining
        head = response_start(status, lines, chunked=self.chunked, close=close)
        if close:
            self.keep_alive = False
        if self.head_only:
            first = b""
        self.transport.write(head + (chunk(first) if self.chunked and first else first))

    def start_sized(self, status: int, lines: bytes, length: int) -> None:
        """Begin an answer of known length; `write` then gives its bytes."""
        close = not self.keep_alive or self.server.draining
        if close:
            self.keep_alive = False
        self.chunked = False
        self.transport.write(response_start(status, lines, content_length=length, close=close))

    def write(self, data: bytes) -> bool:
        """The next piece. False when the reader is so far behind that it was cut off."""
        if self.head_only or not data:
            return True
        self.transport.write(chunk(data) if self.chunked else data)
        if self.paused and self.transport.get_write_buffer_size() > MAX_UNSENT:
            self._leave()
            self.transport.abort()
            return False
        return True

    def finish(self) -> None:
        """The answer is whole. The exchange is over."""
        if self.chunked and self._streaming and not self.head_only:
            self.transport.write(LAST_CHUNK)
        self.done()

    def break_off(self, last: bytes = b"") -> None:
        """End a begun answer so that nobody can take it for whole: `last` is written, no terminator, then close."""
        if last:
            self.transport.write(chunk(last) if self.chunked else last)
        self.exchange = None
        self._release_body()
        if self.chunked or last:
            self.close()
        else:
            self._reset()  # without chunks or words only that tells that something is missing

    def _unsent(self) -> int:
        """Bytes that the client has not taken, those that the kernel holds for it included: it takes more only now and then."""
        sock = self.transport.get_extra_info("socket")
        try:
            kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        except (AttributeError, OSError, ValueError):
            kernel = b""  # it is just being closed
        return self.transport.get_write_buffer_size() + int.from_bytes(kernel, sys.byteorder)

    def _reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()
