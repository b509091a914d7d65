"""`laya.net.loop.Loop` serves its streams where it waits, and is late for nothing else meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from laya.app import _uses_tls
from laya.config.load import loads
from laya.net.loop import NAMES_AT_ONCE, Loop, new_loop
from laya.net.streams import Streams, streams_on

pytest.importorskip("laya.net.native_lane", reason="built without a C compiler: apt install gcc")

LIMIT_S = 20
LATE_S = 1.0  # far more than any machine needs, far less than the limit


class Counting(asyncio.Protocol):
    """Takes what comes and asks nothing of the loop."""

    def __init__(self, on_data: Callable[[bytes], None] = lambda data: None) -> None:
        self.count = 0
        self.on_data = on_data

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.on_data(data)


def run(main: Callable[[Streams], Awaitable[None]]) -> None:
    async def timed() -> None:
        streams = streams_on(asyncio.get_running_loop())
        async with asyncio.timeout(LIMIT_S):
            await main(streams)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(timed())


@contextlib.contextmanager
def flood(streams: Streams) -> Iterator[Counting]:
    """A stream that always has something."""
    ours, peer = socket.socketpair()
    flooded = Counting()
    streams.open(ours, flooded)

    def pour() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer.sendall(bytes(200_000))

    thread = threading.Thread(target=pour, daemon=True)
    thread.start()
    try:
        yield flooded
    finally:
        peer.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        peer.close()


@pytest.mark.parametrize("busy", [False, True])
def test_timers_are_on_time(busy):
    async def main(streams: Streams) -> None:
        with flood(streams) if busy else contextlib.nullcontext(Counting()) as flooded:
            for wait in (0, 0.001, 0.01, 0.05, 0.1) * 4:
                before = time.monotonic()
                await asyncio.sleep(wait)
                assert wait <= time.monotonic() - before + 0.001 < wait + LATE_S
            assert bool(flooded.count) is busy

    run(main)


ASKED: dict[str, Callable[[asyncio.AbstractEventLoop, asyncio.Event], object]] = {
    "call_soon": lambda loop, event: loop.call_soon(event.set),
    "call_later": lambda loop, event: loop.call_later(0.01, event.set),
    "call_at": lambda loop, event: loop.call_at(loop.time() + 0.01, event.set),
    "call_soon_threadsafe": lambda loop, event: loop.call_soon_threadsafe(event.set),
    "another thread": lambda loop, event: threading.Timer(0.01, loop.call_soon_threadsafe, [event.set]).start(),
    "a task": lambda loop, event: loop.create_task(set_later(event)),
    "an executor": lambda loop, event: loop.run_in_executor(None, time.sleep, 0.01).add_done_callback(lambda _: event.set()),
    "a future": lambda loop, event: event.set(),
}


async def set_later(event: asyncio.Event) -> None:
    await asyncio.sleep(0.01)
    event.set()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("how", ASKED)
def test_what_a_stream_asks_of_the_loop_happens_soon(how, busy):
    """Nothing else would end the wait before the limit."""

    async def main(streams: Streams) -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        with flood(streams) if busy else contextlib.nullcontext():
            ours, peer = socket.socketpair()
            streams.open(ours, Counting(lambda data: ASKED[how](loop, event)))
            threading.Timer(0.05, peer.send, [b"now"]).start()
            before = time.monotonic()
            await event.wait()
            assert time.monotonic() - before < LATE_S
            peer.close()

    run(main)


@pytest.mark.parametrize("busy", [False, True])
def test_signals_and_files_of_the_loops_own_are_seen(busy):
    async def main(streams: Streams) -> None:
        loop, signalled, readable = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        read, write = os.pipe()
        loop.add_signal_handler(signal.SIGUSR1, signalled.set)
        loop.add_reader(read, lambda: (os.read(read, 1), readable.set()))
        with flood(streams) if busy else contextlib.nullcontext():
            for _ in range(5):
                before = time.monotonic()
                threading.Timer(0.02, os.kill, [os.getpid(), signal.SIGUSR1]).start()
                await signalled.wait()
                threading.Timer(0.02, os.write, [write, b"x"]).start()
                await readable.wait()
                assert time.monotonic() - before < LATE_S
                signalled.clear()
                readable.clear()
        loop.remove_reader(read)
        loop.remove_signal_handler(signal.SIGUSR1)
        os.close(read)
        os.close(write)

    run(main)


def test_an_interrupt_ends_a_loop_that_waits_for_nothing():
    async def main(streams: Streams) -> None:
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        await asyncio.Event().wait()

    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(main)
    assert time.monotonic() - before < LATE_S


def test_a_process_is_started_and_waited_for():
    async def main(streams: Streams) -> None:
        with flood(streams):
            child = await asyncio.create_subprocess_exec("sh", "-c", "echo out; exit 3", stdout=asyncio.subprocess.PIPE)
            assert await child.communicate() == (b"out\n", None) and child.returncode == 3

    run(main)


def test_streams_that_outlive_their_loop_are_let_go_of():
    files = len(os.listdir("/proc/self/fd"))
    ours, peer = socket.socketpair()
    told = Counting()

    async def main(streams: Streams) -> None:
        streams.open(ours, told)

    run(main)
    peer.close()
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == files


def test_addresses_are_there_while_names_hang(monkeypatch):
    """Nor do the executor's jobs and the end of the loop wait for them."""
    real, go_on = socket.getaddrinfo, threading.Event()

    def hanging(host, *given):
        if host == "hangs.example" and not given[-1] & socket.AI_NUMERICHOST:
            go_on.wait(LIMIT_S)
        return real(host, *given)

    async def main(streams: Streams) -> None:
        loop = asyncio.get_running_loop()
        before = time.monotonic()
        names = [asyncio.ensure_future(loop.getaddrinfo("hangs.example", 80)) for _ in range(40)]
        await asyncio.sleep(0.05)
        assert sum(thread.name == "laya-name" for thread in threading.enumerate()) == NAMES_AT_ONCE
        names[0].cancel()
        assert (await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM))[0][4] == ("127.0.0.1", 80)
        assert (await loop.getaddrinfo("::1", 80))[0][0] == socket.AF_INET6
        assert await loop.run_in_executor(None, lambda: 1) == 1
        assert time.monotonic() - before < LATE_S
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.getaddrinfo("localhost", 80)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    before = time.monotonic()
    run(main)
    assert time.monotonic() - before < 2 * LATE_S
    go_on.set()


