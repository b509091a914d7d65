"""Active health: each backend's health path is asked for every few seconds, over a connection of its own.

In: backends with their pools. Out: `backend.healthy`. It never touches in-flight counts or breakers of real traffic. Loop
thread only.
"""

from __future__ import annotations

import asyncio

from laya.wire.messages import NEED_DATA, Limits, Response
from laya.wire.outbound import Outbound
from laya.wire.reply import open_request_head

PERIOD_S = 5.0  # as often as load balancers commonly probe
TIMEOUT_S = 2.0


class HealthProbe:
    def __init__(self, backends: list) -> None:
        self._backends = [b for b in backends if b.settings.health]
        self._tasks: list[asyncio.Task] = []

    def start(self) -> None:
        self._tasks = [asyncio.get_running_loop().create_task(self._watch(backend)) for backend in self._backends]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _watch(self, backend) -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    backend.healthy = await _probe(backend)
            except (OSError, UnicodeError, TimeoutError):
                backend.healthy = False
            await asyncio.sleep(PERIOD_S)


async def _probe(backend) -> bool:
    address = backend.pool.address
    if address.unix is not None:
        reader, writer = await asyncio.open_unix_connection(address.unix)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=backend.pool.tls)
    try:
        target = backend.settings.health.encode()
        writer.write(open_request_head(b"GET", target, backend.authority, backend.headers) + b"\r\n")
        parser = Outbound(Limits(max_body_bytes=1 << 20))  # a health page says little
        parser.expect(b"GET")
        while True:
            data = await reader.read(65536)
            if data:
                parser.receive(data)
            else:
                parser.receive_eof()
            event = parser.next_event()
            if event is not NEED_DATA or not data:
                return isinstance(event, Response) and event.status < 400
    finally:
        writer.transport.abort()
