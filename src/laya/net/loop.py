"""The event loop, where plain sockets are read and written in C (`laya.net.streams`).

It is asyncio's own, in pure Python, but for where it waits: in C, in one epoll set with all streams and, as one more member,
its other files (listeners, wake-ups, signals). A turn of Python is taken only when one of these, a timer or a callback is due:
under load it hardly runs. uvloop takes a shorter turn, but asks the kernel once for its files and once for the streams.
Loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

from laya.net.in_c import native_lane

NAMES_AT_ONCE = 16  # lookups; one whose server is silent takes its place for some seconds


class Files(selectors.EpollSelector):
    """The loop's own files; the streams are served where it waits for them."""

    streams: Any = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(0) if self.streams.wait(timeout) else []

    def close(self) -> None:
        if self.streams is not None:
            self.streams.close()
        super().close()


class Loop(asyncio.SelectorEventLoop):
    """`streams`: those of `laya.net.native_lane`. What is due from within a stream's callback ends the wait."""

    def __init__(self) -> None:
        files = Files()
        super().__init__(files)
        self.streams = files.streams = native_lane.Streams(self, files.fileno())
        self._names = asyncio.Semaphore(NAMES_AT_ONCE)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        self.streams.leave()
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.TimerHandle:
        self.streams.leave()
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        self.streams.leave()
        super().stop()

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[Any, ...]]:
        """Addresses as such are answered at once. Names are looked up in threads of their own, a few at a time, that keep
        neither the executor's jobs nor the end of the process waiting."""
        try:
            return socket.getaddrinfo(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass
        await self._names.acquire()
        found: asyncio.Future[Any] = self.create_future()

        def end(tell: Callable[[Any], None], what: Any) -> None:
            self._names.release()
            if not found.done():
                tell(what)

        def look() -> None:
            try:
                end_with = found.set_result, socket.getaddrinfo(host, port, family, type, proto, flags)
            except Exception as fault:
                end_with = found.set_exception, fault
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.call_soon_threadsafe(end, *end_with)

        threading.Thread(target=look, name="laya-name", daemon=True).start()
        return await found


def new_loop(*, tls: bool) -> asyncio.AbstractEventLoop:
    """For a process whose connections are plain, or (mostly) under TLS: asyncio's takes twice the time of uvloop's."""
    if not tls and hasattr(native_lane, "Streams"):
        return Loop()
    import uvloop

    return uvloop.new_event_loop()