def test_names_are_found_or_not():
    async def main(streams: Streams) -> None:
        loop = asyncio.get_running_loop()
        assert (await loop.getaddrinfo("localhost", 80, family=socket.AF_INET))[0][4] == ("127.0.0.1", 80)
        for name in ("nobody.invalid", "x" * 300, ""):
            with pytest.raises((OSError, UnicodeError)):
                await loop.getaddrinfo(name, 80, family=socket.AF_INET6 if not name else 0, flags=0 if name else 1 << 20)

    run(main)


def test_a_stream_may_stop_the_loop():
    loop = Loop()
    ours, peer = socket.socketpair()
    streams_on(loop).open(ours, Counting(lambda data: loop.stop()))
    loop.call_later(LIMIT_S, loop.stop)
    peer.send(b"now")
    before = time.monotonic()
    loop.run_forever()
    assert time.monotonic() - before < LATE_S
    peer.close()
    loop.close()


BACKENDS = {"plain": {"url": "http://127.0.0.1:1/v1"}, "started": {"command": "serve {port}"}, "near": {"url": "unix:/s"}}


@pytest.mark.parametrize(("more", "kind"), [
    ({}, Loop),
    ({"backends": BACKENDS | {"far": {"url": "https://127.0.0.1:1/v1"}}}, uvloop.Loop),
    ({"server": {"tls": {"certificate": "c.pem", "key": "k.pem"}}}, uvloop.Loop),
])  # fmt: skip
def test_uvloop_is_there_where_tls_is(more, kind):
    routes = [{"match": name, "to": name} for name in ("plain", "started")]
    config = loads(json.dumps({"backends": BACKENDS, "routes": routes} | more))
    loop = new_loop(tls=_uses_tls(config))
    loop.close()
    assert type(loop) is kind
