"""Sockets in C (`laya.net.streams`) tell their protocols what the loop's own transports tell, in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from laya.net.flow import HIGH_WATER
from laya.net.loop import Loop
from laya.net.streams import Listener, Streams, streams_on

pytest.importorskip("laya.net.native_lane", reason="built without a C compiler: apt install gcc")

LIMIT_S = 20
WAYS = ["loop", "streams"]


@pytest.fixture(autouse=True, params=["laya", "uvloop"])
def on_each_loop(request, monkeypatch) -> None:
    """Each test runs on both loops that a process may have."""
    monkeypatch.setitem(globals(), "new_loop", {"laya": Loop, "uvloop": uvloop.new_event_loop}[request.param])


new_loop: Callable[[], asyncio.AbstractEventLoop] = Loop


class Told:
    """A protocol that keeps what it is told: (what, with what)."""

    def __init__(self, stays: bool = False) -> None:
        self.events: list[tuple] = []
        self.data = b""
        self.stays = stays
        self.transport: Any = None
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_resume: Callable[[], None] = lambda: None

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)
        self.events.append(("made",))

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.events[-1] != ("data",):
            self.events.append(("data",))
        self.on_data(data)

    def eof_received(self) -> bool:
        self.events.append(("eof",))
        return self.stays

    def pause_writing(self) -> None:
        self.events.append(("pause",))

    def resume_writing(self) -> None:
        self.events.append(("resume",))
        self.on_resume()

    def connection_lost(self, why: Exception | None) -> None:
        self.events.append(("lost", type(why)))

    @property
    def is_lost(self) -> bool:
        return self.events[-1][0] == "lost"


def run(main: Callable[..., Any]) -> Any:
    """`main(connect, faults)` on a loop; `connect(way, protocol)` gives the peer's end, a blocking socket."""

    async def timed() -> Any:
        loop = asyncio.get_running_loop()
        streams = streams_on(loop)
        faults: list[dict] = []
        loop.set_exception_handler(lambda _, told: faults.append(told))
        peers: list[socket.socket] = []

        async def connect(way: str, protocol: Any) -> socket.socket:
            ours, peer = tcp_pair()
            peers.append(peer)
            peer.settimeout(LIMIT_S)
            if way == "streams":
                streams.open(ours, protocol)
            else:
                await loop.create_connection(lambda: protocol, sock=ours)
            return peer

        try:
            async with asyncio.timeout(LIMIT_S):
                return await main(connect, faults)
        finally:
            for peer in peers:
                peer.close()
            await asyncio.sleep(0.02)
            streams.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(timed())


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    return ours, peer


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def in_thread(work: Callable[..., Any], *given: Any) -> asyncio.Future:
    return asyncio.get_running_loop().run_in_executor(None, work, *given)


def read_all(peer: socket.socket) -> bytes:
    found = b""
    while data := peer.recv(1 << 20):
        found += data
    return found


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def on_both_ways(main: Callable[[str, Any], Any]) -> None:
    """`main(way, connect)` tells the same of both."""
    told = {way: run(lambda connect, faults, way=way: main(way, connect)) for way in WAYS}
    assert told["streams"] == told["loop"]


def test_words_there_and_back_and_the_end():
    async def main(way, connect):
        told = Told()
        told.on_data = lambda data: told.transport.write(data.upper())
        peer = await connect(way, told)
        peer.sendall(b"hello")
        assert await in_thread(peer.recv, 100) == b"HELLO"
        peer.close()
        await until(lambda: told.is_lost)
        return told.events, told.data, told.transport.is_closing(), told.transport.get_write_buffer_size()

    on_both_ways(main)


@pytest.mark.parametrize("how", ["write", "writelines", "views"])
def test_what_the_kernel_does_not_take_waits_and_comes_whole(how):
    data = random.Random(5).randbytes(9_000_001)

    async def main(way, connect):
        told = Told()
        peer = await connect(way, told)
        if how == "write":
            for at in range(0, len(data), 700_000):
                told.transport.write(data[at : at + 700_000])
        elif how == "writelines":
            told.transport.writelines([data[at : at + 100_000] for at in range(0, len(data), 100_000)])
        else:
            view = memoryview(data)
            told.transport.writelines((data[:5], b"", *(view[at : at + 3_000_000] for at in range(5, len(data), 3_000_000))))
        waits = told.transport.get_write_buffer_size()
        assert 0 < waits < len(data) and told.events == [("made",), ("pause",)]
        told.transport.close()  # and still all of it comes
        assert await in_thread(read_all, peer) == data
        await until(lambda: told.is_lost)
        return [event for event in told.events if event != ("resume",)]  # uvloop leaves it out before the end

    on_both_ways(main)


