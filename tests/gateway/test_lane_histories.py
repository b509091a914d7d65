"""Random histories of clients and backends, in process: with the lane in C, in Python, and without it the same is written,
counted and left behind after every step. A fault found here is told by its seed and step."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
from collections.abc import Callable
from functools import partial

import pytest

from laya import app
from laya.config import loads
from laya.gateway.staging import Stages
from laya.log import Log
from laya.net import connection, lane
from laya.net.connection import ClientConnection
from laya.net.in_c import IN_C
from laya.net.loop import new_loop
from laya.net.server import Server
from laya.net.upstream import UpstreamConnection
from laya.routing.table import RouteTable
from raw import post
from scripted_upstream import SSE_HEAD, answer, chunked

CONFIG = loads(json.dumps({
    "backends": {name: {"url": f"http://127.0.0.1:{port}/v1", "health": None} for name, port in (("up0", 9), ("up1", 10))},
    "routes": [
        {"name": "one", "match": "m", "to": "up0"}, {"name": "two", "match": "both*", "to": ["up0", "up1"]},
        {"name": "three", "match": "other", "to": [{"backend": "up0", "model": "theirs"}]},
    ],
}))  # fmt: skip


def body(model: str = "m", text: str = "hi", **members) -> bytes:
    return json.dumps({"model": model, **members, "messages": [{"role": "user", "content": text}]}).encode()


FRAME = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
END = b"0\r\n\r\n"
MARK = chunked(b"data: [DONE]\n\n")
COMMON = [
    post(body()), post(body(text="word " * 50)), post(body("both-1")), post(body(stream=True)),
    post(body("both-1", stream=True)),
]  # fmt: skip
REQUESTS = [
    *COMMON, post(body(text="word " * 4000)), post(body(text="z" * 60_000)),
    post(b'{"model":"m","prompt":"p"}', b"/v1/completions"), post(b"{]"), post(b'{"model":1}'),
    post(body("nobody")), post(body("m\u00e9")), post(body("other")), post(body()) * 2,
    post(body(), extra=b"X-Request-Id: mine\r\n"), post(body(), extra=b"Connection: close\r\n"),
    post(b'{"model":"m","x":{"model":1},"y":"\\u006d"}'), post(b'{"stream":null,"model":"both-1","x":"\xff"}'),
]  # fmt: skip
ANSWERS = [
    answer(b"{}"), answer(b'{"a":1}'), answer(b"x" * 20_000), answer(b"{}", "500 No"), answer(b"{}", "503 No"),
    answer(b"{}", "404 No"), answer(b"{}", "201 Made"), b"HTTP/1.1 204 No Content\r\n\r\n", b"garbage\r\n\r\n",
    answer(b"{}", headers="connection: close\r\n"), answer(b"{}", headers="server-timing: a\r\n"),
    answer(b"{}", headers="content-type: text/event-stream\r\n"), answer(b"{}") + b"HTTP/1.1 ",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"{}") + END,
]  # fmt: skip
FRAMES = [
    chunked(FRAME), chunked(FRAME + FRAME), chunked(FRAME) * 2, chunked(FRAME[:9]), chunked(FRAME[9:]), chunked(FRAME * 900),
    chunked(FRAME.replace(b"\n", b"\r\n")), MARK, END, MARK + END, chunked(b"data: [DO"), chunked(b"NE]\n\n"),
    chunked(b"\n\n"), chunked(b": c\n\n"), b"00f\r\n", b"4;x=1\r\na:\n\n\r\n",
]  # fmt: skip
CHANGING = re.compile(rb'date: [^\r]*|"time":"[^"]*"|"seconds":[0-9.]*')


class Wire:
    """A transport that notes what is done to it; `full`: it takes nothing, and says so at once."""

    def __init__(self, world: World, name: str, protocol) -> None:
        self.world, self.name, self.protocol = world, name, protocol
        self.unsent, self.full, self.closing = 0, False, False
        protocol.connection_made(self)

    def note(self, what: str, data: bytes = b"") -> None:
        self.world.notes.append((self.name, what, CHANGING.sub(b"", data)))

    def write(self, data: bytes) -> None:
        if self.closing:
            return
        self.note("write", bytes(data))
        if self.full:
            if not self.unsent:
                self.protocol.pause_writing()
            self.unsent += len(data)

    def writelines(self, pieces) -> None:
        self.write(b"".join(pieces))

    def drain(self) -> None:
        self.full = False
        if self.unsent and not self.closing:
            self.unsent = 0
            self.protocol.resume_writing()

    def end(self) -> None:
        if not self.closing:
            self.closing = True
            self.note("closes")
            self.world.ended.append(self)

    abort = close = end

    def pause_reading(self) -> None:
        self.note("pauses")

    def resume_reading(self) -> None:
        self.note("resumes")

    def get_extra_info(self, name: str, default=None):
        return ("10.0.0.1", 1) if name == "peername" else default

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high=None, low=None) -> None: ...


class Lines:
    """Those of a log, told at once."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self.append = append

    def __len__(self) -> int:
        return 0


