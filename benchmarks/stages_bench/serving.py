"""The stages through a real router: a cache hit beside a static reply, the first token with and without redaction, the loop's
longest stall, and what a route without stages pays for those that others have."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from timeit import timeit

from gateway_bench.children import Child, free_port
from gateway_bench.figures import percentile
from gateway_bench.systems import ROOT
from stages_bench.texts import chat, dense, prose

sys.path.insert(0, str(ROOT / "tools"))

from scripted_upstream import DONE, SSE_HEAD, ScriptedUpstream, Sleep, chunked, delta  # noqa: E402

STUB = ROOT / "benchmarks" / "gateway_bench" / "stub.py"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PROMPT_BYTES = 100_000
# A quick backend's time to the first token of a prompt of 25,000 tokens: 250,000 tokens a second of prefill.
FIRST_TOKEN_S = 0.1
WRITERS = 8


class Router:
    """A router with a plain route (`plain`) and, where `stages`, routes that redact and cache beside it."""

    def __init__(self, stack: ExitStack, directory: Path, url: str, *, stages: bool) -> None:
        self.port = free_port()
        routes = [{"name": "plain", "match": "plain", "to": "up"}]
        if stages:
            routes += [
                {"name": "redact", "match": "redact", "to": "up", "redact": True},
                {"name": "cache", "match": "cache", "to": "up", "cache": True},
            ]
        config = {"server": {"port": self.port}, "backends": {"up": {"url": url, "health": None}}, "routes": routes}
        path = directory / f"stages-{self.port}.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "laya", "router", "--config", str(path)]
        child = Child(command, cwd=directory, env={"PYTHONPATH": str(ROOT / "src")})
        stack.callback(child.stop)
        child.wait_until_answers(self.port, HEALTH, 30)

    def connect(self) -> Connection:
        return Connection(self.port)


class Connection:
    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes, mark: bytes = b"") -> tuple[int, bytes]:
        """(ns until the answer is whole, or until `mark` came; what came). An answer without a mark has a length."""
        began = perf_counter_ns()
        self._sock.sendall(request)
        data = self._sock.recv(1 << 16)
        while mark not in data if mark else not _whole(data):
            data += self._sock.recv(1 << 16)
        spent = perf_counter_ns() - began
        while mark and not data.endswith(b"0\r\n\r\n"):
            data += self._sock.recv(1 << 16)
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the router answered {data[:200]!r}")
        return spent, data

    def close(self) -> None:
        self._sock.close()


def _whole(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    return bool(found) and len(body) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


def post(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def in_turn(works: dict[str, Callable[[], int]], count: int, block: int = 10) -> dict[str, dict[str, float]]:
    """p50 and p99 (us) of each work, a block of each in turn, so that the machine's moods fall on all alike."""
    spent: dict[str, list[int]] = {name: [] for name in works}
    for _ in range(count // block):
        for name, work in works.items():
            spent[name] += [work() for _ in range(block)]
    return {
        name: {"p50_us": percentile(sorted(found), 50) / 1000, "p99_us": percentile(sorted(found), 99) / 1000}
        for name, found in spent.items()
    }


def cached(directory: Path, count: int) -> dict[str, dict[str, float]]:
    """A repeated question (plain and streamed) beside /health of the same server; and the route without stages, in a server
    that has stages on other routes and in one that has none."""
    with ExitStack() as stack:
        port = free_port()
        stub = Child([sys.executable, str(STUB), "--port", str(port)], cwd=STUB.parent)
        stack.callback(stub.stop)
        stub.wait_until_answers(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", 30)
        url = f"http://127.0.0.1:{port}/v1"
        staged, bare = Router(stack, directory, url, stages=True), Router(stack, directory, url, stages=False)
        here, there = staged.connect(), bare.connect()
        stack.callback(here.close)
        stack.callback(there.close)
        hit, other = post(chat("What is the capital of France?", "cache", temperature=0)), post(chat("Hello?", "plain"))
        _, first = here.ask(hit)
        _, again = here.ask(hit)
        if b"x-laya-cache: miss" not in first or b"x-laya-cache: hit" not in again:
            raise RuntimeError("the question was not answered from the cache")
        return in_turn({
            "health": lambda: here.ask(HEALTH)[0], "hit": lambda: here.ask(hit)[0],
            "plain_beside_stages": lambda: here.ask(other)[0], "plain_without_stages": lambda: there.ask(other)[0],
        }, count)  # fmt: skip


def first_token(directory: Path, count: int) -> dict[str, dict[str, float]]:
    """Time to the first token of 100 KB prompts, with and without redaction, from a backend that takes 100 ms for it."""
    answer = [SSE_HEAD, Sleep(FIRST_TOKEN_S), chunked(delta("first ")), chunked(delta(None, "stop")), DONE]
    works = {}
    with ScriptedUpstream(lambda asked: answer) as upstream, ExitStack() as stack:
        router = Router(stack, directory, upstream.url, stages=True)
        connection = router.connect()
        stack.callback(connection.close)
        for text, make in (("prose", prose), ("digits", dense)):
            for route in ("plain", "redact"):
                request = post(chat(make(PROMPT_BYTES), route, stream=True))
                works[f"{text}_{route}"] = lambda request=request: connection.ask(request, b"first ")[0]
        return in_turn(works, count, block=2)


def longest_stall(directory: Path, count: int) -> dict[str, float]:
    """Milliseconds of the loop's longest stall while eight clients send 100 KB prompts to be redacted, and without."""
    result = {}
    with ScriptedUpstream(lambda asked: [SSE_HEAD, chunked(delta("x")), chunked(delta(None, "stop")), DONE]) as upstream:
        for route in ("plain", "redact"):
            with ExitStack() as stack:
                router = Router(stack, directory, upstream.url, stages=True)
                bodies = [post(chat(make(PROMPT_BYTES), route, stream=True)) for make in (prose, dense)]
                _flood(router, bodies, 2)  # what a first request costs is another figure
                _stall(router)
                _flood(router, bodies, count)
                result[f"{route}_ms"] = _stall(router) * 1000
    return result


def _flood(router: Router, requests: list[bytes], count: int) -> None:
    def write() -> None:
        connection = router.connect()
        for number in range(count):
            connection.ask(requests[number % len(requests)], b"[DONE]")
        connection.close()

    threads = [threading.Thread(target=write) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stall(router: Router) -> float:
    connection = router.connect()
    _, data = connection.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    connection.close()
    line = next(line for line in data.decode().splitlines() if line.startswith("laya_loop_stall_seconds "))
    return float(line.split()[1])


def off_checks_ns() -> float:
    """Nanoseconds of the questions that a request of a route without stages is asked, on the objects that are asked: the rest
    of its way is the same code as without any stage."""
    from laya.gateway.front import Gateway
    from laya.gateway.plan import HeadPlan
    from laya.gateway.staging import Staging
    from laya.net.connection import ClientConnection
    from laya.routing.table import Route

    plan = HeadPlan.__new__(HeadPlan)
    plan.key = None
    connection = ClientConnection.__new__(ClientConnection)
    gateway, staging = Gateway.__new__(Gateway), Staging.__new__(Staging)
    gateway.staging, staging.caching = staging, None
    names = {"route": Route("r", (), redact=False, cache=False), "plan": plan, "connection": connection, "gateway": gateway}
    asked = (
        "gateway.staging.caching is not None\nplan.key is not None\ngateway.staging.caching is not None\n"
        "route.staged or connection.staged\nroute.cache\nconnection.staged\nconnection.staged"
    )
    rounds = 200_000
    loop = min(timeit("pass", number=rounds) for _ in range(5))
    return max(0.0, min(timeit(asked, globals=names, number=rounds) for _ in range(5)) - loop) / rounds * 1e9