def test_a_source_that_is_told_to_pause_goes_on_when_all_has_gone():
    async def main(way, connect):
        told = Told()
        peer = await connect(way, told)
        left = [b"%07d" % n * 1_000_000 for n in range(4)]  # more than the kernel takes while nobody reads
        whole = b"".join(left)
        told.on_resume = lambda: told.transport.write(left.pop(0)) if left else told.transport.close()
        told.on_resume()
        await until(lambda: ("pause",) in told.events)
        assert await in_thread(read_all, peer) == whole
        await until(lambda: told.is_lost)
        assert all(a != b for a, b in zip(told.events, told.events[1:], strict=False))  # never paused twice
        return told.events[:2], told.events[-1]

    on_both_ways(main)


def test_abort_drops_what_waits():
    async def main(way, connect):
        told = Told()
        peer = await connect(way, told)
        told.transport.write(bytes(8_000_000))
        told.transport.abort()
        told.transport.write(b"more")
        assert told.transport.is_closing()
        await until(lambda: told.is_lost)
        assert len(await in_thread(read_all, peer)) < 8_000_000
        return told.events

    on_both_ways(main)


@pytest.mark.parametrize("reading", [True, False])
def test_a_reset_is_told_as_one(reading):
    async def main(way, connect):
        told = Told()
        peer = await connect(way, told)
        if not reading:
            told.transport.pause_reading()
        reset(peer)
        if not reading:
            used = time.process_time()
            await asyncio.sleep(0.2)
            assert time.process_time() - used < 0.15 and told.events == [("made",)]  # it sleeps
            told.transport.resume_reading()
        await until(lambda: told.is_lost)
        return told.events

    on_both_ways(main)


def test_writing_to_one_that_has_gone_ends_the_connection():
    async def main(way, connect):
        told = Told()
        told.transport = None
        peer = await connect(way, told)
        told.transport.pause_reading()
        peer.close()
        for _ in range(100):
            told.transport.write(b"x" * 1000)
            await asyncio.sleep(0.002)
            if told.is_lost:
                break
        return told.events[-1][0], told.transport.is_closing()

    on_both_ways(main)


def test_a_half_closed_peer_is_still_written_to():
    async def main(way, connect):
        told = Told(stays=True)
        peer = await connect(way, told)
        peer.sendall(b"all")
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: ("eof",) in told.events)
        if way == "streams":
            told.transport.resume_reading()  # uvloop tells the end again then
        told.transport.write(bytes(5_000_000))
        told.transport.write_eof()
        with pytest.raises(RuntimeError):
            told.transport.write(b"after the end")
        assert told.transport.can_write_eof()
        assert await in_thread(read_all, peer) == bytes(5_000_000)
        told.transport.close()
        await until(lambda: told.is_lost)
        return [event for event in told.events if event[0] in ("made", "data", "lost")], told.events.count(("eof",))

    on_both_ways(main)


def test_a_paused_reader_hears_nothing_until_it_goes_on():
    async def main(way, connect):
        told = Told()
        peer = await connect(way, told)
        told.transport.pause_reading()
        told.transport.pause_reading()
        peer.sendall(b"one")
        await asyncio.sleep(0.05)
        assert told.events == [("made",)]
        told.transport.resume_reading()
        told.transport.resume_reading()
        await until(lambda: told.data == b"one")
        told.transport.close()
        peer.sendall(b"nobody reads this")
        await until(lambda: told.is_lost)
        return told.events, told.data

    on_both_ways(main)


def test_a_protocols_mistake_is_reported_and_ends_its_connection_alone():
    async def main(connect, faults):
        for way in WAYS:
            told, other = Told(), Told()
            told.on_data = lambda data: 1 / 0
            peer, witness = await connect(way, told), await connect(way, other)
            peer.sendall(b"x")
            await until(lambda told=told: told.is_lost)
            witness.sendall(b"y")
            await until(lambda other=other: other.data == b"y")
            assert isinstance(faults.pop()["exception"], ZeroDivisionError) and not faults
            assert told.events == [("made",), ("data",), ("lost", ZeroDivisionError)]

    run(main)


