"""The way from a router to an engine process: open while that process is ready, and never to one that has just died.

In: a backend with a gated pool. Out: its gate opened and shut, `healthy`, and the engine's card for /v1/models. One idle
connection is kept to the engine: its end is the first sign that the process has gone, and comes at once. Loop thread only.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import msgspec

from laya.net.asking import Asker
from laya.net.health import FALL

# How often an engine that is ready is asked again: within its keep-alive time, so that only its end closes the connection.
PERIOD_S = 2.0
# While it is away: a restart is seen within this, and a refused connection costs nobody anything.
AWAY_S = 0.1
TIMEOUT_S = 5.0  # a host under full load answers its ready page well within it


class EngineLink:
    """Watches one engine process; `start` and `stop` on the loop."""

    def __init__(self, backend) -> None:
        self._backend = backend
        self._task: asyncio.Task | None = None
        self._reached = False  # its host took the last connection
        backend.pool.absent = "the engine process is not ready"
        backend.pool.on_unreachable = self._away

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        silent = 0
        while True:
            self._reached = False
            try:
                await self._talk()
            except (OSError, UnicodeError, TimeoutError) as exc:
                # Refused or not there: its host lives, and has told whoever waited for an answer.
                gone = not self._reached and not isinstance(exc, ConnectionError | FileNotFoundError)
                silent = silent + 1 if gone else 0
                self._backend.pool.unreachable = silent >= FALL
                self._away()
                await asyncio.sleep(AWAY_S)

    async def _talk(self) -> None:
        """Ask over one connection until it ends. Raises where the engine cannot be reached or does not answer."""
        backend = self._backend
        asker = Asker(backend.pool.address, backend.authority, backend.headers, backend.pool.tls)
        async with asyncio.timeout(TIMEOUT_S):
            await asker.__aenter__()
        self._reached = True
        backend.pool.unreachable = False
        asked = 0
        try:
            while True:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await asker.ask("/ready")
                    if answer is None and not asked:
                        raise ConnectionError
                    if answer is None:
                        return
                    asked += 1
                    ready = answer[0] < 400
                    if ready and not backend.pool.is_open:
                        backend.card = await self._card(asker)
                if ready:
                    self._here()
                else:
                    self._away()
                try:
                    async with asyncio.timeout(PERIOD_S if ready else AWAY_S):
                        await asker.reader.read(1)
                        return  # it closed the connection: asked anew at once
                except TimeoutError:
                    pass
        finally:
            await asker.__aexit__()

    async def _card(self, asker: Asker) -> dict[str, Any] | None:
        answer = await asker.ask(f"/v1/models/{quote(self._backend.name)}")
        if answer is None or answer[0] != 200:
            return None
        try:
            card = msgspec.json.decode(answer[1])
        except msgspec.DecodeError:
            return None
        return card if isinstance(card, dict) else None

    def _here(self) -> None:
        backend = self._backend
        if not backend.pool.is_open:
            backend.healthy = True
            backend.breaker.succeeded()  # what was counted was the death of the process before
            backend.pool.open()

    def _away(self) -> None:
        backend = self._backend
        if backend.pool.is_open or backend.healthy is None:
            backend.healthy = False
            backend.pool.shut("the engine process is not ready")
