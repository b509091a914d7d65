"""Active health: each backend's health path is asked for every few seconds, over a connection of its own.

In: backends with their pools. Out: `backend.healthy`, and `pool.unreachable` where not even a connection to its host can be
made: calls that wait there for their first byte then go elsewhere. It touches no count of real traffic; a backend that is back
after failed probes may be tried at once, by the one request that its breaker lets through. Loop thread only.
"""

from __future__ import annotations

import asyncio
import random

from laya.net.asking import Asker

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
        failures = silent = 0
        pool = backend.pool
        while True:
            answer, reached = False, False
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    async with Asker(pool.address, backend.authority, backend.headers, pool.tls) as asker:
                        reached = True
                        answer = _means(await asker.ask(backend.settings.health, whole=False))
            except ConnectionRefusedError:
                reached = True  # its host lives: what runs there may be ending in order
            except (OSError, UnicodeError, TimeoutError):
                pass
            silent = 0 if reached else silent + 1
            pool.unreachable = silent >= FALL
            if answer and failures:
                backend.breaker.hasten(pool.clock.now)
            failures = failures + 1 if answer is False else 0
            if answer is not False or failures >= FALL or backend.healthy is None:
                backend.healthy = answer
            period = SICK_PERIOD_S if failures else PERIOD_S
            await asyncio.sleep(period * random.uniform(1 - JITTER, 1 + JITTER))


def _means(answer: tuple[int, bytes] | None) -> bool | None:
    """Whether it can serve; None when the path says nothing of that: the server answers, and has no such page for us."""
    if answer is None:
        return False
    status = answer[0]
    if 400 <= status < 500 and status != 429:
        return None
    return status < 400