def test_one_that_ends_another_in_the_same_turn():
    """Both have something to be told; whichever comes first ends the other, which hears nothing more."""

    async def main(connect, faults):
        one, two = Told(), Told()
        peers = [await connect("streams", one), await connect("streams", two)]
        one.on_data = lambda data: two.transport.abort()
        two.on_data = lambda data: one.transport.abort()
        for peer in peers:
            peer.sendall(b"now")
        time.sleep(0.05)  # the loop stands: it finds both
        await until(lambda: one.is_lost or two.is_lost)
        assert sorted([one.data, two.data]) == [b"", b"now"]
        assert not faults

    run(main)


def test_nobody_waits_behind_a_fast_peer():
    async def main(connect, faults):
        flood, other = Told(), Told()
        flood.on_data = lambda data: setattr(flood, "data", b"")
        peer, quiet = await connect("streams", flood), await connect("streams", other)
        other.on_data = other_transport_echo(other)
        done = in_thread(pour, peer)
        for _ in range(100):
            quiet.sendall(b"?")
            assert await in_thread(quiet.recv, 1) == b"?"
            assert not done.done()  # the flood lasts
        flood.transport.abort()
        with pytest.raises(ConnectionError):
            await done

    run(main)


def pour(peer: socket.socket) -> None:
    """Until it is cut off."""
    while True:
        peer.sendall(bytes(1_000_000))


def other_transport_echo(told: Told) -> Callable[[bytes], None]:
    return lambda data: told.transport.write(data)


