"""Active health: each backend's health path is asked for every few seconds, over a connection of its own.

In: backends with their pools. Out: `backend.healthy`. It touches no count of real traffic; a backend that is back after failed
probes may be tried at once, by the one request that its breaker lets through. Loop thread only.
"""

from __future__ import annotations

import asyncio
import random

from laya.wire.messages import NEED_DATA, Limits, Response
from laya.wire.outbound import Outbound
from laya.wire.reply import open_request_head

PERIOD_S = 5.0  # as often as load balancers commonly probe
SICK_PERIOD_S = 1.0  # a sick one, so that it is taken in again soon; a refused connection costs nobody anything
JITTER = 0.2  # share of the period by which probes differ, so that many backends are not asked at the same moment
TIMEOUT_S = 2.0
# Failed probes in a row that make a healthy backend unhealthy: one may be a full accept queue or a pause of a collector.
FALL = 2


class HealthProbe:
    """Watches the backends that have a health path; `watch` may be called again with others."""

    def __init__(self) -> None:
        self._tasks: dict = {}

    def watch(self, backends: list) -> None:
        """Probe these from now on and no others; those that stay keep their pace."""
        wanted = {backend for backend in backends if backend.settings.health}
        for backend in self._tasks.keys() - wanted:
            self._tasks.pop(backend).cancel()
        for backend in wanted - self._tasks.keys():
            self._tasks[backend] = asyncio.get_running_loop().create_task(self._watch(backend))

    def stop(self) -> None:
        self.watch([])

    async def _watch(self, backend) -> None:
        failures = 0
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await _probe(backend)
            except (OSError, UnicodeError, TimeoutError):
                answer = False
            if answer and failures:
                backend.breaker.hasten(backend.pool.clock.now)
            failures = failures + 1 if answer is False else 0
            if answer is not False or failures >= FALL or backend.healthy is None:
                backend.healthy = answer
            period = SICK_PERIOD_S if failures else PERIOD_S
            await asyncio.sleep(period * random.uniform(1 - JITTER, 1 + JITTER))


async def _probe(backend) -> bool | None:
    """Whether it can serve; None when the path says nothing of that: the server answers, and has no such page for us."""
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
                return _means(event)
    finally:
        writer.transport.abort()


def _means(event) -> bool | None:
    if not isinstance(event, Response):
        return False
    if 400 <= event.status < 500 and event.status != 429:
        return None
    return event.status < 400
