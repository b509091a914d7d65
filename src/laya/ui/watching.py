"""One watcher of the page's events: a frame a second until it leaves or the server drains.

In: the desk, which makes the frames. Out: server-sent events on the connection. Loop thread only.
"""

from __future__ import annotations

from laya.gateway.exchange import DONE, STREAMING, Exchange

SSE_LINES = b"content-type: text/event-stream\r\ncache-control: no-store\r\nx-accel-buffering: no\r\n"
RETRY = b"retry: 2000\n\n"  # how soon a browser that lost us asks again, in milliseconds
FRAME_S = 1.0
TICK_S = 0.25  # the clock's: a frame that is due within half of it goes out now


class WatchExchange(Exchange):
    """Counts among the desk's watchers from `start` to its end."""

    def __init__(self, desk, asked: Exchange) -> None:
        super().__init__(asked.gateway, asked.connection, asked.request, b"", asked.plan)
        self._desk = desk
        self._sent_at = float("-inf")

    def start(self) -> None:
        self._desk.watchers += 1
        self.gateway.watchers += 1
        self.move(STREAMING)
        self.status = 200
        self.connection.start(200, SSE_LINES + self.own_lines(), RETRY)

    def on_tick(self, now: float) -> None:
        if self.state is not STREAMING:
            return
        if self.connection.server.draining or self.request.method == b"HEAD":
            self._end("ok")
            self.connection.finish()
        elif now - self._sent_at >= FRAME_S - TICK_S / 2 and not self.connection.paused:  # who reads slowly misses frames
            self._sent_at = now
            self.connection.write(self._desk.frame())

    def _end(self, outcome: str) -> None:
        if self.state is not DONE:
            self._desk.watchers -= 1
            self.gateway.watchers -= 1
        super()._end(outcome)
