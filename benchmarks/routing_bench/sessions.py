"""Sessions through the real router, one mode beside the other: hits, new ones, a full table, cold hits, a kill -9."""

from __future__ import annotations

import json
import random
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns

from gateway_bench.children import Child, free_port
from gateway_bench.figures import percentile
from gateway_bench.systems import ROOT

MODES = ("memory", "hybrid", "persistent")
STUB = ROOT / "benchmarks" / "gateway_bench" / "stub.py"
BODY = b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"What is the capital of France?"}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-laya-session: %b\r\n"
    b"content-length: %d\r\n\r\n%b"
)
CACHE = 1024  # places in the table that is full; small, so that ten times as many sessions are quickly made
ROOM = 1_000_000


class Router:
    """One router process over the stubs, and one kept connection to it."""

    def __init__(self, stack: ExitStack, directory: Path, name: str, mode: str, cache_size: int, stubs: list[int]) -> None:
        self.path = directory / f"{name}.sqlite"
        self.port = free_port()
        config = {
            "server": {"port": self.port, "log_level": "warning"},
            "router": {"mode": mode, "cache_size": cache_size, "path": str(self.path)},
            "backends": {f"b{i}": {"url": f"http://127.0.0.1:{port}/v1", "health": None} for i, port in enumerate(stubs)},
            "routes": [{"name": "r", "match": "*", "policy": "session", "to": [f"b{i}" for i in range(len(stubs))]}],
        }
        self._file = directory / f"{name}.yaml"
        self._file.write_text(json.dumps(config))
        self._directory = directory
        stack.callback(self.stop)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "laya", "router", "--config", str(self._file)]
        self.child = Child(command, cwd=self._directory, env={"PYTHONPATH": str(ROOT / "src")})
        self.child.wait_until_answers(self.port, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 30)
        self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stop(self) -> None:
        self.sock.close()
        self.child.stop()

    def kill(self) -> None:
        self.child.process.send_signal(signal.SIGKILL)
        self.child.process.wait(10)
        self.sock.close()

    def ask(self, session: int) -> int:
        """Nanoseconds of one request."""
        request = REQUEST % (b"s%d" % session, len(BODY), BODY)
        began = perf_counter_ns()
        self.sock.sendall(request)
        data = self.sock.recv(65536)
        while not data.endswith(b"}}"):
            data += self.sock.recv(65536)
        spent = perf_counter_ns() - began
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the router answered {data[:200]!r}")
        return spent


@contextmanager
def stubs(count: int) -> Iterator[list[int]]:
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            port = free_port()
            child = Child([sys.executable, str(STUB), "--port", str(port)], cwd=STUB.parent)
            stack.callback(child.stop)
            child.wait_until_answers(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", 30)
            ports.append(port)
        yield ports


def in_turn(routers: dict[str, Router], sessions: dict[str, list[int]], block: int = 10) -> dict[str, list[int]]:
    """All requests of all routers, a few of each in turn, so that the machine's moods fall on all alike (with blocks of 50 two
    routers of the same mode were a tenth apart); sorted ns."""
    spent: dict[str, list[int]] = {name: [] for name in routers}
    longest = max(map(len, sessions.values()))
    for start in range(0, longest, block):
        for name, router in routers.items():
            spent[name] += [router.ask(session) for session in sessions[name][start : start + block]]
    return {name: sorted(found) for name, found in spent.items()}


def points(spent: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """p50 and p99 in us, and what each mode adds to `memory`."""
    figures = {name: {"p50_us": percentile(ns, 50) / 1000, "p99_us": percentile(ns, 99) / 1000} for name, ns in spent.items()}
    for found in figures.values():
        found["added_p50_us"] = found["p50_us"] - figures["memory"]["p50_us"]
        found["added_p99_us"] = found["p99_us"] - figures["memory"]["p99_us"]
    return figures


def modes(directory: Path, count: int) -> dict[str, dict[str, dict[str, float]]]:
    """{situation: {mode: figures}}: hits and new sessions with room, a full table, and cold hits after a restart."""
    rng = random.Random(4)
    result = {}
    with stubs(2) as ports, ExitStack() as stack:
        room = {mode: Router(stack, directory, f"room-{mode}", mode, ROOM, ports) for mode in MODES}
        known = list(range(200))
        in_turn(room, dict.fromkeys(MODES, known))
        result["hit"] = points(in_turn(room, dict.fromkeys(MODES, [rng.choice(known) for _ in range(count)])))
        result["new"] = points(in_turn(room, dict.fromkeys(MODES, list(range(1000, 1000 + count)))))
        full = {mode: Router(stack, directory, f"full-{mode}", mode, CACHE, ports) for mode in MODES}
        in_turn(full, dict.fromkeys(MODES, list(range(CACHE * 10))))
        asked = [rng.randrange(CACHE * 10) for _ in range(count)]
        result["full"] = points(in_turn(full, dict.fromkeys(MODES, asked)))
        for router in room.values():
            router.stop()
            router.start()
        result["cold"] = points(in_turn(room, dict.fromkeys(MODES, list(range(1000, 1000 + count)))))
    return result


def storm(directory: Path, count: int) -> dict[str, float]:
    """Memory mode, the same requests: ten times more sessions than places, against room for all."""
    rng = random.Random(5)
    with stubs(2) as ports, ExitStack() as stack:
        routers = {
            "full": Router(stack, directory, "storm-full", "memory", CACHE, ports),
            "room": Router(stack, directory, "storm-room", "memory", ROOM, ports),
        }
        in_turn(routers, dict.fromkeys(routers, list(range(CACHE * 10))))
        asked = [rng.randrange(CACHE * 10) for _ in range(count)]
        spent = in_turn(routers, dict.fromkeys(routers, asked))
    full, room = percentile(spent["full"], 99) / 1000, percentile(spent["room"], 99) / 1000
    return {"full_p99_us": full, "room_p99_us": room, "eviction_p99_ratio": full / room}


def kept_after_kill(directory: Path, count: int) -> dict[str, dict[str, float]]:
    """Sessions acknowledged, then kill -9 at once: how many are on disk when the next process opens it."""
    result = {}
    with stubs(2) as ports:
        for mode in MODES:
            with ExitStack() as stack:
                router = Router(stack, directory, f"kill-{mode}", mode, ROOM, ports)
                for session in range(count):
                    router.ask(session)
                router.kill()
                result[mode] = {"acknowledged": count, "kept": _rows(router.path) if mode != "memory" else 0}
                router.start()
    return result


def _rows(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
    finally:
        connection.close()


def sqlite_version() -> str:
    return sqlite3.sqlite_version


def laya_version() -> str:
    command = [sys.executable, "-c", "import laya; print(laya.__version__)"]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True).stdout.strip()
