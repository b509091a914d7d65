"""One small question after another over a connection of its own: health paths and cards, never a client's request.

In: an address and a path. Out: status and body, or None when the connection has ended. Loop thread only.
"""

from __future__ import annotations

import asyncio

from laya.net.pool import Address
from laya.wire.messages import NEED_DATA, BodyData, EndOfBody, Limits, Response
from laya.wire.outbound import Outbound
from laya.wire.reply import open_request_head

MAX_BODY = 1 << 20  # such pages say little


class Asker:
    """`async with Asker(...)`: connects; OSError, UnicodeError or TimeoutError where that fails."""

    def __init__(self, address: Address, authority: bytes, headers: list[tuple[bytes, bytes]], tls=None) -> None:
        self._address = address
        self._authority = authority
        self._headers = headers
        self._tls = tls
        self._parser = Outbound(Limits(max_body_bytes=MAX_BODY))
        self.reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Asker:
        address = self._address
        if address.unix is not None:
            self.reader, self._writer = await asyncio.open_unix_connection(address.unix)
        else:
            self.reader, self._writer = await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        return self

    async def __aexit__(self, *_) -> None:
        self._writer.transport.abort()

    async def ask(self, path: str, *, whole: bool = True) -> tuple[int, bytes] | None:
        """None: the connection ended, or what came is no answer. Not `whole`: the status will do, and no question follows."""
        self._writer.write(open_request_head(b"GET", path.encode(), self._authority, self._headers) + b"\r\n")
        self._parser.expect(b"GET")
        status, parts = 0, []
        while True:
            event = self._parser.next_event()
            if event is NEED_DATA:
                data = await self.reader.read(65536)
                if data:
                    self._parser.receive(data)
                    continue
                self._parser.receive_eof()
                event = self._parser.next_event()
                if event is NEED_DATA:
                    return None
            if type(event) is Response:
                if event.body is not None or not whole:
                    return event.status, event.body or b""
                status = event.status
            elif type(event) is BodyData:
                parts.append(event.data)
            elif type(event) is EndOfBody:
                return status, b"".join(parts)
            else:
                return None
