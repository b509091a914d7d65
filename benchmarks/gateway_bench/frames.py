"""Streams: how long a frame is on its way from the stub's write to the client's read, and how soon the first one comes.

Each frame's text is the time at which the stub wrote it (both processes read CLOCK_MONOTONIC), so a delay is a difference of
two clock readings and the stub's own pacing cancels out. What a gateway adds is the difference to the straight run.
"""

from __future__ import annotations

import asyncio
import re
import time

import uvloop

from gateway_bench.bodies import http, streamed
from gateway_bench.chunks import Dechunker
from gateway_bench.figures import percentile

STAMP = re.compile(rb'"content": ?"(\d{10,20})"')  # some gateways write the JSON anew, with blanks
STAGGER_S = 0.003  # between the streams' starts: not a divisor of the stub's 5 ms, so that frames do not come in bursts
LIMIT_S = 60.0


class StreamClient(asyncio.Protocol):
    """One connection that reads one stream at a time."""

    def __init__(self) -> None:
        self.delays: list[int] = []  # ns, without those of first frames
        self.first: list[int] = []  # ns from the request to the first frame
        self.errors = 0
        self._done: asyncio.Future | None = None

    def connection_made(self, transport) -> None:
        self.transport = transport

    async def stream(self, request: bytes, frames: int) -> None:
        """Ask and wait until the stream has ended."""
        self._done = asyncio.get_running_loop().create_future()
        self._expected, self._seen = frames, 0
        self._response, self._tail = Dechunker(), b""
        self._began = time.monotonic_ns()
        self.transport.write(request)
        await self._done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        payload = self._tail + self._response.feed(data)
        last = 0
        for match in STAMP.finditer(payload):
            last = match.end()
            if self._seen:
                self.delays.append(now - int(match[1]))
            else:
                self.first.append(now - self._began)
            self._seen += 1
        self._tail = payload[max(last, len(payload) - 64) :]  # a stamp may be cut: 64 bytes hold any
        if self._response.done:
            self._end()

    def connection_lost(self, exc) -> None:
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self.errors += self._seen != self._expected
            self._done.set_result(None)


def run(port: int, streams: int, frames: int, *, dense: bool = False) -> dict[str, float]:
    """`streams` at the same time, each of `frames` frames, after a short one each that opens all connections.

    `dense`: the stub writes each frame as soon as the last one is written; `per_frame_us` is then the time that a frame takes
    of the whole chain's capacity.
    """
    return uvloop.run(_run(port, streams, frames, dense))


async def _run(port: int, streams: int, frames: int, dense: bool) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(StreamClient, "127.0.0.1", port))[1] for _ in range(streams)]

    async def one(client: StreamClient, number: int, count: int, stagger_s: float) -> None:
        await asyncio.sleep(stagger_s * number)
        await client.stream(http(streamed(count, number, dense), port, number % 16), count)

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(one(client, number, 2, 0.0) for number, client in enumerate(clients)))  # all at the same time
        for client in clients:
            client.delays.clear()
            client.first.clear()
        began = time.monotonic_ns()
        stagger_s = 0.0 if dense else STAGGER_S
        await asyncio.gather(*(one(client, number, frames, stagger_s) for number, client in enumerate(clients)))
        took = time.monotonic_ns() - began
    for client in clients:
        client.transport.close()
    delays = sorted(delay for client in clients for delay in client.delays)
    first = sorted(wait for client in clients for wait in client.first)
    return {
        "frame_p50_us": percentile(delays, 50) / 1e3, "frame_p99_us": percentile(delays, 99) / 1e3,
        "ttft_p50_us": percentile(first, 50) / 1e3, "per_frame_us": took / max(1, len(delays) + len(first)) / 1e3,
        "frames": len(delays) + len(first),
        "errors": sum(client.errors for client in clients),
    }  # fmt: skip