@pytest.mark.parametrize("seed", range(6))
def test_any_course_of_writes_pauses_and_reads_keeps_every_byte_in_its_place(seed):
    chance = random.Random(seed)

    async def main(connect, faults):
        told = Told()
        peer = await connect("streams", told)
        peer.settimeout(0)
        sent, wanted, got, given = b"", b"", b"", b""
        for _ in range(400):
            step = chance.randrange(7)
            size = chance.choice([1, 100, 5000, 70_000, 300_000, 1_000_000])
            if step == 0 and len(wanted) - len(got) < 8_000_000:
                wanted += (data := chance.randbytes(size))
                told.transport.write(data)
            elif step == 1 and len(wanted) - len(got) < 8_000_000:
                pieces = [chance.randbytes(size // 7 + 1) for _ in range(chance.randrange(40))]
                wanted += b"".join(pieces)
                told.transport.writelines(pieces)
            elif step == 2:
                try:
                    got += peer.recv(size)
                except BlockingIOError:
                    pass
            elif step == 3:
                try:
                    data = chance.randbytes(size)
                    given += data[: peer.send(data)]
                except BlockingIOError:
                    pass
            elif step == 4:
                chance.choice([told.transport.pause_reading, told.transport.resume_reading])()
            else:
                await asyncio.sleep(0)
        told.transport.resume_reading()
        told.transport.write_eof()
        peer.settimeout(LIMIT_S)
        got += await in_thread(read_all, peer)
        peer.close()
        await until(lambda: told.is_lost)
        assert got == wanted and told.data == given and sent == b"" and not faults

    run(main)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_new_connection_misses_nothing_that_came_with_it(tmp_path, kind):
    async def main(connect, faults):
        streams = streams_on(asyncio.get_running_loop())
        where = ("127.0.0.1", 0) if kind == "tcp" else str(tmp_path / "s")
        family = socket.AF_INET if kind == "tcp" else socket.AF_UNIX
        with socket.socket(family) as listener:
            listener.bind(where)
            listener.listen()
            told = Told()
            connecting = asyncio.ensure_future(streams.connect(family, listener.getsockname(), told))
            await asyncio.sleep(0)  # the kernel has made it, and nobody was told yet
            peer, _ = listener.accept()
            peer.sendall(b"early")
            peer.close()
            await connecting
            await until(lambda: told.is_lost)
        assert told.events == [("made",), ("data",), ("eof",), ("lost", type(None))] and told.data == b"early"
        assert isinstance(told.transport.get_extra_info("peername"), tuple) is (kind == "tcp")
        streams.close()

    run(main)


def test_nobody_there_is_told_as_what_it_is(tmp_path):
    """At once, later, or never: each by its own error, and nothing is left of the try."""

    async def main(connect, faults):
        streams = streams_on(asyncio.get_running_loop())
        told = Told()
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
            files = len(os.listdir("/proc/self/fd"))
            where = full.getsockname()
            with pytest.raises(FileNotFoundError):
                await streams.connect(socket.AF_UNIX, str(tmp_path / "nothing"), told)
            with pytest.raises(TimeoutError):  # the kernel takes no more for this one
                async with asyncio.timeout(0.2):
                    await streams.connect(socket.AF_INET, where, told)
            later = asyncio.ensure_future(streams.connect(socket.AF_INET, where, told))
            await asyncio.sleep(0.05)
            assert not later.done() and len(os.listdir("/proc/self/fd")) == files + 1
        with pytest.raises(ConnectionRefusedError):
            await later  # at the kernel's next try, after a second
        with pytest.raises(ConnectionRefusedError):
            await streams.connect(socket.AF_INET, where, told)
        await asyncio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) == files - 2 and not told.events and not faults
        streams.close()

    run(main)


def test_what_has_ended_is_gone():
    async def main(connect, faults):
        await asyncio.sleep(0.05)

        def alive() -> int:
            gc.collect()
            return sum(type(thing).__name__ == "Stream" for thing in gc.get_objects())

        files, before = len(os.listdir("/proc/self/fd")), alive()
        for n in range(200):
            told = Told()
            peer = await connect("streams", told)
            told.transport.write(bytes(3_000_000 if n % 3 else 3))
            if n % 2:
                told.transport.abort()
            reset(peer)
            await until(lambda told=told: told.is_lost)
        del told
        await asyncio.sleep(0.01)
        assert alive() == before and len(os.listdir("/proc/self/fd")) <= files

    run(main)


def test_without_files_for_more_connections_they_wait_and_those_that_are_there_go_on():
    async def main(connect, faults):
        loop = asyncio.get_running_loop()
        streams = streams_on(loop)
        made: list[Told] = []

        def make() -> Told:
            made.append(Told())
            made[-1].on_data = other_transport_echo(made[-1])
            return made[-1]

        sock = socket.create_server(("127.0.0.1", 0), backlog=64)
        listener = streams.listen(sock, make)
        assert isinstance(streams, Streams) and isinstance(listener, Listener)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        first = socket.create_connection(sock.getsockname())
        await until(lambda: len(made) == 1)
        peers = [socket.socket() for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for peer in peers:
                peer.settimeout(LIMIT_S)
                peer.connect(sock.getsockname())
            await until(lambda: faults)
            first.sendall(b"here")
            assert await in_thread_free(first) == b"here"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        await until(lambda: len(made) == 4)
        assert 1 <= len(faults) <= 3  # told now and then, not in a circle
        for peer in (first, *peers):
            peer.sendall(b"all")
            assert await in_thread_free(peer) == b"all"
            peer.close()
        listener.close()
        await until(lambda: all(told.is_lost for told in made))
        streams.close()

    run(main)


async def in_thread_free(peer: socket.socket) -> bytes:
    """What comes next, without a thread: one needs files."""
    peer.setblocking(False)
    while True:
        try:
            return peer.recv(100)
        except BlockingIOError:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("how", ["write", "writelines"])
def test_a_buffer_that_waits_keeps_its_size(how):
    """Whoever wrote it cannot shrink it below what is counted as unsent."""

    async def main(connect, faults):
        told = Told()
        peer = await connect("streams", told)
        data = bytearray(b"x" * 9_000_000)
        if how == "write":
            told.transport.write(data)
        else:
            told.transport.writelines([data])
        assert told.transport.get_write_buffer_size()
        with pytest.raises(BufferError):
            data.clear()
        told.transport.close()
        assert await in_thread(read_all, peer) == bytes(data)
        await until(lambda: told.is_lost)
        data.clear()  # it is let go of
        assert not faults

    run(main)


def test_protocols_that_write_end_and_fail_where_they_are_told_something():
    """Each callback may do to its own stream what it likes: nothing is told after the end, and the end is told once."""

    async def main(connect, faults):
        def aborts(told: Told) -> None:
            told.transport.abort()

        def closes(told: Told) -> None:
            told.transport.write(b"last words")
            told.transport.close()

        def ends(told: Told) -> None:
            told.transport.write_eof()

        def fails(told: Told) -> None:
            raise ZeroDivisionError

        for where in ("pause_writing", "resume_writing", "eof_received", "connection_lost", "connection_made"):
            for act in (aborts, closes, ends, fails):
                class Acting(Told):
                    pass

                def acting(self: Told, *given: Any, name: str = where, act: Callable = act) -> None:
                    getattr(Told, name)(self, *given)
                    act(self)

                setattr(Acting, where, acting)
                told = Acting()
                peer = await connect("streams", told)
                with contextlib.suppress(RuntimeError):  # where its end is written already
                    told.transport.write(bytes(6_000_000))
                reader = in_thread(read_until_end, peer)
                if where == "resume_writing":
                    await until(lambda told=told: ("resume",) in told.events)
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_WR)
                await until(lambda told=told: told.is_lost)
                await reader
                assert [event[0] for event in told.events].count("lost") == 1
                assert [type(fault["exception"]) for fault in faults] == [ZeroDivisionError] * (act is fails)
                faults.clear()

    run(main)


def read_until_end(peer: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        read_all(peer)


@pytest.mark.parametrize("waits", [False, True])
def test_of_lines_that_cannot_all_be_written_none_is(waits):
    async def main(connect, faults):
        told = Told()
        peer = await connect("streams", told)
        before = bytes(7_000_000 * waits)
        told.transport.write(before)
        unsent = told.transport.get_write_buffer_size()
        with pytest.raises(TypeError):
            told.transport.writelines([b"one", 2, b"three"])
        assert told.transport.get_write_buffer_size() == unsent
        told.transport.writelines([b"on", b"ly"])
        told.transport.close()
        assert await in_thread(read_all, peer) == before + b"only"

    run(main)


def test_an_answer_of_eof_received_that_is_neither_true_nor_false():
    class Neither:
        def __bool__(self) -> bool:
            raise ZeroDivisionError

    async def main(connect, faults):
        told: Any = Told(stays=Neither())  # type: ignore[arg-type]
        peer = await connect("streams", told)
        peer.close()
        await until(lambda: told.is_lost)
        assert told.events[-1] == ("lost", ZeroDivisionError)
        assert isinstance(faults.pop()["exception"], ZeroDivisionError) and not faults

    run(main)


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_end_open_and_write_to_each_other_in_every_callback(seed):
    """Whatever one does to another, itself or a new one while the kernel's events are handed out: each hears of its end once,
    of nothing after that, and no file stays open."""
    chance = random.Random(seed)

    async def main(connect, faults):
        loop = asyncio.get_running_loop()
        streams = streams_on(loop)
        all_of_them: list[Wild] = []
        wild = True

        class Wild(Told):
            def act(self) -> None:
                if not wild:
                    return
                other = chance.choice([self, *all_of_them[-20:]]).transport
                step = chance.randrange(12)
                if step < 4:
                    with contextlib.suppress(RuntimeError):
                        other.write(bytes(chance.choice([1, 1000, 300_000])))
                elif step == 4:
                    other.abort()
                elif step == 5:
                    other.close()
                elif step == 6:
                    other.pause_reading()
                elif step == 7:
                    other.resume_reading()
                elif step == 8:
                    other.write_eof()
                elif step == 9 and len(all_of_them) < 300:
                    pair()
                elif step == 10:
                    gc.collect(0)
                else:
                    raise ZeroDivisionError

            def told(self, name: str, *given: Any) -> Any:
                assert not self.events or not self.is_lost
                result = getattr(Told, name)(self, *given)
                self.data = b""
                self.act()
                return result

        for name in ("connection_made", "data_received", "eof_received", "pause_writing", "resume_writing", "connection_lost"):
            setattr(Wild, name, lambda self, *given, name=name: self.told(name, *given))

        def pair() -> None:
            for sock in socket.socketpair() if chance.randrange(2) else tcp_pair():
                wild_one = Wild(stays=bool(chance.randrange(2)))
                all_of_them.append(wild_one)
                wild_one.transport = Mute  # until it is made
                streams.open(sock, wild_one)

        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            pair()
        for _ in range(400):
            for one in chance.sample(all_of_them[-20:], 4):
                with contextlib.suppress(ZeroDivisionError):
                    one.act()
            await asyncio.sleep(0)
        wild = False
        for one in all_of_them:
            one.transport.abort()
        await until(lambda: all(one.is_lost for one in all_of_them))
        await asyncio.sleep(0.01)
        assert len(all_of_them) > 50
        assert {type(fault["exception"]) for fault in faults} <= {ZeroDivisionError}
        assert all([event[0] for event in one.events].count("lost") == 1 for one in all_of_them)
        assert len(os.listdir("/proc/self/fd")) <= files
        streams.close()

    run(main)


class Mute:
    """A transport that is not there yet."""

    write = abort = close = pause_reading = resume_reading = write_eof = staticmethod(lambda *given: None)
