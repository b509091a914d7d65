"""Two backends behind Laya, one killed under load: no request of which no byte had reached its client fails.

    python tools/failover_demo.py [--seconds 12] [--clients 16] [--policy least_busy]

Starts a router and two stub backends as processes on loopback, keeps clients busy with plain and streamed chat completions,
kills one backend with SIGKILL after a third of the time and starts it again after two thirds. Prints what came of every request
and ends with code 0 only if nothing failed that could have been answered elsewhere.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from scripted_upstream import DONE, SSE_HEAD, ScriptedUpstream, Sleep, answer, chunked, completion, delta  # noqa: E402

FRAMES, PAUSE_S = 10, 0.01  # a stub's stream; a plain answer takes as long as all of it, so that many are under way at the kill


def work(asked) -> list:
    """What a stub answers."""
    if asked.method == "GET":
        return [answer(b"")]
    if not asked.json().get("stream"):
        return [Sleep(FRAMES * PAUSE_S), answer(completion("whole"))]
    frames = [step for i in range(FRAMES) for step in (chunked(delta(f"{i} ")), Sleep(PAUSE_S))]
    return [SSE_HEAD, *frames, chunked(delta(None, "stop")), DONE]


class Stub:
    """A backend in a process of its own, on a port that stays the same."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--stub", str(self.port)], stdout=subprocess.PIPE)
        self.process.stdout.readline()  # it says when it listens

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.process.stdout.close()


class Clients:
    """Threads that ask without a pause, on kept connections, half of them for streams."""

    def __init__(self, port: int, count: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.backends: Counter[str] = Counter()
        self.slowest = 0.0
        self._port = port
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self, stream: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]})
        while not self._stop.is_set():
            began = time.perf_counter()
            outcome, backend = self._ask(connection, body, stream)
            with self._lock:
                self.outcomes[f"{'stream' if stream else 'plain'}: {outcome}"] += 1
                self.backends[backend] += 1
                self.slowest = max(self.slowest, time.perf_counter() - began)

    def _ask(self, connection: http.client.HTTPConnection, body: str, stream: bool) -> tuple[str, str]:
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return f"FAILED without a byte ({type(error).__name__})", "none"
        backend = response.getheader("x-laya-backend", "none")
        try:
            data = response.read()
        except (OSError, http.client.HTTPException):
            data = b""
        if response.status != 200:
            return f"FAILED without a byte (status {response.status})", backend
        if data.endswith(b"data: [DONE]\n\n") if stream else b'"whole"' in data:
            return "whole", backend
        connection.close()
        return "cut after the first byte, with an error in the stream" if stream else "FAILED in a plain answer", backend


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_router(directory: str, port: int, stubs: list[Stub], policy: str) -> subprocess.Popen:
    config = {
        "server": {"port": port, "log_level": "warning"},
        "backends": {f"stub-{i + 1}": {"url": f"http://127.0.0.1:{stub.port}/v1"} for i, stub in enumerate(stubs)},
        "routes": [{"name": "demo", "match": "*", "policy": policy, "to": [f"stub-{i + 1}" for i in range(len(stubs))]}],
    }
    path = Path(directory) / "laya.yaml"
    path.write_text(json.dumps(config))
    router = subprocess.Popen([sys.executable, "-m", "laya", "router", "--config", str(path)], cwd=ROOT / "src")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return router
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the router did not start")


def retries(port: int) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return [line for line in lines if line.startswith(("laya_retries_total", "laya_backend_inflight", "laya_breaker_state"))]


def run(seconds: float, count: int, policy: str) -> int:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stubs = [Stub(free_port()) for _ in range(2)]
        for stub in stubs:
            stack.callback(stub.kill)
        port = free_port()
        router = start_router(directory, port, stubs, policy)
        stack.callback(lambda: (router.terminate(), router.wait(20)))
        clients = Clients(port, count)
        clients.start()
        time.sleep(seconds / 3)
        print(f"{sum(clients.outcomes.values())} requests so far; killing stub-1", flush=True)
        stubs[0].kill()
        time.sleep(seconds / 3)
        print(f"{sum(clients.outcomes.values())} requests so far; starting stub-1 again", flush=True)
        before = clients.backends["stub-1"]
        stubs[0].start()
        time.sleep(seconds / 3)
        clients.stop()
        back = clients.backends["stub-1"] - before
        for outcome, times in sorted(clients.outcomes.items()):
            print(f"  {times:6} {outcome}")
        print(f"  slowest {clients.slowest * 1000:.0f} ms; stub-1 answered {back} after it came back")
        for line in retries(port):
            print(f"  {line}")
        failed = sum(times for outcome, times in clients.outcomes.items() if "FAILED" in outcome)
    print("no request without a byte sent failed" if not failed else f"{failed} requests failed that need not have")
    return 1 if failed or not back else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--policy", default="least_busy")
    parser.add_argument("--stub", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub is None:
        return run(arguments.seconds, arguments.clients, arguments.policy)
    with ScriptedUpstream(work, port=arguments.stub):
        print("listening", flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