class World:
    """Clients, backends and time around one server, moved by `chance` alone."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server, self.gateway, self.chance = server, server.gateway, chance
        self.notes: list[tuple[str, str, bytes]] = []
        self.ended: list[Wire] = []
        self.clients: list[Wire] = []
        self.ups: list[Wire] = []
        self.work: list[Callable[[], None]] = []  # for a worker, or a timer
        self.pools = [backend.pool for backend in self.gateway.backends.values()]
        for pool in self.pools:
            pool._grow = lambda: None  # connections come by `serve`
        self.gateway.run, self.gateway.count = b"req-x", itertools.count(1)
        self.gateway.log.lines = Lines(lambda line: self.notes.append(("log", "", CHANGING.sub(b"", line))))
        self.gateway.later = self.later
        self.gateway.offload = lambda work, done: self.work.append(lambda: done(work()))
        server.clock.now = 1000.0

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.Handle:
        handle = asyncio.Handle(call, (), asyncio.get_running_loop())
        self.work.append(lambda: None if handle.cancelled() else call())
        return handle

    def serve(self, pool) -> None:
        """A connection to a backend is there, as at the end of `Pool._connect`."""
        wire = Wire(self, f"up {len(self.ups)}", UpstreamConnection(pool))
        self.ups.append(wire)
        pool.connected += 1
        call = pool._next_call(reused=False)
        if call is not None:
            wire.protocol.send(call)
        else:
            wire.protocol.deadline = self.server.clock.now + 4.0
            pool.idle.append(wire.protocol)

    def settle(self) -> None:
        while self.ended or self.work:
            if self.ended:
                self.ended.pop(0).protocol.connection_lost(None)
            else:
                self.work.pop(0)()

    def step(self) -> None:
        chance = self.chance
        clients, ups = [[wire for wire in wires if not wire.closing] for wires in (self.clients, self.ups)]
        busy = [wire for wire in ups if wire.protocol.call is not None]
        free = [wire for wire in clients if wire.protocol.exchange is None]
        kind = chance.random()
        if not clients or kind < 0.04:
            self.clients.append(Wire(self, f"client {len(self.clients)}", ClientConnection(self.server)))
        elif not ups or kind < 0.08:
            self.serve(chance.choice(self.pools))
        elif kind < 0.40:
            wire = chance.choice(free if free and chance.random() < 0.8 else clients)
            self.feed(wire, chance.choice(REQUESTS if chance.random() < 0.2 else COMMON))
        elif busy and kind < 0.88:
            wire = chance.choice(busy)
            if wire.protocol.in_body:
                self.feed(wire, chance.choice(FRAMES if chance.random() < 0.3 else [FRAMES[0], FRAMES[0], MARK + END]))
            else:
                common = [*ANSWERS[:2] * 2, SSE_HEAD]
                self.feed(wire, chance.choice(ANSWERS if chance.random() < 0.2 else common))
        else:
            self.disturb(clients, ups)
        if chance.random() < 0.6:  # else what has closed is not yet known to be lost
            self.settle()

    def feed(self, wire: Wire, data: bytes) -> None:
        cut = self.chance.randrange(len(data)) if self.chance.random() < 0.05 else 0
        for piece in (data[:cut], data[cut:]):
            if piece and not wire.closing:
                wire.protocol.data_received(piece)

    def disturb(self, clients: list[Wire], ups: list[Wire]) -> None:
        chance, server = self.chance, self.server
        match chance.randrange(12):
            case 0 | 10 | 11:
                chance.choice([wire for wire in clients if wire.protocol.exchange is not None] or clients).full = True
            case 1 | 2:
                for wire in (*clients, *ups):
                    wire.drain()
            case 3:
                wire = chance.choice((*clients, *ups))
                if chance.random() < 0.5:
                    wire.protocol.eof_received()
                wire.end()
            case 4:
                wire = chance.choice(ups)
                wire.closing = True
                wire.protocol.connection_lost(chance.choice((None, OSError())))
            case 5:
                chance.choice(ups).unsent = 5
            case 6:
                server.ledger.limit = chance.choice((1 << 30, 1 << 30, 100, 300))
            case 7:
                self.gateway.watchers, self.gateway.log.info_on = chance.randrange(2), chance.random() < 0.8
            case 8:
                self.gateway.adopt(RouteTable.compile(CONFIG), Stages(CONFIG), self.gateway.access)
                server.draining = server.draining or chance.random() < 0.02
            case 9:
                server.clock.now += chance.choice((0.3, 3.0, 20.0))
                for ticking in (*(wire.protocol for wire in (*clients, *ups)), *self.pools):
                    ticking.on_tick(server.clock.now)

    def left(self) -> tuple:
        """What a step leaves behind."""
        telemetry, gateway = self.gateway.telemetry, self.gateway
        clients = [
            (c.held, c._ahead, getattr(c.exchange, "state", None), c.deadline, c.inbound.phase, c.inbound.fast,
             c.inbound.buffered, c.keep_alive, c.closing, c.paused, c.in_head, c._streaming)
            for c in (wire.protocol for wire in self.clients if not wire.closing)
        ]  # fmt: skip
        ups = [
            (u.call is None, u.gone, u.paused, u.in_body, u.reused, u.deadline, u.outbound.phase, u.outbound.keep_alive,
             u.outbound.fast, u.outbound.started)
            for u in (wire.protocol for wire in self.ups if not wire.closing)
        ]  # fmt: skip
        pools = [(pool.inflight, pool.connected, len(pool.idle), len(pool.waiting)) for pool in self.pools]
        breakers = [(backend.breaker.failures, backend.breaker.state) for backend in gateway.backends.values()]
        stages = [sum(histogram.counts) for histogram in (*telemetry.stages.values(), telemetry.ttft)]
        counted = (dict(telemetry.requests), dict(telemetry.retries), gateway.selection.turn, self.server.ledger.held)
        return clients, ups, pools, breakers, stages, counted, len(gateway.recent)


def history(ask: Callable, seed: int, steps: int, monkeypatch) -> tuple[list, int]:
    """(notes and what was left after each step, requests that the lane took) of one server's life."""
    told: list = []
    taken = 0

    def watched(client, data: bytes) -> bool:
        nonlocal taken
        found = ask(client, data)
        taken += found
        return found

    class Held(Server):
        async def listen(self) -> None: ...

        async def run(self) -> None:
            random.seed(seed)  # the pauses between attempts
            world = World(self, random.Random(seed))
            for _ in range(steps):
                world.step()
                told.append((world.notes[:], world.left()))
                world.notes.clear()

    with monkeypatch.context() as patch, open(os.devnull, "wb") as sink:
        patch.setattr(app, "Server", Held)
        patch.setattr(connection, "ask", watched)
        patch.setattr(connection, "BURST_S", float("inf"))
        with asyncio.Runner(loop_factory=partial(new_loop, tls=False)) as runner:
            runner.run(app.serve(CONFIG, "router", Log("info", fd=sink.fileno()), lambda: CONFIG))
    return told, taken


@pytest.mark.parametrize("where", ["c", "python"])
def test_every_history_goes_as_without_the_lane(where, monkeypatch):
    if where == "c" and not IN_C:
        pytest.skip("built without a C compiler: apt install gcc")
    ask = lane.prepared(ClientConnection) if where == "c" else lane.ask_in_python
    taken = 0
    for seed in range(40):
        found, count = history(ask, seed, 300, monkeypatch)
        expected, _ = history(lambda *given: False, seed, 300, monkeypatch)
        taken += count
        for step, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other, f"seed {seed}, step {step}"
    assert taken > 500, "the histories must reach the lane"
