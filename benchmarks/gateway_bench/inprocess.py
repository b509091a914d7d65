"""The whole forwarding path in this process without a socket: the real composition, with transports that only note writes.

`measured(work)` runs the application as `laya router` does, but instead of listening and waiting for a signal it calls
`work(Path)`. What is timed is therefore all Python between the two `data_received` and the two `write`, and nothing of the
kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from gateway_bench import stub
from gateway_bench.bodies import LARGE_BYTES, SMALL_BYTES, bodies, http, streamed
from gateway_bench.systems import laya_config
from laya import app
from laya.config import loads
from laya.log import Log
from laya.net import connection
from laya.net.connection import ClientConnection
from laya.net.loop import new_loop
from laya.net.server import Server
from laya.net.upstream import UpstreamConnection

KINDS = 512  # different requests in turn
STAGES = ("request in to upstream write", "then, until the loop is free", "answer in to client write", "then, until it is free")


class Sink:
    """A transport that keeps the last write and when it came."""

    def __init__(self) -> None:
        self.last: Any = b""
        self.at = 0.0

    def write(self, data) -> None:
        self.at = perf_counter()
        self.last = data

    def writelines(self, data) -> None:
        self.at = perf_counter()
        self.last = b"".join(data)

    def set_write_buffer_limits(self, high=None, low=None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def get_extra_info(self, name, default=None):
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Path:
    """One client connection and one to the backend, both open."""

    def __init__(self, server) -> None:
        self.server = server
        self.gateway = server.gateway
        self.client = ClientConnection(server)
        self.to_client = Sink()
        self.client.connection_made(self.to_client)
        self.pool = self.gateway.backends["stub"].pool
        self.to_backend = Sink()
        self._connect_backend()
        self.bodies = {size: bodies(size)[:KINDS] for size in (SMALL_BYTES, LARGE_BYTES)}
        self.requests = {
            size: [http(body, 8000, number % 16) for number, body in enumerate(found)] for size, found in self.bodies.items()
        }
        self.check()

    def _connect_backend(self) -> None:
        """As `Pool` does when a connection was made."""
        self.backend = UpstreamConnection(self.pool)
        self.backend.connection_made(self.to_backend)
        self.pool.connected += 1
        self.pool.idle.append(self.backend)

    def check(self) -> None:
        """What is timed is what is meant: the request goes out, the answer comes back."""
        request = self.requests[SMALL_BYTES][0]
        self.client.data_received(request)
        sent = bytes(self.to_backend.last)
        assert sent.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n"), sent
        assert sent.endswith(request.partition(b"\r\n\r\n")[2]), sent
        self.backend.data_received(stub.COMPLETION)
        answer = bytes(self.to_client.last)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
        assert answer.endswith(stub.BODY), answer

    def forward(self, size: int, rounds: int = 1) -> float:
        """Seconds of this thread for one request of `size`, the mean over `rounds` times all kinds."""
        requests, answer = self.requests[size], stub.COMPLETION
        ask, reply = self.client.data_received, self.backend.data_received
        clear = self._clear_log
        began = thread_time()
        for _ in range(rounds):
            for request in requests:
                ask(request)
                reply(answer)
            clear()
        return (thread_time() - began) / (rounds * len(requests))

    def _clear_log(self) -> None:
        """What the log's thread would take away."""
        self.gateway.log.lines.clear()
        self.gateway.log._pieces.clear()

    def stages(self, size: int) -> dict[str, float]:
        """Seconds by stage, each the median over all kinds (on the wall clock: a preempted request is an outlier)."""
        spent: list[tuple[float, ...]] = []
        answer, requests = stub.COMPLETION, self.requests[size]
        for request in requests:
            t0 = perf_counter()
            self.client.data_received(request)
            t1 = perf_counter()
            self.backend.data_received(answer)
            t2 = perf_counter()
            sent, answered = self.to_backend.at, self.to_client.at
            spent.append((sent - t0, t1 - sent, answered - t1, t2 - answered))
        self._clear_log()
        return dict(zip(STAGES, map(median, zip(*spent, strict=True)), strict=True))

    def frame(self, count: int) -> float:
        """Seconds of this thread for one frame of a stream of `count`."""
        self.client.data_received(http(streamed(count, 1), 8000))
        self.backend.data_received(stub.STREAM_HEAD)
        data = stub.chunk(stub.FRAME % 1234567890123456)
        took = self.backend.data_received
        began = thread_time()
        for _ in range(count):
            took(data)
        spent = thread_time() - began
        took(stub.chunk(stub.LAST) + b"0\r\n\r\n")
        assert bytes(self.to_client.last).endswith(b"0\r\n\r\n")
        return spent / count


def measured(work: Callable[[Path], Any]) -> Any:
    """What `work` returns, called with everything composed as in `laya router`, access log and metrics on."""
    kept: list[Any] = []

    class Held(Server):
        async def listen(self) -> None: ...

        async def run(self) -> None:
            kept.append(work(Path(self)))

    with open(os.devnull, "wb") as sink:
        log = Log("info", fd=sink.fileno())
        config = loads(json.dumps(laya_config(port=8000, stub_port=9, log_level="info", health=None)))
        real, app.Server = app.Server, Held
        # Nobody else waits for a turn, and the loop, which would go on after a break, does not run.
        burst, connection.BURST_S = connection.BURST_S, float("inf")
        try:
            with asyncio.Runner(loop_factory=partial(new_loop, tls=False)) as runner:
                runner.run(app.serve(config, "router", log, lambda: config))
        finally:
            app.Server = real
            connection.BURST_S = burst
    return kept[0]
